"""Stretches of a run that were made alike, each with the configuration and code it had."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise import config as configuration
from groupwise.config import Config
from groupwise.errors import RunError
from groupwise.replay.recorded import Recorded
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.starts import Start, changes_on_the_way, read_starts, stretches
from groupwise.stages.consequences import anchored


@dataclass(frozen=True)
class RunPart:
    """Steps that were made under one configuration, with one number of threads and one code."""

    config: Config
    first: int
    last: int
    threads: int | None
    origin: Mapping[str, str]

    def __str__(self) -> str:
        return (
            f"step {self.first}" if self.first == self.last else f"steps {self.first}..{self.last}"
        )

    def alike(self, other: RunPart) -> bool:
        return (
            not configuration.difference(self.config, other.config)
            and self.threads == other.threads
            and self.origin == other.origin
        )


def parts_of(
    folder: RunFolder, config: Config, manifest: Mapping[str, Any], last: int
) -> list[RunPart]:
    """Return the parts of the steps 1 to `last`, in order; `config` is that of config.toml.

    config.toml stands for the last start's: whoever moved the data says so there.
    """
    starts = read_starts(folder)
    if not starts:  # an older groupwise wrote none down: one configuration is all there is
        origin = manifest.get("origin") or {}
        return [RunPart(config, 1, last, manifest.get("threads"), origin)]
    found: list[RunPart] = []
    for each in stretches(starts, last):
        own = config if each.start is starts[-1] else _read(folder, each.start)
        part = RunPart(own, each.first, each.last, each.start.threads, each.start.origin)
        if found and found[-1].alike(part):
            before = found.pop()
            part = RunPart(part.config, before.first, part.last, part.threads, part.origin)
        found.append(part)
    return found


def _read(folder: RunFolder, start: Start) -> Config:
    try:
        return configuration.load(tomllib.loads(start.config))
    except ValueError as error:
        raise RunError(
            f"The configuration of the start after step {start.step} in {folder.starts} can't be "
            f"read: {error}. It is written in one piece, so it was edited or the disk is faulty."
        ) from error


def made_alike(run: Recorded, steps: Sequence[int], asked: bool) -> tuple[Recorded, list[int], str]:
    """Return the run as it was for these steps, those of them that it holds for, and a note.

    A method is put beside the run's own, so all steps must be of one: of several, those that were
    asked for are refused, and of all that there are the last stretch is taken.
    """
    parts = parts_of(run.folder, run.config, run.folder.read_manifest(), max(steps))
    groups: list[tuple[Recorded, list[int]]] = []
    for part in parts:
        own = [step for step in steps if part.first <= step <= part.last]
        recipe = anchored(part.config, part.config.recipe)
        made = replace(run, config=part.config, recipe=recipe)
        if groups and _learned_alike(groups[-1][0], made):
            groups[-1] = (made, groups[-1][1] + own)
        elif own:
            groups.append((made, own))
    if len(groups) == 1:
        return *groups[0], ""
    spans = ", ".join(f"{own[0]}..{own[-1]}" for _, own in groups)
    changed = " ".join(f"{words}." for words in changes_on_the_way(run.folder))
    if asked:
        raise RunError(
            f"These steps of {run.folder.path} were not made alike: {changed} Replay one stretch "
            f"at a time: --step with one of {spans}."
        )
    made, own = groups[-1]
    return (
        made,
        own,
        (
            f"Of the run, steps {own[0]}..{own[-1]} are replayed: the others were made with other "
            f"settings ({changed}) and can be replayed for themselves with --step: {spans}."
        ),
    )


def _learned_alike(one: Recorded, two: Recorded) -> bool:
    return (one.recipe.text(), one.config.engine.temperature) == (
        two.recipe.text(),
        two.config.engine.temperature,
    )


def edited(folder: RunFolder, config: Config) -> list[str]:
    """Return where config.toml differs from the record of the last start."""
    starts = read_starts(folder)
    if not starts:
        return []
    changes = configuration.difference(starts[-1].config, config)
    return [str(change).rpartition(" (")[0] for change in changes]


def lay_out_checkpoint(folder: RunFolder, step: int, again: RunFolder) -> bool:
    """Put the state after a step where a second run goes on from; False if none was kept."""
    for kept in (folder.checkpoints / f"step_{step}", folder.path / "snapshots" / f"step_{step}"):
        if (kept / "resume" / "state.json").is_file():
            shutil.copytree(kept, again.checkpoints / kept.name, dirs_exist_ok=True)
            return True
    return False
