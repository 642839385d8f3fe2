"""Curves as inline SVG: no script, no network. Colours are the page's (CSS variables)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 26  # margins, for the axes' numbers
MOST_POINTS = 400  # of a line; more are not seen


@dataclass(frozen=True)
class Point:
    """A value at a step, with its standard error where it has one."""

    step: int
    value: float
    error: float | None = None


@dataclass(frozen=True)
class Curve:
    """The data of a chart."""

    title: str
    points: Sequence[Point]
    share: bool = False  # from 0 to 1, written in percent
    sparse: bool = False  # measured now and then: every point is marked
    events: Sequence[int] = ()  # steps with something to know about


def svg(curve: Curve) -> str:
    """Return the chart; a screen reader gets title and description."""
    points = [point for point in curve.points if math.isfinite(point.value)]
    name = "".join(c if c.isalnum() else "-" for c in curve.title.lower())
    place = ""
    if points:
        scale = Scale.of(curve, points)
        place = (  # for a script that is asked what stands where
            f' data-first="{scale.first}" data-last="{scale.last}"'
            f' data-left="{scale.x(scale.first)}" data-right="{scale.x(scale.last)}"'
        )
        marks = [*_grid(scale), *_events(curve, scale), *_drawing(curve, points, scale)]
    else:
        marks = [_label(WIDTH / 2, HEIGHT / 2, "middle", "no values")]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{name}-t {name}-d"'
        f"{place}>"
        f'<title id="{name}-t">{escape(curve.title)}</title>'
        f'<desc id="{name}-d">{escape(description(curve, points))}</desc>{"".join(marks)}</svg>'
    )


def description(curve: Curve, points: Sequence[Point]) -> str:
    if not points:
        return "No values yet."
    values = [point.value for point in points]
    first, last = points[0], points[-1]
    return (
        f"{number(first.value, curve.share)} at step {first.step}, "
        f"{number(last.value, curve.share)} at step {last.step}; lowest "
        f"{number(min(values), curve.share)}, highest {number(max(values), curve.share)}."
    )


# --- scales -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The places of steps and values on the chart."""

    first: int
    last: int
    low: float
    high: float
    share: bool

    @classmethod
    def of(cls, curve: Curve, points: Sequence[Point]) -> Scale:
        first, last = points[0].step, points[-1].step
        if curve.share:
            return cls(first, last, 0.0, 1.0, True)
        low = min(point.value - (point.error or 0.0) for point in points)
        high = max(point.value + (point.error or 0.0) for point in points)
        room = 0.06 * (high - low) or max(abs(high), 1e-9) * 0.5
        floor = 0.0 if 0.0 <= low <= 0.5 * high else low - room  # near 0, the axis starts there
        return cls(first, last, floor, high + room, False)

    def x(self, step: float) -> float:
        along = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(LEFT + along * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        up = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten) within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(k * size, 12) for k in range(first, last + 1)]


def number(value: float, share: bool = False) -> str:
    if share:
        return f"{100 * value:.3g} %"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- marks ------------------------------------------------------------------------------------


def _label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="tick" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def _grid(scale: Scale) -> list[str]:
    marks = []
    for value in ticks(scale.low, scale.high):
        y = scale.y(value)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(_label(LEFT - 6, y + 3.5, "end", number(value, scale.share)))
    for step in sorted({round(step) for step in ticks(scale.first, scale.last)}):
        x = scale.x(step)
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        marks.append(_label(x, HEIGHT - 8, anchor, f"{step:,}"))
    return marks


def _events(curve: Curve, scale: Scale) -> list[str]:
    """Draw a line through the chart at each step of an event that it shows."""
    places = [scale.x(step) for step in curve.events if scale.first <= step <= scale.last]
    bottom = HEIGHT - BOTTOM
    return [f'<path class="event" d="M{x} {TOP}V{bottom}"/>' for x in dict.fromkeys(places)]


def _drawing(curve: Curve, points: Sequence[Point], scale: Scale) -> list[str]:
    if curve.sparse or len(points) == 1:
        return [_line("line", points, scale), *_dots(points, scale)]
    window = max(1, len(points) // 20)
    if window == 1:
        return [_line("line", points, scale)]
    smoothed = thin(smooth(points, window))
    return [_line("raw", thin(points), scale), _line("line", smoothed, scale)]


def _line(style: str, points: Sequence[Point], scale: Scale) -> str:
    places = " ".join(f"{scale.x(point.step)},{scale.y(point.value)}" for point in points)
    return f'<polyline class="{style}" points="{places}"/>'


def _dots(points: Sequence[Point], scale: Scale) -> list[str]:
    marks = []
    for point in points:
        x, shown = scale.x(point.step), number(point.value, scale.share)
        if point.error:
            top, bottom = scale.y(point.value + point.error), scale.y(point.value - point.error)
            bar = f"M{x} {top}V{bottom}M{x - 3} {top}h6M{x - 3} {bottom}h6"
            marks.append(f'<path class="error" d="{bar}"/>')
            shown += f" ± {number(point.error, scale.share)}"
        marks.append(
            f'<circle class="dot" cx="{x}" cy="{scale.y(point.value)}" r="2.2">'
            f"<title>step {point.step}: {shown}</title></circle>"
        )
    return marks


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Return at each step the mean of the last `window` values: nothing of the future."""
    sums = [0.0, *accumulate(point.value for point in points)]
    starts = [max(0, at + 1 - window) for at in range(len(points))]
    return [
        Point(point.step, (sums[at + 1] - sums[start]) / (at + 1 - start))
        for at, (point, start) in enumerate(zip(points, starts, strict=True))
    ]


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Reduce points to `most`, the lowest and the highest of each stretch: spikes stay."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept = []
    for at in range(0, len(points), stretch):
        part = points[at : at + stretch]
        ends = {min(part, key=lambda p: p.value), max(part, key=lambda p: p.value)}
        kept += sorted(ends, key=lambda p: p.step)
    return kept


# --- on a terminal ------------------------------------------------------------------------------

EIGHTHS = " ▁▂▃▄▅▆▇█"
ROWS = 6
WIDEST = 6


def plot(
    points: Sequence[Point], width: int, *, mark: int | None = None, ascii_only: bool = False
) -> list[str]:
    """Return columns of a few lines of text, and an arrow under the step `mark`."""
    values = [point for point in points if math.isfinite(point.value)]
    if not values:
        return ["  no values"]
    columns = _columns(values, width)
    heights = [value for value, _ in columns]
    low, high = min(0.0, *heights), max(heights)
    scale = 8 * ROWS / (high - low) if high > low else 0.0
    filled = [round((value - low) * scale) for value in heights]
    wide = max(1, min(WIDEST, width // len(columns)))  # characters of a column
    lines = []
    for row in reversed(range(ROWS)):
        label = {ROWS - 1: number(high), 0: number(low)}.get(row, "")
        parts = [min(max(eighths - 8 * row, 0), 8) for eighths in filled]
        drawn = "".join(
            " #"[part >= 4] if ascii_only else EIGHTHS[part] for part in parts for _ in range(wide)
        )
        lines.append(f"{label:>9} |{drawn}")
    ends = f"step {columns[0][1]}", f"{columns[-1][1]}"
    lines.append(
        f"{'':>10} {ends[0]}{ends[1]:>{max(wide * len(columns) - len(ends[0]), len(ends[1]) + 1)}}"
    )
    if mark is not None:
        at = next((i for i, (_, step) in enumerate(columns) if step >= mark), len(columns) - 1)
        lines.append(f"{'':>11}{'':>{at * wide}}^ first bad step: {mark}")
    return lines


def _columns(points: Sequence[Point], width: int) -> list[tuple[float, int]]:
    """Return (value, last step) of each column: of several points the farthest from the middle."""
    count = min(len(points), max(width, 1))
    middle = sorted(point.value for point in points)[len(points) // 2]
    columns = []
    for at in range(count):
        part = points[len(points) * at // count : len(points) * (at + 1) // count]
        value = max(part, key=lambda point: abs(point.value - middle)).value
        columns.append((value, part[-1].step))
    return columns
