"""docs/claims.md: every claim beside what was measured."""

# ruff: noqa: E501 - a paragraph of the page is one line

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.claim import MINUS, SCORES, Claim, Expectation, Question, asked_elsewhere
from experiments.judge import contrast, direction, over_all, verdict
from groupwise.evaluate.statistics import shown_p

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
INTRO = """# Claims of the papers, measured

<!-- Written by `python -m experiments.run --page` from experiments/. Do not edit. -->

Papers say what their methods gain. Here are such claims, tried again in experiments that are small enough for a laptop and strict enough to be wrong. First, in a sentence each, what was asked and what was seen; then how the verdicts are reached; then each claim with its figures. Words that are new stand in the [glossary](words.md).

{claims}

## How it was measured

Small experiments, each a file of experiments/ that says what is claimed, by whom, which arms show it and which direction and size are expected. `python -m experiments.run NAME` runs it ([compare](compare.md): equal starts, prompts and random numbers), in minutes on two CPU cores unless it says otherwise; the same command goes on where it was stopped. `python -m experiments.run all --page` makes the whole page: {hours} hours of runs. What came out stands here whatever it is.

A verdict holds for this model, task and budget: a transformer of two layers that adds digits is no proof about a model of 32 billion parameters. It says whether the mechanism acts where nothing else differs. All runs of a claim start from one model, so intervals are over what is sampled in training, not over starting models; the embedded one is made anew on each kind of machine, and a claim may come out otherwise from another (l_kl_reward_hacking did).

A verdict says two things, the direction and the size. A difference is *separable* with p < 0.05 (two-sided, paired by seed, for accuracy and area also by task; corrected by Holm's method for all {tests} differences that this page judges, so that the chance of a single false one among them is below 5 %). Its size is compared with the expected one, which is the published one or a careful reading of a plot, as each claim says. What was chosen when results had been seen (a setting, a measure, more seeds) is marked with a dagger (†), and the claim says what it was: its p is too small. Where two claims ask the same question in two settings, each says what the other found.

| verdict | where one arm should have more | where two arms should be alike |
|---|---|---|
| **as claimed** | separable, in the direction of the claim, and the expected size lies within the interval | the whole interval lies within the margin |
| **direction as claimed, size not: smaller** (or **larger**) | separable, in the direction of the claim; the whole interval lies below, or above, the expected size | |
| **the opposite** | separable, in the other direction | |
| **apart** | | separable, and not surely within the margin |
| **not seen** | not separable, and the whole interval lies below the expected size | |
| **open** | not separable, and the expected size lies within the interval | not separable, and not surely within the margin |
| **no contrast** | | the arm that should differ lies within the margin too, which then tells nothing |
| **by construction** | an arm has exactly 0 in every run, because its method can't have any: nothing was tested | |
| **not measured** | a run has no value of it, or it was asked when the runs were gone | the same |

Intervals are of 95 %, each for itself: one may leave 0 out and its difference still be *open* or *not seen*, because among {tests} such intervals some leave out what is true. The readings below speak of intervals. Measures other than accuracy are means over the last tenth of the steps ([metrics](metrics.md)); `start` is accuracy before training, and `A - B` the difference of two measures of one run. Shares of the second arm's mean are in percent with a sign. *Smallest visible*: the true difference that this design would call separable with a chance of 80 %, were its claim judged alone.
"""


def whole(claims: Sequence[Claim]) -> str:
    known = {name: x for name in [claim.name for claim in claims] if (x := result(name))}
    known = dict(zip(known, over_all(list(known.values())), strict=True))
    tests = sum("p" in x for found in known.values() for x in found["expectations"])
    found = [(claim, known.get(claim.name)) for claim in claims]
    beside = _beside(claims, known)
    told = [f"- [{x.name}](#{x.name}): {x.plain}" for x, measured in found if measured]
    rows = ["| claim | verdicts |", "|---|---|"]
    for claim, measured in found:
        if measured:
            said = "; ".join(
                _brief(claim, e, entry, measured) for e, entry in entries(claim, measured)
            )
            rows.append(f"| [{claim.name}](#{claim.name}) | {said} |")
        else:
            rows.append(f"| {claim.name} | not run yet |")
    hours = sum(found["seconds"] for found in known.values()) / 3600
    intro = INTRO.replace("{tests}", str(tests)).replace("{hours}", f"{hours:.0f}")
    intro = intro.replace("{claims}", "\n".join(told))
    parts = [intro, "\n".join(rows) + "\n"]
    parts += [section(claim, measured, beside) for claim, measured in found if measured]
    return "\n".join(parts)


Beside = Mapping[tuple[str, str, str], Sequence[str]]  # of a claim's expectation: what others found


def _beside(claims: Sequence[Claim], known: Mapping[str, Mapping[str, Any]]) -> Beside:
    """Return a sentence for each side of two expectations that ask the same."""
    said: dict[tuple[str, str, str], list[str]] = {}
    for one, other in asked_elsewhere(claims):
        if one[0].name not in known or other[0].name not in known:
            continue
        for (claim, e), (elsewhere, asked) in ((one, other), (other, one)):
            own, theirs = (_verdict(x, known[x[0].name]) for x in ((claim, e), (elsewhere, asked)))
            said.setdefault((claim.name, e.measure, e.sides), []).append(
                f"The same question in [{elsewhere.name}](#{elsewhere.name}) (`{asked.measure}`, "
                f"{asked.sides}): **{theirs}**. {_agreement(own, theirs)}"
            )
    return said


def _verdict(question: Question, found: Mapping[str, Any]) -> str:
    claim, wanted = question
    (entry,) = (entry for e, entry in entries(claim, found) if e == wanted)
    return verdict(wanted, entry, found["arms"])


def _agreement(own: str, theirs: str) -> str:
    one, other = direction(own), direction(theirs)
    if one * other < 0:
        return "The two disagree."
    if one and other:
        return "The two agree."
    return "Only one of the two saw anything." if one or other else "Neither saw anything."


def result(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def entries(claim: Claim, found: Mapping[str, Any]) -> list[tuple[Expectation, Mapping[str, Any]]]:
    """Each expectation with its figures; none where it was not asked yet when they were made."""
    known = {(x["measure"], x["more"], x["than"]): x for x in found["expectations"]}
    return [(e, known.get((e.measure, e.more, e.than), {})) for e in claim.expect]


def section(claim: Claim, found: Mapping[str, Any], beside: Beside | None = None) -> str:
    """What is claimed, how it was tried, and what came out."""
    minutes = found["seconds"] / 60
    lines = [
        f"## {claim.name}", "",
        claim.plain, "",
        f"Claimed: **{claim.claim}** {claim.source}.", "",
        f"Published: {claim.published}", "",
        f"Here: {claim.setting} {len(claim.arms)} arms x {found['seeds']} seeds, "
        f"{_budget(found['budget'])} a run, {minutes:.0f} minutes of runs in all "
        f"({found['machine']}).", "",
        *_arms(claim, found["arms"]), "",
        *(line for e, entry in entries(claim, found)
          for line in _lines(claim, e, entry, found, beside or {})),
    ]  # fmt: skip
    if claim.looked:
        lines += ["", f"† Chosen when results had been seen: {claim.looked}."]
    if claim.reading:
        lines += ["", claim.reading]
    return "\n".join(lines) + "\n"


def _lines(
    claim: Claim,
    e: Expectation,
    entry: Mapping[str, Any],
    found: Mapping[str, Any],
    beside: Beside,
) -> list[str]:
    """One expectation's sentence, what of it was chosen late, and what another claim found."""
    lines = [f"- {_sentence(claim, e, entry, found)}"]
    if e.looked:
        lines.append(f"  † Chosen when results had been seen: {e.looked}.")
    return lines + [f"  {text}" for text in beside.get((claim.name, e.measure, e.sides), ())]


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


def _brief(claim: Claim, e: Expectation, entry: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    said = verdict(e, entry, found["arms"])
    return f"{e.measure}: {e.sides}: **{said}**{_mark(claim, e)}"


def _mark(claim: Claim, e: Expectation) -> str:
    return " †" if claim.looked or e.looked else ""


def _sentence(
    claim: Claim, e: Expectation, entry: Mapping[str, Any], found: Mapping[str, Any]
) -> str:
    """An expectation, the numbers, the verdict."""
    said = f"`{e.measure}`, {e.more} {'as much as' if e.alike else 'more than'} {e.than}: "
    called = verdict(e, entry, found["arms"])
    mark = _mark(claim, e)
    if "difference" not in entry:
        return f"{said}**{called}**{mark}."
    bound = _margin(e, found) if e.alike else f"expected {_amount(e.size, e)}"
    interval = f"{_amount(entry['low'], e)} to {_amount(entry['high'], e)}"
    smallest = entry["smallest_visible"]  # None where so few seeds could show nothing
    visible = "nothing" if smallest is None else _amount(smallest, e)
    return (
        f"{said}{_amount(entry['difference'], e, sign=True)} ({interval}, "
        f"p = {shown_p(entry['p'])}; {bound}; smallest visible {visible}): **{called}**{mark}."
    )


def _margin(e: Expectation, found: Mapping[str, Any]) -> str:
    """How far apart arms that are alike may be, and how far what should differ is."""
    distance = _amount(contrast(e, found["arms"]), e)
    named = f"{e.contrast} is {distance} away" if isinstance(e.contrast, str) else f"not {distance}"
    return f"alike means within ±{_amount(e.size, e)}, {named}"


def _amount(value: float, e: Expectation, *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if e.relative:
        return f"{100 * value:{plus}.1f} %"
    if _is_share(e.measure):
        return f"{100 * value:{plus}.1f} points"
    return f"{value:{plus}.3g}"
