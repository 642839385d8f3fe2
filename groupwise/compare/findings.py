"""Arms and pairs with their intervals: the contents of compare.json (docs/compare.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from groupwise.compare.equal_arms import find_equal_arms
from groupwise.compare.outcomes import (
    CURVES,
    Array,
    RunOutcome,
    grid,
    score_curve,
    training_curve,
)
from groupwise.compare.plan import ComparisonPlan, Job
from groupwise.evaluate import statistics
from groupwise.evaluate.statistics import ALPHA, POWER, Difference

FORMAT = 1
SCORES = ("final", "area")
# What an arm of which no run finished, and a pair of which one seed did, have no value of.
MEASURED = (
    "start",
    "final",
    "area",
    "steps",
    "tokens",
    "seconds",
    "length",
    "entropy",
    "episodes",
    "curves",
)
TESTED = ("difference", "low", "high", "p", "p_uncorrected", "separable", "stderr", "stderr_seeds",
          "stderr_tasks", "level", "smallest_visible", "seeds_needed", "tasks_needed")  # fmt: skip


def findings(
    plan: ComparisonPlan,
    done: Sequence[Sequence[RunOutcome]],
    failed: Mapping[Job, str],
    measures: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the whole result. Differences are a − b, in shares (0.031 is 3.1 points).

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
        "fewest_seeds": statistics.fewest_units(math.comb(len(plan.arms), 2)),
        "arms": [_arm(plan, number, runs, failed, measures) for number, runs in enumerate(done)],
        "pairs": pairs([arm.name for arm in plan.arms], done, measures),
        "same_start": same_start(done, by_seed=any(a.config.adapter.rank for a in plan.arms)),
        "versions": versions(done),
        "coincide": [
            {"arms": list(each.arms), "why": each.text}
            for each in find_equal_arms({arm.name: arm.config for arm in plan.arms})
        ],
    }


# --- arms -------------------------------------------------------------------------------------


def _arm(
    plan: ComparisonPlan,
    number: int,
    runs: Sequence[RunOutcome],
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
        "episodes": _episodes(runs),
        "curves": curves(plan, runs),
    }
    return found


def _episodes(runs: Sequence[RunOutcome]) -> dict[str, Any] | None:
    """Return how episodes ended, and how many groups taught; None where nobody answered."""
    if not any(one.stops for one in runs):
        return None
    names = sorted({name for one in runs for name in one.stops})
    dead = [x for one in runs if (x := one.ends.get("groups/dead_share")) is not None]
    return {
        "stops": {name: _mean([one.stops.get(name, 0.0) for one in runs]) for name in names},
        "turns": _mean([one.ends["turns/mean"] for one in runs]),
        "useful_groups": 1 - _mean(dead) if dead else None,
    }


def _estimate(values: Sequence[float], share: bool) -> dict[str, Any]:
    """Return the mean over seeds, its interval (None of one seed), and the value of each seed."""
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


def curves(plan: ComparisonPlan, runs: Sequence[RunOutcome]) -> dict[str, Any]:
    """Return means over seeds at equal places of the budget, and their standard errors."""
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
    left: tuple[RunOutcome, ...]
    right: tuple[RunOutcome, ...]

    def by(self, measure: str) -> Difference | None:
        """Compare by `final` or `area` score or a metric; None where it can't be told."""
        sides = self.values(measure)
        return None if sides is None else statistics.paired_difference(*sides)

    def values(self, measure: str) -> tuple[Array, Array] | None:
        """Return the values of both sides: by seed and task where it is a mean over tasks, else by
        seed.

        Tasks without a value in some run are left out. What tasks were asked is luck as well, so
        without values by task there is no judgement of what was measured on them.
        """
        runs = (*self.left, *self.right)
        if measure in SCORES or any(measure in one.by_task for one in runs):
            return self._by_task(measure)
        if measure.startswith("eval/") and not all(one.by_task for one in runs):
            return None
        sides = [[one.value(measure) for one in side] for side in (self.left, self.right)]
        known = [[value for value in side if value is not None] for side in sides]
        return (np.array(known[0]), np.array(known[1])) if known == sides else None

    def _by_task(self, measure: str) -> tuple[Array, Array] | None:
        rows = [_of_tasks(one, measure) for one in (*self.left, *self.right)]
        if len({len(row) for row in rows}) != 1:
            return None
        table = np.array(rows, float)  # nan where a task has no value
        table = table[:, ~np.isnan(table).any(axis=0)]
        if not table.size:
            return None
        return table[: len(self.left)], table[len(self.left) :]


class Judgement(NamedTuple):
    """A difference among others that are judged together with it."""

    found: Difference
    p: float  # corrected
    level: float  # that the uncorrected one must stay below, where seeds are not too few


def _of_tasks(one: RunOutcome, measure: str) -> Sequence[float | None]:
    known = {"final": one.scores, "area": one.areas}
    return known[measure] if measure in known else one.by_task.get(measure, ())


def pairs(
    names: Sequence[str], done: Sequence[Sequence[RunOutcome]], measures: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Compare every two arms; p-values are corrected over all pairs and measures together."""
    found = [pair_of(names, done, *two) for two in combinations(range(len(names)), 2)]
    judged = judgements(found, (*SCORES, *measures))
    fewest = statistics.fewest_units(len(found))
    share = all(one.measure == "accuracy" for runs in done for one in runs)
    rows = []
    for pair, each in zip(found, judged, strict=True):
        row: dict[str, Any] = {"a": pair.a, "b": pair.b, "seeds": [one.seed for one in pair.left]}
        own = {by: _tested(one, fewest) for by, one in each.items()}
        if share:
            own |= {by: _of_shares(own[by]) for by in SCORES}
        row |= own["final"] or dict.fromkeys(TESTED)
        row |= {"area": own["area"], "measures": {name: own[name] for name in measures}}
        rows.append(row)
    return rows


def judgements(found: Sequence[Pair], kinds: Sequence[str]) -> list[dict[str, Judgement | None]]:
    """Return the judgements of these pairs, each by each measure, as one family."""
    testable = [(pair, kind) for pair in found if len(pair.left) > 1 for kind in kinds]
    judged = judge([pair.by(kind) for pair, kind in testable], len(found))
    known = {(id(pair), kind): one for (pair, kind), one in zip(testable, judged, strict=True)}
    return [{kind: known.get((id(pair), kind)) for kind in kinds} for pair in found]


def pair_of(
    names: Sequence[str], done: Sequence[Sequence[RunOutcome]], first: int, second: int
) -> Pair:
    sides = [{one.seed: one for one in done[number]} for number in (first, second)]
    both = sorted(sides[0].keys() & sides[1].keys())
    left, right = (tuple(side[seed] for seed in both) for side in sides)
    return Pair(names[first], names[second], left, right)


def family(differences: Sequence[Difference | None], pairs: int) -> list[dict[str, Any] | None]:
    """Return judgements that are made together, of so many pairs, as compare.json has them."""
    fewest = statistics.fewest_units(pairs)
    return [_tested(each, fewest) for each in judge(differences, pairs)]


def judge(differences: Sequence[Difference | None], pairs: int) -> list[Judgement | None]:
    """Correct each judgement for all of them; None where there is nothing to judge."""
    known = [each for each in differences if each is not None]
    raw = [each.p for each in known]
    p = statistics.corrected(raw, [each.spread.units for each in known], pairs)
    judged = map(Judgement, known, p, statistics.holm_levels(raw))
    return [None if each is None else next(judged) for each in differences]


def _tested(judged: Judgement | None, fewest: int) -> dict[str, Any] | None:
    if judged is None:
        return None
    found, p, level = judged
    spread, effect = found.spread, found.mean
    separable = p < ALPHA
    open_question = not separable and effect != 0.0
    return {
        "difference": effect,
        "low": found.low,
        "high": found.high,
        "p": p,
        "p_uncorrected": found.p,
        "separable": separable,
        "stderr": spread.stderr,
        "stderr_seeds": math.sqrt(spread.from_units),
        "stderr_tasks": math.sqrt(spread.from_tasks),
        "level": level,
        "smallest_visible": statistics.smallest_visible_effect(spread, alpha=level)
        if spread.units >= fewest
        else None,
        "seeds_needed": statistics.seeds_needed(effect, spread, alpha=level, fewest=fewest)
        if open_question
        else None,
        "tasks_needed": statistics.tasks_needed(effect, spread, alpha=level)
        if open_question and spread.from_tasks
        else None,
    }


def _of_shares(tested: dict[str, Any] | None) -> dict[str, Any] | None:
    """Cut an interval of shares at ±1: they can't differ by more."""
    if tested is None:
        return None
    return tested | {"low": max(tested["low"], -1.0), "high": min(tested["high"], 1.0)}


def same_start(done: Sequence[Sequence[RunOutcome]], by_seed: bool) -> bool:
    """Return whether all runs began with the same data and weights, by their hashes; seed by seed
    where a seed has weights of its own.
    """
    begun: dict[int, set[tuple[str | None, ...]]] = {}
    for runs in done:
        for one in runs:
            hashes = tuple(one.origin.get(name) for name in ("weights", "data"))
            begun.setdefault(one.seed if by_seed else 0, set()).add(hashes)
    return all(len(hashes) == 1 for hashes in begun.values())


def versions(done: Sequence[Sequence[RunOutcome]]) -> list[str]:
    """Return the versions of groupwise and PyTorch that made the runs: one if all agree."""
    return sorted({one.versions for runs in done for one in runs})
