"""Accuracy against tokens, before and after training: `groupwise eval --budgets` on a claim's runs.

The same held-out tasks, answers cut off after so many tokens and made to conclude. The question is
whether training adds more with many tokens than with few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from groupwise.cli import main as groupwise
from groupwise.compare.plan import Folder, Job, Plan
from groupwise.compare.starts import start_of
from groupwise.validate import statistics

Array = npt.NDArray[np.float64]


def measure(asked: Mapping[str, Any], plan: Plan, folder: Folder) -> dict[str, Any]:
    """Of the arm `asked["arm"]`: accuracy at every budget, and the gain at the longest over that
    at the shortest, paired by task, over seeds and tasks."""
    number = [arm.folder for arm in plan.arms].index(asked["arm"])
    config = plan.arms[number].config
    start = start_of(config, folder) or Path(config.model.path)
    runs = [folder.run(plan, Job(number, seed)) / "checkpoints/latest" for seed in plan.seeds]
    out, sizes = folder.path / "scaling", [str(size) for size in asked["budgets"]]
    options = {
        "--suite": "held_out", "--tasks": asked["tasks"], "--samples": asked["samples"],
        "--temperature": 1, "--budgets": ",".join(sizes), "--force": asked["force"],
        "--force-tokens": asked["force_tokens"], "--out": out,
    }  # fmt: skip
    said = [str(word) for option in options.items() for word in option]
    source = str(runs[0].parents[1] / "config.toml")
    if groupwise(["eval", str(start), *map(str, runs), source, *said]):
        raise SystemExit(f"{folder.path}: the evaluation failed")
    tables = np.array([table(result, sizes) for result in read(out, [start, *runs])])
    known = ~np.isnan(tables).any(axis=(0, 2))  # a task that some grading failed for tells nothing
    before, after = tables[0, known], tables[1:, known]
    return {"budgets": asked["budgets"], **compared(before, after)}


def compared(before: Array, after: Array) -> dict[str, Any]:
    """Of [task, budget] and [seed, task, budget]: is the last budget's gain above the first's?"""
    gains = after - before
    found = statistics.paired_difference(gains[:, :, -1], gains[:, :, 0])
    return {
        "before": estimates(before[None]),
        "after": estimates(after),
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "smallest_visible": statistics.smallest_visible_effect(found.spread),
    }


def read(out: Path, models: Sequence[Path]) -> list[Mapping[str, Any]]:
    """The results of these models, in this order."""
    stored = json.loads((out / "results.json").read_text())["results"]
    known = {Path(result["model"]["path"]).resolve(): result for result in stored}
    return [known[model.resolve()] for model in models]


def table(result: Mapping[str, Any], sizes: Sequence[str]) -> Array:
    """The share of samples that are right, of each task at each budget; nan without a verdict."""
    rows = sorted(result["tasks"], key=lambda task: task["key"])
    shares = [[np.mean(np.array(row["budgets"][size], float)) for size in sizes] for row in rows]
    return np.array(shares)


def estimates(scores: Array) -> list[dict[str, float]]:
    """Of [seed, task, budget]: the mean at every budget, and its error over tasks."""
    by_task = scores.mean(axis=0)
    means = by_task.mean(axis=0)
    errors = by_task.std(axis=0, ddof=1) / np.sqrt(len(by_task))
    return [{"mean": float(m), "stderr": float(e)} for m, e in zip(means, errors, strict=True)]
