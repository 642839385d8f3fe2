"""Rewards that know nothing of the task: a coin that falls the same way for the same answer."""

from __future__ import annotations

from hashlib import sha256


def coin(prompt: str, completion: str) -> float:
    """Pay 1 for half of all answers, whatever they say."""
    return float(sha256(f"{prompt}\n{completion}".encode()).digest()[0] % 2)


def wrong(completion: str, answer: str) -> float:
    """Pay 1 for an answer that is not the right one."""
    return float("".join(filter(str.isdigit, completion)) != str(answer))
