"""From runs to figures, and from figures to verdicts.

Figures (differences, intervals, p) are stored in results/. Verdicts are not: they follow from the
figures and from what the claim's file expects, whenever the page is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from experiments.claim import MINUS, SCORES, Claim, Expectation
from groupwise.compare.findings import family, pair_of
from groupwise.compare.outcomes import RunOutcome
from groupwise.evaluate import statistics
from groupwise.evaluate.statistics import ALPHA, Difference, paired_difference

PAIRED_BY_TASK = {"accuracy": "final", "area": "area"}  # a claim's word for it, and compare's
SMALLER, LARGER = (f"direction as claimed, size not: {size}" for size in ("smaller", "larger"))
FIGURES = ("difference", "low", "high", "smallest_visible")

Runs = Mapping[str, Sequence[RunOutcome]]  # of each arm
Arms = Mapping[str, Mapping[str, Any]]  # of each arm: estimates by measure


# --- figures ------------------------------------------------------------------------------------


def figures(claim: Claim, runs: Runs) -> dict[str, Any]:
    """What is stored of a claim's runs: its arms, and each expectation's difference."""
    table = {name: arm(claim, runs[name]) for name in claim.arms}
    return {"arms": table, "expectations": differences(claim, runs, table)}


def arm(claim: Claim, runs: Sequence[RunOutcome]) -> dict[str, Any]:
    """What the claim speaks of, as mean and standard error over seeds."""
    found: dict[str, Any] = {"steps": mean(one.steps for one in runs)}
    for measure in (*SCORES, *claim.measures):
        values = [value(one, measure) for one in runs]
        known = [x for x in values if x is not None]
        found[measure] = estimate(known) if known == values else None
    return found


def estimate(values: Sequence[float]) -> dict[str, float]:
    low, high = statistics.bootstrap_interval(values)
    error = statistics.stderr(values)
    return {"mean": mean(values), "low": low, "high": high, "stderr": error}


def value(one: RunOutcome, measure: str) -> float | None:
    """Of one run; a difference of two measures where the text names two."""
    scores = {"accuracy": one.final, "area": one.area, "start": one.start}
    parts = [scores.get(part, one.ends.get(part)) for part in measure.split(MINUS)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return known[0] - sum(known[1:])


def differences(claim: Claim, runs: Runs, arms: Arms) -> list[dict[str, Any]]:
    """Each expectation as it was measured, paired by seed; those that are tests are one family."""
    tests = [None if settled(e, arms) else difference(e, runs) for e in claim.expect]
    pairs = {(e.more, e.than) for e, test in zip(claim.expect, tests, strict=True) if test}
    found = []
    for e, tested in zip(claim.expect, family(tests, len(pairs)), strict=True):
        entry: dict[str, Any] = {"measure": e.measure, "more": e.more, "than": e.than}
        if tested is not None:
            unit = abs(middle(arms, e.than, e.measure)) if e.relative else 1.0
            known = {key: tested[key] for key in FIGURES}
            entry |= {key: None if x is None else x / unit for key, x in known.items()}
            entry |= {key: tested[key] for key in ("p", "p_uncorrected")}
        found.append(entry)
    return found


def difference(e: Expectation, runs: Runs) -> Difference | None:
    """Of the first arm from the second, or from a number; None where a run did not measure it."""
    first = runs[e.more]
    if not isinstance(e.than, str) and e.measure in PAIRED_BY_TASK:
        own = pair_of((e.more, e.more), (first, first), 0, 1).values(PAIRED_BY_TASK[e.measure])
        return None if own is None else paired_difference(own[0], np.full_like(own[0], e.than))
    if not isinstance(e.than, str):
        values = [value(one, e.measure) for one in first]
        known = [x for x in values if x is not None]
        return paired_difference(known, [e.than] * len(known)) if known == values else None
    pair = pair_of((e.more, e.than), (first, runs[e.than]), 0, 1)
    if e.measure in PAIRED_BY_TASK or all(e.measure in one.by_task for one in first):
        return pair.by(PAIRED_BY_TASK.get(e.measure, e.measure))
    sides = [[value(one, e.measure) for one in side] for side in (pair.left, pair.right)]
    known_sides = [[x for x in side if x is not None] for side in sides]
    return paired_difference(*known_sides) if known_sides == sides else None


def middle(arms: Arms, arm: str | float, measure: str) -> float:
    """The mean of an arm; a number is its own."""
    if not isinstance(arm, str):
        return float(arm)
    first, *less = (arms[arm][part]["mean"] for part in measure.split(MINUS))
    return float(first - sum(less))


def over_all(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results with each p corrected for everything that is judged in any of them.

    By Holm's method, over what was measured in each claim before its own correction; older results
    have only what came behind it, which is larger. A claim's own p stays where it is the larger,
    as with few seeds.
    """
    tested = [x for found in results for x in found["expectations"] if "p" in x]
    corrected = iter(statistics.holm([x.get("p_uncorrected", x["p"]) for x in tested]))
    return [
        {
            **found,
            "expectations": [
                {**x, "p": max(x["p"], next(corrected))} if "p" in x else x
                for x in found["expectations"]
            ],
        }
        for found in results
    ]


# --- verdicts -----------------------------------------------------------------------------------


def settled(e: Expectation, arms: Arms) -> bool:
    """Whether an arm has exactly 0 of the measure in every run: a method that can't have any."""
    if e.alike or e.measure in SCORES or MINUS in e.measure:
        return False
    known = [arms[arm][e.measure] for arm in (e.more, e.than) if isinstance(arm, str)]
    return any(one is not None and one["mean"] == one["stderr"] == 0.0 for one in known)


def verdict(e: Expectation, found: Mapping[str, Any], arms: Arms) -> str:
    """In words that do not hide a size: docs/claims.md explains them at its top."""
    if settled(e, arms):
        return "by construction"
    if "difference" not in found:
        return "not measured"
    if e.alike:
        return _of_alike(e, found, arms)
    if found["p"] >= ALPHA:
        return "not seen" if found["high"] < e.size else "open"
    if found["difference"] < 0:
        return "the opposite"
    if found["high"] < e.size:
        return SMALLER
    return LARGER if found["low"] > e.size else "as claimed"


def direction(said: str) -> int:
    """Return 1 for a verdict in the claim's direction, -1 for one against it, 0 for none."""
    if said.startswith(("as claimed", "direction as claimed")):
        return 1
    return -1 if said in ("the opposite", "apart") else 0


def _of_alike(e: Expectation, found: Mapping[str, Any], arms: Arms) -> str:
    if contrast(e, arms) <= e.size:
        return "no contrast"
    if -e.size < found["low"] and found["high"] < e.size:
        return "as claimed"
    return "apart" if found["p"] < ALPHA else "open"


def contrast(e: Expectation, arms: Arms) -> float:
    """How far what should differ is from the second arm."""
    if not isinstance(e.contrast, str):
        assert e.contrast is not None  # `read` sees to it
        return float(e.contrast)
    second = middle(arms, e.than, e.measure)
    unit = abs(second) if e.relative else 1.0
    return abs(middle(arms, e.contrast, e.measure) - second) / unit
