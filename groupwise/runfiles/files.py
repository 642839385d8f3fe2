"""Files that survive a crash: replaced as a whole, or appended line by line and synced.

Nothing here knows what a run is. A line file (.jsonl) may end in a torn line after a crash: readers
leave it out, and the next append starts where the last whole line ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import RunError
from groupwise.runfiles.schemas import Schema, any_object
from groupwise.runfiles.whole import sync_folder, whole_file

HALF = re.compile(
    rb"(?i)\\ud[89a-f]"
)  # an escape of half a surrogate pair, perhaps beside the other


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write the new file as a whole, or leave the old one, whatever happens; durable on return."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


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
    """Return how many bytes come before a torn last line."""
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


def file_status(path: Path) -> os.stat_result | None:
    """Return the facts of a file that may be read, None if there is none.

    A folder, a pipe or a device is refused, and so is a link that leads out of the folder that the
    file stands in: whoever hands on a run folder must not choose which of our files are shown.
    """
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # no permission, a circle of links, a name that is too long
        raise unreadable(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise unreadable(path, f"it is {what}, where a file belongs")
    real, home = os.path.realpath(path), os.path.realpath(path.parent)
    if os.path.commonpath([real, home]) != home:
        raise unreadable(path, f"it is a link out of its folder, to {real}")
    return found


def unreadable(path: Path, why: str) -> RunError:
    return RunError(f"{path} can't be read: {why}. Put the file back, or remove it.")


def read_bytes(path: Path, start: int = 0) -> bytes | None:
    """Return what an ordinary file holds from a byte on; None if there is none."""
    if file_status(path) is None:
        return None
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:  # it went away in between
        return None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from error


def from_json(data: bytes) -> Any:
    """Turn JSON into values that can be shown and counted with; raise ValueError for other text.

    What is no finite number is None, as it is where groupwise writes it.
    """
    try:
        value = json.loads(
            data, parse_constant=lambda word: None, parse_float=_finite, parse_int=_countable
        )
        # Half a surrogate pair can only have come as an escape, and UTF-8 can't hold it.
        return plain(value) if HALF.search(data) else value
    except RecursionError:
        raise ValueError("lists or objects too deep within one another") from None


def _finite(word: str) -> float | None:
    number = float(word)
    return number if math.isfinite(number) else None


def _countable(word: str) -> int | None:
    return int(word) if len(word) < 300 else None  # a float holds numbers of 308 digits


def read_object(path: Path, fits: Schema) -> dict[str, Any]:
    """Read a JSON file, {} if there is none."""
    data = read_bytes(path)
    if data is None:
        return {}
    try:
        value = from_json(data)
        wrong = fits(value)
        why = f"does not hold what it should: {wrong}" if wrong else ""
    except ValueError as error:
        why = f"is not JSON ({error})"
    if why:
        raise RunError(
            f"{path} {why}. It is written in one piece, so it was edited or the disk is faulty. "
            "Remove it and run again: what it said is written anew."
        )
    return dict(value)


class Lines(NamedTuple):
    """The readable lines of a .jsonl file, and in words the damage."""

    found: list[tuple[bytes, dict[str, Any]]]  # every sound line, as it stands and as an object
    size: int  # bytes up to the last whole line
    number: int  # of all lines in them
    damage: str  # the first broken line, and how many others there are; "" if all are sound


def scan_lines(path: Path, fits: Schema, start: int = 0, before: int = 0) -> Lines:
    """Read a .jsonl file from the byte `start` on, before which so many lines stand.

    What a crash did to the last line is left out. A broken line before it, or a last one that is
    whole and does not fit, is damage: no crash does that.
    """
    *lines, _torn = (read_bytes(path, start) or b"").split(b"\n")
    found, wrong, size = [], [], 0
    for number, line in enumerate(lines, start=1):
        try:
            value = from_json(line)
        except ValueError as error:
            if number == len(lines):
                lines.pop()
                break
            wrong.append((number, f"is not JSON ({error})"))
        else:
            misfit = fits(value)
            if misfit:
                wrong.append((number, f"does not hold what it should: {misfit}"))
            else:
                found.append((line + b"\n", value))
        size += len(line) + 1
    if not wrong:
        return Lines(found, size, len(lines), "")
    first, why = wrong[0]
    others = f" So it is with {len(wrong) - 1:,} other lines." if len(wrong) > 1 else ""
    damage = (
        f"Line {before + first} of {path} {why}.{others} A crash damages only the last line, so "
        "the file was edited or the disk is faulty. Restore the line, or remove the file and run "
        "again without its history."
    )
    return Lines(found, size, len(lines), damage)


def read_lines(path: Path, fits: Schema = any_object) -> list[tuple[bytes, dict[str, Any]]]:
    """Return every whole line of a .jsonl file, as it is and as an object; none if there is no
    file.

    What a crash did to the last line is left out; other damage is an error.
    """
    lines = scan_lines(path, fits)
    if lines.damage:
        raise RunError(lines.damage)
    return lines.found


class GrowingFile:
    """A .jsonl file of which only the new lines are read; a rewound file is read again."""

    def __init__(self, path: Path, fits: Schema = any_object) -> None:
        self.path, self._fits = path, fits
        self.damage = ""  # the first thing that could not be read
        self._forget()

    def _forget(self) -> None:
        self._file = 0  # its number on the disk: a rewind puts another file in its place
        self._end = self._number = 0
        self._broken = ""  # the first broken line

    @property
    def stamp(self) -> str:
        """Return a mark of how far it was read."""
        return f"{self._file}-{self._end}"

    def news(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether all that was read before is void, and the lines to add."""
        try:
            found = file_status(self.path)
            size, file = (0, 0) if found is None else (found.st_size, found.st_ino)
            void = self._end > 0 and (file != self._file or size < self._end)
            if void or not file:
                self._forget()
            self._file = file
            lines = scan_lines(self.path, self._fits, self._end, self._number)
        except RunError as error:
            self.damage = str(error)
            return False, []
        self._end += lines.size
        self._number += lines.number
        self._broken = self._broken or lines.damage
        self.damage = self._broken
        return void, [value for _, value in lines.found]


def to_line(values: Mapping[str, Any]) -> str:
    """Write one JSON object: floats come back bit for bit, NaN and infinities become null."""
    return json.dumps(plain(values), ensure_ascii=False, allow_nan=False)


def to_page(values: Mapping[str, Any]) -> str:
    """Write the same for people to read, one entry a line."""
    return json.dumps(plain(values), ensure_ascii=False, allow_nan=False, indent=2) + "\n"


def plain(value: Any) -> Any:
    """Return a value that JSON can hold. Tensors and the like are refused by json: give numbers."""
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
    """Return text that UTF-8 can hold: half a surrogate pair, which a decoder may leave, becomes
    '?'.
    """
    return text.encode("utf-8", "replace").decode("utf-8")
