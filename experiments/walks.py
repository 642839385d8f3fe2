"""Walks: a task whose answers can use their tokens, and a reward that holds them to an allowance.

    python -m experiments.walks           # writes walks/direct.jsonl and walks/in_steps.jsonl

`4abca=` asks where a walk ends that starts at 4 and takes four steps; each letter is a fixed
shuffling of the ten digits. With places (`4abca=___`) the stops between may be written as well:
`7;2;0;5`. A stop is one look-up, the end alone is all of them at once.
"""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).parent / "walks"
LETTERS, STEPS, ROWS = "abc", 6, 1000
STOP, PLACE = ";", "_"


def stops(start: int, letters: str) -> list[int]:
    """Where a walk is after each letter."""
    maps = {name: random.Random(name).sample(range(10), 10) for name in LETTERS}
    found, at = [], start
    for letter in letters:
        at = maps[letter][at]
        found.append(at)
    return found


def rows() -> dict[str, list[dict[str, str]]]:
    """Of each file; no walk is in both."""
    walks = [(start, "".join(w)) for start in range(10) for w in product(LETTERS, repeat=STEPS)]
    random.Random("walks").shuffle(walks)
    parts = {"direct": walks[:ROWS], "in_steps": walks[ROWS : 2 * ROWS]}
    return {name: [_row(*walk, name == "in_steps") for walk in own] for name, own in parts.items()}


def _row(start: int, letters: str, in_steps: bool) -> dict[str, str]:
    *between, end = map(str, stops(start, letters))
    shown = between if in_steps else []
    prompt = f"{start}{letters}={PLACE * len(shown)}"
    return {"prompt": prompt, "answer": end, "solution": STOP.join([*shown, end])}


def in_its_places(completion: str, prompt: str, answer: str) -> float:
    """1 for a right end behind no more stops than the prompt has places for."""
    written = re.match(rf"[\d{STOP}]*", completion)
    *between, end = written.group().split(STOP) if written else [""]
    return float(end == answer and len(between) <= prompt.count(PLACE))


def text(own: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in own)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, own in rows().items():
        (FOLDER / f"{name}.jsonl").write_text(text(own), "utf-8")
