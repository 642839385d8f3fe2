"""The interface of a tracker, and the facts that it gets about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

PROJECT = "groupwise"  # that runs belong to, unless the client's own environment names another

Setting = str | bool | int | float


@dataclass(frozen=True)
class TrackedRun:
    """The facts of a run that do not change from step to step."""

    name: str
    id: str  # stays the same when the run is resumed
    settings: Mapping[str, Setting]  # by dotted names, without secrets
    place: Path  # a folder for the tracker's own files


@dataclass(frozen=True)
class Note:
    """An event of events.jsonl."""

    step: int
    title: str
    text: str
    grave: bool


class Tracker(Protocol):
    """One run in a tracker, new or continued. Whatever goes wrong is raised."""

    # Whether it can be told all anew, as a resumed run drops steps and does them again. If not, a
    # step is sent once: what is done again is the same, apart from the clock.
    takes_back: bool

    def reached(self) -> int | None:
        """Return the last step that its store holds, -1 for none; None if the client can't tell."""

    def take_back(self) -> None:
        """Withdraw what it has of the run."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def note(self, note: Note) -> None: ...

    def flush(self) -> None:
        """Wait until all so far has left this process, as far as the client can promise that."""

    def close(self, finished: bool) -> None:
        """Mark the run as finished, or as stopped: it may go on."""


def note_of(event: Mapping[str, Any]) -> Note:
    kind = str(event.get("kind", "event"))
    return Note(
        int(event["step"]),
        str(event.get("rule", kind)),
        str(event.get("text", "")),
        bool(event.get("grave", False)),
    )
