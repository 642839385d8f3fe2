"""Supervised steps on one GPU: real tokens a second and peak memory, settings beside each other.

    python benchmarks/gpu_sft.py --model DIR --train ROWS.jsonl --case 64:16384 --case 256:8192

A case is rows a step : tokens of a micro-batch, and `:r` for recomputed activations. Rows are
{"prompt", "solution"}, learned as conversations behind the model's own chat template. Tokens are
those of prompts and answers, padding not counted (there is none); seconds are those of whole steps,
from the rows to the records handed to the writer. `--rank 16` trains an adapter. The cases follow
each other in one run; peak memory is that of each one's steps. A row of JSON a case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu
import pyarrow.parquet as parquet
import torch

from groupwise.config import Config, load
from groupwise.model.memory import peak_bytes
from groupwise.training.opening import open_run
from groupwise.training.run import Run

SIDES = ("prompt_token_ids", "token_ids")
RATE = 1e-5  # the peer's
LEAST = 1024  # tokens of a micro-batch that any case could have

Row = dict[str, Any]


def settings(given: argparse.Namespace) -> Config:
    """Return what all cases share."""
    adapter = {"adapter.rank": given.rank, "adapter.alpha": 2.0 * given.rank} if given.rank else {}
    common: Row = {
        "recipe": "sft",
        "steps": gpu.ENDLESS,
        "model.path": str(given.model),
        "model.dtype": given.dtype,
        "model.device": given.device,
        "data.train": str(given.train),
        "data.template": "chat",
        "optim.learning_rate": RATE,
        "optim.micro_tokens": LEAST,
        "eval.tasks": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_seconds": 0.0,
    }
    return load(None, given.set, **(common | adapter))


def named(text: str) -> Row:
    rows, micro, *more = text.split(":")
    return {"rows": int(rows), "micro_tokens": int(micro), "recompute": more == ["r"]}


def measured(given: argparse.Namespace, run: Run, watch: gpu.Watch, size: Row) -> Row:
    """Take the steps of one case, those that warm up first."""
    config = replace(run.config, prompts_per_step=size["rows"])
    run, run.stage.config = run._replace(config=config), config
    learner = run.parts.learner
    learner.micro_tokens, learner.model.recompute = size["micro_tokens"], size["recompute"]
    forget(given.device)
    started, first = time.perf_counter(), len(watch.seen)
    at, seconds = run.progress.step, list[float]()
    while len(seconds) < given.warmup + given.steps:
        late = time.perf_counter() - started > given.budget
        if late and len(seconds) > given.warmup:
            break
        seconds.append(gpu.timed_step(run))
    run.reporter.recorder.flush()
    files = [run.reporter.folder.rollout(at + step + 1) for step in range(len(seconds))]
    tokens = [tokens_of(file) for file in files[given.warmup :]]
    counted, metrics = seconds[given.warmup :], watch.seen[first + given.warmup :]
    names = sorted(x for x in metrics[-1] if x.startswith(("time/", "speed/", "supervised/")))
    peak = peak_bytes(given.device)
    return {
        "tokens_per_second": sum(tokens) / sum(counted),
        "tokens_a_step": statistics.mean(tokens),
        "peak_bytes": peak,
        "peak_gib": peak / 2**30,
        "micro_tokens_used": learner.micro_tokens,
        "first_seconds": seconds[: given.warmup],
        "seconds": counted,
        "metrics": {name: gpu.mean_of(metrics, name) for name in names},
    }


def tokens_of(file: Path) -> int:
    """Return the tokens of a step: prompts and answers."""
    table = parquet.read_table(file, columns=list(SIDES))
    return sum(len(ids) for side in SIDES for ids in table[side].to_pylist())


def forget(device: str) -> None:
    """Count memory anew, with nothing left of the case before."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def cases(given: argparse.Namespace) -> Iterator[Row]:
    watch = gpu.Watch()
    with (
        tempfile.TemporaryDirectory() as scratch,
        open_run(settings(given), Path(scratch) / "run", watch) as run,
    ):
        run.keeper.saver.wait()  # the host's memory for checkpoints is made beside the start
        for text in given.case:
            size = named(text)
            found = {"model": given.model.name, "rank": given.rank, **size}
            yield found | measured(given, run, watch, size)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--case", action="append", required=True, metavar="ROWS:TOKENS[:r]")
    parser.add_argument("--rank", type=int, default=0, help="of an adapter; 0: all weights learn")
    parser.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=10, help="steps that are")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of a case's steps")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--results", type=Path, help="a file of JSON lines to append to")
    given = parser.parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    for found in cases(given):
        line = json.dumps({"row": "sft", "command": command, **found, **gpu.versions(given.device)})
        print(line, flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
