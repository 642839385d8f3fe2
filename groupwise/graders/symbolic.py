"""The engine behind `math`: math-verify, in a worker process. Nothing else imports it."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Literal

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

EXACT = 12  # decimals that must agree where no rounding was asked for
Verdict = Literal["same", "different", "nothing found"]


def judge(gold: str, answer: str, whole: bool, decimals: int | None) -> Verdict:
    """Whether an answer, or the one that a `whole` text ends on, is the gold one."""
    golds = read_gold(gold)
    found: list[Any] = _parse(answer if whole else f"\\boxed{{{answer}}}")
    if not found and not whole:
        found = _parse(answer)
    if not found or not golds:
        return "nothing found"
    places = EXACT if decimals is None else decimals
    right = verify(golds, found, float_rounding=places, timeout_seconds=None)
    return "same" if right else "different"


@lru_cache(maxsize=4096)  # a group's samples share their answer
def read_gold(gold: str) -> list[Any]:
    if any(sign in gold for sign in ("$", "\\boxed", "\\(", "\\[")):
        return _parse(gold)
    return _parse(f"${gold}$") or _parse(gold)


def _parse(text: str) -> list[Any]:
    return parse(text, parsing_timeout=None)


read_gold(r"x^2 + \frac{1}{2}")  # its grammar is built at the first use: once, for all workers
