"""`groupwise compare`: methods side by side under equal conditions, with intervals.

Stopped by Ctrl-C, it saves the runs under way; the same command goes on with them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import print_json, say, start_pytorch, warn
from groupwise.common.progress import NEXT_AFTER, clock, heard, phase
from groupwise.errors import ConfigError, RecipeWarning, nearest

if TYPE_CHECKING:
    from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, Job
    from groupwise.compare.workers import JobProgress

ARMS = (
    'recipes, with settings behind them in quotes ("grpo recipe.gate.high=0.3"), or whole '
    "configurations (mine.toml)"
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="methods side by side under equal conditions, with intervals",
        usage="groupwise compare ARM ARM ... [--seeds N] [--budget tokens=3e5] [--config FILE] "
        "[--set KEY=VALUE]... [--sweep KEY=A,B,C] [--measure NAME]... [--out DIR] [--jobs N] "
        "[--json]",
        example="groupwise compare grpo dapo --seeds 3 --budget steps=20 --out runs/compare/both",
    )
    parser.add_argument("items", nargs="*", metavar="ARM", help=ARMS)
    parser.add_argument(
        "--seeds", type=int, default=5, metavar="N", help="runs of each arm; default: 5"
    )
    parser.add_argument(
        "--budget", default="tokens=3e5", metavar="UNIT=N",
        help="of each run: tokens sampled, seconds or steps; default: tokens=3e5",
    )  # fmt: skip
    parser.add_argument(
        "--config", metavar="FILE", help="what all arms share; default: the embedded task"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="a setting for all arms; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--sweep", default="", metavar="KEY=A,B,C", help="each arm with each of these values"
    )
    parser.add_argument(
        "--measure", action="append", default=[], metavar="NAME", dest="measures",
        help="compare by this measure of docs/metrics.md, too, at the end; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="default: runs/compare_<the arms>; the same one is gone on with",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="runs at a time; default: one a core or GPU"
    )
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Run the comparison; return 0, 1 where a run failed, 130 where it was stopped."""
    begun = time.perf_counter()
    if args.seeds < 2:
        raise ConfigError(
            f"--seeds {args.seeds}: from one seed nobody can tell a method from its luck, and no "
            "interval can be given. Take 2 or more; 5 are usual."
        )
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs {args.jobs} would run nothing. Take 1 or more.")
    start_pytorch()
    with phase("checking the arms"):
        from groupwise.compare.arms import ArmBudget, arms_of, check
        from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, seeds_from

        check_measures(args.measures)
        budget = ArmBudget.parse(args.budget)
        source = Path(args.config) if args.config else None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RecipeWarning)
            arms = arms_of(
                args.items, budget, source=source, settings=args.settings, sweep=args.sweep
            )
        said = (*(str(warning.message) for warning in caught), *check(arms))
    for doubt in (*said, *too_few(args.seeds, len(arms))):
        warn(doubt)
    plan = ComparisonPlan(tuple(arms), seeds_from(arms[0].config.seed, args.seeds), budget)
    folder = ComparisonFolder(Path(args.out) if args.out else default_folder(args, arms[0].folder))
    with folder.locked(warn) as lock:
        return _compare(args, plan, folder, lock, begun)


def too_few(seeds: int, arms: int) -> Iterator[str]:
    """Warn before the runs if there are too few seeds for a verdict."""
    from groupwise.evaluate.statistics import fewest_units

    fewest = fewest_units(math.comb(arms, 2))
    if seeds < fewest:
        yield (
            f"{seeds} seeds can't tell {arms} arms apart, whatever comes out: so few agree by luck "
            f"too often. {fewest} are the fewest; more can be added by the same command later."
        )


def check_measures(names: Sequence[str]) -> None:
    from groupwise.runfiles.catalogue import CATALOGUE, find

    for name in names:
        found = find(name)
        if found is not None and found.unit == "text":
            raise ConfigError(f"--measure {name} is no number: arms can't be compared by it.")
        if found is None or name.endswith("*"):
            raise ConfigError(
                f"--measure {name}: no run measures that. {nearest(name, CATALOGUE)} "
                "docs/metrics.md lists them."
            )


def default_folder(args: argparse.Namespace, first: str) -> Path:
    """Return a folder name that tells what is compared, short enough for a file system."""
    import hashlib

    said = [*args.items, args.sweep, args.budget, args.config or "", *sorted(args.settings)]
    mark = hashlib.sha256("\n".join(said).encode()).hexdigest()[:8]
    return Path("runs") / f"compare_{first[:40]}_{mark}"


def _compare(
    args: argparse.Namespace,
    plan: ComparisonPlan,
    folder: ComparisonFolder,
    lock: int,
    begun: float,
) -> int:
    from groupwise.compare import findings, outcomes, shared_start, summary, workers
    from groupwise.compare.page import write_all
    from groupwise.compare.places import places_for, threads_for

    places = places_for(plan, args.jobs)
    plan = plan.with_threads(threads_for(folder.read(), places))
    folder.take(plan)
    jobs = folder.undone(plan)
    kept = len(plan.jobs) - len(jobs)
    say(
        f"{len(plan.arms)} arms x {len(plan.seeds)} seeds, {plan.budget} each, into {folder.path}"
        + (f"; {kept} runs are done already" if kept else "")
    )
    progress = None
    try:
        with interruptible():
            if jobs:
                shared_start.prepare(plan, folder, say)
                progress = workers.run_jobs(plan, folder, jobs, places, lock, StatusLine(plan))
            else:
                shared_start.check_unchanged(plan, folder)
    except KeyboardInterrupt:
        left = len(folder.undone(plan))
        say(f"stopped: {left} of {len(plan.jobs)} runs are left. {go_on(sys.argv)}")
        return 130
    failed = dict.fromkeys(folder.undone(plan), "it did not finish")
    failed |= progress.failed if progress else {}
    with phase("judging the arms"):
        done, damaged = outcomes.outcomes(plan, folder)
        failed |= damaged
        found = findings.findings(plan, done, failed, args.measures)
    found["cost"] = cost(progress, len(places), time.perf_counter() - begun)
    with phase("writing tables and plots"):
        written = write_all(folder.path, found, plan, done)
    if args.json:
        print_json(found)
    else:
        print(summary.text(found))
        print(f"\n{summary.cost_line(found['cost'])}; {', '.join(written)} in {folder.path}")
    if failed:
        say(f"{len(failed)} runs failed; the logs are log.txt in their folders. {go_on(sys.argv)}")
    return 1 if failed else 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn a request to end the process into a KeyboardInterrupt, whoever sends it."""

    def interrupt(number: int, frame: object) -> None:
        say("\nsaving the runs under way (once more ends them where they are) ...")
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def go_on(command: Sequence[str]) -> str:
    program = Path(command[0]).name
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of `python -m`
    first = [program]
    if module and program.endswith(".py"):
        first = ["python", "-m", module.name.removesuffix(".__main__")]
    return f"The same command goes on with them: {shlex.join([*first, *command[1:]])}"


def cost(progress: JobProgress | None, places: int, wall: float) -> dict[str, Any]:
    """Return the cost of this call: seconds by the clock, those of the runs, and the overhead.

    The share is of the processes' time, over the sum of the runs.
    """
    runs = sum(progress.seconds.values()) if progress else 0.0
    used = min(places, len(progress.jobs)) if progress else places
    clean = progress is not None and runs > 0 and not progress.failed
    return {
        "wall_seconds": wall,
        "run_seconds": runs,
        "places": used,
        "overhead_share": used * wall / runs - 1 if clean else None,
    }


class StatusLine:
    """A line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self, plan: ComparisonPlan) -> None:
        self._plan = plan
        self._begun, self._shown, self._said = time.perf_counter(), -1, 0.0
        self._failed: set[Job] = set()
        self._live = sys.stderr.isatty()

    def __call__(self, progress: JobProgress) -> None:
        for job in progress.failed.keys() - self._failed:
            name = self._plan.arms[job.arm].name
            say(f"{self._clear()}FAILED {name}, seed {job.seed}: {progress.failed[job]}")
            self._failed.add(job)
        done = len(progress.seconds) + len(progress.failed)
        took, share = time.perf_counter() - self._begun, progress.share
        quiet = done == self._shown and took - self._said < NEXT_AFTER
        if not self._live and quiet:
            return
        self._shown, self._said = done, took
        left = f", {clock(took / share * (1 - share))} left" if share > 0.01 else ""
        line = f"{progress.words}{left}"
        over = self._live and done < len(progress.jobs)
        heard()
        print(f"{self._clear()}{line}", end="" if over else "\n", file=sys.stderr, flush=True)

    def _clear(self) -> str:
        return "\r\033[K" if self._live else ""
