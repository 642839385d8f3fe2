"""The result of a comparison in words and figures for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.common.progress import clock
from groupwise.evaluate.statistics import shown_p
from groupwise.watch.episodes import ends_in_words

MANY_SEEDS = 1_000  # beyond that, advice is no advice
NOTHING_VISIBLE = "this design could have seen no difference at all"


def text(found: Mapping[str, Any]) -> str:
    """Return the table, then what can be told apart and what can't."""
    lines = [*table(found), *episodes(found), "", *verdicts(found), *measured(found)]
    lines += warnings(found)
    lines += ["", correction(found)] if correction(found) else []
    if any(pair["seeds_needed"] for pair in found["pairs"]):
        lines += ["The same command with more --seeds keeps these runs and adds to them."]
    return "\n".join(lines)


def correction(found: Mapping[str, Any]) -> str:
    """Describe the correction of p; "" where nothing was tested."""
    tested = sum(each is not None for pair in found["pairs"] for each in judgements(pair).values())
    if not tested:
        return ""
    own = ", ".join(("final score", "mean over the budget", *measures(found)))
    return (
        f"p is corrected for the {tested} judgements that are made here ({own}; of every two arms) "
        "by Holm's method, and for how easily so few seeds agree by luck; intervals are not."
    )


def judgements(pair: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Return all judgements of a pair; None where there is none."""
    final = pair if pair["p"] is not None else None
    return {"final": final, "mean over budget": pair["area"], **pair["measures"]}


def columns(found: Mapping[str, Any]) -> list[str]:
    measure = found["measure"]
    unit = next(iter(found["budget"]))
    return ["", f"final {measure}", f"mean over {unit}", "tokens", "seconds", "steps", "length",
            "entropy", *measures(found), "seeds"]  # fmt: skip


def measures(found: Mapping[str, Any]) -> list[str]:
    """Return the measures that arms are compared by beside the score."""
    return next((list(arm["measures"]) for arm in found["arms"] if arm["seeds"]), [])


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a line for each arm; means over seeds, ± one standard error."""
    made = []
    for arm in found["arms"]:
        seeds = f"{len(arm['seeds'])}"
        if arm["failed"]:
            seeds += f", {len(arm['failed'])} failed"
        if not arm["seeds"]:
            made.append([arm["name"], *["-"] * (7 + len(measures(found))), seeds])
            continue
        made.append(
            [
                arm["name"],
                _estimate(arm["final"], found["measure"]),
                _estimate(arm["area"], found["measure"]),
                f"{arm['tokens']:,.0f}",
                f"{arm['seconds']:,.1f}",
                f"{arm['steps']:,.0f}",
                f"{arm['length']:,.1f}",
                "-" if arm["entropy"] is None else f"{arm['entropy']:.3f}",
                *("-" if own is None else _measure(own) for own in arm["measures"].values()),
                seeds,
            ]
        )
    return made


def table(found: Mapping[str, Any]) -> list[str]:
    lines = [columns(found), *rows(found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    made = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    budget = ", ".join(f"{amount:,} {unit}" for unit, amount in found["budget"].items())
    starts = [arm["start"] for arm in found["arms"] if arm["seeds"]]
    before = f"; before training {_value(starts[0], found['measure'])}" if starts else ""
    return [*made, f"{budget} a run{before}; ±: one standard error over seeds"]


def episodes(found: Mapping[str, Any]) -> list[str]:
    """Return a line for each arm with environments: why episodes ended, which groups taught."""
    lines = []
    for arm in found["arms"]:
        own = arm.get("episodes")
        if own is None:
            continue
        ends = ", ".join(ends_in_words(own["stops"]))
        taught = own["useful_groups"]
        shown = "" if taught is None else f"; {taught:.0%} of the groups taught something"
        lines.append(f"{arm['name']}: {own['turns']:.1f} turns; episodes ended {ends}{shown}")
    return ["", "In the last tenth of the steps:", *lines] if lines else []


def _estimate(estimate: Mapping[str, Any], measure: str) -> str:
    shown = _value(estimate["mean"], measure)
    if estimate["stderr"] is None:
        return shown
    error = estimate["stderr"]
    return f"{shown} ± {100 * error:.1f}" if measure == "accuracy" else f"{shown} ± {error:.3f}"


def _measure(estimate: Mapping[str, Any]) -> str:
    """Format a metric in its own unit."""
    mean, error = estimate["mean"], estimate["stderr"]
    return f"{mean:.4g}" if error is None else f"{mean:.4g} ± {error:.2g}"


def _value(value: float, measure: str) -> str:
    return f"{100 * value:.1f} %" if measure == "accuracy" else f"{value:.3f}"


# --- verdicts ---------------------------------------------------------------------------------


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each pair: differences first, the largest on top."""
    pairs = found["pairs"]
    by_size = sorted(
        pairs, key=lambda pair: (not pair["separable"], -abs(pair["difference"] or 0.0))
    )
    return [verdict(pair, found["measure"], found["fewest_seeds"]) for pair in by_size]


def verdict(pair: Mapping[str, Any], measure: str, fewest: int) -> str:
    """Describe the final scores of two arms; also the area, where that differs in its verdict."""
    a, b, seeds = pair["a"], pair["b"], len(pair["seeds"])
    if seeds < 2:
        return (
            f"{a} and {b}: no verdict, {seeds} of the seeds finished in both. Two are the least; "
            "the same command tries those that failed again."
        )
    if pair["difference"] is None:
        return f"{a} and {b}: no verdict, no held-out task has a score in all of their runs."
    if pair["separable"]:
        return f"{_better(pair, a, b)} by {_amount(pair, measure)}.{_along(pair, measure)}"
    if pair["difference"] == pair["low"] == pair["high"] == 0.0:
        return (
            f"{a} and {b} are equal in every task of every seed: the difference is exactly 0."
            f"{_along(pair, measure)}"
        )
    return (
        f"{a} and {b} are not separable at this budget: {_signed(pair, measure)} for {a} "
        f"({_interval(pair, measure)}, p = {shown_p(pair['p'])}). {_needed(pair, measure, fewest)}"
        f"{_along(pair, measure)}"
    )


def _along(pair: Mapping[str, Any], measure: str) -> str:
    """Describe where the curves differ and the final scores do not, or the reverse."""
    area = pair["area"]
    if area is None or not area["separable"]:
        return ""
    if pair["separable"] and (area["difference"] > 0) == (pair["difference"] > 0):
        return ""
    return (
        f" Over the whole budget {_better(area, pair['a'], pair['b'])} by "
        f"{_amount(area, measure)} on average."
    )


def measured(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each pair and metric that was asked for."""
    lines = []
    for name in measures(found):
        lines += ["", f"By {name}, at the end:"]
        for pair in found["pairs"]:
            if len(pair["seeds"]) < 2:
                lines.append(f"{pair['a']} and {pair['b']}: no verdict, as above.")
            else:
                lines.append(_measured(pair["a"], pair["b"], pair["measures"][name]))
    return lines


def _measured(a: str, b: str, tested: Mapping[str, Any] | None) -> str:
    if tested is None:
        return (
            f"{a} and {b}: no verdict, not all of their runs measured it in their last steps (on "
            "held-out tasks: of each task, too)."
        )
    if tested["separable"]:
        more, less, turned = (a, b, tested) if tested["difference"] > 0 else (b, a, _turned(tested))
        interval = f"{turned['low']:.3g} to {turned['high']:.3g}"
        size = f"{turned['difference']:.3g} ({interval}, p = {shown_p(tested['p'])})"
        return f"{more} has more than {less} by {size}."
    if tested["difference"] == tested["low"] == tested["high"] == 0.0:
        return f"{a} and {b} are equal in every seed: the difference is exactly 0."
    visible = NOTHING_VISIBLE
    if tested["smallest_visible"] is not None:
        visible = f"this design could have seen {tested['smallest_visible']:.3g}"
    return (
        f"{a} and {b} are not separable: {tested['difference']:+.3g} for {a} "
        f"({tested['low']:.3g} to {tested['high']:.3g}, p = {shown_p(tested['p'])}); {visible}."
    )


def _better(pair: Mapping[str, Any], a: str, b: str) -> str:
    first, second = (a, b) if pair["difference"] > 0 else (b, a)
    return f"{first} is better than {second}"


def _amount(pair: Mapping[str, Any], measure: str) -> str:
    """Format a difference as `3.1 points (1.2 to 5.0, p = 0.01)`, of the better one."""
    turned = pair if pair["difference"] > 0 else _turned(pair)
    size = _points(turned["difference"], measure)
    return f"{size} ({_interval(turned, measure)}, p = {shown_p(pair['p'])})"


def _turned(pair: Mapping[str, Any]) -> dict[str, float]:
    """Swap the two sides."""
    return {"difference": -pair["difference"], "low": -pair["high"], "high": -pair["low"]}


def _needed(pair: Mapping[str, Any], measure: str, fewest: int) -> str:
    """Say what would show a difference of the size found, and what this design could show."""
    needed, tasks, seeds = pair["seeds_needed"], pair["tasks_needed"], len(pair["seeds"])
    if seeds < fewest:
        return _too_few(needed, seeds, fewest)
    smallest = pair["smallest_visible"]
    visible = f"this design could have seen {_points(smallest, measure)}."
    if measure == "accuracy" and smallest >= 1.0:
        visible = f"{NOTHING_VISIBLE}."
    if pair["difference"] == 0.0:
        return f"There is no difference to look for; {visible}"
    if needed is not None and needed <= seeds:  # it has that power, and was unlucky
        return f"A few more seeds may show it; {visible}"
    if needed is not None and needed <= MANY_SEEDS:
        more = "one more seed" if needed == seeds + 1 else f"{needed - seeds:,} more seeds"
        return f"About {more} would be needed to show that; {visible}"
    if needed is not None:
        return f"More than {MANY_SEEDS:,} seeds would be needed to show that; {visible}"
    if tasks is not None:
        return (
            f"No number of seeds would show that, about {tasks:,} held-out tasks would; {visible}"
        )
    return f"No number of seeds would show that on so few held-out tasks; {visible}"


def _too_few(needed: int | None, seeds: int, fewest: int) -> str:
    """Explain that so few seeds can agree by luck, whatever they show."""
    said = f"{seeds} seeds can't tell arms apart, however they come out: {fewest} are the fewest"
    if needed is None or needed > MANY_SEEDS:
        return f"{said}."
    if needed == fewest:
        return f"{said}, and may show a difference of this size."
    return f"{said}, and about {needed:,} would be needed to show a difference of this size."


def _points(size: float, measure: str) -> str:
    return f"{100 * size:.1f} points" if measure == "accuracy" else f"{size:.3f}"


def _signed(pair: Mapping[str, Any], measure: str) -> str:
    if measure == "accuracy":
        return f"{100 * pair['difference']:+.1f} points"
    return f"{pair['difference']:+.3f}"


def _interval(pair: Mapping[str, Any], measure: str) -> str:
    if measure == "accuracy":
        return f"{100 * pair['low']:.1f} to {100 * pair['high']:.1f}"
    return f"{pair['low']:.3f} to {pair['high']:.3f}"


# --- what to know beside ------------------------------------------------------------------------


def warnings(found: Mapping[str, Any]) -> list[str]:
    """Return warnings: failed runs, and starts or versions that were not the same."""
    said = []
    for arm in found["arms"]:
        for each in arm["failed"]:
            said.append(f"FAILED {arm['name']}, seed {each['seed']}: {each['why']}")
        if arm["failed"] and arm["seeds"]:
            said.append(
                f"{arm['name']}: its figures are those of {len(arm['seeds'])} seeds that did not "
                "fail, which flatters it."
            )
    unknown = [pair for pair in found["pairs"] if len(pair["seeds"]) > 1 and pair["area"] is None]
    if unknown:
        said.append(
            f"Of {len(unknown)} of {len(found['pairs'])} pairs the means over the budget are not "
            "judged: their runs do not have every held-out task's score of every evaluation "
            "(evaluations.jsonl, which older versions did not write)."
        )
    said += [each["why"] for each in found["coincide"]]
    if not found["same_start"]:
        said.append(
            "The runs did not all begin with the same data and weights: what was found may be due "
            "to that."
        )
    if len(found["versions"]) > 1:
        said.append(
            f"The runs were made by several versions ({'; '.join(found['versions'])}): what was "
            "found may be due to that."
        )
    return ["", *said] if said else []


def cost_line(cost: Mapping[str, Any]) -> str:
    """Return how long it took, and how much of that was not spent in runs."""
    places = "1 process" if cost["places"] == 1 else f"{cost['places']} processes"
    line = f"{clock(cost['wall_seconds'])} on {places}"
    if cost["overhead_share"] is not None:
        line += f", {100 * cost['overhead_share']:.1f} % beside the runs"
    return line
