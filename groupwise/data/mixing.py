"""Several sources as one: their numbers, prompts that repeat, and what is held out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from groupwise.data.tasks import normalised
from groupwise.errors import DataError
from groupwise.records import Task


def joined(parts: dict[str, list[Task]]) -> list[Task]:
    """One after the other, each task with its source, no two with the same number."""
    if len(parts) == 1:
        return [task for part in parts.values() for task in part]
    tasks: list[Task] = []
    for source, part in parts.items():
        first = tasks[-1].id + 1 if tasks else 0
        tasks += [replace(task, id=first + task.id, source=source) for task in part]
    return tasks


def interleaved(parts: dict[str, list[Task]]) -> list[Task]:
    """The same by turns, so that the first tasks are of all sources."""
    named = joined(parts)
    columns = [[task for task in named if task.source == source] for source in parts]
    if len(parts) == 1:
        return named
    return [task for row in zip_longest(*columns) for task in row if task is not None]


def repeats(tasks: Sequence[Task]) -> tuple[list[Task], int]:
    """Tasks whose prompt an earlier one has, and how many of them disagree about the answer."""
    first: dict[str, Task] = {}
    later, conflicts = [], 0
    for task in tasks:
        known = first.setdefault(normalised(task.prompt), task)
        if known is not task:
            later.append(task)
            conflicts += known.answer != task.answer
    return later, conflicts


def split_by_hash(tasks: Sequence[Task], share: float) -> tuple[list[Task], list[Task]]:
    """To train on, and to hold out: about this share of the prompts, in an order without meaning.

    Where a prompt goes depends on its text alone. So equal prompts go to the same side, and one
    that is held out stays so when the data grows, is reordered or comes in another format.
    """
    place = {task.id: _place(normalised(task.prompt)) for task in tasks}
    train = [task for task in tasks if place[task.id] >= share]
    held = [task for task in tasks if place[task.id] < share]
    if not train or not held:
        side = "to hold out" if train else "to train on"
        raise DataError(
            f"data.holdout_share = {share:g} of {len(tasks)} tasks leaves none {side}. Change it, "
            "or name another file in data.eval."
        )
    return train, sorted(held, key=lambda task: (place[task.id], task.id))


def _place(text: str) -> float:
    """From 0 to 1, evenly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
