"""The run folders of a comparison read back: curves over the budget, and final values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from groupwise.compare.arms import ArmBudget
from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, Job
from groupwise.config import difference
from groupwise.errors import RunError
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.starts import change_words, code_changes, read_starts, stretches
from groupwise.training.continuing import finished

GRID = 48  # stretches of the budget that curves are drawn over
LAST = 0.1  # of a run: the share over which what it measured at its end is the mean
NO_MATTER = ("checkpoint.", "watch.")  # settings that no result depends on
STOP = "turns/stop/"  # in the names of metrics
CURVES = {"entropy": "entropy/mean", "length": "length/sampled_mean"}  # of training, by step

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RunOutcome:
    """One finished run."""

    seed: int
    measure: str  # accuracy, or reward where nothing says what is correct
    points: tuple[dict[str, float], ...]  # evaluations: step, tokens, seconds, score
    final: float
    area: float  # mean score over the budget
    scores: tuple[float | None, ...]  # at the end, of each held-out task
    steps: int
    tokens: int
    seconds: float  # of steps, evaluation left out
    length: float  # of held-out answers, at the end
    ends: dict[str, float]  # every number of metrics.jsonl that its last steps have
    curves: dict[str, tuple[Array, Array]]  # of training: name -> where, value
    origin: dict[str, str]  # hashes of data and starting weights
    versions: str  # of groupwise and PyTorch that made it
    # Runs that did not keep what each task gave have none of these:
    areas: tuple[float | None, ...] = ()  # the area of each held-out task
    by_task: dict[str, list[float | None]] = field(default_factory=dict)  # of the last evaluation
    stops: dict[str, float] = field(default_factory=dict)  # shares of episodes, in its last steps

    @property
    def start(self) -> float:
        return self.points[0]["score"]

    def value(self, measure: str) -> float | None:
        """Return the `final` or `area` score, or a metric at the end."""
        scores = {"final": self.final, "area": self.area}
        return scores[measure] if measure in scores else self.ends.get(measure)

    @property
    def entropy(self) -> float | None:
        return self.ends.get("entropy/mean")


def outcomes(
    plan: ComparisonPlan, folder: ComparisonFolder
) -> tuple[list[list[RunOutcome]], dict[Job, str]]:
    """Return the finished runs of each arm by seed, and the problems with the others."""
    found: list[list[RunOutcome]] = [[] for _ in plan.arms]
    damaged: dict[Job, str] = {}
    for job in plan.jobs:
        path = folder.run(plan, job)
        summary = finished(plan.config(job), path)
        if summary is None:
            continue
        try:
            found[job.arm].append(outcome(path, job, plan.budget, summary))
        except RunError as error:
            damaged[job] = f"{error} Remove {path}, and the same command runs it anew."
    return found, damaged


def outcome(path: Path, job: Job, budget: ArmBudget, summary: Mapping[str, Any]) -> RunOutcome:
    """Read one run folder."""
    _check_unchanged(RunFolder(path), summary["steps"])
    lines = _with_seconds(_all_steps(RunFolder(path), summary["steps"]))
    measure = "accuracy" if any("eval/accuracy" in line for line in lines) else "reward"
    evaluations = RunFolder(path).read_evaluations()
    points = tuple(
        {
            "step": line["step"],
            "tokens": line.get("cost/tokens", 0),
            "seconds": line["seconds"],
            "score": line[f"eval/{measure}"],
        }
        for line in lines
        if f"eval/{measure}" in line
    )
    last, manifest = lines[-1], RunFolder(path).read_manifest()
    measured = all(point["score"] is not None for point in points)
    if len(points) < 2 or not measured or last.get("eval/length") is None:
        raise RunError(f"{path} has no evaluations to compare.")
    unit = _unit(budget)
    made_by = manifest.get("versions", {})
    return RunOutcome(
        seed=job.seed,
        measure=measure,
        points=points,
        final=points[-1]["score"],
        area=area([p[unit] for p in points], [p["score"] for p in points], budget.amount),
        scores=tuple(summary.get("scores_after", ())),
        areas=_areas(evaluations, points, f"eval/{measure}", budget),
        by_task=_last_by_task(evaluations, points),
        stops=_stops(lines),
        steps=last["step"],
        tokens=last.get("cost/tokens", 0),
        seconds=last["seconds"],
        length=last["eval/length"],
        ends=_ends(lines),
        curves={name: _series(lines, metric, unit) for name, metric in CURVES.items()},
        origin=dict(manifest.get("origin", {})),
        versions=f"groupwise {made_by.get('groupwise')}, PyTorch {made_by.get('torch')}",
    )


def _check_unchanged(run: RunFolder, last: int) -> None:
    """Refuse a run that was continued with other settings: its end is not that of its arm."""
    made = [each.start for each in stretches(read_starts(run), last)]
    for one, two in pairwise(made):
        changed = [str(change).rpartition(" (")[0] for change in difference(one.config, two.config)
                   if not change.key.startswith(NO_MATTER)]  # fmt: skip
        changed += map(change_words, code_changes(one.origin, two.origin))
        if changed:
            raise RunError(
                f"{run.path} was changed on the way, from step {two.step + 1} on: "
                f"{'; '.join(changed)}."
            )


def _all_steps(run: RunFolder, last: int) -> list[dict[str, Any]]:
    """Return the metrics of every step. With a gap, areas and costs would be wrong."""
    lines = run.read_metrics()
    if [line.get("step") for line in lines] != list(range(last + 1)):
        raise RunError(
            f"{run.metrics} does not hold every step from 0 to {last}: it was edited, or the disk "
            "is faulty."
        )
    return lines


def _areas(
    evaluations: Sequence[Mapping[str, Any]],
    points: Sequence[Mapping[str, float]],
    metric: str,
    budget: ArmBudget,
) -> tuple[float | None, ...]:
    """Return each task's area; None where a score is missing, () without an evaluation."""
    tables = {line["step"]: line.get(metric) for line in evaluations}
    rows = [tables.get(point["step"]) for point in points]
    if any(row is None or len(row) != len(rows[0] or ()) for row in rows):
        return ()
    scores = np.array(rows, float)  # of evaluations and tasks; nan where there is none
    places = [point[_unit(budget)] for point in points]
    shares = [area(places, own, budget.amount) for own in np.eye(len(points)).tolist()]
    return tuple(None if math.isnan(x) else float(x) for x in np.array(shares) @ scores)


def _last_by_task(
    evaluations: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, float]]
) -> dict[str, list[float | None]]:
    own = [line for line in evaluations if line["step"] == points[-1]["step"]]
    return {name: values for name, values in own[-1].items() if name != "step"} if own else {}


def _unit(budget: ArmBudget) -> str:
    """Return the name of the unit in which the budget is counted."""
    return {"steps": "step"}.get(budget.unit, budget.unit)


def _with_seconds(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the seconds that steps took so far, without those of evaluations."""
    found, spent = [], 0.0
    for line in lines:
        spent += (line.get("time/step") or 0.0) - (line.get("time/eval") or 0.0)
        tokens = {"cost/tokens": line.get("cost/tokens", 0)}
        found.append({**line, **tokens, "seconds": spent})
    return found


def _series(lines: Sequence[Mapping[str, Any]], metric: str, unit: str) -> tuple[Array, Array]:
    key = {"tokens": "cost/tokens"}.get(unit, unit)
    own = [(line[key], line[metric]) for line in lines if line.get(metric) is not None]
    table = np.array(own, float).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _ends(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each metric over the last tenth of the steps, or the last evaluation.

    A step may lack one (no wrong answer has a length). What none of these steps has is not there:
    what it was before is not how the run ended.
    """
    known: dict[str, list[float]] = {}
    for line in _last(lines):
        for name, value in line.items():
            if isinstance(value, int | float):
                known.setdefault(name, []).append(value)
    evaluated = {name: values[-1:] for name, values in known.items() if name.startswith("eval/")}
    return {name: sum(values) / len(values) for name, values in (known | evaluated).items()}


def _last(lines: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last tenth of the steps."""
    steps = [line for line in lines if line["step"] > 0]
    return steps[-max(1, round(LAST * len(steps))) :]


def _stops(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return why episodes ended in the last tenth of the steps. What a step lacks was no end."""
    own = [line for line in _last(lines) if "turns/mean" in line]
    names = sorted({name for line in own for name in line if name.startswith(STOP)})
    return {
        name.removeprefix(STOP): sum(line.get(name, 0.0) for line in own) / len(own)
        for name in names
    }


# --- curves at equal places -------------------------------------------------------------------


def area(places: Sequence[float], scores: Sequence[float], budget: float) -> float:
    """Return the mean of a curve over the budget, linear between its points, constant after the
    last.
    """
    inner = [place for place in places if 0 < place < budget]
    grid = np.unique(np.array([0.0, *inner, float(budget)]))
    values = np.interp(grid, places, scores)
    return float(np.trapezoid(values, grid) / budget)


def grid(budget: ArmBudget) -> Array:
    return np.linspace(0.0, budget.amount, GRID + 1)


def score_curve(one: RunOutcome, budget: ArmBudget) -> Array:
    """Return the score at every place of the grid."""
    unit = _unit(budget)
    places, scores = ([p[name] for p in one.points] for name in (unit, "score"))
    return np.interp(grid(budget), places, scores)


def training_curve(one: RunOutcome, name: str, budget: ArmBudget) -> Array | None:
    """Return the mean of a training metric in the stretch that ends at each place of the grid."""
    places, values = one.curves[name]
    if not len(places):
        return None
    edges = grid(budget)
    at = np.clip(np.searchsorted(edges, places, side="left"), 1, GRID)
    counts = np.bincount(at, minlength=GRID + 1)
    sums = np.bincount(at, weights=values, minlength=GRID + 1)
    filled = counts > 0
    return np.interp(edges, edges[filled], sums[filled] / counts[filled])
