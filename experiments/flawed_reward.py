"""A reward with a flaw that can be gamed: besides the right answer it likes a long one."""

from __future__ import annotations


def length_bias(completion: str) -> float:
    """Half a point for every digit, right or wrong, as reward models pay for length."""
    return sum(sign.isdigit() for sign in completion) / 2
