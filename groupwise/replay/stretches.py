"""The stretches of a run that were made alike, each with the configuration and code it had."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from groupwise import config as configuration
from groupwise.config import Config
from groupwise.errors import RunError
from groupwise.watch.folder import RunFolder
from groupwise.watch.starts import Start, read_starts, stretches


@dataclass(frozen=True)
class Part:
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

    def alike(self, other: Part) -> bool:
        return (
            not configuration.difference(self.config, other.config)
            and self.threads == other.threads
            and self.origin == other.origin
        )


def parts_of(
    folder: RunFolder, config: Config, manifest: Mapping[str, Any], last: int
) -> list[Part]:
    """The parts of the steps 1 to `last`, in order; `config` is that of config.toml.

    config.toml stands for the last start's: whoever moved the data says so there.
    """
    starts = read_starts(folder)
    if not starts:  # an older groupwise wrote none down: one configuration is all there is
        origin = manifest["origin"]
        return [Part(config, 1, last, manifest.get("threads"), origin)]
    found: list[Part] = []
    for each in stretches(starts, last):
        own = config if each.start is starts[-1] else _read(folder, each.start)
        part = Part(own, each.first, each.last, each.start.threads, each.start.origin)
        if found and found[-1].alike(part):
            before = found.pop()
            part = Part(part.config, before.first, part.last, part.threads, part.origin)
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


def edited(folder: RunFolder, config: Config) -> list[str]:
    """What config.toml says otherwise than the last start was written down with."""
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
