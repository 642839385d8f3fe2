"""A reward that holds an answer to its allowance: as many running sums as the prompt has places."""

from __future__ import annotations

import re


def in_its_places(completion: str, prompt: str, answer: str) -> float:
    """1 for a right sum behind no more running sums than `_` in the prompt: 7+5+9=_ -> 12;21."""
    written = re.match(r"[-\d;]*", completion)
    *running, last = written.group().split(";") if written else [""]
    return float(last == answer and len(running) <= prompt.count("_"))
