"""The ranks of a run, as its page shows them: who waited, and how evenly they worked."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from groupwise.view.runs import ViewedRun
from groupwise.watch.chart import number

STEPS = 20  # the last ones that are looked at
WAIT = "time/rank_wait_"


def ranks_of(run: ViewedRun) -> dict[str, Any] | None:
    """Return means of the last steps, as texts; None of a run in one process."""
    names = [name for name in run.columns if name.startswith(WAIT) and name[len(WAIT) :].isdigit()]
    last = {name: run.points(name)[-STEPS:] for name in names}
    measured = [points for points in last.values() if points]
    if not measured:
        return None
    newest = max(points[-1].step for points in measured)
    step = _mean(run, "time/step")
    rows = []
    for name in sorted(names, key=lambda name: int(name[len(WAIT) :])):
        if not last[name] or last[name][-1].step != newest:
            continue  # of a time when there were more ranks
        waits = fmean(point.value for point in last[name])
        share = "" if not step else number(waits / step, share=True)
        rows.append({"rank": name[len(WAIT) :], "waits": f"{waits:.2f} s", "share": share})
    imbalance, gather = _mean(run, "time/rank_imbalance"), _mean(run, "time/rank_gather")
    return {
        "steps": len(max(measured, key=len)),
        "rows": rows,
        "imbalance": "not measured" if imbalance is None else f"{imbalance:.2f}",
        "gather": "not measured" if gather is None else f"{gather:.2f} s",
    }


def _mean(run: ViewedRun, name: str) -> float | None:
    points = run.points(name)[-STEPS:]
    return fmean(point.value for point in points) if points else None
