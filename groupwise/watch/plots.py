"""A run's curves as PNG files, for a paper or a colleague: the report's, drawn by matplotlib."""

from __future__ import annotations

import io
import os
import re
from importlib.util import find_spec
from pathlib import Path

from groupwise.common.extras import install
from groupwise.errors import ConfigError
from groupwise.runfiles import schemas
from groupwise.runfiles.files import write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.partial import PartialReader
from groupwise.watch.chart import Curve, smooth, thin
from groupwise.watch.report import curves

SIZE, DOTS = (5.0, 3.0), 200  # inches, and dots in one
LINE, EVENT = "#0b62c4", "#b3261e"


def can_plot() -> bool:
    return find_spec("matplotlib") is not None


def write_plots(path: str | os.PathLike[str]) -> list[Path]:
    """Write plots/NAME.png for every curve of the report that has values."""
    if not can_plot():
        raise ConfigError(f"PNG plots are drawn by matplotlib: `{install('view')}`")
    folder, seen = RunFolder(path), PartialReader()  # the report says what is damaged
    made = []
    for _, curve in curves(
        seen.lines(folder.metrics, schemas.metrics), seen.lines(folder.events, schemas.events)
    ):
        if curve.points:
            name = re.sub(r"\W+", "_", curve.title.lower())
            place = folder.path / "plots" / f"{name}.png"
            with folder.writing(f"plots/{place.name}"):
                place.parent.mkdir(exist_ok=True)
                write_atomic(place, png(curve))
            made.append(place)
    return made


def png(curve: Curve) -> bytes:
    """Draw one curve: as measured and smoothed, standard errors, and lines where a rule fired."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    window = 1 if curve.sparse else max(1, len(curve.points) // 20)
    points = thin(curve.points)
    steps, values = [p.step for p in points], [p.value for p in points]
    if curve.sparse or len(points) == 1:
        errors = [p.error or 0.0 for p in points]
        axes.errorbar(steps, values, yerr=errors, color=LINE, marker="o", markersize=3, capsize=2)
    else:
        axes.plot(steps, values, color=LINE, linewidth=0.7 if window > 1 else 1.6,
                  alpha=0.4 if window > 1 else 1.0)  # fmt: skip
    if window > 1:
        smoothed = thin(smooth(curve.points, window))
        axes.plot([p.step for p in smoothed], [p.value for p in smoothed], color=LINE)
    for step in curve.events:
        axes.axvline(step, color=EVENT, linestyle=":", linewidth=1.2)
    if curve.share:
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title(curve.title, fontsize=10)
    axes.set_xlabel("step")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    page = io.BytesIO()
    figure.savefig(page, format="png", dpi=DOTS, metadata={"Software": None})
    return page.getvalue()
