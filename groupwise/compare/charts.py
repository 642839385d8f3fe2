"""Curves of several arms in one chart, with bands: as inline SVG for the page, and as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from groupwise.watch.chart import number, ticks

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40
# Told apart by people who do not see all colours (Okabe and Ito), on light and dark pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#7f7f7f", "#8c4bc9")
DASHES = ("", "6 3", "2 3", "9 3 2 3")  # where colours have run out
DOTS = 200  # of a PNG, in an inch


@dataclass(frozen=True)
class Line:
    """A mean over seeds, and its standard error where there are several."""

    name: str
    values: Sequence[float]
    errors: Sequence[float] | None

    def edges(self) -> tuple[list[float], list[float]]:
        errors = self.errors or [0.0] * len(self.values)
        low = [x - e for x, e in zip(self.values, errors, strict=True)]
        return low, [x + e for x, e in zip(self.values, errors, strict=True)]


@dataclass(frozen=True)
class Chart:
    """Lines over the same places."""

    title: str
    unit: str
    places: Sequence[float]
    lines: Sequence[Line]
    share: bool = False  # written in percent

    def range(self) -> tuple[float, float]:
        low = min(min(line.edges()[0]) for line in self.lines)
        high = max(max(line.edges()[1]) for line in self.lines)
        room = 0.05 * (high - low) or max(abs(high), 1e-9) * 0.1
        return low - room, high + room


def colour(at: int) -> str:
    return COLOURS[at % len(COLOURS)]


def dash(at: int) -> str:
    return DASHES[at // len(COLOURS) % len(DASHES)]


# --- for the page -----------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """Return the chart as SVG; a screen reader gets title and description."""
    bottom, top = chart.range()
    last = chart.places[-1]

    def x(place: float) -> float:
        return round(LEFT + place / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(
            HEIGHT - BOTTOM - (value - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM), 1
        )

    marks = []
    for value in ticks(bottom, top):
        marks.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value)}" y2="{y(value)}"/>'
            + _label(LEFT - 6, y(value) + 3.5, "end", number(value, chart.share))
        )
    for place in ticks(0.0, last):
        anchor = "end" if x(place) > WIDTH - RIGHT - 20 else "middle"
        marks.append(_label(x(place), HEIGHT - 22, anchor, f"{place:,.0f}"))
    marks.append(_label((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "middle", escape(chart.unit)))
    for at, line in enumerate(chart.lines):
        low, high = line.edges()
        if line.errors:
            there = [f"{x(p)},{y(v)}" for p, v in zip(chart.places, high, strict=True)]
            back = [f"{x(p)},{y(v)}" for p, v in zip(chart.places, low, strict=True)]
            outline = " ".join(there + back[::-1])
            marks.append(f'<polygon points="{outline}" fill="{colour(at)}" opacity="0.15"/>')
    for at, line in enumerate(chart.lines):
        points = " ".join(f"{x(p)},{y(v)}" for p, v in zip(chart.places, line.values, strict=True))
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="{colour(at)}" stroke-width="2" '
            f'stroke-dasharray="{dash(at)}"><title>{escape(line.name)}</title></polyline>'
        )
    name = "".join(c if c.isalnum() else "-" for c in chart.title.lower())
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(chart.title)}</title>'
        f'<desc id="{name}-d">{escape(description(chart))}</desc>{"".join(marks)}</svg>'
    )


def description(chart: Chart) -> str:
    ends = [
        f"{line.name}: {number(line.values[0], chart.share)} to "
        f"{number(line.values[-1], chart.share)}"
        for line in chart.lines
    ]
    return f"Over {chart.unit}. {'; '.join(ends)}."


def _label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def legend(names: Sequence[str]) -> str:
    keys = [
        f'<li><svg viewBox="0 0 26 8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" '
        f'stroke="{colour(at)}" stroke-width="3" stroke-dasharray="{dash(at)}"/></svg>'
        f"{escape(name)}</li>"
        for at, name in enumerate(names)
    ]
    return f'<ul class="legend">{"".join(keys)}</ul>'


# --- for a paper ------------------------------------------------------------------------------


def png(chart: Chart) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for at, line in enumerate(chart.lines):
        style = (0, tuple(map(float, dash(at).split()))) if dash(at) else "-"
        axes.plot(chart.places, line.values, color=colour(at), label=line.name, linestyle=style)
        if line.errors:
            axes.fill_between(
                chart.places, *line.edges(), color=colour(at), alpha=0.15, linewidth=0
            )
    if chart.share:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_title(chart.title)
    axes.set_xlabel(chart.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    stored = io.BytesIO()
    figure.savefig(stored, format="png", dpi=DOTS)
    return stored.getvalue()
