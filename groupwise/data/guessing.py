"""The success rate of a blind guesser: by options, by yes or no, by the most frequent answer.

A guess that is right is rewarded like a solution, and teaches guessing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from groupwise.data.tasks import prompt_text
from groupwise.records import Task

CHANCE = 0.05  # from which on a row is guessable
LEAST_ROWS = 50  # below, how often an answer comes says little
TWO_WAYS = frozenset(
    (
        "yes", "no", "true", "false", "correct", "incorrect", "right", "wrong", "valid", "invalid",
        "possible", "impossible", "even", "odd", "converges", "diverges", "convergent", "divergent",
        "sí", "oui", "non", "ja", "nein", "да", "нет", "是", "否", "对", "错", "はい", "いいえ",
    )
)  # fmt: skip
LABEL = re.compile(r"(?<![A-Za-z0-9])\(?([A-J])[).:](?=[\s\\$}*~]|\S)")
PLAIN = re.compile(r"[\s$*_`\"'()]+|\.(?!\d)|\\(?:text|textbf|mathrm|boxed)\b|[{}]")
MOST_OPTIONS, LEAST_OPTIONS = 10, 3


@dataclass(frozen=True)
class Guess:
    """A way to be right without the question, and how often it is right."""

    how: str
    chance: float


def by_form(task: Task) -> Guess | None:
    """Return the guess that the row itself allows: options, or an answer that is one of two."""
    answer = plain(task.answer)
    if isinstance(task.answer, bool) or answer in TWO_WAYS:
        return Guess("an answer of two, such as yes or no", 1 / 2)
    number = _listed(task) or _in_text(prompt_text(task.prompt), answer)
    return Guess(f"one of {number} options", 1 / number) if number else None


def _listed(task: Task) -> int:
    given = task.columns.get("choices", task.columns.get("options"))
    if isinstance(given, dict):
        given = given.get("text", list(given.values()))
    return len(given) if isinstance(given, list | tuple) and len(given) > 1 else 0


def _in_text(prompt: str, answer: str) -> int:
    """Count the options that a question lists, A to at least C, the answer among them; else 0."""
    wanted = "ABCDEFGHIJ"
    places: list[re.Match[str]] = []
    for match in LABEL.finditer(prompt):
        if len(places) < MOST_OPTIONS and match[1] == wanted[len(places)]:
            places.append(match)
    if len(places) < LEAST_OPTIONS:
        return 0
    letters = wanted[: len(places)].lower()
    behind = [m.end() for m in places]
    ends = [*(m.start() for m in places[1:]), len(prompt)]
    texts = [plain(prompt[a:b]) for a, b in zip(behind, ends, strict=True)]
    is_letter = len(answer) == 1 and answer in letters
    return len(places) if is_letter or (answer and answer in texts) else 0


def plain(answer: Any) -> str:
    """Return an answer for counting: those that only look different become equal."""
    return PLAIN.sub("", str(answer)).casefold() if answer is not None else ""


def by_frequency(times: int, rows: int) -> Guess | None:
    """Return the success rate of always giving the most frequent answer, on the other rows."""
    if rows < LEAST_ROWS:
        return None
    return Guess("an answer that many rows have", (times - 1) / (rows - 1))
