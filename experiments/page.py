"""docs/claims.md: every claim beside what was measured."""

# ruff: noqa: E501 - a paragraph of the page is one line

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claim import MINUS, SCORES, Claim, Expectation
from experiments.judge import contrast, verdict

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
INTRO = """# Claims of the papers, measured

<!-- Written by `python -m experiments.run --page` from experiments/. Do not edit. -->

Small experiments, each a file of experiments/ that says what is claimed, by whom, which arms show it and which direction and size are expected. `python -m experiments.run NAME` runs it ([compare](compare.md): equal starts, prompts and random numbers), in minutes on two CPU cores unless it says otherwise; the same command goes on where it was stopped. What came out stands here whatever it is.

A verdict holds for this model, task and budget: a transformer of two layers that adds digits is no proof about a model of 32 billion parameters. It says whether the mechanism acts where nothing else differs. All runs of a claim start from one model, so intervals are over what is sampled in training, not over starting models; the embedded one is made anew on each kind of machine, and a claim may come out otherwise from another (l_kl_reward_hacking did).

A verdict says two things, the direction and the size. A difference is *separable* with p < 0.05 (two-sided, paired by seed, for accuracy and area also by task; Holm over the expectations of a claim). Its size is compared with the expected one, which is the published one or a careful reading of a plot, as each claim says.

| verdict | where one arm should have more | where two arms should be alike |
|---|---|---|
| **as claimed** | separable, in the direction of the claim, and the expected size lies within the interval | the whole interval lies within the margin |
| **as claimed, smaller**; **as claimed, larger** | separable, in the direction of the claim; the whole interval lies below, or above, the expected size | |
| **the opposite** | separable, in the other direction | |
| **apart** | | separable, and not surely within the margin |
| **not seen** | not separable, and the whole interval lies below the expected size | |
| **open** | not separable, and the expected size lies within the interval | not separable, and not surely within the margin |
| **no contrast** | | the arm that should differ lies within the margin too, which then tells nothing |
| **by construction** | an arm has exactly 0 in every run, because its method can't have any: nothing was tested | |
| **not measured** | a run has no value of it, or it was asked when the runs were gone | the same |

Intervals are of 95 %, each for itself. Measures other than accuracy are means over the last tenth of the steps ([metrics](metrics.md)); `start` is accuracy before training, and `A - B` the difference of two measures of one run. Shares of the second arm's mean are in percent with a sign. *Smallest visible*: the true difference that this design would call separable with a chance of 80 %.
"""


def whole(claims: Sequence[Claim]) -> str:
    found = [(claim, result(claim.name)) for claim in claims]
    rows = ["| claim | verdicts |", "|---|---|"]
    for claim, measured in found:
        if measured:
            said = "; ".join(_brief(e, entry, measured) for e, entry in entries(claim, measured))
            rows.append(f"| [{claim.name}](#{claim.name}) | {said} |")
        else:
            rows.append(f"| {claim.name} | not run yet |")
    parts = [INTRO, "\n".join(rows) + "\n"]
    parts += [section(claim, measured) for claim, measured in found if measured]
    return "\n".join(parts)


def result(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def entries(claim: Claim, found: Mapping[str, Any]) -> list[tuple[Expectation, Mapping[str, Any]]]:
    """Each expectation with its figures; none where it was not asked yet when they were made."""
    known = {(x["measure"], x["more"], x["than"]): x for x in found["expectations"]}
    return [(e, known.get((e.measure, e.more, e.than), {})) for e in claim.expect]


def section(claim: Claim, found: Mapping[str, Any]) -> str:
    """What is claimed, how it was tried, and what came out."""
    minutes = found["seconds"] / 60
    lines = [
        f"## {claim.name}", "",
        f"**{claim.claim}** {claim.source}.", "",
        f"Published: {claim.published}", "",
        f"Here: {claim.setting} {len(claim.arms)} arms x {found['seeds']} seeds, "
        f"{_budget(found['budget'])} a run, {minutes:.0f} minutes of runs in all "
        f"({found['machine']}).", "",
        *_arms(claim, found["arms"]), "",
        *(f"- {_sentence(e, entry, found)}" for e, entry in entries(claim, found)),
    ]  # fmt: skip
    if claim.reading:
        lines += ["", claim.reading]
    return "\n".join(lines) + "\n"


def _budget(text: str) -> str:
    unit, _, amount = text.partition("=")
    return f"{float(amount):,.0f} {unit}"


def _arms(claim: Claim, found: Mapping[str, Any]) -> list[str]:
    by = ["accuracy", *(["area"] if any(e.measure == "area" for e in claim.expect) else [])]
    by += claim.measures
    lines = [f"| arm | {' | '.join(by)} |", f"|---{'|---' * len(by)}|"]
    for name, text in claim.arms.items():
        cells = [_cell(found[name][measure], measure) for measure in by]
        shown = name if name == text else f"{name}: `{text}`"
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    start = next(iter(found.values()))["start"]["mean"]
    return [*lines, "", f"Accuracy before training: {100 * start:.1f} %. ±: one standard error."]


def _cell(estimate: Mapping[str, Any] | None, measure: str) -> str:
    if estimate is None:
        return "–"
    mean, error = estimate["mean"], estimate["stderr"]
    if _is_share(measure):
        return f"{100 * mean:.1f} % ± {100 * error:.1f}"
    return f"{mean:.4g} ± {error:.2g}"


def _is_share(measure: str) -> bool:
    """Of right answers: its differences are told in points."""
    return all(part in SCORES or part.endswith("/accuracy") for part in measure.split(MINUS))


def _brief(e: Expectation, entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    sign = "=" if e.alike else ">"
    said = verdict(e, entry, found["arms"])
    return f"{e.measure}: {e.more} {sign} {e.than}: **{said}**"


def _sentence(e: Expectation, entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """An expectation, the numbers, the verdict."""
    said = f"`{e.measure}`, {e.more} {'as much as' if e.alike else 'more than'} {e.than}: "
    called = verdict(e, entry, found["arms"])
    if "difference" not in entry:
        return f"{said}**{called}**."
    bound = _margin(e, found) if e.alike else f"expected {_amount(e.size, e)}"
    interval = f"{_amount(entry['low'], e)} to {_amount(entry['high'], e)}"
    smallest = entry["smallest_visible"]  # None where so few seeds could show nothing
    visible = "nothing" if smallest is None else _amount(smallest, e)
    return (
        f"{said}{_amount(entry['difference'], e, sign=True)} ({interval}, "
        f"p = {_p(entry['p'])}; {bound}; smallest visible {visible}): **{called}**."
    )


def _margin(e: Expectation, found: Mapping[str, Any]) -> str:
    """How far apart arms that are alike may be, and how far what should differ is."""
    distance = _amount(contrast(e, found["arms"]), e)
    named = f"{e.contrast} is {distance} away" if isinstance(e.contrast, str) else f"not {distance}"
    return f"alike means within ±{_amount(e.size, e)}, {named}"


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}"


def _amount(value: float, e: Expectation, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if e.relative:
        return f"{100 * value:{plus}.1f} %"
    if _is_share(e.measure):
        return f"{100 * value:{plus}.1f} points"
    return f"{value:{plus}.3g}"
