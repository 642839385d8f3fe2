"""Weights & Biases: offline unless its environment or a login says otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read on import

import wandb

from groupwise.watch.mirrors.tracker import PROJECT, Note, TrackedRun


def open_tracker(about: TrackedRun) -> WandbRun:
    return WandbRun(about)


class WandbRun:
    takes_back = False  # a step that is not after the last one is ignored

    def __init__(self, about: TrackedRun) -> None:
        about.place.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=about.id,
            name=about.name,
            resume="allow",
            mode=None if os.environ.get("WANDB_MODE") else _mode(),
            dir=about.place.parent,  # it makes a folder `wandb` itself
            # Git's remote may hold a password; output and code are those of the mirror.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        self._run.config.update(dict(about.settings), allow_val_change=True)

    def reached(self) -> int | None:
        return None

    def take_back(self) -> None:
        raise NotImplementedError

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step, commit=True)

    def note(self, note: Note) -> None:
        level = "ERROR" if note.grave else "WARN"
        self._run.alert(note.title, f"step {note.step}: {note.text}", level=level)

    def flush(self) -> None:
        """Do nothing: all went to a process of wandb's, which outlives this one."""

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def _mode() -> Literal["online", "offline"]:
    return "online" if wandb.login(prompt=False) else "offline"
