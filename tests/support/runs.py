"""Small runs for the tests: a tiny model that trains in a second, and what a run leaves behind."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from groupwise.config import Config, load
from groupwise.training import cold_start
from groupwise.training.loop import train
from groupwise.watch.display import Display

SMALL: dict[str, Any] = {
    "recipe": "dr_grpo",
    "recipe.aggregation.length": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "steps": 3,
    "model.device": "cpu",  # on every machine: the bits are compared
    "model.dtype": "float32",
    "model.threads": 1,
    "tiny.width": 32,
    "tiny.layers": 2,
    "tiny.heads": 2,
    "tiny.cold_start_steps": 60,
    "tiny.cold_start_batch": 32,
    "data.options": {"digits": 1},
    "engine.max_tokens": 4,
    "engine.slots": 16,
    "optim.learning_rate": 1e-3,
    "eval.every": 2,
    "eval.tasks": 8,
    "checkpoint.every_steps": 1,
}


def small(**changes: Any) -> Config:
    """A run of a few steps; names of nested settings with `__` for the dot."""
    named = {key.replace("__", "."): value for key, value in changes.items()}
    if "recipe" in named:
        return load({k: v for k, v in SMALL.items() if not k.startswith("recipe")} | named)
    return load(SMALL | named)


def once(teach: Callable[..., None]) -> Callable[..., None]:
    """A cold start, two thirds of a small run, is computed once for the same model and lessons."""
    taught: dict[Any, dict[str, Tensor]] = {}

    @functools.wraps(teach)
    def remembered(config: Config, loaded: Any, tasks: Sequence[Any], *asked: Any) -> None:
        model = loaded.model
        found = hashlib.sha256()
        for weights in model.parameters():
            found.update(weights.detach().numpy().tobytes())
        for task in tasks:
            found.update(f"{task.prompt}\0{task.columns['solution']}\0".encode())
        key = (config.tiny, config.seed, found.digest(), torch.get_num_threads())
        if key not in taught:
            teach(config, loaded, tasks, *asked)
            taught[key] = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict(taught[key])

    return remembered


cold_start.teach = once(cold_start.teach)


def quiet() -> Display:
    return Display(io.StringIO(), live=False)


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(small(**changes), folder, quiet())


def start(folder: Path, **changes: Any) -> int:
    """The run in a process of its own; returns its id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run(folder, **changes)
            status = 0
        finally:
            os._exit(status)
    return child


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Every metrics line, without what depends on the clock or the machine."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: x for name, x in line.items() if not name.startswith(("time/", "memory/"))}
        for line in lines
    ]


def left_behind(folder: Path) -> dict[str, Any]:
    """All of a run that must repeat bit for bit, however often it was started.

    That it was told to go on further is an event, and no other's: tests of its own look at it.
    """
    last = (folder / "checkpoints" / "latest").resolve()
    events = [json.loads(x) for x in (folder / "events.jsonl").read_text().splitlines()]
    events = [event for event in events if event["kind"] != "settings"]
    values = json.loads((last / "resume" / "values.json").read_text())
    # Which evaluation was the best hangs on where a run was stopped: each stop has one of its own.
    for name in ("seconds", "trained", "best_step"):
        values.pop(name)
    summary = json.loads((folder / "summary.json").read_text())
    summary.pop("seconds")
    found: dict[str, Any] = {
        "metrics": metrics(folder),
        "events": [{k: v for k, v in e.items() if not k.startswith("time/")} for e in events],
        "values": values,
        "summary": summary,
    }
    files = [*sorted(folder.glob("rollouts/*.parquet")), *sorted(last.rglob("*.safetensors"))]
    return found | {
        str(f.relative_to(last if last in f.parents else folder)): f.read_bytes() for f in files
    }
