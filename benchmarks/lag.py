"""What sampling ahead hides, and what its machinery costs where nothing is sampled ahead.

    python benchmarks/lag.py overlap [--steps 12] [--rounds 2] [--tokens 48] [--width 256]
    python benchmarks/lag.py cost [--steps 500]

`overlap`: steps of a run on one thread that samples and learns in turns, and of one with a lag of
1 whose sampler has a process of its own; in turns, as the machine may have others to serve. Hidden:
what a step became shorter, as a share of the shorter phase. Simulated: what `groupwise plan
--simulate` makes of the steps in turns, to be held against the measured step. `cost`: steps of two
runs alike, one of them with its prompts in the queue of train.lag, but no lag; step by step, in one
process. Its time is the processor's, which others on the machine do not lengthen.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config, load
from groupwise.plan.simulate import SimulatedWay, recorded, simulate
from groupwise.stages.ahead import Ahead
from groupwise.training import loop
from groupwise.training.loop import steps, train
from groupwise.watch.display import Display

QUIET: dict[str, Any] = {
    "recipe": "tis",
    "model.device": "cpu",
    "model.dtype": "float32",
    "model.threads": 1,
    "data.options": {"digits": 3},
    "tiny.cold_start_steps": 1,
    "eval.every": 0,
    "eval.tasks": 0,
    "checkpoint.every_steps": 0,
    "optim.learning_rate": 1e-5,
}
WARM = 3  # steps of a run that are not counted


def overlap(asked: argparse.Namespace) -> None:
    """Print what a lag of 1 hides of the shorter phase."""
    base = QUIET | {
        "tiny.width": asked.width,
        "tiny.layers": 6,
        "prompts_per_step": 8,
        "engine.max_tokens": asked.tokens,
        "engine.min_tokens": asked.tokens,  # so that every step is as long
        "steps": asked.steps + WARM,
    }
    arms = {
        "in turns": load(base),
        "lag 1": load(base | {"train.lag": 1, "engine.servers": 1}),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    simulated = []
    for _ in range(asked.rounds):
        for name, config in arms.items():
            with trained(config) as folder:
                found[name] += timed(folder)
                if not config.train.lag:
                    simulated.append(with_lag(folder))
    typical = {name: statistics.median(x["time/step"] for x in own) for name, own in found.items()}
    turns = found["in turns"]
    rollout = statistics.median(x["time/rollout"] + x["time/grade"] for x in turns)
    learn = typical["in turns"] - rollout
    hidden = (typical["in turns"] - typical["lag 1"]) / min(rollout, learn)
    idle = {
        side: statistics.median(x[f"time/{side}_idle"] for x in found["lag 1"])
        for side in ("learner", "sampler")
    }
    said = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rollout": rollout,
        "learn": learn,
        **typical,
        "hidden": hidden,
        "simulated lag 1": statistics.median(simulated),
        **{f"{side} idle": seconds for side, seconds in idle.items()},
    }
    print(json.dumps({k: round(x, 3) if isinstance(x, float) else x for k, x in said.items()}))


@contextlib.contextmanager
def trained(config: Config) -> Iterator[Path]:
    """Yield the folder of a run, which is gone afterwards."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder, Display(io.StringIO(), live=False))
        yield Path(folder)


def timed(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of a run's steps, without the first."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["step"] > WARM]


def with_lag(folder: Path) -> float:
    """Return the seconds of a step with a lag of 1, as simulated from a run in turns.

    Its steps are replayed many times, as the first rollout and the last update stand alone.
    """
    run = recorded(folder)
    way = SimulatedWay("lag 1", lag=1, apart=True)
    return simulate(run.steps * 50, run.slots, run.rates, way).step


def cost(asked: argparse.Namespace) -> None:
    """Print the processor's seconds of a step with the queue and without."""
    config = load(
        QUIET | {"tiny.width": 64, "prompts_per_step": 8, "engine.max_tokens": 8}
        | {"steps": asked.steps + WARM}
    )  # fmt: skip
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        plain = going(config, Path(folder) / "plain")
        with queued():
            queue = going(config, Path(folder) / "queue")
            next(queue)
        next(plain)
        spent: dict[str, list[float]] = {"plain": [], "queue": []}
        for number in range(asked.steps + WARM - 1):
            for name, run in (("plain", plain), ("queue", queue))[:: 1 if number % 2 else -1]:
                begun = time.process_time()
                next(run)
                if number >= WARM:
                    spent[name].append(time.process_time() - begun)
        plain.close()
        queue.close()
    mean = {name: statistics.mean(x) for name, x in spent.items()}
    typical = {name: statistics.median(x) for name, x in spent.items()}
    said = {
        "steps": len(spent["plain"]),
        "mean_ms": {name: round(1000 * x, 3) for name, x in mean.items()},
        "median_ms": {name: round(1000 * x, 3) for name, x in typical.items()},
        "mean_share": round(mean["queue"] / mean["plain"] - 1, 4),
        "median_share": round(typical["queue"] / typical["plain"] - 1, 4),
    }
    print(json.dumps(said))


def going(config: Config, folder: Path) -> Generator[dict[str, Any], None, dict[str, Any]]:
    return steps(config, folder, Display(io.StringIO(), live=False))


@contextlib.contextmanager
def queued() -> Iterator[None]:
    """Let runs that are opened here have the queue of a lag, with slots for one step."""
    opened = loop.open_run

    @contextlib.contextmanager
    def opening(*given: Any, **named: Any) -> Iterator[Any]:
        with opened(*given, **named) as run:
            run.parts.ahead = Ahead(run.config, run.parts, run.progress.cursor)
            yield run

    loop.open_run = opening
    try:
        yield
    finally:
        loop.open_run = opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True)
    one = kinds.add_parser("overlap")
    one.add_argument("--steps", type=int, default=12)
    one.add_argument("--rounds", type=int, default=2)
    one.add_argument("--tokens", type=int, default=48)
    one.add_argument("--width", type=int, default=256)
    one.set_defaults(measure=overlap)
    two = kinds.add_parser("cost")
    two.add_argument("--steps", type=int, default=500)
    two.set_defaults(measure=cost)
    asked = parser.parse_args()
    asked.measure(asked)


if __name__ == "__main__":
    main()
