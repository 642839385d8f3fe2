"""A reader for people: what of a run's files can be read, and in words what can't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from groupwise.errors import RunError
from groupwise.runfiles.files import scan_lines
from groupwise.runfiles.schemas import Schema

P = ParamSpec("P")
T = TypeVar("T")


class PartialReader:
    """A reader of several files; a damaged one does not stop the others."""

    def __init__(self) -> None:
        self.damage: list[str] = []

    def get(self, read: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | None:
        """Return what is read; None where it can't be."""
        try:
            return read(*args, **options)
        except RunError as error:
            self.damage.append(str(error))
            return None

    def lines(self, path: Path, fits: Schema) -> list[dict[str, Any]]:
        """Return the sound lines of a .jsonl file."""
        found = self.get(scan_lines, path, fits)
        if found is None:
            return []
        if found.damage:
            self.damage.append(found.damage)
        return [value for _, value in found.found]
