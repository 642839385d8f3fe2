"""The pages of runs as HTML: the data of the templates, which escape all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.view.curves import sections_of
from groupwise.view.facts import progress_of, row_of, tiles_of, verdict_of
from groupwise.view.ranks import ranks_of
from groupwise.view.render import plotly_styles, render
from groupwise.view.runs import ViewedRun


def home(runs: Mapping[str, ViewedRun], places: Sequence[Path]) -> str:
    rows: list[dict[str, Any]] = []
    for run in runs.values():
        about = run.about()
        parent = _run_at(runs, about.parent)
        rows.append({"run": run, "about": about, "parent": parent, "facts": row_of(run, about)})
    # Runs of a comparison or a pipeline stand together, behind those of none.
    heads = sorted({row["run"].group for row in rows})
    tables = {head: [row for row in rows if row["run"].group == head] for head in heads}
    return render("home.html", tables=tables, places=[str(place) for place in places])


def _run_at(runs: Mapping[str, ViewedRun], path: Path | None) -> ViewedRun | None:
    return next((run for run in runs.values() if path and run.folder.path == path), None)


def run_page(run: ViewedRun, runs: Mapping[str, ViewedRun], token: str = "") -> str:
    """Return the page of a run. `token`: of a server that may write notes."""
    about = run.about()
    progress = progress_of(run, about)
    return render(
        "run.html",
        run=run,
        others=[name for name in runs if name != run.name],
        chain=[other for other in runs.values() if run.pipeline and other.pipeline == run.pipeline],
        sections=sections_of(run),
        about=about,
        progress=progress,
        verdict=verdict_of(run, about, progress),
        tiles=tiles_of(run, about, progress),
        parent=_run_at(runs, about.parent),
        last=about.rollouts[-1] if about.rollouts else None,
        styles=plotly_styles(),
        ranks=ranks_of(run),
        token=token,
    )


def trouble_page(title: str, words: str) -> str:
    return render("trouble.html", title=title, words=words)
