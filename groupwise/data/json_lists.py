"""A JSON list read one element at a time: only that element is in memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from io import BufferedIOBase
from typing import Any

CHUNK = 2**20
SPACES = re.compile(r"[ \t\r\n]*")


class NoList(ValueError):
    """The file holds something else than a list; `found` is its kind."""

    def __init__(self, found: str) -> None:
        super().__init__(found)
        self.found = found


class TooLong(ValueError):
    """An element that is longer than the limit, or that does not end."""


def elements(file: BufferedIOBase, most: int) -> Iterator[Any]:
    """Yield the elements of a list in the file.

    Raises json.JSONDecodeError with line and column of the whole file, UnicodeDecodeError, NoList,
    or TooLong for an element of more than `most` characters.
    """
    text = _Text(file, most)
    if text.next_letter() != "[":
        kind = type(text.value()).__name__
        raise text.error("Extra data") if text.next_letter() else NoList(kind)
    text.skip()
    if text.next_letter() == "]":
        text.skip()
    else:
        while True:
            yield text.value()
            letter = text.next_letter()
            if letter not in (",", "]"):
                raise text.error("Expecting ',' delimiter")
            text.skip()
            if letter == "]":
                break
    if text.next_letter():
        raise text.error("Extra data")


class _Text:
    """A window over the file's text that moves on and grows as it is asked to."""

    def __init__(self, file: BufferedIOBase, most: int) -> None:
        self._file, self._most = file, most
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._read = 0  # bytes, for errors of the decoder
        self._window, self._at, self._ended = "", 0, False
        self._line, self._column = 1, 1  # of the window's first letter
        self._parse = json.JSONDecoder().raw_decode

    def next_letter(self) -> str:
        """Return the next letter that is no space, without taking it; "" at the end."""
        while True:
            self._at = SPACES.match(self._window, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._window):
                return self._window[self._at]
            if self._ended:
                return ""
            self._more()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> Any:
        """Read the next value completely."""
        self.next_letter()
        while True:
            try:
                found, end = self._parse(self._window, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.error(error.msg, error.pos) from None
            else:
                # A number at the very end of the window may go on behind it.
                if end < len(self._window) or self._ended:
                    self._at = end
                    return found
            if len(self._window) - self._at > self._most:
                raise TooLong
            self._more()

    def _more(self) -> None:
        """Drop what was used, and read at least as much again as is left: each once or twice."""
        used = self._window[: self._at]
        lines = used.count("\n")
        self._line += lines
        self._column = len(used) - used.rfind("\n") if lines else self._column + len(used)
        rest = self._window[self._at :]
        raw = self._file.read(max(CHUNK, len(rest)))
        self._ended = not raw
        try:
            self._window = rest + self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            error.start += self._read
            raise
        self._at = 0
        self._read += len(raw)

    def error(self, message: str, at: int | None = None) -> json.JSONDecodeError:
        """Return an error at the current letter, or at one of the window, with its place in the
        file.
        """
        before = self._window[: self._at if at is None else at]
        made = json.JSONDecodeError(message, "", 0)
        lines = before.count("\n")
        made.lineno = self._line + lines
        made.colno = len(before) - before.rfind("\n") if lines else self._column + len(before)
        return made
