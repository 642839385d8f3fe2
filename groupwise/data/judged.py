"""Rows with judgements on answers: which of them is better, or how good each of their steps is.

Read from the columns of a task as people write them: `chosen` and `rejected`, ranked `completions`,
or steps in `completions` with `labels`. Whatever is wrong with a row is said with its number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, TypeGuard

from groupwise.data.steps import step_ends
from groupwise.errors import DataError
from groupwise.records import Task

SHOWN = 60  # characters of a text that is quoted
LARGEST = 1e30  # of ranks and margins: float32 holds it


@dataclass(frozen=True)
class Ranked:
    """Answers to one prompt, and how good each is beside the others: larger is better."""

    answers: tuple[str, ...]
    good: tuple[float, ...]
    margin: float = 0.0  # how far apart their scores should be


@dataclass(frozen=True)
class Stepwise:
    """An answer in steps; a step without a label (None) is read and not learned."""

    steps: tuple[str, ...]
    labels: tuple[float | None, ...]


def ranked(task: Task) -> Ranked:
    """Read the answers of a row that are compared: a pair, or a ranking where rank 1 is best."""
    columns = task.columns
    margin = _margin(task)
    if columns.get("completions") is not None:
        return _ranking(task, columns["completions"], margin)
    chosen, rejected = (answer_said(task, name, columns.get(name)) for name in PAIR)
    return Ranked((chosen, rejected), (1.0, 0.0), margin)


PAIR = ("chosen", "rejected")


def stepwise(task: Task, separator: str) -> Stepwise:
    """Read the steps of a row and their labels."""
    steps, labels = (task.columns.get(name) for name in ("completions", "labels"))
    for name, found in (("completions", steps), ("labels", labels)):
        if not isinstance(found, Sequence) or isinstance(found, str) or not found:
            raise DataError(
                f"Row {task.id} has no list in column {name!r}. A process reward model learns from "
                "`completions`, the texts of the steps, and `labels`, a number from 0 to 1 or true "
                "or false for each."
            )
    assert steps is not None and labels is not None
    if len(steps) != len(labels):
        raise DataError(
            f"Row {task.id} has {len(steps)} steps in `completions` and {len(labels)} in `labels`: "
            "which label is whose, nobody can tell. Give every step one, null for none."
        )
    _check_steps(task, steps, separator)
    return Stepwise(tuple(steps), tuple(_label(task, x) for x in labels))


def text_of(steps: Sequence[str], separator: str) -> str:
    """Return the steps as one text, each with the separator behind it."""
    return "".join(step + separator for step in steps)


def check_ranked(tasks: Sequence[Task]) -> None:
    """Refuse rows that say nothing about which answer is better."""
    told = False
    for task in tasks:
        found = ranked(task)
        by_text: dict[str, set[float]] = {}
        for text, good in zip(found.answers, found.good, strict=True):
            by_text.setdefault(text, set()).add(good)
        told = told or (len(by_text) > 1 and len(set(found.good)) > 1)
    if tasks and not told:
        raise DataError(
            "In every row the better answer is the same text as the worse one, or all are ranked "
            "alike: there is no preference to learn. Check that `chosen` and `rejected` are not "
            "copies of one column."
        )


def check_stepwise(tasks: Sequence[Task], separator: str) -> None:
    """Refuse labels that are all the same: a constant would be learned."""
    seen = {y for task in tasks for y in stepwise(task, separator).labels if y is not None}
    if tasks and not seen:
        raise DataError("No step of any row has a label, so nothing can be learned. Label some.")
    if len(seen) == 1:
        raise DataError(
            f"All steps have the label {seen.pop():g}: a model that always says so would be right, "
            "and nothing about steps is learned. Add rows with other labels."
        )


def answer_said(task: Task, column: str, found: Any) -> str:
    """Return an answer as a text: as it stands, or what its one assistant message says."""
    if isinstance(found, Sequence) and not isinstance(found, str):
        roles = [m.get("role") if isinstance(m, Mapping) else None for m in found]
        if roles != ["assistant"]:
            raise DataError(
                f"Row {task.id}, column {column!r}: an answer is a text or one message of the "
                f"assistant, and these are messages of {short(roles)}. Put the turns before the "
                "last one into `prompt`; of whole conversations that begin alike it is split off."
            )
        found = found[0].get("content")
    if not isinstance(found, str) or not found.strip():
        raise DataError(
            f"Row {task.id} has no text in column {column!r}, which a reward model learns from. "
            "Give every row `chosen` and `rejected`, or `completions` with a rank each."
        )
    return found


def _ranking(task: Task, found: Any, margin: float) -> Ranked:
    entries = found if isinstance(found, Sequence) and not isinstance(found, str) else ()
    answers, good = [], []
    for entry in entries:
        rank = entry.get("rank") if isinstance(entry, Mapping) else None
        if not _finite(rank):
            raise DataError(
                f"Row {task.id}: an entry of `completions` has rank {short(rank)}, not a number. "
                'Write [{"rank": 1, "completion": "the best"}, {"rank": 2, "completion": "..."}].'
            )
        answers.append(answer_said(task, "completions", entry.get("completion")))
        good.append(-float(rank))
    if len(answers) < 2 or len(set(good)) < 2:
        raise DataError(
            f"Row {task.id} ranks {len(answers)} answers, and none above another. A ranking has "
            "at least two of different ranks."
        )
    return Ranked(tuple(answers), tuple(good), margin)


def _margin(task: Task) -> float:
    margin = task.columns.get("margin")
    if margin is None:
        return 0.0
    if not _finite(margin):
        raise DataError(
            f"Row {task.id} has margin {short(margin)}: it says by how much the better answer's "
            "score should lead, a number. Mend it, or leave the column out."
        )
    return float(margin)


def _finite(value: Any) -> TypeGuard[float]:
    """Tell whether it is a number that a float holds, which a whole number of any size is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST and math.isfinite(value)


def _label(task: Task, label: Any) -> float | None:
    if label is None:
        return None
    if isinstance(label, bool):
        return float(label)
    if not isinstance(label, int | float) or not 0 <= label <= 1:
        raise DataError(
            f"Row {task.id} has the label {short(label)}: a step's is true or false, or a number "
            "from 0 to 1, or null for none."
        )
    return float(label)


def _check_steps(task: Task, steps: Sequence[Any], separator: str) -> None:
    """Refuse steps that end elsewhere when their text is read than where their labels say."""
    for number, step in enumerate(steps):
        if not isinstance(step, str) or not step.strip():
            raise DataError(
                f"Row {task.id}, step {number}, is {short(step)}: an empty step has no end that a "
                "label could stand at. Leave it out, and its label."
            )
        if separator in step:
            raise DataError(
                f"Row {task.id}, step {number}, holds the separator {separator!r} itself: "
                f"{step[:SHOWN]!r} would be read as several steps. Split it, or set "
                "recipe.separator to what stands between your steps."
            )
    ends, at = [], 0
    for step in steps:
        ends.append(at + len(step))
        at += len(step) + len(separator)
    if step_ends(text_of(steps, separator), separator) != ends:
        raise DataError(
            f"Row {task.id}: with {separator!r} behind each, the steps end elsewhere than its "
            "labels say, because one begins or ends with a part of the separator. Strip the steps."
        )
