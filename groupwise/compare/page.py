"""The result as files: compare.json, compare.html, CSV tables, and PNG curves."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.compare import charts, summary
from groupwise.compare.charts import Chart, Line
from groupwise.compare.outcomes import RunOutcome
from groupwise.compare.plan import ComparisonPlan
from groupwise.errors import RunError
from groupwise.runfiles.files import to_page, write_atomic
from groupwise.watch.plots import can_plot
from groupwise.watch.report import HEAD, STYLE, section, table, text

TITLES = {
    "score": "Held-out {measure}",
    "entropy": "Entropy in nats",
    "length": "Tokens sampled an answer",
}
MORE_STYLE = """
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1rem; list-style: none; padding: 0; }
.legend svg { width: 26px; height: 8px; display: inline-block; margin-right: .4rem; }
.verdicts li { margin: .35rem 0; }
.curves { grid-template-columns: repeat(auto-fill, minmax(420px, 1fr)); }
.curves figure:first-child { grid-column: 1 / -1; }
.curves figure:not(:first-child) .tick { font-size: 15px; }
th, td { overflow-wrap: normal; }
"""
METHOD = (
    "All runs of a seed start from the same weights, draw the same prompts with the same random "
    "numbers and are evaluated on the same tasks, so differences are taken seed by seed and task "
    "by task. Intervals are 95 % bootstrap intervals over seeds and tasks, as wide as so few seeds "
    "ask for; p-values are two-sided, of Student's t for seeds and for tasks, corrected for all "
    "judgements of this page by Holm's method, and no smaller than the chance that so few seeds "
    "agree by luck; intervals are not corrected. The smallest visible difference is one that this "
    "design would have told apart four times in five."
)


def write_all(
    path: Path, found: Mapping[str, Any], plan: ComparisonPlan, done: Sequence[Sequence[RunOutcome]]
) -> list[str]:
    """Write all files; return their names."""
    drawn = charts_of(found)
    files: dict[str, bytes | str] = {
        "compare.json": to_page(found),
        "compare.html": page(path.resolve().name, found, plan, drawn),
        "pairs.csv": _csv(_pair_rows(found)),
        "runs.csv": _csv(_run_rows(plan, done, summary.measures(found))),
        "curves.csv": _csv(_curve_rows(plan, done)),
    }
    if can_plot():
        files |= {f"{name}.png": charts.png(chart) for name, chart in drawn.items()}
    try:
        for name, content in files.items():
            write_atomic(path / name, content)
    except OSError as error:
        raise RunError(f"{path} can't be written: {error}.") from None
    return list(files)


# --- curves -----------------------------------------------------------------------------------


def charts_of(found: Mapping[str, Any]) -> dict[str, Chart]:
    """Return the charts by file name, the score first."""
    arms = [arm for arm in found["arms"] if arm["seeds"]]
    made = {}
    for name, title in TITLES.items():
        lines = [
            Line(arm["name"], arm["curves"][name]["mean"], arm["curves"][name]["stderr"])
            for arm in arms
            if name in arm["curves"]
        ]
        if lines:
            measure = found["measure"]
            share = name == "score" and measure == "accuracy"
            made[measure if name == "score" else name] = Chart(
                title.format(measure=measure),
                next(iter(found["budget"])),
                arms[0]["curves"]["at"],
                lines,
                share,
            )
    return made


# --- the page ---------------------------------------------------------------------------------


def page(
    name: str, found: Mapping[str, Any], plan: ComparisonPlan, drawn: Mapping[str, Chart]
) -> str:
    """Return the page, which is self-contained: no script, nothing loaded."""
    said = [*summary.verdicts(found), *filter(None, summary.measured(found))]
    sentences = "".join(f"<li>{text(each)}</li>" for each in said)
    troubles = "".join(f"<p>{text(each)}</p>" for each in summary.warnings(found) if each)
    figures = "".join(
        f"<figure><h3>{text(chart.title)}</h3>{charts.svg(chart)}"
        f"{charts.legend([line.name for line in chart.lines])}"
        "<figcaption>Mean over seeds; band: ± one standard error.</figcaption></figure>"
        for chart in drawn.values()
    )
    shares = found["measure"] == "accuracy"
    pairs = "<p>Accuracies as shares: 0.031 is 3.1 points.</p>" if shares else ""
    slots = [[arm["name"], *_slots(arm["recipe"])] for arm in found["arms"]]
    body = "\n".join(
        [
            f"<h1>{text(name)}</h1>",
            f"<p>{len(plan.arms)} arms x {len(plan.seeds)} seeds, {text(plan.budget)} each.</p>",
            troubles,
            section("Verdict", f'<ul class="verdicts">{sentences}</ul>'),
            section("Arms", table(summary.columns(found), summary.rows(found))),
            section("Curves", f'<div class="curves">{figures}</div>'),
            section(
                "Pairs", pairs + table(PAIR_HEAD, [_shown(row) for row in _pair_rows(found)[1:]])
            ),
            section("What the arms are", table(("", "recipe", "slots"), slots)),
            section("How it was measured", f"<p>{text(METHOD)}</p>"),
        ]
    )
    title = f"<title>{text(name)}: groupwise compare</title>"
    return (
        f"{HEAD}{title}\n<style>{STYLE}{MORE_STYLE}</style>\n</head>\n"
        f"<body><main>\n{body}\n</main></body>\n</html>\n"
    )


def _slots(recipe: Mapping[str, str]) -> tuple[str, str]:
    own = [f"{kind} = {slots}" for kind, slots in recipe.items() if kind != "name" and slots]
    return recipe["name"], "; ".join(own)


# --- tables -----------------------------------------------------------------------------------

PAIR_HEAD = ("a", "b", "of", "difference a − b", "low", "high", "p (corrected)", "p uncorrected",
             "separable", "smallest visible", "seeds", "seeds needed")  # fmt: skip


def _pair_rows(found: Mapping[str, Any]) -> list[list[Any]]:
    rows: list[list[Any]] = [list(PAIR_HEAD)]
    for pair in found["pairs"]:
        for of, tested in summary.judgements(pair).items():
            if tested is not None:
                names = ("difference", "low", "high", "p", "p_uncorrected", "separable",
                         "smallest_visible")  # fmt: skip
                numbers = [tested.get(name) for name in names]
                seeds = [len(pair["seeds"]), tested.get("seeds_needed")]
                rows.append([pair["a"], pair["b"], of, *numbers, *seeds])
    return rows


def _shown(row: Sequence[Any]) -> list[str]:
    """Return a row for people, with short numbers."""
    return [
        "" if cell is None
        else ("yes" if cell else "no") if isinstance(cell, bool)
        else f"{cell:.3g}" if isinstance(cell, float)
        else str(cell)
        for cell in row
    ]  # fmt: skip


def _run_rows(
    plan: ComparisonPlan, done: Sequence[Sequence[RunOutcome]], measures: Sequence[str]
) -> list[list[Any]]:
    names = ("seed", "start", "final", "area", "steps", "tokens", "seconds", "length", "entropy")
    rows: list[list[Any]] = [["arm", *names, *measures]]
    for arm, runs in zip(plan.arms, done, strict=True):
        for one in runs:
            own = [getattr(one, name) for name in names]
            rows.append([arm.name, *own, *(one.ends.get(name) for name in measures)])
    return rows


def _curve_rows(plan: ComparisonPlan, done: Sequence[Sequence[RunOutcome]]) -> list[list[Any]]:
    """Return every evaluation as it was measured."""
    names = ("step", "tokens", "seconds", "score")
    rows: list[list[Any]] = [["arm", "seed", *names]]
    for arm, runs in zip(plan.arms, done, strict=True):
        for one in runs:
            rows += [[arm.name, one.seed, *(point[name] for name in names)] for point in one.points]
    return rows


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    stored = io.StringIO()
    csv.writer(stored, lineterminator="\n").writerows(rows)
    return stored.getvalue()
