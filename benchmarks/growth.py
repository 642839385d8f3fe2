"""How cost grows, from the `shape` rows of benchmarks/gpu.py: a table, and a plot beside it.

    python benchmarks/growth.py gpu.jsonl docs/growth.svg

The table goes to standard output. Both axes of the plot are logarithmic; broken lines are the
roofline.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind too
WIDTH, HEIGHT = 360, 240  # of a panel
LEFT, RIGHT, BOTTOM, TOP = 56, 20, 34, 30  # its margins
PHASES, AXES = ("rollout", "update"), ("group", "tokens")
NAMES = {"group": "group size", "tokens": "length"}


def read(file: Path) -> list[Row]:
    """Measured cases; of one that was measured twice, the last."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    shapes = [row for row in rows if row["row"] == "shape" and "left_out" not in row]
    case = ("shape", "phase", "prompts", "group", "tokens")
    return list({tuple(row[name] for name in case): row for row in shapes}.values())


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| shape | prompts x group | tokens | rollout tokens/s | of the roofline | update, s "
        "| of the roofline | peak memory, GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        case = (row["shape"], row["prompts"], row["group"], row["tokens"])
        cases.setdefault(case, {})[row["phase"]] = row
    for (shape, prompts, group, tokens), found in cases.items():
        rollout, update = (found.get(phase) for phase in PHASES)
        speed = f"{rollout['tokens_per_second']:,.0f}" if rollout else "–"
        seconds = f"{min(update['seconds']):.2f}" if update else "–"
        memory = max(row["peak_bytes"] for row in found.values()) / 1e9
        lines.append(
            f"| {shape} | {prompts} x {group} | {tokens:,} | {speed} | {_share(rollout)} "
            f"| {seconds} | {_share(update)} | {memory:.1f} |"
        )
    return "\n".join(lines)


def _share(row: Row | None) -> str:
    floor = row and row["roofline_seconds"]
    return f"{floor / min(row['seconds']):.0%}".replace("%", " %") if row and floor else "–"


def plot(rows: Sequence[Row]) -> str:
    """A panel for each phase and axis, side by side and below one another."""
    panels = [
        f'<g transform="translate({column * WIDTH},{line * HEIGHT})">'
        f"{panel([row for row in rows if row['phase'] == phase], phase, axis)}</g>"
        for line, phase in enumerate(PHASES)
        for column, axis in enumerate(AXES)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(panels)}</svg>\n"
    )


def panel(rows: Sequence[Row], phase: str, axis: str) -> str:
    """Tokens a second along one axis, a line for each shape at its most measured other size."""
    other = AXES[1 - AXES.index(axis)]
    lines: dict[str, list[Row]] = {}
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine = [row for row in rows if row["shape"] == shape]
        often = Counter(row[other] for row in mine).most_common(1)[0][0]
        same = sorted((row for row in mine if row[other] == often), key=lambda row: row[axis])
        if len(same) > 1:
            lines[f"{shape}, {NAMES[other]} {often}"] = same
    shown = [row for line in lines.values() for row in line]
    if not shown:
        return _text(WIDTH / 2, HEIGHT / 2, f"{phase} by {NAMES[axis]}: not measured", "middle")
    x_of, x_ticks = _scale([row[axis] for row in shown], 2, LEFT, WIDTH - RIGHT)
    heights = [speed for row in shown for speed in (row["tokens_per_second"], _roofline(row))]
    y_of, y_ticks = _scale([y for y in heights if y], 10, HEIGHT - BOTTOM, TOP)
    marks = [_text(LEFT, 14, f"{phase}: tokens/s by {NAMES[axis]}", "start")]
    for x in x_ticks:
        marks += [_line([(x_of(x), TOP), (x_of(x), HEIGHT - BOTTOM)], "#ddd")]
        marks += [_text(x_of(x), HEIGHT - BOTTOM + 13, f"{x:,.0f}", "middle")]
    for y in y_ticks:
        marks += [_line([(LEFT, y_of(y)), (WIDTH - RIGHT, y_of(y))], "#ddd")]
        marks += [_text(LEFT - 4, y_of(y) + 3, f"{y:,.0f}", "end")]
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at = [(x_of(row[axis]), y_of(row["tokens_per_second"])) for row in line]
        floor = [(x_of(row[axis]), y_of(_roofline(row))) for row in line if _roofline(row)]
        marks += [_line(at, colour), _line(floor, colour, ' stroke-dasharray="4 3"')]
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in at]
        marks += [_text(LEFT - 20 + 104 * number, HEIGHT - 6, name, "start", colour)]
    return "".join(marks)


def _roofline(row: Row) -> float:
    """Tokens a second; 0 where the device's peaks are not known."""
    floor = row["roofline_seconds"]
    return row["prompts"] * row["group"] * row["tokens"] / floor if floor else 0.0


def _scale(values: Sequence[float], base: int, start: float, end: float) -> tuple[Any, list[float]]:
    """From a value to a place, on powers of the base around all values; and those powers."""
    low = math.floor(math.log(min(values), base) + 1e-9)
    high = max(math.ceil(math.log(max(values), base) - 1e-9), low + 1)

    def place(value: float) -> float:
        return start + (math.log(value, base) - low) / (high - low) * (end - start)

    return place, [float(base) ** power for power in range(low, high + 1)]


def _line(points: Sequence[tuple[float, float]], colour: str, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}"{more}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


if __name__ == "__main__":
    found = read(Path(sys.argv[1]))
    print(table(found))
    Path(sys.argv[2]).write_text(plot(found))
