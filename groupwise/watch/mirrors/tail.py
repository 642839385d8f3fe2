"""A mirror of a run folder in a tracker: what is there, and what is added while the run is written.

`mirrors/NAME.json` in the run folder remembers under which id the tracker has the run, and up to
which step. So it does not matter how often a mirror is stopped, or how late it is started.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.files import GrowingFile, to_line, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.naming import run_name
from groupwise.watch.mirrors import FOLDER, open_tracker
from groupwise.watch.mirrors.settings import hide, settings_of
from groupwise.watch.mirrors.tracker import Note, TrackedRun, Tracker, note_of

POLL = 0.5  # seconds between two looks at the files
AT_ONCE = 100  # steps that are sent before it is written down that they were
PATIENCE = 600  # seconds that a client may take for them; after that the process is ended
TAKEOVER = 60.0  # seconds that the mirror of a run that was killed has to end


def mirror(folder: RunFolder, name: str) -> int:
    """Bring a tracker up to date, and continue as long as the run's present writer does.

    Returns the last step that it has.
    """
    place = folder.path / FOLDER
    with folder.writing(FOLDER):
        place.mkdir(exist_ok=True)
    with _alone(place / f".{name}.lock", name):
        known = _Known(place / f"{name}.json", folder)
        about = TrackedRun(known.name, known.id, settings_of(folder), place / name)
        writer = folder.writer()
        with _patience():
            tail = Tail(folder, open_tracker(name, about), known)
        while True:
            over = writer is None or folder.writer() != writer  # before the look: it misses nothing
            tail.look()
            if over:
                break
            time.sleep(POLL)
        with _patience():
            tail.close()
    return known.step


def up_to_date(folder: RunFolder, name: str) -> bool:
    """Return whether the tracker has all steps."""
    lines = folder.read_metrics()
    return (
        not lines or _Known(folder.path / FOLDER / f"{name}.json", folder).step == lines[-1]["step"]
    )


class Tail:
    """The part of the files that was read, and the part of it that the tracker has."""

    def __init__(self, folder: RunFolder, tracker: Tracker, known: _Known) -> None:
        self._folder, self._tracker, self._known = folder, tracker, known
        reached = tracker.reached()
        self._sent = known.step if reached is None else reached
        self._open()
        if tracker.takes_back:  # the run may have been resumed since: all of it again
            self._again()

    def _open(self) -> None:
        self._metrics = GrowingFile(self._folder.metrics, schemas.metrics)
        self._events = GrowingFile(self._folder.events, schemas.events)
        self._waiting: list[Note] = []  # for the metrics line of their step

    def _again(self) -> None:
        self._tracker.take_back()
        self._sent = -1
        self._open()

    def look(self) -> None:
        """Send what was added. Events are written before the metrics of their step."""
        void, lines = _sound(self._metrics)
        if void and self._tracker.takes_back:  # resumed by another process
            self._again()
            _, lines = _sound(self._metrics)
        void, events = _sound(self._events)
        waiting = [] if void else self._waiting
        self._waiting = waiting + [x for x in map(note_of, events) if x.step > self._sent]
        new = [line for line in lines if line["step"] > self._sent]
        for at in range(0, len(new), AT_ONCE):
            with _patience():
                self._send(new[at : at + AT_ONCE])

    def _send(self, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            self._sent = int(line["step"])
            self._tell_up_to(self._sent)
            self._tracker.log(self._sent, numbers(line))
        self._tracker.flush()
        self._known.write(self._sent)

    def _tell_up_to(self, step: float) -> None:
        for note in self._waiting:
            if note.step <= step:
                self._tracker.note(Note(note.step, note.title, hide(note.text), note.grave))
        self._waiting = [note for note in self._waiting if note.step > step]

    def close(self) -> None:
        self._tell_up_to(math.inf)  # of a step that was not finished
        summary = self._folder.read_summary()
        self._tracker.close(finished=summary.get("steps", math.nan) == self._sent)


def _sound(file: GrowingFile) -> tuple[bool, list[dict[str, Any]]]:
    """Return what is new in a file; raise if it is damaged: no step is missed silently."""
    found = file.news()
    if file.damage:
        raise RunError(file.damage)
    return found


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line that are numbers; null, for what is not finite, is left out."""
    return {
        name: value
        for name, value in line.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


class _Known:
    """`NAME.json`: the run's id and name in the tracker, and the last step that it was told."""

    def __init__(self, path: Path, folder: RunFolder) -> None:
        self._path = path
        try:
            stored = json.loads(path.read_bytes())
            self.id, self.step = str(stored["id"]), int(stored["step"])
            # Older versions called a run by its folder alone, and wrote no name down.
            self.name = str(stored.get("name", folder.path.resolve().name))
        except FileNotFoundError:
            self.id, self.step = uuid.uuid4().hex[:8], -1
            self.name = run_name(folder.path).replace("/", ".")  # it may name a file there
            self.write(-1)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"{path} can't be read ({error}). It is written in one piece, so it was edited or "
                "the disk is faulty. Remove it: the tracker then gets the run anew."
            ) from error

    def write(self, step: int) -> None:
        self.step = step
        write_atomic(self._path, to_line({"id": self.id, "name": self.name, "step": step}))


@contextlib.contextmanager
def _alone(path: Path, name: str) -> Iterator[None]:
    """Lock out a second mirror to the same tracker, which would send everything twice."""
    deadline = time.monotonic() + TAKEOVER
    with open(path, "wb") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"Another process mirrors this run to {name}, and sends what there is to "
                        "send. End it first if it hangs."
                    ) from None
                time.sleep(POLL)
        yield


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """End this process if a client hangs inside."""
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
