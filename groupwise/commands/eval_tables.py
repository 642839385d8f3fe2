"""The tables that `groupwise eval` prints: figures with their errors, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import aligned

if TYPE_CHECKING:
    from groupwise.evaluate.results import Comparison, Result
    from groupwise.evaluate.scores import Figure


def text(found: Sequence[Result], comparisons: Sequence[Comparison]) -> str:
    from groupwise.evaluate.scores import by_budget, grouped

    lines: list[str] = []
    for suite in dict.fromkeys(str(result.suite["name"]) for result in found):
        own = [result for result in found if result.suite["name"] == suite]
        lines += [*([""] if lines else []), _title(own[0]), *_table(own)]
        for column in dict.fromkeys(name for x in own for name in grouped(x.outcomes)):
            tables = [(x.name, grouped(x.outcomes).get(column, {})) for x in own]
            lines += ["", *_groups(column, tables)]
        if any(result.settings.get("budgets") for result in own):
            lines += ["", *_budgets([(x.name, by_budget(x.outcomes)) for x in own])]
        lines += _differences([each for each in comparisons if each.suite == suite])
    note = "± standard error of the mean over tasks; samples of one task are no independent trials"
    return "\n".join([*lines, "", note])


def _title(result: Result) -> str:
    suite, settings = result.suite, result.settings
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    return (
        f"{suite['name']}: {suite['tasks']} tasks x {settings['samples']}, {how}, up to "
        f"{settings['max_tokens']} tokens ({suite['source']}, data {suite['data']})"
    )


def _table(results: Sequence[Result]) -> list[str]:
    from groupwise.evaluate.scores import metrics

    figures = [metrics(x.outcomes, x.samples, x.settings["at"]) for x in results]
    names = list(dict.fromkeys(name for each in figures for name in each))
    rows = [["model", *names, "tokens", "cut off", "failed"]]
    for result, each in zip(results, figures, strict=True):
        lengths = [tokens for outcome in result.outcomes for tokens in outcome.tokens]
        cut = sum(sum(outcome.truncated) for outcome in result.outcomes) / len(lengths)
        wrong = sum(outcome.failed for outcome in result.outcomes)
        shown = [_figure(each.get(name)) for name in names]
        mean = sum(lengths) / len(lengths)
        rows.append([result.name, *shown, f"{mean:.0f}", f"{cut:.0%}", str(wrong)])
    return aligned(rows)


def _groups(column: str, tables: Sequence[tuple[str, dict[str, Figure]]]) -> list[str]:
    values = list(dict.fromkeys(value for _, table in tables for value in table))
    rows = [[column, "tasks", *(name for name, _ in tables)]]
    for value in values:
        some = [table.get(value) for _, table in tables]
        number = max(each.tasks for each in some if each is not None)
        rows.append([value, str(number), *(_figure(each) for each in some)])
    return aligned(rows)


def _budgets(tables: Sequence[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    rows = [["budget", *(x for name, _ in tables for x in (name, "forced"))]]
    for at, size in enumerate(each["budget"] for each in tables[0][1]):
        cells = []
        for _, table in tables:
            cells += [_figure(table[at]["accuracy"]), f"{table[at]['forced_share']:.0%}"]
        rows.append([str(size), *cells])
    return aligned(rows)


def _differences(comparisons: Sequence[Comparison]) -> list[str]:
    from groupwise.evaluate.statistics import ALPHA, shown_p

    if not comparisons:
        return []
    rows = [["difference", "points", "95 % interval", "p", "tasks"]]
    notes = []
    for each in comparisons:
        rows.append(
            [
                f"{each.a} - {each.b}",
                f"{100 * each.difference:+.1f}",
                f"{100 * each.low:+.1f} to {100 * each.high:+.1f}",
                f"{shown_p(each.p)}{'' if each.p < ALPHA else ', not separable'}",
                str(each.tasks),
            ]
        )
        if each.settings:
            notes.append(f"{each.a} and {each.b} differ in {', '.join(each.settings)}.")
    return ["", *aligned(rows), *notes]


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    error = "" if figure.stderr is None else f" ±{100 * figure.stderr:.1f}"
    return f"{100 * figure.value:.1f}{error}"
