"""How often `groupwise compare` tells equal arms apart by anything that it says, and unequal ones.

    python benchmarks/false_positives.py               # a few minutes on one core
    python benchmarks/false_positives.py --repeats 200 # a first look

Comparisons are made up, with all that real ones have: seeds that differ, tasks that are easy and
hard, what seeds and tasks have between them, few held-out tasks or evaluations, accuracies near the
ceiling, runs that fail. They are judged by what `compare` itself calls, over all pairs of arms: the
final score, the mean over the budget, and two measures of training. Printed is the share of
comparisons in which at least one of these is called separable. Where arms are equal, that is an
error, and must be below 5 %; where one is better, it is the power.

A share above 5 % may be chance. Those are drawn anew, ten times as often, and that second share is
held against what 5 % comes to in so many draws: one such script in a hundred goes beyond it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt

from groupwise.compare.findings import SCORES, judgements, pair_of
from groupwise.compare.outcomes import RunOutcome
from groupwise.evaluate.statistics import ALPHA

SEEDS = (2, 3, 5, 8)
MEASURES = ("entropy/mean", "length/mean")
REPEATS = 1000
MORE = 10  # times as many, where a share is above what is allowed
FALSE_ALARM = 0.01  # of the script as a whole, if every true share were as large as is allowed

Array = npt.NDArray[np.float64]
Drawn = np.random.Generator


def _normal(draw: Drawn, shape: tuple[int, ...]) -> Array:
    return draw.normal(size=shape)


def _heavy(draw: Drawn, shape: tuple[int, ...]) -> Array:
    return draw.standard_t(2.5, shape)


def _skewed(draw: Drawn, shape: tuple[int, ...]) -> Array:
    return draw.lognormal(0.0, 1.0, shape)


def _even(draw: Drawn, shape: tuple[int, ...]) -> Array:
    return draw.uniform(-1.7, 1.7, shape)


def _two_kinds(draw: Drawn, shape: tuple[int, ...]) -> Array:
    """Half of the runs take off, and all that do are alike."""
    return 10.0 * (draw.random(shape) < 0.5) + 0.02 * draw.normal(size=shape)


def _apart(draw: Drawn, luck: Array) -> Array:
    """Measures that have nothing to do with how well a run goes, nor with each other."""
    return draw.normal(size=(len(luck), len(MEASURES)))


def _along(draw: Drawn, luck: Array) -> Array:
    """Measures that follow how well a run goes."""
    return luck + 0.02 * draw.normal(size=(len(luck), len(MEASURES)))


def _constant(draw: Drawn, luck: Array) -> Array:
    """The same in all runs but for one in ten, which is off by one."""
    return (draw.random((len(luck), len(MEASURES))) < 0.1).astype(float)


@dataclass(frozen=True)
class Setting:
    """What arms have in common. Spreads are of log-odds, at the end of the budget."""

    arms: int = 2
    tasks: int = 64
    evaluations: int = 4
    samples: int = 1  # of a task
    level: float = 0.0  # of an average task
    by_seed: float = 0.3
    by_task: float = 1.5
    rest: float = 0.5  # of a seed's task
    own_tasks: float = 0.0  # arms are good at other tasks, and equally good on average
    runs: Callable[[Drawn, tuple[int, ...]], Array] = _normal
    measure: Callable[[Drawn, Array], Array] = _apart
    better: float = 0.0  # the second arm, in log-odds and in deviations of a measure


EQUAL = {
    "as usual: 64 tasks, 4 evaluations": Setting(),
    "256 tasks, 12 evaluations": Setting(tasks=256, evaluations=12),
    "four arms": Setting(arms=4),
    "seeds alike": Setting(by_seed=0.0, rest=0.0),
    "seeds far apart": Setting(by_seed=1.5),
    "each arm has tasks of its own": Setting(own_tasks=1.0),
    "tasks of its own, four arms": Setting(own_tasks=1.0, arms=4),
    "tasks of its own, 4 of them": Setting(own_tasks=2.0, tasks=4, samples=16, evaluations=2),
    "8 tasks, 2 evaluations": Setting(tasks=8, evaluations=2),
    "one evaluation": Setting(evaluations=1),
    "near the ceiling": Setting(level=4.0),
    "heavy tails": Setting(runs=_heavy, measure=_along),
    "skewed": Setting(runs=_skewed, measure=_along),
    "seeds spread evenly": Setting(runs=_even, by_seed=1.0, measure=_along),
    "half of the runs take off": Setting(runs=_two_kinds, measure=_along),
    "half take off, four arms": Setting(runs=_two_kinds, measure=_along, arms=4),
    "measures nearly constant": Setting(measure=_constant),
}
BETTER = {
    f"{name}, better by {points}": replace(setting, better=gap)
    for name, setting in (
        ("64 tasks", Setting()),
        ("256 tasks, 12 evaluations", Setting(tasks=256, evaluations=12)),
    )
    for gap, points in ((0.5, "7 points"), (1.0, "14 points"), (2.0, "23 points"))
}


def simulate(setting: Setting, seeds: int, draw: Drawn) -> list[list[RunOutcome]]:
    """Of each arm the runs. All begin with the same scores, and a seed is easier for all arms."""
    tasks, places = setting.tasks, np.linspace(0.0, 1.0, setting.evaluations + 1)
    easy = draw.normal(setting.level, setting.by_task, tasks)
    shared = 0.5 * setting.by_seed * draw.normal(size=(seeds, 1))

    def asked(odds: Array) -> Array:
        right = draw.binomial(setting.samples, 1 / (1 + np.exp(-odds)))
        return np.asarray(right / setting.samples)

    start = asked(np.broadcast_to(easy, (seeds, tasks)))
    done = []
    for arm in range(setting.arms):
        better = setting.better if arm == 1 else 0.0
        luck = setting.runs(draw, (seeds, 1))
        gained = 1.0 + better + shared + setting.by_seed * luck
        gained = gained + setting.own_tasks * draw.normal(size=tasks)
        gained = gained + setting.rest * draw.normal(size=(seeds, tasks))
        scores = np.array([start, *(asked(easy + place * gained) for place in places[1:])])
        areas = np.trapezoid(scores, places, axis=0)
        measured = setting.measure(draw, luck) + better
        done.append(
            [_outcome(s, scores[-1, s], areas[s], measured[s].tolist()) for s in range(seeds)]
        )
    return done


def _outcome(seed: int, scores: Array, areas: Array, measured: Sequence[float]) -> RunOutcome:
    return RunOutcome(
        seed=seed, measure="accuracy", points=(), final=float(scores.mean()),
        area=float(areas.mean()), scores=tuple(scores.tolist()), areas=tuple(areas.tolist()),
        by_task={}, steps=0, tokens=0, seconds=0.0, length=0.0,
        ends=dict(zip(MEASURES, measured, strict=True)), curves={}, origin={}, versions="",
    )  # fmt: skip


def told_apart(done: Sequence[Sequence[RunOutcome]]) -> list[str]:
    """What at least one pair of these arms is called separable by."""
    names = [str(arm) for arm in range(len(done))]
    pairs = [pair_of(names, done, *two) for two in combinations(range(len(done)), 2)]
    return [
        kind
        for row in judgements(pairs, (*SCORES, *MEASURES))
        for kind, judged in row.items()
        if judged is not None and judged.p < ALPHA
    ]


def rates(setting: Setting, seeds: int, repeats: int, seed: int = 0) -> dict[str, float]:
    """The share of comparisons in which something is told apart: by each kind, and by any."""
    draw = np.random.default_rng((seed, seeds))
    found = [told_apart(simulate(setting, seeds, draw)) for _ in range(repeats)]
    by_kind = {k: sum(k in kinds for kinds in found) / repeats for k in (*SCORES, *MEASURES)}
    return by_kind | {"any": sum(bool(kinds) for kinds in found) / repeats}


def allowed(repeats: int, cells: int) -> float:
    """Return the largest share that a true one of 5 % comes to, by the binomial distribution, in
    all of so many cells at once."""
    beyond, count = 0.0, repeats + 1
    while beyond <= FALSE_ALARM / cells:
        count -= 1
        beyond += math.exp(
            math.lgamma(repeats + 1) - math.lgamma(count + 1) - math.lgamma(repeats - count + 1)
            + count * math.log(ALPHA) + (repeats - count) * math.log1p(-ALPHA)
        )  # fmt: skip
    return count / repeats


def table(settings: dict[str, Setting], repeats: int) -> dict[tuple[str, int], float]:
    """Print a line for each setting, a column for each number of seeds; return their shares."""
    width = max(map(len, settings)) + 2
    print("".ljust(width) + "".join(f"{f'{n} seeds':>20}" for n in SEEDS))
    shares = {}
    for name, setting in settings.items():
        found = [rates(setting, seeds, repeats) for seeds in SEEDS]
        shares |= {(name, n): one["any"] for n, one in zip(SEEDS, found, strict=True)}
        cells = [f"{x['any']:7.1%} ({x['final']:.0%}, {x['area']:.0%})" for x in found]
        print(name.ljust(width) + "".join(f"{cell:>20}" for cell in cells), flush=True)
    return shares


def too_many(shares: dict[tuple[str, int], float], repeats: int) -> bool:
    """Draw what came out above 5 % anew, more often; tell whether it is too much for chance."""
    above = [cell for cell, share in shares.items() if share > ALPHA]
    limit = allowed(MORE * repeats, len(shares))
    print(f"\nErrors above 5 %: {len(above)} of {len(shares)}", end="")
    print(f"; again, {MORE * repeats} comparisons each, of which 5 % may come out as {limit:.2%}")
    again = [rates(EQUAL[name], n, MORE * repeats, seed=1)["any"] for name, n in above]
    for (name, n), share in zip(above, again, strict=True):
        print(f"{name}, {n} seeds: {shares[name, n]:.1%}, {share:.2%}", flush=True)
    return any(share > limit for share in again)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N")
    repeats = parser.parse_args().repeats
    print(f"{repeats} comparisons each; told apart by anything (by final score, by area)\n")
    print("Equal arms: errors")
    shares = table(EQUAL, repeats)
    print("\nThe second arm is better: power")
    table(BETTER, repeats)
    return int(too_many(shares, repeats))


if __name__ == "__main__":
    raise SystemExit(main())
