"""Several runs over each other: their arms, what differs between them, and how they end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from groupwise.view.curves import charts
from groupwise.view.render import plotly_styles, render
from groupwise.view.runs import RunFacts, ViewedRun
from groupwise.watch.chart import number
from groupwise.watch.report import curves_of

MOST = 64  # runs on one page: each is asked for its curves


def arm_of(run: ViewedRun) -> str:
    """Return what seeds of one arm of a comparison have in common; the run's own name elsewhere."""
    if run.group and run.pipeline is None and "/" in run.short:
        return f"{run.group}/{run.short.rpartition('/')[0]}"
    return run.name


def overlay_page(runs: Sequence[ViewedRun], title: str = "") -> str:
    known = [(run, run.about()) for run in runs]
    names = list(dict.fromkeys(arm_of(run) for run in runs))
    first = {arm_of(run): (run, about) for run, about in reversed(known)}
    of_arms = [first[name] for name in names]
    changes, trouble = _differences([about for _, about in of_arms], seeds=len(names) < len(runs))
    counts = [name for run in runs for name in run.columns]
    common = [name for name in dict.fromkeys(counts) if counts.count(name) > 1]
    return render(
        "compare.html",
        title=title,
        runs=runs,
        arms=[names.index(arm_of(run)) for run in runs],
        names=[_within(name, title) for name in names],
        ends=[
            _ends(_within(name, title), [run for run in runs if arm_of(run) == name])
            for name in names
        ],
        changes=changes,
        trouble=trouble,
        known=known,
        sections=charts(common),
        columns=common,
        styles=plotly_styles(),
    )


def _within(name: str, group: str) -> str:
    """Return a name without that of the group that the page is about."""
    return name.removeprefix(f"{group}/")


def _ends(name: str, runs: Sequence[ViewedRun]) -> dict[str, Any]:
    """Return the last values of an arm's runs: their mean, and the standard error over seeds."""
    found: dict[str, Any] = {"name": name, "runs": runs}
    for kind, (_, metric, share) in zip(("accuracy", "reward"), curves_of(runs[0].columns)[:2],
                                        strict=True):  # fmt: skip
        values = [points[-1].value for run in runs if (points := run.points(metric))]
        found[kind] = number(fmean(values), share) if values else "–"
        if len(values) > 1:
            found[kind] += f" ± {number(stdev(values) / math.sqrt(len(values)), share)}"
    return found


def _differences(
    abouts: Sequence[RunFacts], *, seeds: bool
) -> tuple[list[tuple[str, list[Any]]] | None, str]:
    """Return the settings that differ, with the value of each; or why that is not known.

    `seeds`: whether there are several of an arm, so that a seed is no difference between arms.
    """
    from groupwise.config import difference  # heavy: it knows every recipe

    texts = [about.config for about in abouts]
    if not all(texts):
        which = "One of the runs" if len(texts) > 1 else "The run"
        return None, f"{which} has no config.toml that can be read."
    rows: dict[str, tuple[Any, Mapping[int, Any]]] = {}
    for at, text in enumerate(texts[1:], start=1):
        try:
            changes = difference(texts[0] or "", text or "")
        except (ValueError, RecursionError) as error:
            return None, f"The configurations can't be compared: {error}"
        for change in changes:
            old, others = rows.get(change.key, (change.old, {}))
            rows[change.key] = old, {**others, at: change.new}
    told = {key: row for key, row in rows.items() if not (seeds and key == "seed")}
    return [(key, [old, *(others.get(at, old) for at in range(1, len(texts)))])
            for key, (old, others) in told.items()], ""  # fmt: skip
