"""Arms and pairs with their intervals: what compare.json holds (docs/compare.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from groupwise.compare.outcomes import (
    CURVES,
    Array,
    Outcome,
    grid,
    score_curve,
    training_curve,
)
from groupwise.compare.plan import Job, Plan
from groupwise.validate import statistics
from groupwise.validate.statistics import ALPHA, POWER, Difference

FORMAT = 1
SCORES = ("final", "area")
# What an arm of which no run finished, and a pair of which one seed did, have no value of.
MEASURED = ("start", "final", "area", "steps", "tokens", "seconds", "length", "entropy", "curves")
TESTED = ("difference", "low", "high", "p", "p_uncorrected", "separable", "stderr", "stderr_seeds",
          "stderr_tasks", "level", "smallest_visible", "seeds_needed", "tasks_needed")  # fmt: skip


def findings(
    plan: Plan,
    done: Sequence[Sequence[Outcome]],
    failed: Mapping[Job, str],
    measures: Sequence[str] = (),
) -> dict[str, Any]:
    """The whole result. Differences are a − b, in shares (0.031 is 3.1 points).

    `measures` are those of metrics.jsonl that arms are compared by as well.
    """
    scores = {one.measure for runs in done for one in runs}
    return {
        "format": FORMAT,
        "budget": {plan.budget.unit: plan.budget.amount},
        "seeds": list(plan.seeds),
        "measure": scores.pop() if len(scores) == 1 else "accuracy",
        "alpha": ALPHA,
        "power": POWER,
        "arms": [_arm(plan, number, runs, failed, measures) for number, runs in enumerate(done)],
        "pairs": pairs([arm.name for arm in plan.arms], done, measures),
        "same_start": same_start(done, by_seed=any(a.config.adapter.rank for a in plan.arms)),
        "versions": versions(done),
    }


# --- arms -------------------------------------------------------------------------------------


def _arm(
    plan: Plan,
    number: int,
    runs: Sequence[Outcome],
    failed: Mapping[Job, str],
    measures: Sequence[str],
) -> dict[str, Any]:
    arm = plan.arms[number]
    found: dict[str, Any] = {
        "name": arm.name,
        "recipe": {"name": arm.config.recipe.name, **arm.config.recipe.text()},
        "seeds": [one.seed for one in runs],
        "failed": [
            {"seed": job.seed, "why": why} for job, why in failed.items() if job.arm == number
        ],
    }
    if not runs:
        return found | dict.fromkeys(MEASURED) | {"measures": dict.fromkeys(measures)}
    entropies = [one.entropy for one in runs if one.entropy is not None]
    share = runs[0].measure == "accuracy"
    found |= {
        "start": _mean([one.start for one in runs]),
        "final": _estimate([one.final for one in runs], share),
        "area": _estimate([one.area for one in runs], share),
        "steps": _mean([one.steps for one in runs]),
        "tokens": _mean([one.tokens for one in runs]),
        "seconds": _mean([one.seconds for one in runs]),
        "length": _mean([one.length for one in runs]),
        "entropy": _mean(entropies) if entropies else None,
        "measures": {
            name: _estimate([one.ends[name] for one in runs], share=False)
            if all(name in one.ends for one in runs)
            else None
            for name in measures
        },
        "curves": curves(plan, runs),
    }
    return found


def _estimate(values: Sequence[float], share: bool) -> dict[str, Any]:
    """The mean over seeds, its interval (None of one seed), and what each seed gave."""
    low = high = error = None
    if len(values) > 1:
        low, high = statistics.bootstrap_interval(values)
        error = statistics.stderr(values)
        if share:
            low, high = max(low, 0.0), min(high, 1.0)
    mean = _mean(values)
    return {"mean": mean, "low": low, "high": high, "stderr": error, "by_seed": list(values)}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def curves(plan: Plan, runs: Sequence[Outcome]) -> dict[str, Any]:
    """Means over seeds at equal places of the budget, and their standard errors."""
    found: dict[str, Any] = {"at": [round(float(x), 3) for x in grid(plan.budget)]}
    found["score"] = _band([score_curve(one, plan.budget) for one in runs])
    for name in CURVES:
        own = [training_curve(one, name, plan.budget) for one in runs]
        known = [curve for curve in own if curve is not None]
        if known:
            found[name] = _band(known)
    return found


def _band(values: Sequence[Array]) -> dict[str, list[float] | None]:
    table = np.array(values)
    error = None
    if len(values) > 1:
        error = [float(x) for x in table.std(axis=0, ddof=1) / math.sqrt(len(values))]
    return {"mean": [float(x) for x in table.mean(axis=0)], "stderr": error}


# --- pairs ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """Two arms and the seeds that both finished."""

    a: str
    b: str
    left: tuple[Outcome, ...]
    right: tuple[Outcome, ...]

    def by(self, measure: str) -> Difference | None:
        """By `final` or `area` score or a measure of metrics.jsonl; None where a run lacks it."""
        if measure == "final":
            return self._finals()
        sides = [[one.value(measure) for one in side] for side in (self.left, self.right)]
        known = [[value for value in side if value is not None] for side in sides]
        return statistics.paired_difference(*known) if known == sides else None

    def _finals(self) -> Difference:
        """Over seeds and tasks, where each task's score is known in all runs."""
        sides = [_by_task(side) for side in (self.left, self.right)]
        if sides[0].shape != sides[1].shape or not sides[0].size:
            return self._by_seed()
        known = ~np.isnan(sides[0]).any(axis=0) & ~np.isnan(sides[1]).any(axis=0)
        if not known.any():
            return self._by_seed()
        return statistics.paired_difference(sides[0][:, known], sides[1][:, known])

    def _by_seed(self) -> Difference:
        return statistics.paired_difference(
            [one.final for one in self.left], [one.final for one in self.right]
        )


def _by_task(runs: Sequence[Outcome]) -> Array:
    """Rows of seeds, columns of tasks; nan where a task has no score."""
    widths = {len(one.scores) for one in runs}
    if len(widths) != 1:
        return np.zeros((0, 0))
    return np.array([[np.nan if x is None else x for x in one.scores] for one in runs], float)


def pairs(
    names: Sequence[str], done: Sequence[Sequence[Outcome]], measures: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Every two arms; p-values corrected over all pairs that could be tested, by each measure."""
    found = [pair_of(names, done, *two) for two in combinations(range(len(names)), 2)]
    testable = [pair for pair in found if len(pair.left) > 1]
    share = all(one.measure == "accuracy" for runs in done for one in runs)
    tested = {
        by: iter(family([pair.by(by) for pair in testable], share and by in SCORES))
        for by in (*SCORES, *measures)
    }
    rows = []
    for pair in found:
        row: dict[str, Any] = {"a": pair.a, "b": pair.b, "seeds": [one.seed for one in pair.left]}
        if len(pair.left) > 1:
            own = {by: next(those) for by, those in tested.items()}
            row |= own["final"] or {}
            row |= {"area": own["area"], "measures": {name: own[name] for name in measures}}
        else:
            row |= dict.fromkeys((*TESTED, "area")) | {"measures": dict.fromkeys(measures)}
        rows.append(row)
    return rows


def pair_of(
    names: Sequence[str], done: Sequence[Sequence[Outcome]], first: int, second: int
) -> Pair:
    sides = [{one.seed: one for one in done[number]} for number in (first, second)]
    both = sorted(sides[0].keys() & sides[1].keys())
    left, right = (tuple(side[seed] for seed in both) for side in sides)
    return Pair(names[first], names[second], left, right)


def family(differences: Sequence[Difference | None], share: bool) -> list[dict[str, Any] | None]:
    """Comparisons that are made together: each must hold against the number of them.

    Shares can't differ by more than 1, whatever the width of an interval.
    """
    most = 1.0 if share else math.inf
    raw = [each.p for each in differences if each is not None]
    judged = iter(zip(statistics.holm(raw), statistics.holm_levels(raw), strict=True))
    return [
        None if each is None else _tested(each, *next(judged), most=most) for each in differences
    ]


def _tested(found: Difference, p: float, level: float, most: float) -> dict[str, Any]:
    spread, effect = found.spread, found.mean
    separable = p < ALPHA
    open_question = not separable and effect != 0.0
    return {
        "difference": effect,
        "low": max(found.low, -most),
        "high": min(found.high, most),
        "p": p,
        "p_uncorrected": found.p,
        "separable": separable,
        "stderr": spread.stderr,
        "stderr_seeds": math.sqrt(spread.from_units),
        "stderr_tasks": math.sqrt(spread.from_tasks),
        "level": level,
        "smallest_visible": statistics.smallest_visible_effect(spread, alpha=level),
        "seeds_needed": statistics.seeds_needed(effect, spread, alpha=level)
        if open_question
        else None,
        "tasks_needed": statistics.tasks_needed(effect, spread, alpha=level)
        if open_question and spread.from_tasks
        else None,
    }


def same_start(done: Sequence[Sequence[Outcome]], by_seed: bool) -> bool:
    """Whether all runs began with the same data and weights, by their hashes; those of each seed
    where a seed has weights of its own."""
    begun: dict[int, set[tuple[str | None, ...]]] = {}
    for runs in done:
        for one in runs:
            hashes = tuple(one.origin.get(name) for name in ("weights", "data"))
            begun.setdefault(one.seed if by_seed else 0, set()).add(hashes)
    return all(len(hashes) == 1 for hashes in begun.values())


def versions(done: Sequence[Sequence[Outcome]]) -> list[str]:
    """Of groupwise and PyTorch that runs were made with: one, if all were made with the same."""
    return sorted({one.versions for runs in done for one in runs})
