"""Figures of a suite, from right and wrong samples of each task.

Every figure is a mean over tasks of a value that each task has, and its standard error is that of
the spread between tasks: samples of one task are no independent trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from groupwise.evaluate.estimates import PassCount, none_pass, over_prompts
from groupwise.evaluate.votes import majority

COLUMNS = ("level", "difficulty", "subject", "type", "category", "task")  # looked at by themselves
MOST_VALUES = 30  # of such a column: more are no groups
NO_VALUE = "none"


@dataclass(frozen=True)
class TaskOutcome:
    """The result of one task."""

    key: str  # of its prompt and answer: the same in every file and run
    id: int
    correct: tuple[
        bool | None, ...
    ]  # of each sample; None where nothing says so, or grading failed
    tokens: tuple[int, ...]
    truncated: tuple[bool, ...]  # which samples hit the limit
    failed: int  # samples whose grading failed
    votes: tuple[int, ...] | None = None  # of the samples that were graded; see votes.py
    groups: Mapping[str, str] | None = None  # column -> value
    budgets: Mapping[int, tuple[bool | None, ...]] | None = None  # correct with so many tokens

    @property
    def count(self) -> PassCount:
        known = [right for right in self.correct if right is not None]
        return PassCount(len(known), sum(known))

    @property
    def accuracy(self) -> float | None:
        return self.count.passed / self.count.samples if self.count.samples else None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> TaskOutcome:
        budgets = stored.get("budgets")
        votes = stored.get("votes")
        return cls(
            key=stored["key"],
            id=stored["id"],
            correct=tuple(stored["correct"]),
            tokens=tuple(stored["tokens"]),
            truncated=tuple(stored["truncated"]),
            failed=stored["failed"],
            votes=None if votes is None else tuple(votes),
            groups=stored.get("groups"),
            budgets=budgets and {int(size): tuple(x) for size, x in budgets.items()},
        )


@dataclass(frozen=True)
class Figure:
    """A mean over tasks, its standard error and 95 % interval."""

    value: float
    stderr: float | None  # None of a single task
    low: float
    high: float
    tasks: int


def figure(values: Sequence[float], trials: float) -> Figure:
    """Return the figure; `trials` is the largest number of independent trials behind the values."""
    found = over_prompts(values, trials)
    number = len(values)
    stderr = None
    if number > 1:
        spread = sum((x - found.value) ** 2 for x in values) / (number - 1)
        stderr = math.sqrt(spread / number)
    return Figure(found.value, stderr, found.low, found.high, number)


def average(outcomes: Sequence[TaskOutcome]) -> Figure | None:
    """Return the mean share of right samples: avg@n of n samples."""
    known = [x for x in outcomes if x.accuracy is not None]
    if not known:
        return None
    samples = sum(x.count.samples for x in known)
    return figure([x.accuracy for x in known if x.accuracy is not None], samples)


def pass_at(outcomes: Sequence[TaskOutcome], k: int) -> Figure | None:
    """Return the chance that one of k samples is right, over all k-subsets: without bias."""
    counts = [x.count for x in outcomes if x.count.samples >= k]
    if not counts:
        return None
    trials = sum(count.samples for count in counts) // k
    return figure([1 - none_pass(count, k) for count in counts], trials)


def majority_at(outcomes: Sequence[TaskOutcome], k: int) -> Figure | None:
    """Return the chance that the answer of most of k samples is right, over all k-subsets; ties are
    split evenly.
    """
    voted = [x.votes for x in outcomes if x.votes is not None and len(x.votes) >= k]
    if not voted:
        return None
    return figure([majority(votes, k) for votes in voted], sum(map(len, voted)) // k)


def metrics(outcomes: Sequence[TaskOutcome], samples: int, at: Sequence[int]) -> dict[str, Figure]:
    """Return avg@n, pass@k and maj@k by name."""
    found = {f"avg@{samples}": average(outcomes)}
    for k in at:
        found[f"pass@{k}"] = pass_at(outcomes, k)
    for k in at:
        if k > 1:
            found[f"maj@{k}"] = majority_at(outcomes, k)
    return {name: each for name, each in found.items() if each is not None}


def grouped(outcomes: Sequence[TaskOutcome]) -> dict[str, dict[str, Figure]]:
    """Return avg@n by the values of each column, in their order."""
    found: dict[str, dict[str, Figure]] = {}
    for column in dict.fromkeys(name for x in outcomes for name in x.groups or ()):
        rows: dict[str, list[TaskOutcome]] = {}
        for outcome in outcomes:
            rows.setdefault((outcome.groups or {}).get(column, NO_VALUE), []).append(outcome)
        figures = {value: average(rows[value]) for value in sorted(rows, key=_order)}
        found[column] = {value: each for value, each in figures.items() if each is not None}
    return found


def by_budget(outcomes: Sequence[TaskOutcome]) -> list[dict[str, Any]]:
    """Return the accuracy where answers are cut off at growing numbers of tokens."""
    sizes = sorted({size for x in outcomes for size in x.budgets or ()})
    found = []
    for size in sizes:
        cut = [
            TaskOutcome(x.key, x.id, x.budgets[size], x.tokens, (), 0)
            for x in outcomes
            if x.budgets
        ]
        lengths = [min(tokens, size) for x in outcomes for tokens in x.tokens]
        forced = [
            tokens > size or at_limit
            for x in outcomes
            for tokens, at_limit in zip(x.tokens, x.truncated, strict=True)
        ]
        found.append(
            {
                "budget": size,
                "accuracy": average(cut),
                "tokens": sum(lengths) / len(lengths),
                "forced_share": sum(forced) / len(forced),
            }
        )
    return found


def values_of(columns: Sequence[Mapping[str, Any]], asked: Sequence[str]) -> list[dict[str, str]]:
    """Return each task's group by each column: those asked for, or known ones with few values."""
    names = list(asked)
    if not names:
        for name in COLUMNS:
            values = {_text(row.get(name)) for row in columns} - {NO_VALUE}
            if 1 < len(values) <= MOST_VALUES:
                names.append(name)
    return [{name: _text(row.get(name)) for name in names} for row in columns]


def _text(value: Any) -> str:
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value).strip() if plain and str(value).strip() else NO_VALUE


def _order(value: str) -> tuple[float, str]:
    """Return a sort key: numbers by value, before texts."""
    try:
        return float(value), value
    except ValueError:
        return math.inf, value
