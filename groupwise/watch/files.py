"""Files that survive a crash: replaced as a whole, or appended line by line and synced.

Nothing here knows what a run is. A line file (.jsonl) may end in a torn line after a crash: readers
leave it out, and the next append starts where the last whole line ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.errors import RunError

PARTIAL = ".partial"  # how the name of a file ends while it is being written


def write_atomic(path: Path, data: bytes | str) -> None:
    """The new file as a whole, or the old one, whatever happens in between; durable on return."""
    data = data.encode() if isinstance(data, str) else data
    beside, descriptor = _open_half(path)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _open_half(path: Path) -> tuple[Path, int]:
    """Make a file beside, under a name of its own, locked for as long as its writer lives."""
    while True:
        half = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PARTIAL}")
        descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # where a file system has no locks, nobody tidies
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return half, descriptor
        os.close(descriptor)  # tidied away before it was locked


def remove_halves(folder: Path) -> None:
    """Remove what dead processes left half written; what a living one writes is left alone."""
    for half in folder.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError):  # locked by its writer, or gone by now
            descriptor = os.open(half, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                half.unlink()
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make names that were added to or taken from a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add whole lines, durable on return. On failure the file is as long as before."""
    data = "".join(f"{line}\n" for line in lines).encode()
    if not data:
        return
    fresh = not path.exists()
    with open(path, "ab") as file:
        end = _end_of_whole_lines(path)
        try:
            file.truncate(end)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise
    if fresh:
        sync_folder(path.parent)


def _end_of_whole_lines(path: Path, block: int = 65536) -> int:
    """How many bytes stand before a torn last line."""
    with open(path, "rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0:
            start = max(0, at - block)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            at = start
    return 0


def read_lines(path: Path, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Every whole line of a .jsonl file, as it stands and as an object; none if there is no file.

    What a crash did to the last line is left out. A broken line before it is an error: no crash
    does that. `start` is the byte to read on from, where a line begins.
    """
    try:
        with open(path, "rb") as file:
            file.seek(start)
            *lines, _torn = file.read().split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if number == len(lines):
                break
            place = f"Line {number}" + (f" after byte {start}" if start else "")
            raise RunError(
                f"{place} of {path} is not a JSON object ({error}). A crash damages only the "
                "last line, so the file was edited or the disk is faulty. Restore the line, or "
                "remove the file and run again without its history."
            ) from error
        found.append((line + b"\n", value))
    return found


class Growing:
    """A .jsonl file of which only the new lines are read; a rewound file is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = 0  # its number on the disk: a rewind puts another file in its place
        self._end = 0

    @property
    def stamp(self) -> str:
        """What was read of it."""
        return f"{self._file}-{self._end}"

    def news(self) -> tuple[bool, list[dict[str, Any]]]:
        """Whether all that was read before is void, and the lines to add."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            void, self._file, self._end = self._end > 0, 0, 0
            return void, []
        void = self._end > 0 and (found.st_ino != self._file or found.st_size < self._end)
        start = 0 if void else self._end
        lines = read_lines(self.path, start) if found.st_size > start else []
        self._file, self._end = found.st_ino, start + sum(len(raw) for raw, _ in lines)
        return void, [value for _, value in lines]


def to_line(values: Mapping[str, Any]) -> str:
    """One JSON object: floats come back bit for bit, NaN and infinities become null."""
    return json.dumps(plain(values), ensure_ascii=False, allow_nan=False)


def to_page(values: Mapping[str, Any]) -> str:
    """The same for people to read, one entry a line."""
    return json.dumps(plain(values), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def plain(value: Any) -> Any:
    """What JSON can say. Tensors and the like are refused by json: give numbers."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def storable(text: str) -> str:
    """Text that UTF-8 can hold: half a surrogate pair, which a decoder may leave, becomes '?'."""
    return text.encode("utf-8", "replace").decode("utf-8")
