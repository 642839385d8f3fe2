"""TensorBoard: event files, written by its own writer. Numbers are float32 there."""

from __future__ import annotations

import time
from collections.abc import Mapping

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from groupwise.watch.mirrors.tracker import Note, Setting, TrackedRun


def open_tracker(about: TrackedRun) -> EventFiles:
    return EventFiles(about)


class EventFiles:
    takes_back = True  # readers drop what they have where a session starts at step 0

    def __init__(self, about: TrackedRun) -> None:
        for earlier in about.place.glob("events.out.tfevents.*"):
            earlier.unlink()  # what it says is said again
        self._about, self._writer = about, EventFileWriter(str(about.place))

    def reached(self) -> int | None:
        return None

    def take_back(self) -> None:
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=0, session_log=start))
        self._describe()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=x) for name, x in numbers.items()]
        self._add(step, Summary(value=values))

    def note(self, note: Note) -> None:
        self._add(note.step, text_pb(f"events/{note.title}", note.text))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, finished: bool) -> None:
        self._writer.close()

    def _describe(self) -> None:
        self._add(0, hparams_pb(dict(self._about.settings), trial_id=self._about.id))
        self._add(0, text_pb("config", _table(self._about.settings)))

    def _add(self, step: int, summary: Summary) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


def _table(settings: Mapping[str, Setting]) -> str:
    """Write a table in Markdown, which the text page shows."""
    rows = [f"| `{name}` | `{str(x).replace('|', '¦')}` |" for name, x in settings.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])
