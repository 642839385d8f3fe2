"""The run folder: where a run's files are, and how they are written so that a crash loses nothing.

`RunFolder(path)` only names the files; `check_writable` makes the folder. docs/run_folder.md says
what is in each file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupwise.errors import DiskError, RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.disk_errors import disk_error
from groupwise.runfiles.files import (
    append_lines,
    read_bytes,
    read_lines,
    read_object,
    to_line,
    to_page,
    unreadable,
    write_atomic,
)
from groupwise.runfiles.lock import NAME as LOCK
from groupwise.runfiles.lock import Lock, writer
from groupwise.runfiles.manifest import machine_facts
from groupwise.runfiles.whole import PARTIAL, remove_unfinished, sync_folder

FILES = ("config.toml", "manifest.json", "metrics.jsonl", "events.jsonl", "evaluations.jsonl",
         "selected.jsonl", "starts.jsonl", "summary.json", "report.html")  # fmt: skip
PROBE = ".probe_"  # how files begin that are only written to see whether they can be


@dataclass(frozen=True)
class Event:
    """A message or an action beside the numbers."""

    step: int
    kind: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        known = {"step": self.step, "kind": self.kind, "text": self.text}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return to_line({**known, **self.fields, "time/at": now})


@dataclass(frozen=True)
class Rewound:
    """The lines that `rewind` dropped, by step."""

    metrics: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    rollouts: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return how many steps will be done again."""
        return len({*self.metrics, *self.rollouts})

    def __str__(self) -> str:
        return str(len(self))


class RunFolder:
    """The files of one run. Reading needs no lock; one process at a time writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config, self.manifest = self.path / "config.toml", self.path / "manifest.json"
        self.metrics, self.events = self.path / "metrics.jsonl", self.path / "events.jsonl"
        self.evaluations = self.path / "evaluations.jsonl"
        self.summary, self.report = self.path / "summary.json", self.path / "report.html"
        self.starts = self.path / "starts.jsonl"  # see runfiles/starts.py
        self.selected = self.path / "selected.jsonl"  # answers of earlier runs
        self.rollouts, self.checkpoints = self.path / "rollouts", self.path / "checkpoints"
        self.aside = self.path / ".again"
        self._lock: Lock | None = None  # while this process holds the run
        self._appending = threading.Lock()  # the recorder's thread and the loop both append events

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    def rollout(self, step: int) -> Path:
        return self.rollouts / f"step_{step}.parquet"

    # --- before anything expensive ------------------------------------------------------------

    def check_writable(self) -> None:
        """Make the folder and write to every part of it."""
        for name in FILES:
            if (self.path / name).is_dir():
                raise RunError(
                    f"{self.path / name} is a folder, and the run needs a file there. Move it "
                    "away, or choose another run folder with --run."
                )
        for folder in (self.path, self.rollouts, self.checkpoints):
            with self.writing(folder.name):
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / f"{PROBE}{os.getpid()}"
                write_atomic(probe, b"groupwise")
                probe.unlink()
        for path in (self.path / name for name in FILES):
            if path.exists():
                with self.writing(path.name):
                    open(path, "r+b").close()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process, here; a process that dies lets go, however it dies."""
        with self.writing(".lock"):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path)
        try:
            with self.writing(".lock"):
                lock.take()
            self._lock = lock
            yield
        finally:
            if self._lock is lock:
                self._lock = None
            lock.release()

    @contextlib.contextmanager
    def nothing_left_if_refused(self, *others: Path) -> Iterator[None]:
        """Remove what was made for a start that fails before it is written down, `others` too.

        Folders only if they are empty: what somebody else put there meanwhile stays.
        """
        places = (*others, self.rollouts, self.checkpoints, self.path / LOCK)
        made = [x for x in (*places, self.path, *self.path.parents) if not os.path.lexists(x)]
        try:
            yield
        except BaseException:
            if not self.starts.exists() and self.path.is_dir():
                with contextlib.suppress(OSError, RunError), self.locked():
                    for path in made:
                        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            raise

    def check_place(self) -> None:
        """Stop where the folder that this process locked was moved, deleted or taken over."""
        if self._lock is not None:
            self._lock.check()

    def writer(self) -> str | None:
        """Return who writes to it now, in words; None if nobody does."""
        return writer(self.path)

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Write where the run is, and turn errors of the disk into advice for a person."""
        try:
            self.check_place()
            yield
        except OSError as error:
            raise disk_error(what, self.path, error) from error

    @contextlib.contextmanager
    def saying_what_is_left(self) -> Iterator[None]:
        """Add to an error of the disk what the next start will find, and where.

        This goes around all writers: a checkpoint that was under way counts when it has arrived.
        """
        try:
            yield
        except (RunError, OSError) as error:
            self.check_place()
            if not isinstance(error, DiskError):
                raise
            latest = self.checkpoints / "latest"
            if latest.is_symlink():
                left = f"The last good checkpoint, checkpoints/{os.readlink(latest)}, is intact"
                then = "goes on from there"
            else:
                left, then = "There was no checkpoint yet", "starts from the beginning"
            raise RunError(f"{error} {left}: the same command again {then}.") from error

    def leftovers(self) -> list[Path]:
        """Return temporary files that a killed process may have left behind."""
        folders = [self.path, *(x for x in self.path.glob("[!.]*") if x.is_dir())]
        names = (f".*{PARTIAL}", f"{PROBE}*")
        return [path for each in folders for name in names for path in each.glob(name)]

    def tidy(self) -> None:
        """Remove what dead processes left behind; for the one that holds the lock.

        `groupwise report` and mirrors write beside it: what they have under way is left alone.
        """
        with self.writing("what a killed process left"):
            for path in self.leftovers():
                if path.name.startswith(PROBE):
                    path.unlink()
                else:
                    remove_unfinished(path.parent)

    # --- writing ------------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        with self.writing("config.toml"):
            write_atomic(self.config, text)

    def write_manifest(
        self,
        origin: Mapping[str, str],
        fetched: Mapping[str, str] | None = None,
        dropped: Mapping[str, int] | None = None,
        kept: Mapping[str, Any] | None = None,
        *,
        parent: Mapping[str, Any] | None = None,
        seconds: float,
        tokens: int,
    ) -> None:
        """Write what this start runs on; an earlier start's is kept where it differs.

        `origin` maps "data", "weights" to hashes, `fetched` settings to what they named on a hub,
        with the commit, `dropped` files to how many of their rows were malformed and left out,
        `kept` says how many answers of earlier runs are learned from, and why others are not;
        `parent` is the run that it started from; seconds and tokens are the cost so far.
        """
        given = {"origin": origin, "hub": fetched or {}, "dropped_rows": dropped or {}}
        given |= {} if kept is None else {"kept_answers": kept}
        given |= {} if parent is None else {"parent": parent}
        facts = json.loads(to_line({**machine_facts(), **{k: dict(x) for k, x in given.items()}}))
        before = self.read_manifest()
        earlier = list(before.get("earlier", ()))
        was = {key: before[key] for key in facts if key in before}
        if was and was != {key: facts[key] for key in was}:
            earlier.append(was)
        self._store_manifest({"format": 1, **facts, "earlier": earlier}, seconds, tokens)

    def write_selected(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write which answers of earlier runs are learned from."""
        with self.writing("selected.jsonl"):
            write_atomic(self.selected, "".join(f"{to_line(line)}\n" for line in lines))

    def write_cost(self, *, seconds: float, tokens: int) -> None:
        """Write the cost so far into the manifest."""
        self._store_manifest(self.read_manifest(), seconds, tokens)

    def _store_manifest(self, manifest: Mapping[str, Any], seconds: float, tokens: int) -> None:
        cost = {"seconds": seconds, "tokens": tokens}
        with self.writing("manifest.json"):
            write_atomic(self.manifest, to_page({**manifest, "cost": cost}))

    def add_events(self, events: Sequence[Event]) -> None:
        with self._appending, self.writing("events.jsonl"):
            append_lines(self.events, [event.line() for event in events])

    def add_metrics(self, line: str) -> None:
        with self.writing("metrics.jsonl"):
            append_lines(self.metrics, [line])

    def add_evaluation(self, line: str) -> None:
        with self.writing("evaluations.jsonl"):
            append_lines(self.evaluations, [line])

    # --- reading ------------------------------------------------------------------------------

    def read_config(self) -> str | None:
        """Read the configuration's text; None before the first start."""
        data = read_bytes(self.config)
        try:
            return None if data is None else data.decode("utf-8")
        except ValueError as error:
            raise unreadable(self.config, f"it is no text ({error})") from error

    def read_settings(self) -> dict[str, Any]:
        """Read the configuration as a table, of any version; {} before the first start."""
        try:
            return tomllib.loads(self.read_config() or "")
        except (ValueError, RecursionError) as error:
            raise unreadable(self.config, f"it is no valid TOML ({error})") from error

    def read_metrics(self) -> list[dict[str, Any]]:
        return [value for _, value in read_lines(self.metrics, schemas.metrics)]

    def read_events(self) -> list[dict[str, Any]]:
        return [value for _, value in read_lines(self.events, schemas.events)]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """Read the evaluations by task; runs of older versions have none."""
        return [value for _, value in read_lines(self.evaluations, schemas.evaluations)]

    def read_manifest(self) -> dict[str, Any]:
        return read_object(self.manifest, schemas.manifest)

    def read_summary(self) -> dict[str, Any]:
        return read_object(self.summary, schemas.summary)

    def rollout_steps(self) -> list[int]:
        """Return the steps whose rollouts are there, in order."""
        return _steps_in(self.rollouts)

    def durable_step(self) -> int:
        """Return the last step up to which metrics and rollouts have no gap: the latest to resume
        from.
        """
        counted = {line["step"] for line in self.read_metrics()} & set(self.rollout_steps())
        step = 0
        while step + 1 in counted:
            step += 1
        return step

    # --- going back ---------------------------------------------------------------------------

    def set_aside(self, step: int) -> list[Path]:
        """Move rollouts after `step` out of the way of those that are written when it is done
        again.

        Their verdicts hold until then, even if doing it again is cut short too.
        """
        with self.writing("the rollouts after the last checkpoint"):
            self.forget(step)
            later = [number for number in self.rollout_steps() if number > step]
            if later:
                self.aside.mkdir(exist_ok=True)
            for number in later:
                os.replace(self.rollout(number), self.aside / self.rollout(number).name)
            if later:
                sync_folder(self.aside)
        return [self.aside / f"step_{number}.parquet" for number in _steps_in(self.aside)]

    def forget(self, step: int | None = None) -> None:
        """Delete rollouts set aside of steps that are done again by now; without a step, all of
        them.
        """
        for number in _steps_in(self.aside):
            if step is None or number <= step:
                (self.aside / f"step_{number}.parquet").unlink()
        with contextlib.suppress(OSError):  # not there, or not empty
            self.aside.rmdir()

    def rewind(self, step: int) -> Rewound:
        """Drop all that was written after `step`.

        Metrics go first: a metrics line promises that its rollouts are there. Starts go last: they
        say what the steps were made with. A rewind that is itself cut short is completed by the
        next one.
        """
        with self.writing("the files after the last checkpoint"):
            metrics = _drop_after(self.metrics, step)
            events = _drop_after(self.events, step)
            _drop_after(self.evaluations, step)
            rollouts = tuple(number for number in self.rollout_steps() if number > step)
            for number in rollouts:
                self.rollout(number).unlink()
            _drop_after(self.starts, step)
            if rollouts and self.rollouts.is_dir():
                sync_folder(self.rollouts)
        return Rewound(metrics, events, rollouts)


def _steps_in(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(folder, error.strerror or str(error)) from error
    found = (re.fullmatch(r"step_([0-9]{1,15})\.parquet", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _drop_after(path: Path, step: int) -> tuple[int, ...]:
    """Keep the lines up to a step, byte for byte; return the steps of those dropped."""
    lines = read_lines(path, schemas.line)
    kept = b"".join(raw for raw, value in lines if value["step"] <= step)
    if path.exists() and path.stat().st_size != len(kept):
        write_atomic(path, kept)
    return tuple(value["step"] for _, value in lines if value["step"] > step)
