"""The run folder: where a run's files are, and how they are written so that a crash loses nothing.

`RunFolder(path)` only names the files; `check_writable` makes the folder. docs/run_folder.md says
what is in each file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupwise.errors import DiskError, RunError
from groupwise.watch.files import (
    PARTIAL,
    append_lines,
    read_lines,
    sync_folder,
    to_line,
    to_page,
    write_atomic,
)
from groupwise.watch.manifest import machine_facts

FILES = ("config.toml", "manifest.json", "metrics.jsonl", "events.jsonl", "evaluations.jsonl",
         "starts.jsonl", "summary.json", "report.html")  # fmt: skip


@dataclass(frozen=True)
class Event:
    """Something that was said or done beside the numbers."""

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
    """What `rewind` dropped, by step."""

    metrics: tuple[int, ...] = ()
    events: tuple[int, ...] = ()
    rollouts: tuple[int, ...] = ()

    def __len__(self) -> int:
        """How many steps will be done again."""
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
        self.starts = self.path / "starts.jsonl"  # see watch/starts.py
        self.rollouts, self.checkpoints = self.path / "rollouts", self.path / "checkpoints"
        self.aside = self.path / ".again"
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
                probe = folder / f".probe_{os.getpid()}"  # another process may be trying as well
                write_atomic(probe, b"groupwise")
                probe.unlink()
        for path in (self.path / name for name in FILES):
            if path.exists():
                with self.writing(path.name):
                    open(path, "r+b").close()

    def check_room(self, *, whole: int, best: int, keep: int) -> str | None:
        """Refuse where not one checkpoint fits; return a warning where not all fit.

        `whole` is what a checkpoint takes that a run goes on from, `best` one of weights alone; an
        old one goes when the new one is there.
        """
        files = (path for path in self.checkpoints.rglob("*") if path.is_file())
        there = sum(path.stat().st_size for path in files)
        free = shutil.disk_usage(self.path).free
        if free + there < whole + best:
            raise RunError(
                f"{self.path} has {size(free)} free, and a checkpoint takes {size(whole)} "
                f"({size(best)} of weights, the rest optimizer), beside one of weights alone for "
                "the best policy. Free some space, train an adapter (adapter.rank), or choose a "
                "folder on another disk with --run."
            )
        needed = (keep + 1) * whole + 2 * best
        if free + there >= needed:
            return None
        return (
            f"{self.path} has {size(free)} free. A checkpoint takes {size(whole)}, and with "
            f"checkpoint.keep={keep}, the one that is being written and the best two the run may "
            f"need {size(needed)}. A full disk stops the run, and loses none of them; "
            "checkpoint.keep=1 needs less."
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for this process; a process that dies lets go, however it dies."""
        with self.writing(".lock"):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                _take(descriptor)
            except BlockingIOError:
                raise RunError(
                    f"{holder(self.path / '.lock')} is writing to {self.path}. Two writers would "
                    "mix their files. Wait for it, stop it, or choose another folder with --run."
                ) from None
            _held.add(descriptor)
            with self.writing(".lock"):
                sign(descriptor)
            yield
        finally:
            _held.discard(descriptor)
            os.close(descriptor)

    def writer(self) -> str | None:
        """Who writes to it now, in words; None if nobody does."""
        try:
            descriptor = os.open(self.path / ".lock", os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return holder(self.path / ".lock")
        finally:
            os.close(descriptor)
        return None

    @contextlib.contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Turn what the disk says into what a person can do about it."""
        try:
            yield
        except OSError as error:
            raise self._trouble(what, error) from error

    @contextlib.contextmanager
    def saying_what_is_left(self) -> Iterator[None]:
        """Add to an error of the disk what the next start will find.

        This goes around all writers: a checkpoint that was under way counts when it has arrived.
        """
        try:
            yield
        except DiskError as error:
            latest = self.checkpoints / "latest"
            if latest.is_symlink():
                left = f"The last good checkpoint, checkpoints/{os.readlink(latest)}, is intact"
                then = "continues from there"
            else:
                left, then = "There was no checkpoint yet", "starts from the beginning"
            raise RunError(f"{error} {left}: the same command {then}.") from error

    def _trouble(self, what: str, error: OSError) -> RunError:
        place = f"{what} of the run folder {self.path}"
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            return RunError(
                f"Can't write {place}: a file is in the way of a folder, or a folder in the way of "
                f"a file ({error}). Move it away, or choose another run folder with --run."
            )
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return RunError(
                f"Can't write {place}: it is read-only for this user ({error}). Change its "
                "permissions, or choose another run folder with --run."
            )
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return DiskError(
                f"Can't write {place}: the disk or the quota is full. Free some space."
            )
        return DiskError(
            f"Can't write {place}: the disk reports an error ({error}). Check the disk."
        )

    # --- writing ------------------------------------------------------------------------------

    def write_config(self, text: str) -> None:
        with self.writing("config.toml"):
            write_atomic(self.config, text)

    def write_manifest(
        self,
        origin: Mapping[str, str],
        fetched: Mapping[str, str] | None = None,
        dropped: Mapping[str, int] | None = None,
        *,
        seconds: float,
        tokens: int,
    ) -> None:
        """What this start runs on; what an earlier start ran on is kept where it differs.

        `origin` maps "data", "weights" to hashes, `fetched` settings to what they named on a hub,
        with the commit, `dropped` files to how many of their rows were malformed and left out;
        seconds and tokens are the cost so far.
        """
        given = {"origin": origin, "hub": fetched or {}, "dropped_rows": dropped or {}}
        facts = json.loads(to_line({**machine_facts(), **{k: dict(x) for k, x in given.items()}}))
        before = self.read_manifest()
        earlier = list(before.get("earlier", ()))
        was = {key: before[key] for key in facts if key in before}
        if was and was != {key: facts[key] for key in was}:
            earlier.append(was)
        self._store_manifest({"format": 1, **facts, "earlier": earlier}, seconds, tokens)

    def write_cost(self, *, seconds: float, tokens: int) -> None:
        """The cost so far, into the manifest."""
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
        """The configuration's text; None before the first start."""
        return self.config.read_text("utf-8") if self.config.is_file() else None

    def read_metrics(self) -> list[dict[str, Any]]:
        return [value for _, value in read_lines(self.metrics)]

    def read_events(self) -> list[dict[str, Any]]:
        return [value for _, value in read_lines(self.events)]

    def read_evaluations(self) -> list[dict[str, Any]]:
        """By task; of runs of older versions there are none."""
        return [value for _, value in read_lines(self.evaluations)]

    def read_manifest(self) -> dict[str, Any]:
        return _read_object(self.manifest)

    def read_summary(self) -> dict[str, Any]:
        return _read_object(self.summary)

    def rollout_steps(self) -> list[int]:
        """The steps whose rollouts are there, in order."""
        return _steps_in(self.rollouts)

    def durable_step(self) -> int:
        """The last step up to which metrics and rollouts have no gap: resume not behind it."""
        counted = {line["step"] for line in self.read_metrics()} & set(self.rollout_steps())
        step = 0
        while step + 1 in counted:
            step += 1
        return step

    # --- going back ---------------------------------------------------------------------------

    def set_aside(self, step: int) -> list[Path]:
        """Rollouts after `step`, out of the way of those that are written when it is done again.

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
        """What was set aside of steps that are done again by now; without a step, all of it."""
        for number in _steps_in(self.aside):
            if step is None or number <= step:
                (self.aside / f"step_{number}.parquet").unlink()
        with contextlib.suppress(OSError):  # not there, or not empty
            self.aside.rmdir()

    def rewind(self, step: int) -> Rewound:
        """Drop all that was written after `step`, and what a crash left half written.

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
            halves = [*self.path.glob(f".*{PARTIAL}"), *self.rollouts.glob(f".*{PARTIAL}")]
            for half in halves:
                half.unlink()
            if rollouts and self.rollouts.is_dir():
                sync_folder(self.rollouts)
        return Rewound(metrics, events, rollouts)


def _steps_in(folder: Path) -> list[int]:
    numbers = (path.stem.removeprefix("step_") for path in folder.glob("step_*.parquet"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def _drop_after(path: Path, step: int) -> tuple[int, ...]:
    """Keep the lines up to a step, byte for byte; the steps of those dropped."""
    lines = read_lines(path)
    kept = b"".join(raw for raw, value in lines if value["step"] <= step)
    if path.exists() and path.stat().st_size != len(kept):
        write_atomic(path, kept)
    return tuple(value["step"] for _, value in lines if value["step"] > step)


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file, {} if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(
            f"{path} is not JSON ({error}). It is written in one piece, so it was edited or the "
            "disk is faulty. Remove it and run again: what it said is written anew."
        ) from error
    return dict(value)


def size(count: int) -> str:
    """Bytes for people."""
    number = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


# --- the lock ---------------------------------------------------------------------------------

# A forked child (a grader's worker) inherits the lock's descriptor, and would hold the lock after
# its parent's death. It closes its copy, which leaves the parent's lock as it is.
_held: set[int] = set()


def _let_go_in_child() -> None:
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def _take(descriptor: int, tries: int = 50, pause: float = 0.02) -> None:
    """Whoever asks for the writer holds the lock for a moment; a writer holds it for long."""
    for _ in range(tries - 1):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def sign(descriptor: int) -> None:
    """Write into a lock that this process holds it."""
    me = {"pid": os.getpid(), "host": platform.node()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, to_line(me).encode(), 0)


def holder(path: Path) -> str:
    """Who signed a lock, in words."""
    try:
        signed = json.loads(path.read_bytes())
        elsewhere = signed["host"] != platform.node()
        return f"Process {signed['pid']}" + (f" on {signed['host']}" if elsewhere else "")
    except (OSError, ValueError, KeyError, TypeError):  # it has the lock, and has not signed yet
        return "Another process"
