"""The embedded model as a folder, made once: runs that start from it take less than a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from runs import SMALL, quiet, small

from groupwise.config import Config, load
from groupwise.data import load as load_data
from groupwise.model.formats.checkpoint import save
from groupwise.prepare.setup import TASKS_SEED
from groupwise.runfiles.rollouts import read
from groupwise.training.cold_start import cold_started
from groupwise.training.loop import train


def make(folder: Path, **changes: Any) -> str:
    """The folder's name: what model.path is set to."""
    torch.set_num_threads(1)
    config = small(**changes)
    found = load_data(config.data, seed=TASKS_SEED, held_out=config.eval.tasks)
    made = cold_started(config, found.train, found.eval)
    save(made.model, folder, made.files)
    return str(folder)


def settings(model: str, **changes: Any) -> dict[str, Any]:
    """Of a run of a few steps from that folder, by dotted names (`__` for the dot)."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    own = {k: v for k, v in SMALL.items() if not k.startswith("tiny.")}
    if "recipe" in named:
        own = {k: v for k, v in own.items() if not k.startswith("recipe")}
    if named.get("data.train", "arithmetic") != "arithmetic":
        own.pop("data.options")
    return own | {"model.path": model} | named


def configured(model: str, **changes: Any) -> Config:
    return load(settings(model, **changes))


def run_from(model: str, folder: Path, **changes: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(configured(model, **changes), folder, quiet())


def events(folder: Path, kind: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if not kind or event["kind"] == kind]


def rows(folder: Path, step: int) -> list[dict[str, Any]]:
    """A step's rollouts, row by row."""
    found: list[dict[str, Any]] = read(folder / "rollouts" / f"step_{step}.parquet").to_pylist()
    return found


def latest(folder: Path) -> str:
    return (folder / "checkpoints" / "latest").resolve().name
