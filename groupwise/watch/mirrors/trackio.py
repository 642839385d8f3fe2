"""Trackio: a SQLite file per project, or the Space or server that its environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping

from groupwise.watch.mirrors.tracker import PROJECT, Note, TrackedRun

REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


def open_tracker(about: TrackedRun) -> TrackioRun:
    if not any(os.environ.get(name) for name in REMOTE):
        os.environ.setdefault("TRACKIO_DIR", str(about.place))  # read on import, as is the next
        os.environ["HF_HUB_OFFLINE"] = "1"  # else it asks the hub who the user is
    return TrackioRun(about)


class TrackioRun:
    takes_back = False

    def __init__(self, about: TrackedRun) -> None:
        import trackio

        self._levels = trackio.AlertLevel
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{about.name}-{about.id}",  # runs are found again by their names
            resume="allow",
            config=dict(about.settings),
            embed=False,
        )

    def reached(self) -> int | None:
        """Ask the store, which alone knows what arrived: trackio writes from a thread."""
        return int(self._run._next_step) - 1

    def take_back(self) -> None:
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def note(self, note: Note) -> None:
        level = self._levels.ERROR if note.grave else self._levels.WARN
        self._run.alert(note.title, note.text, level=level, step=note.step)

    def flush(self) -> None:
        """Do nothing: trackio's thread writes twice a second."""

    def close(self, finished: bool) -> None:
        self._run.finish()
