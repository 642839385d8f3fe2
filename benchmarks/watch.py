"""What watching costs: the seconds of measures and rules in a step, as a share of the step.

    python benchmarks/watch.py [CONFIG.toml] [KEY=VALUE ...] [--steps 30]
    python benchmarks/watch.py --workload-s SMOLLM2_FOLDER [KEY=VALUE ...]

Default: configs/demo.toml; workload S needs a GPU. Every function that a step calls only to watch
is timed where it is called, on a GPU until the device has done its share: measures of samples,
waste, tallies of the token phase, the tail of the mismatch, the gradient's signal and noise, costs,
health rules. Prints a line each, and the whole.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import gpu

from groupwise.config import Config, load
from groupwise.groups import phase as groups_phase
from groupwise.losses import phase
from groupwise.optim.adamw import AdamW
from groupwise.stages import groups as teach
from groupwise.training import loop
from groupwise.training.reporter import Reporter
from groupwise.watch.display import Display

WATCHING: tuple[tuple[Any, str], ...] = (
    (loop, "sample_measures"),
    (loop, "wasted"),
    (loop, "costs"),
    (loop, "rollout_work"),
    (groups_phase, "edge_share"),
    (phase, "_measure"),
    (teach, "mismatch_tail"),
    (AdamW, "signal_to_noise"),
    (Reporter, "judge"),
)


def settings(args: argparse.Namespace, scratch: Path) -> Config:
    if args.workload_s is None:
        changes = [*args.items[1:], f"steps={args.steps}", "eval.every=0"]
        return load((args.items or ["configs/demo.toml"])[0], changes)
    row = ["step", "--model", args.workload_s]
    changes = [word for item in args.items for word in ("--set", item)]
    return gpu.workload(gpu.parser().parse_args([*row, *changes]), scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("items", nargs="*")
    parser.add_argument("--workload-s", metavar="MODEL")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    spent = {name: 0.0 for _, name in WATCHING}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            begun = gpu.now(device)
            try:
                return function(*values, **named)
            finally:
                spent[name] += gpu.now(device) - begun

        return call

    for owner, name in WATCHING:
        setattr(owner, name, timed(name, getattr(owner, name)))
    shares: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = settings(args, Path(folder))
        device = config.model.device
        display = Display(io.StringIO(), live=False)
        with closing(loop.steps(config, Path(folder) / "run", display)) as taken:
            for metrics in islice(taken, args.steps + 1):
                step = metrics.get("time/step")
                if step and metrics["step"] > 2:  # the first ones warm up
                    shares.append({name: seconds / step for name, seconds in spent.items()})
                spent.update(dict.fromkeys(spent, 0.0))
    for name in spent:
        print(f"{name:<16} {100 * statistics.median(share[name] for share in shares):.3f} %")
    whole = statistics.median(sum(share.values()) for share in shares)
    print(f"{'all of it':<16} {100 * whole:.2f} % of a step (median of {len(shares)})")


if __name__ == "__main__":
    main()
