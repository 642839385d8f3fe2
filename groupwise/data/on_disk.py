"""Tasks that do not fit in memory: kept in a temporary file, read again whenever one is drawn.

In memory are eight bytes a task. The file has no name, so that nothing is left behind however a run
ends. It is a sequence of tasks like a list: the order they come in, and what is done with them, are
the same for both.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tempfile
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import DataError
from groupwise.records import LearnedRow, Task, Turn

IN_MEMORY = 256 * 2**20  # bytes of packed tasks; as objects with token ids, about ten times that
SPARE = 2**30  # bytes of the disk that are left to others
LOOK = 64 * 2**20  # bytes between two looks at the disk

Places = NDArray[np.int64]


class DiskTasks(Sequence[Task]):
    """Tasks in a temporary file, or some of them, in any order."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._file = _File(tasks)
        self._places: Places = np.arange(len(self._file.ends))

    @property
    def bytes(self) -> int:
        return int(self._file.ends[-1]) if len(self._file.ends) else 0

    def tasks_at(self, places: Places) -> DiskTasks:
        """Return the tasks at these places, from the same file."""
        chosen = DiskTasks.__new__(DiskTasks)
        chosen._file, chosen._places = self._file, self._places[places]
        return chosen

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> Task: ...
    @overload
    def __getitem__(self, place: slice) -> DiskTasks: ...
    def __getitem__(self, place: int | slice) -> Task | DiskTasks:
        if isinstance(place, slice):
            return self.tasks_at(np.arange(len(self))[place])
        return self._file.read(int(self._places[place]))

    def __iter__(self) -> Iterator[Task]:
        return (self._file.read(int(place)) for place in self._places)


class _File:
    """Records one after the other, and the end of each."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.folder = scratch_folder()
        ends = array("q")
        try:
            self.file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115, it lives as long
            looked = end = 0
            for task in tasks:
                end += self.file.write(packed(task))
                ends.append(end)
                if end >= looked:
                    looked = end + LOOK
                    self._check_room()
            self.file.flush()
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self._full() from error
            raise DataError(
                f"The data is larger than memory should hold, and {self.folder} can't be written "
                f"to ({error}). Set TMPDIR to a folder with room, or data.streaming=never."
            ) from error
        self.ends: Places = np.frombuffer(ends, np.int64) if ends else np.zeros(0, np.int64)

    def read(self, place: int) -> Task:
        start = int(self.ends[place - 1]) if place else 0
        return unpacked(_read_at(self.file, start, int(self.ends[place]) - start))

    def _check_room(self) -> None:
        if shutil.disk_usage(self.folder).free < SPARE:
            raise self._full()

    def _full(self) -> DataError:
        return DataError(
            f"The data, unpacked, does not fit into {self.folder}: less than "
            f"{SPARE // 2**20:,} MiB are free there. Set TMPDIR to a folder with more room."
        )


def store_tasks(tasks: Iterable[Task], streaming: str) -> Sequence[Task]:
    """Store tasks in a list, or on disk where that is asked for (always) or they are many."""
    if streaming == "never":
        return list(tasks)
    rest, held, size = iter(tasks), deque[Task](), 0
    if streaming == "auto":
        for task in rest:
            held.append(task)
            size += len(packed(task))
            if size > IN_MEMORY:
                break
        else:
            return list(held)
    return DiskTasks(chain(_taken_from(held), rest))


def store_alike(tasks: Sequence[Task], made: Iterable[Task]) -> Sequence[Task]:
    """Store what was made of these tasks the way they are stored themselves."""
    return DiskTasks(made) if isinstance(tasks, DiskTasks) else list(made)


def tasks_at(tasks: Sequence[Task], places: Places) -> Sequence[Task]:
    """Return the tasks at these places."""
    if isinstance(tasks, DiskTasks):
        return tasks.tasks_at(places)
    return [tasks[place] for place in places.tolist()]


def scratch_folder() -> str:
    """Return a folder for large temporary files. /tmp is a part of memory on many machines."""
    asked = os.environ.get("TMPDIR")
    return asked or ("/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir())


def packed(task: Task) -> bytes:
    ids = np.asarray(task.token_ids, np.uint32).tobytes()
    taught = np.asarray(task.teacher_ids, np.uint32).tobytes()
    row = (
        task.id,
        task.prompt,
        task.answer,
        task.columns,
        ids,
        task.source,
        task.grader,
        taught,
        _packed_row(task.row),
    )
    return pickle.dumps(row, pickle.HIGHEST_PROTOCOL)


def unpacked(record: bytes) -> Task:
    row: list[Any] = list(pickle.loads(record))  # written by this very process
    for place in (4, 7):
        row[place] = _numbers(row[place])
    if row[8] is not None:
        prompt, ids, turns, learned = row[8]
        turns = tuple(Turn(*turn) for turn in turns)
        row[8] = LearnedRow(_numbers(prompt), _numbers(ids), turns, learned)
    return Task(*row)


def _packed_row(row: LearnedRow | None) -> tuple[Any, ...] | None:
    if row is None:
        return None
    prompt, ids = (np.asarray(x, np.uint32).tobytes() for x in (row.prompt_ids, row.token_ids))
    return prompt, ids, tuple(map(tuple, row.turns)), row.learned


def _numbers(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, np.uint32).tolist())


def _read_at(file: IO[bytes], start: int, length: int) -> bytes:
    """Read without the file's own position, which processes and threads would share."""
    pieces = []
    while length:
        piece = os.pread(file.fileno(), length, start)
        if not piece:
            raise DataError("The temporary file of the data was cut off. Start the run again.")
        pieces.append(piece)
        start, length = start + len(piece), length - len(piece)
    return b"".join(pieces)


def _taken_from(held: deque[Task]) -> Iterator[Task]:
    """Yield the tasks, and let go of each."""
    while held:
        yield held.popleft()
