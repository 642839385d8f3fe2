"""The runs that are shown, and their line files, read on as they grow."""

from __future__ import annotations

import math
import os
import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from groupwise.common.progress import duration
from groupwise.errors import ConfigError, RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.files import GrowingFile, read_lines
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.naming import comparison_of, distinct_names
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.stages import pipeline_of, read_stages
from groupwise.runfiles.starts import changes_on_the_way
from groupwise.view.notes import Notes, read_notes
from groupwise.watch.chart import Point
from groupwise.watch.vital_signs import useful_share

T = TypeVar("T")
MARKS = ("config.toml", "metrics.jsonl", "rollouts")  # one of them makes a folder a run
DEPTH = 5  # folders within folders that are looked through: runs/compare/NAME/runs/ARM/seed_0
USEFUL = "groups/useful_share"  # shown instead of its opposite, groups/dead_share


@dataclass(frozen=True)
class RunFacts:
    """A run in words."""

    state: str
    config: str | None
    changed: list[str]  # on the way
    rollouts: list[int]  # the steps that have some
    damage: list[str]  # files that can't be read, and why
    settings: Mapping[str, Any]
    summary: Mapping[str, Any]
    manifest: Mapping[str, Any]
    notes: Notes
    written: float | None  # when it last wrote a line of metrics, as the system counts
    begun: str = ""  # date and time of its first start
    parent: Path | None = None  # the run that it started from
    started: str = ""  # the same in words, with step and weights


class ViewedRun:
    """One run folder: its curves and events by column, as far as they are written."""

    def __init__(self, path: Path, name: str, group: str = "") -> None:
        self.folder, self.name = RunFolder(path), name
        self.group = group  # the name of the comparison or pipeline that it belongs to
        self.short = name.removeprefix(f"{group}/")  # beside others of it
        self.pipeline = pipeline_of(path)
        self.lock = threading.RLock()  # requests are answered by several threads
        self._metrics = GrowingFile(self.folder.metrics, schemas.metrics)
        self._events = GrowingFile(self.folder.events, schemas.events)
        self._small: dict[str, tuple[tuple[int, ...], Any]] = {}
        self._clear()
        self.events: list[dict[str, Any]] = []

    def _clear(self) -> None:
        self.steps: array[int] = array("q")
        self.columns: dict[str, array[float]] = {}  # NaN where a line has no number
        self.last: dict[str, Any] = {}

    def refresh(self) -> None:
        """Read what was written since the last time."""
        with self.lock:
            void, lines = self._metrics.news()
            if void:
                self._clear()
            for line in lines:
                self._add(line)
            void, lines = self._events.news()
            self.events = [*([] if void else self.events), *lines]

    def _add(self, line: dict[str, Any]) -> None:
        before = len(self.steps)
        self.steps.append(int(line["step"]))
        useful = useful_share(line)
        for name, value in (line | ({} if useful is None else {USEFUL: useful})).items():
            if name != "step" and isinstance(value, int | float):
                column = self.columns.get(name)
                if column is None:
                    column = self.columns[name] = array("d", [math.nan]) * before
                column.append(value)
        for column in self.columns.values():
            if len(column) == before:
                column.append(math.nan)
        self.last = line

    def points(self, name: str) -> list[Point]:
        """Return a metric where it was measured; held-out ones with their standard error."""
        with self.lock:
            values = self.columns.get(name)
            errors = self.columns.get(f"{name}_stderr")
            if values is None:
                return []
            return [
                Point(step, value, _known(errors[at]) if errors is not None else None)
                for at, (step, value) in enumerate(zip(self.steps, values, strict=True))
                if math.isfinite(value)
            ]

    def at(self, step: int) -> dict[str, float]:
        """Return all that was measured in a step."""
        with self.lock:
            place = bisect_left(self.steps, step)
            if place == len(self.steps) or self.steps[place] != step:
                return {}
            return {name: column[place] for name, column in self.columns.items()
                    if math.isfinite(column[place])}  # fmt: skip

    def version(self) -> str:
        """Return a text that changes whenever there is something new to show."""
        return f"{self._metrics.stamp}-{self._events.stamp}"

    def about(self) -> RunFacts:
        """Return everything beside the curves, as far as it can be read now."""
        self.refresh()
        seen = PartialReader()
        seen.damage += [x.damage for x in (self._metrics, self._events) if x.damage]
        folder, small = self.folder, self._unchanged
        config = seen.get(small, folder.config, folder.read_config)
        settings = (seen.get(small, folder.config, folder.read_settings) if config else None) or {}
        summary = seen.get(small, folder.summary, folder.read_summary) or {}
        starts = seen.get(small, folder.starts, self._starts) or ("", [])
        steps = seen.get(folder.rollout_steps) or []
        manifest = seen.get(small, folder.manifest, folder.read_manifest) or {}
        notes = seen.get(read_notes, folder) or Notes()
        parent, started = self._parent(manifest.get("parent"))
        state = self._state(summary, settings)
        return RunFacts(state, config, starts[1], steps, seen.damage, settings, summary, manifest,
                        notes, self._written(), starts[0], parent, started)  # fmt: skip

    def _unchanged(self, path: Path, read: Callable[[], T]) -> T:
        """Return what a small file has; read again when it has changed."""
        try:
            now = path.stat()
        except OSError:
            return read()
        stamp, key = (now.st_ino, now.st_mtime_ns, now.st_size), f"{path.name} {read.__name__}"
        if self._small.get(key, (None,))[0] != stamp:
            self._small[key] = stamp, read()
        value: T = self._small[key][1]
        return value

    def _starts(self) -> tuple[str, list[str]]:
        """Return when the run was first started, and what later starts changed."""
        lines = read_lines(self.folder.starts, schemas.starts)
        begun = str(lines[0][1].get("time/at", "")) if lines else ""
        return begun.replace("T", " ").removesuffix("Z"), changes_on_the_way(self.folder)

    def _written(self) -> float | None:
        try:
            return self.folder.metrics.stat().st_mtime
        except OSError:  # it is not there yet, or went away in between
            return None

    def _parent(self, found: Any) -> tuple[Path | None, str]:
        if not isinstance(found, Mapping) or not isinstance(found.get("folder"), str):
            return None, ""
        weights = str(found.get("weights", ""))[:12]
        words = f"{found['folder']}, step {found.get('step')}, weights {weights}"
        return (self.folder.path / found["folder"]).resolve(), words

    def _state(self, summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Describe the state: finished, or how far it is and when it last wrote."""
        if not self.steps:
            return "No step written yet."
        step, total = self.steps[-1], settings.get("steps")
        if summary.get("steps") == step:
            return f"Finished after {step:,} steps."
        of = f" of {total:,}" if isinstance(total, int) else ""
        written = self._written()
        if written is None:
            return f"Step {step:,}{of}."
        since = max(0, round(time.time() - written))
        since -= since % 60 if since >= 90 else 0  # not a new text every second
        return f"Step {step:,}{of}, written {duration(since)} ago."


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Runs:
    """Runs by name: the folders that were given, and those inside them."""

    def __init__(self, places: Sequence[str | os.PathLike[str]]) -> None:
        self.places = [Path(place) for place in places]
        for place in self.places:
            if not os.path.isdir(place):
                raise ConfigError(
                    f"There is no folder {str(place)!r}. Give a run folder, or a folder of them: "
                    "groupwise view runs"
                )
        wholes = [place.resolve().parts for place in self.places]
        self._labels = dict(zip(self.places, distinct_names(wholes), strict=True))
        self._known: dict[Path, ViewedRun] = {}
        self._lock = threading.Lock()

    def all(self) -> dict[str, ViewedRun]:
        """Return all runs in the order given; looks again each time, as runs may have started
        since.
        """
        with self._lock:
            for place in self.places:
                for path in runs_in(place):
                    if path.resolve() not in self._known:
                        self._known[path.resolve()] = self._named(path, place)
            return {run.name: run for path, run in self._known.items() if os.path.isdir(path)}

    def _named(self, path: Path, place: Path) -> ViewedRun:
        """Name a run by its place in the given folder, as folders of all arms are called alike.

        A name stays: later runs of the same name have the place's before it, or a number.
        """
        within, chain = comparison_of(path), pipeline_of(path)
        if within is not None and place in (within, *within.parents):
            head = "/".join(within.relative_to(place).parts) or self._labels[place]
            name = f"{head}/{path.parent.name}/{path.name}"
        elif chain is not None and place in (chain, *chain.parents):
            head = "/".join(chain.relative_to(place).parts) or self._labels[place]
            name = f"{head}/{path.name}"
        else:
            head = ""
            name = "/".join(path.relative_to(place).parts) or self._labels[place]
        taken = {run.name for run in self._known.values()}
        if name in taken and path != place:
            head, name = (f"{self._labels[place]}/{x}" if x else x for x in (head, name))
        number, free = 1, name
        while free in taken:
            number += 1
            free = f"{name} ({number})"
        return ViewedRun(path.resolve(), free, head)


def runs_in(place: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the place itself if it is a run, else those in it, in the order of their names.

    A folder that may not be looked into counts as a run, whose page says so; a run's own folders
    are not looked into.
    """
    if any(os.path.lexists(place / mark) for mark in MARKS):
        yield place
    elif depth:
        try:
            inside = _in_order(place)
        except PermissionError:
            yield place
        except OSError:  # it went away in between
            return
        else:
            for each in inside:
                if os.path.isdir(each) and not each.name.startswith("."):
                    yield from runs_in(each, depth - 1)


def _in_order(place: Path) -> list[Path]:
    """Return what is in a folder by name; the stages of a pipeline in the order of the chain."""
    inside = sorted(place.iterdir())
    try:
        chain = read_stages(place)
    except RunError:  # damaged: the runs themselves can be shown all the same
        chain = None
    order = {} if chain is None else {x.folder: at for at, x in enumerate(chain.stages)}
    return sorted(inside, key=lambda path: order.get(path.name, len(order)))
