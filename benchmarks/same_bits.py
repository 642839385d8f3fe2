"""Whether another revision computes the same: python benchmarks/same_bits.py REV [--only NAME ...]

Runs small configurations with the package at REV and with the present one, from the same saved
model folder, and compares what they leave behind bit for bit: weights, optimizer, metrics (less
what depends on the clock or the machine) and rollouts (the columns that both have). Prints a line
for each configuration and ends with 1 if any differs. A rearrangement must leave all alike; where
a change mends a bug, the log says which lines it changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet  # type: ignore[import-untyped]
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parents[1]
CALL = "import sys; from groupwise.cli import main; sys.exit(main())"
CLOCK = ("time/", "memory/")

COMMON = {
    "steps": 4,
    "prompts_per_step": 4,
    "group_size": 4,
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.threads": 1,
    "data.train": "arithmetic",
    "data.options.digits": 1,
    "engine.max_tokens": 6,
    "engine.slots": 16,
    "optim.learning_rate": 1e-3,
    "eval.every": 2,
    "eval.tasks": 8,
    "checkpoint.every_steps": 2,
}
START = {
    "steps": 1,
    "recipe.name": "grpo",
    "model.path": "tiny",
    "tiny.width": 32,
    "tiny.layers": 2,
}
SINGLES = {"group_size": 1, "prompts_per_step": 8}
TWICE = {"recipe.schedule.updates": 2}
LORA = {"adapter.rank": 4, "adapter.targets": ["q_proj", "v_proj"]}
LABELS = "labels.jsonl"

# name -> what differs from COMMON; None leaves a setting out
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "refills": {"recipe.name": "dapo", "recipe.shaping": "", **TWICE},
    "reference": {"recipe.name": "grpo", "reference.update": "ema:0.9", **TWICE},
    "reset": {"recipe.name": "grpo", "reference.update": "reset:2"},
    "memory": {"recipe.name": "dcpo"},
    "exponent": {"recipe.name": "lambda_grpo"},
    "sequences": {"recipe.name": "gspo", **TWICE},
    "greedy": {"recipe.name": "remax", **SINGLES},
    "likeliest": {"recipe.name": "dppo_topk", "recipe.gate.k": 10},
    "labels": {"recipe.name": "dpo", "data.train": LABELS, "data.options.digits": None},
    "spin": {"recipe.name": "spin", **SINGLES},
    "best_of_group_dpo": {"recipe.name": "best_of_group_dpo"},
    "adapter": {"recipe.name": "grpo", **LORA},
    "int8": {"recipe.name": "tis", "engine.weights": "int8", **TWICE},
    "stale": {"recipe.name": "icepop", "engine.weights": "stale:1"},
    "resumed": {"recipe.name": "grpo", **TWICE},
}
RESUMED = "resumed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="what the present tree is compared with")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        before = unpacked(given.revision, place / "before")
        model = start(before, place)
        with ThreadPoolExecutor(2) as pool:
            found = pool.map(lambda name: compared(name, before, model, place), given.only)
            wrong = 0
            for name, differences in zip(given.only, found, strict=True):
                print(f"{name:16}{'; '.join(differences[:3]) or 'same'}", flush=True)
                wrong += bool(differences)
    print(f"{len(given.only) - wrong} of {len(given.only)} are the same as {given.revision}")
    return 1 if wrong else 0


def unpacked(revision: str, folder: Path) -> Path:
    """Return a folder with the package as it was."""
    folder.mkdir()
    packed = ["git", "-C", str(HERE), "archive", revision, "groupwise"]
    archive = subprocess.run(packed, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder


def start(tree: Path, place: Path) -> str:
    """Return the embedded model of that tree behind its cold start: it can add a little."""
    train(tree, written(START, place / "start.toml"), place / "start")
    return str(place / "start" / "cold_start")


def written(changes: dict[str, Any], path: Path) -> Path:
    """Write a configuration, one setting a line, and beside it the labelled pairs."""
    rows = [{"prompt": f"{a}+2=", "chosen": str(a + 2), "rejected": str(a)} for a in range(8)]
    path.with_name(LABELS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {key: x for key, x in (COMMON | changes).items() if x is not None}
    path.write_text("".join(f"{key} = {json.dumps(x)}\n" for key, x in settings.items()))
    return path


def train(tree: Path, config: Path, folder: Path, *changes: str) -> None:
    """Run a configuration with the package of that tree."""
    command = [sys.executable, "-c", CALL, "train", str(config), "--run", str(folder), *changes]
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{config.stem} with {tree} ended with:\n{done.stderr or done.stdout}")


def compared(name: str, before: Path, model: str, place: Path) -> list[str]:
    """Return what differs between the two trees' runs of a configuration."""
    (place / name).mkdir()
    config = written(CONFIGURATIONS[name] | {"model.path": model}, place / name / f"{name}.toml")
    runs = []
    for tree in (before, HERE):
        folder = place / name / f"run_{len(runs)}"
        if name == RESUMED:
            train(tree, config, folder, "steps=3")
        train(tree, config, folder)
        runs.append(folder)
    return list(differences(*runs))


def differences(one: Path, other: Path) -> Iterator[str]:
    """Say what two run folders do not have in common, the gravest first."""
    for file in ("*.safetensors", "resume/*.safetensors"):
        yield from _tensors(*(_tensors_of(run, file) for run in (one, other)))
    yield from _metrics(*(_metrics_of(run) for run in (one, other)))
    names = [sorted(x.name for x in (run / "rollouts").iterdir()) for run in (one, other)]
    if names[0] != names[1]:
        yield f"rollouts: {names[0]} and {names[1]}"
    for file in sorted(set(names[0]) & set(names[1])):
        yield from _rollouts(file, *(run / "rollouts" / file for run in (one, other)))


def _tensors_of(run: Path, files: str) -> dict[str, torch.Tensor]:
    found = sorted((run / "checkpoints" / "latest").glob(files))
    return {_place(x.stem, name): t for x in found for name, t in load_file(x).items()}


def _place(part: str, name: str) -> str:
    """Return where a tensor is kept; the length exponent was once kept with the optimizer."""
    return f"{'length_exponent' if name.startswith('exponent') else part}:{name}"


def _tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Iterator[str]:
    if not one:
        yield "no tensors to compare"
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            yield f"{name} is only in the {'first' if name in one else 'second'}"
        elif not torch.equal(one[name], other[name]):
            yield f"{name} differs"


def _metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: x for k, x in line.items() if not k.startswith(CLOCK)} for line in lines]


def _metrics(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Iterator[str]:
    if len(one) != len(other):
        yield f"{len(one)} lines of metrics and {len(other)}"
    for a, b in zip(one, other, strict=False):
        differing = [k for k in sorted(a.keys() | b.keys()) if str(a.get(k)) != str(b.get(k))]
        if differing:
            yield f"metrics of step {a['step']}: {', '.join(differing)}"


def _rollouts(name: str, one: Path, other: Path) -> Iterator[str]:
    tables = [parquet.read_table(path) for path in (one, other)]
    if not len(tables[0]):  # a revision that did not record such answers
        return
    both = [x for x in tables[0].column_names if x in tables[1].column_names]
    differing = [x for x in both if str(tables[0][x].to_pylist()) != str(tables[1][x].to_pylist())]
    if differing:
        yield f"{name}: {', '.join(differing)}"


if __name__ == "__main__":
    sys.exit(main())
