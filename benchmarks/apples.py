"""Word problems without end: the prompts of workload S, and their reward."""

from __future__ import annotations

import re
from typing import Any

QUESTION = (
    "Tom has {start} apples and buys {boxes} boxes of {each} apples each. He gives away {away} "
    "apples. How many apples does Tom have now? Think step by step."
)


def row(number: int) -> dict[str, Any]:
    """A problem as a line of a data file."""
    start, boxes, each, away = number + 3, 2 * number + 1, number % 7 + 2, number % 5
    question = QUESTION.format(start=start, boxes=boxes, each=each, away=away)
    return {
        "prompt": [{"role": "user", "content": question}],
        "answer": str(start + boxes * each - away),
    }


def last_number(completion: str, answer: str) -> float:
    """1 if the last whole number of the text is the answer."""
    found = re.findall(r"-?\d+", completion)
    return float(bool(found) and found[-1] == answer)
