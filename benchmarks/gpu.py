"""One GPU at its limit: a row of docs/performance.md a call, printed and appended as JSON.

    python benchmarks/gpu.py rollout --model DIR             tokens/s, all completions full length
    python benchmarks/gpu.py step --model DIR [--train F]    whole steps: seconds, memory, mismatch
    python benchmarks/gpu.py train --model DIR --train F --test F --seconds 240
    python benchmarks/gpu.py shape --shape 7B --group 4,16,64 --tokens 256,1024 [--phases rollout]
    python benchmarks/gpu.py vllm (--model DIR | --shape 7B) the peer, where it is installed

Without --train the prompts are word problems (workload S), with it GSM8K as in
configs/gsm8k_qwen.toml (workload M). `--set optim.micro_tokens=32768` changes any setting. With
`--device cpu --dtype float32` and small numbers every row runs without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import afterwards
import apples
import peer
import shapes
import torch

from groupwise.config import Config, load
from groupwise.engine.protocol import Request
from groupwise.model.cost import Group
from groupwise.model.formats.checkpoint import Loaded, read_companions
from groupwise.model.formats.checkpoint import load as load_model
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.memory import peak_bytes
from groupwise.prepare.engines import judge_of
from groupwise.prepare.rollouts import grade, sample_groups
from groupwise.prepare.setup import sampling_of, set_up
from groupwise.records import Task
from groupwise.training.loop import one_step
from groupwise.training.opening import open_run
from groupwise.training.run import Run
from groupwise.watch.display import Display
from groupwise.watch.speed import device_of

HERE = Path(__file__).resolve().parent
GSM8K = HERE.parent / "configs" / "gsm8k_qwen.toml"
ENDLESS = 1_000_000  # steps, of runs that end by the clock or after some
PROBLEMS = 4096  # word problems
PHASES = ("rollout", "update")  # of a shape
GOAL = 0.63  # held-out accuracy whose time is taken
# Metrics of a step that go into its row.
KEPT = ("time/", "speed/", "mismatch/", "length/", "reward/mean", "groups/dead", "optim/micro")

Row = dict[str, Any]


class Watch(Display):
    """Keeps the metrics of every step; what it shows leaves standard output to the rows."""

    def __init__(self) -> None:
        super().__init__(sys.stderr, live=False)
        self.seen: list[dict[str, Any]] = []

    def step(self, metrics: Any) -> None:
        self.seen.append(dict(metrics))
        super().step(metrics)


def now(device: str) -> float:
    """The time when the device has done all that was asked of it."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


# --- what is run ------------------------------------------------------------------------------


def workload(given: argparse.Namespace, scratch: Path) -> Config:
    """M with --train, else S; options over it, then --set."""
    common: Row = {
        "steps": ENDLESS,
        "seed": given.seed,
        "model.path": str(given.model),
        "model.dtype": given.dtype,
        "model.device": given.device,
        "eval.every": 0,
        "checkpoint.every_steps": 0,
        "checkpoint.every_seconds": 0,
    }
    options = {
        "prompts_per_step": given.prompts,
        "group_size": given.group,
        "engine.max_tokens": given.tokens,
    }
    common |= {name: value for name, value in options.items() if value}
    if given.train:
        held_out = {"data.eval": str(given.test)} if given.test else {"data.eval": ""}
        return load(GSM8K, overrides(given), **common, **held_out, **{"data.train": given.train})
    own: Row = {
        "recipe": "grpo@trl",
        "prompts_per_step": 64,
        "group_size": 16,
        "data.train": data_file(scratch, [apples.row(number) for number in range(PROBLEMS)]),
        "data.shuffle": False,
        "reward.parts": {f"{HERE / 'apples.py'}:last_number": 1.0},
        "engine.max_tokens": 256,
        "eval.tasks": 0,
    }
    return load(None, overrides(given), **(own | common))


def overrides(given: argparse.Namespace) -> list[str]:
    return [*given.set, *(["engine.exact=true"] if given.exact else [])]


def data_file(scratch: Path, rows: Sequence[Row]) -> str:
    file = scratch / "data.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in rows))
    return str(file)


# --- rollouts ---------------------------------------------------------------------------------


def rollout(given: argparse.Namespace) -> Iterator[Row]:
    """Completions with log-probabilities of workload S's prompts, whatever the model."""
    given.train = None
    with tempfile.TemporaryDirectory() as scratch:
        config = workload(given, Path(scratch))
        setup = set_up(
            config,
            lambda *_: load_model(given.model, getattr(torch, given.dtype), given.device),
        )
    yield full_length(given, config, setup.loaded, setup.tasks[: config.prompts_per_step])


def full_length(
    given: argparse.Namespace, config: Config, loaded: Loaded, tasks: Sequence[Task]
) -> Row:
    """End tokens can't be drawn before engine.max_tokens: no completion is shorter."""
    tokens, group = config.engine.max_tokens, config.group_size
    engine = judge_of(config, loaded)
    sampling = sampling_of(config, min_tokens=tokens)
    seconds = []
    for draw in range(given.repeats + 1):
        requests = [Request(task.token_ids, group, task.id, draw) for task in tasks]
        begun = now(given.device)
        groups = engine.generate(requests, sampling)
        seconds.append(now(given.device) - begun)
        lengths = {len(c.token_ids) for completions in groups for c in completions}
        if lengths != {tokens}:
            raise SystemExit(f"completions have {sorted(lengths)} tokens instead of {tokens}")
    total = len(tasks) * group * tokens
    size = [Group(len(task.token_ids), [tokens] * group) for task in tasks]
    head_VD = loaded.model.head_weight
    return {
        "prompts": len(tasks),
        "group": group,
        "tokens": tokens,
        "prompt_tokens": statistics.mean(len(task.token_ids) for task in tasks),
        "first_seconds": seconds[0],
        "seconds": seconds[1:],
        "tokens_per_second": total / min(seconds[1:]),
        "roofline_seconds": afterwards.rollout_floor(
            loaded.model.config,
            size,
            config.engine.slots,
            head_VD.element_size(),
            device_of(head_VD.device),
        ),
        "peak_bytes": peak_bytes(given.device),
    }


# --- whole steps ------------------------------------------------------------------------------


def step(given: argparse.Namespace) -> Iterator[Row]:
    """Whole steps after the first ones: how long, how much memory, and where the time goes."""
    given.test = None
    with tempfile.TemporaryDirectory() as scratch:
        config = workload(given, Path(scratch))
        watch = Watch()
        with open_run(config, Path(scratch) / "run", watch) as run:
            seconds = [timed_step(run) for _ in range(given.warmup + given.steps)]
            last, loaded = run.reporter.folder.rollout(run.progress.step), run.parts.loaded
        gaps = afterwards.mismatch(last)
        device = device_of(loaded.model.head_weight.device)
        beside = afterwards.beside_roofline(
            loaded, last, watch.seen[-1], config.engine.slots, device
        )
    taken = watch.seen[given.warmup :]
    names = sorted(name for name in taken[-1] if name.startswith(KEPT))
    yield {
        "prompts": config.prompts_per_step,
        "group": config.group_size,
        "tokens": config.engine.max_tokens,
        "first_seconds": seconds[: given.warmup],
        "seconds": seconds[given.warmup :],
        "step_seconds": statistics.mean(seconds[given.warmup :]),
        "peak_bytes": peak_bytes(given.device),
        "mismatch": gaps,
        "last_step": beside,
        "metrics": {name: mean_of(taken, name) for name in names},
    }


def timed_step(run: Run) -> float:
    device = run.config.model.device
    begun = now(device)
    one_step(run, threading.Event())
    return now(device) - begun


def mean_of(taken: Sequence[Row], name: str) -> float | None:
    known = [x[name] for x in taken if isinstance(x.get(name), (int, float))]
    return statistics.mean(known) if known else None


# --- learning ---------------------------------------------------------------------------------


def train(given: argparse.Namespace) -> Iterator[Row]:
    """GSM8K for so many seconds of training, with held-out accuracy on the way.

    The clock starts at the first step and stands still while held-out tasks are answered: their
    time is given beside it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = workload(given, Path(scratch))
        watch = Watch()
        with open_run(config, Path(scratch) / "run", watch) as run:
            curve = [{"step": 0, "seconds": 0.0, "with_evals": 0.0, **held_out(run)}]
            seconds: list[float] = []
            evaluating = 0.0
            while sum(seconds) <= given.seconds:
                seconds.append(timed_step(run))
                trained = sum(seconds)
                if run.progress.step % given.eval_every and trained <= given.seconds:
                    continue
                found = held_out(run)
                evaluating += found["eval_seconds"]
                clock = {
                    "step": run.progress.step,
                    "seconds": trained,
                    "with_evals": trained + evaluating,
                }
                curve.append({**clock, **found})
                print(json.dumps(curve[-1]), file=sys.stderr, flush=True)
    reached: Row = next((point for point in curve if point["strict"] >= GOAL), {})
    yield {
        "budget_seconds": given.seconds,
        "before": curve[0],
        "after": curve[-1],
        "goal": GOAL,
        "seconds_to_goal": reached.get("seconds"),
        "seconds_to_goal_with_evals": reached.get("with_evals"),
        "step_seconds": statistics.median(seconds),
        "peak_bytes": peak_bytes(given.device),
        "settings": given.set,
        "curve": curve,
        "seconds": [round(x, 3) for x in seconds],
        "reward": [round(x.get("reward/mean", 0.0), 4) for x in watch.seen],
        "length": [round(x.get("length/mean", 0.0), 1) for x in watch.seen],
    }


def held_out(run: Run) -> Row:
    """Greedy answers to the held-out tasks; the mean of every part of the reward by its name."""
    device = run.config.model.device
    begun = now(device)
    sampling = sampling_of(run.config, temperature=run.config.eval.temperature)
    written = sample_groups(
        run.parts.engine, [(task, 0) for task in run.parts.held_out], 1, sampling, stream="eval"
    )
    graded = grade(run.parts.grader, run.parts.loaded.tokenizer, written)
    rows = [rollout for group in graded for rollout in group]
    parts = {
        name.rpartition(":")[2]: statistics.mean(float(r.grade.parts[name] or 0.0) for r in rows)
        for name in run.parts.grader.parts
    }
    return {
        **parts,
        "tasks": len(rows),
        "length": statistics.mean(len(r.completion.token_ids) for r in rows),
        "truncated": statistics.mean(float(r.completion.truncated) for r in rows),
        "eval_seconds": now(device) - begun,
    }


# --- how cost grows ---------------------------------------------------------------------------


def shape(given: argparse.Namespace) -> Iterator[Row]:
    """Random weights: rollouts and updates at every group size and length, a row each."""
    budget = shapes.Budget(given.budget, given.device)
    with tempfile.TemporaryDirectory() as scratch:
        rows = shapes.prompts(given.prompts, given.prompt_tokens, given.seed)
        data = data_file(Path(scratch), rows)
        dtype = getattr(torch, given.dtype)
        setup = set_up(
            shapes.case(given, overrides(given), data, 2, max(given.tokens)),
            lambda *_: shapes.policy(given.shape, dtype, given.device, given.seed),
        )
        for group, tokens, phase in product(given.group, given.tokens, given.phases):
            config = shapes.case(given, overrides(given), data, group, tokens)
            measures: dict[str, Callable[[], Row]] = {
                "rollout": partial(full_length, given, config, setup.loaded, setup.tasks),
                "update": partial(
                    shapes.learn,
                    config,
                    setup.loaded,
                    setup.tasks,
                    given.repeats,
                    lambda: now(given.device),
                ),
            }
            size = {"prompts": given.prompts, "group": group, "tokens": tokens}
            found = budget.row(phase, given.prompts * group * tokens, measures[phase])
            yield {"shape": given.shape, "phase": phase, **size, **found}


def vllm(given: argparse.Namespace) -> Iterator[Row]:
    """The peer on the same prompts."""
    if given.shape:
        rows = shapes.prompts(given.prompts, given.prompt_tokens, given.seed)
        tokenizer = Tokenizer.from_files(shapes.FILES)
        prompts = [tokenizer.prompt(row["prompt"]) for row in rows]
    else:
        tokenizer = Tokenizer.from_files(read_companions(given.model))
        prompts = [tokenizer.prompt(apples.row(i)["prompt"]) for i in range(given.prompts)]
    size = {"prompts": given.prompts, "group": given.group, "tokens": given.tokens}
    for row in peer.rollouts(
        shapes.SHAPES[given.shape] if given.shape else given.model,
        prompts,
        group=given.group,
        tokens=given.tokens,
        dtype=given.dtype,
        memory=given.memory,
        repeats=given.repeats,
        budget=given.budget,
        now=lambda: now(given.device),
    ):
        yield {"shape": given.shape, **size, **row}


# --- command line -----------------------------------------------------------------------------


def versions(device: str) -> Row:
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    for package in ("triton", "vllm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.startswith("cuda"):
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def phases(text: str) -> list[str]:
    found = text.split(",")
    if set(found) - set(PHASES):
        raise argparse.ArgumentTypeError(f"{text!r}: some of {','.join(PHASES)}")
    return found


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--results", type=Path, help="a file of JSON lines to append to")
    common.add_argument("--device", default="cuda")
    common.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    common.add_argument("--seed", type=int, default=0)
    common.add_argument("--repeats", type=int, default=3, help="after a first one that warms up")
    common.add_argument("--exact", action="store_true", help="engine.exact=true")
    common.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    made = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    rows = made.add_subparsers(dest="row", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], Iterator[Row]]) -> Any:
        row = rows.add_parser(name, parents=[common], help=(run.__doc__ or "").split("\n")[0])
        row.set_defaults(run=run)
        return row

    for name, run in (("rollout", rollout), ("step", step), ("train", train)):
        row = add(name, run)
        row.add_argument("--model", type=Path, required=True)
        for option in ("--prompts", "--group", "--tokens"):
            row.add_argument(option, type=int, help="instead of the workload's")
        row.add_argument("--train", help="GSM8K's training problems, JSON lines", default=None)
        row.add_argument("--test", help="its test problems", default=None)
        row.add_argument("--warmup", type=int, default=2, help="steps that are not counted")
        row.add_argument("--steps", type=int, default=5, help="steps that are")
        row.add_argument("--seconds", type=float, default=240.0, help="of training")
        row.add_argument("--eval-every", type=int, default=5, help="steps")
    for name, run in (("shape", shape), ("vllm", vllm)):
        row = add(name, run)
        kind = numbers if name == "shape" else int
        row.add_argument("--shape", choices=list(shapes.SHAPES))
        row.add_argument("--prompts", type=int, default=64)
        row.add_argument("--group", type=kind, default=kind("16"))
        row.add_argument("--tokens", type=kind, default=kind("256"))
        row.add_argument("--prompt-tokens", type=int, default=75, help="of made-up prompts")
        row.add_argument("--budget", type=float, default=400.0, help="seconds; then no new case")
        if name == "shape":
            row.add_argument("--phases", type=phases, default=list(PHASES), help="of a case")
        row.add_argument("--model", type=Path)
        row.add_argument("--memory", type=float, default=0.5, help="share of the GPU for vLLM")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    given = parser().parse_args(arguments)
    command = " ".join(sys.argv[1:] if arguments is None else arguments)
    about = {"row": given.row, "command": command, "versions": versions(given.device)}
    for found in given.run(given):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        line = json.dumps({**about, "when": when, **found})
        print(line, flush=True)
        if given.results:
            given.results.parent.mkdir(parents=True, exist_ok=True)
            with given.results.open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
