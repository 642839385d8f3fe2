"""Several sources as one: their numbers, prompts that repeat, and what is held out.

Prompts are compared by eight bytes of a hash of their text, so that none has to be kept.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from groupwise.data.on_disk import Places, tasks_at
from groupwise.data.tasks import normalised
from groupwise.errors import DataError
from groupwise.records import Task

Keys = NDArray[np.uint64]


def renumber(task: Task, first: int, source: str) -> Task:
    """Return a task numbered after all tasks of the sources before its own."""
    return replace(task, id=first + task.id, source=source)


def interleaved(tasks: Sequence[Task]) -> Sequence[Task]:
    """Take from the sources in turns, so that the first tasks are of all of them."""
    places: dict[str, array[int]] = {}
    for place, task in enumerate(tasks):
        places.setdefault(task.source, array("q")).append(place)
    if len(places) == 1:
        return tasks
    turns = (place for turn in zip_longest(*places.values()) for place in turn if place is not None)
    return tasks_at(tasks, np.fromiter(turns, np.int64, len(tasks)))


def keys_of(tasks: Sequence[Task]) -> Keys:
    """Return keys that are equal for prompts that are the same."""
    return np.fromiter((_key(normalised(task.prompt)) for task in tasks), np.uint64, len(tasks))


def repeats(tasks: Sequence[Task], keys: Keys) -> tuple[Places, int]:
    """Find tasks whose prompt an earlier one has, and count those with another answer."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    first_of = first[which]
    later = np.flatnonzero(first_of != np.arange(len(keys)))
    differ = [tasks[int(at)].answer != tasks[int(first_of[at])].answer for at in later]
    return later, sum(differ)


def split_by_hash(tasks: Sequence[Task], share: float) -> tuple[Sequence[Task], Sequence[Task]]:
    """Split tasks into training and about this share of held-out prompts, in an arbitrary order.

    Where a prompt goes depends on its text alone. So equal prompts go to the same side, and one
    that is held out stays so when the data grows, is reordered or comes in another format.
    """
    place = keys_of(tasks) / 2.0**64  # from 0 to 1, evenly
    train, held = np.flatnonzero(place >= share), np.flatnonzero(place < share)
    if not len(train) or not len(held):
        side = "to hold out" if len(train) else "to train on"
        raise DataError(
            f"data.holdout_share = {share:g} of {len(tasks)} tasks leaves none {side}. Change it, "
            "or name another file in data.eval."
        )
    held = held[np.argsort(place[held], kind="stable")]
    return tasks_at(tasks, train), tasks_at(tasks, held)


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
