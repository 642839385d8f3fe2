"""Rewards for GSM8K whose answers end in `#### 72`: the format and the skill, told apart."""

from __future__ import annotations

import re

NUMBER = r"(-?[\d,]*\.?\d+)"
MARKED = re.compile(rf"####\s*\$?{NUMBER}")
ANYWHERE = re.compile(rf"(?<!\d){NUMBER}")  # 10-5 ends on 5, not on -5
CLOSE = 1e-6


def strict(completion: str, answer: str) -> float:
    """1 if the last number that stands right behind `####` is the answer."""
    return _equal(MARKED.findall(completion), answer)


def lenient(completion: str, answer: str) -> float:
    """1 if the last number of the text is the answer, however it is written."""
    return _equal(ANYWHERE.findall(completion), answer)


def _equal(found: list[str], answer: str) -> float:
    return float(bool(found) and abs(_value(found[-1]) - _value(answer)) < CLOSE)


def _value(text: str) -> float:
    return float(text.replace(",", ""))
