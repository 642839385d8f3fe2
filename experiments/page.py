"""docs/claims.md: every claim beside what was measured."""

# ruff: noqa: E501 - a paragraph of the page is one line

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.run import Claim

RESULTS = Path(__file__).parent / "results"
INTRO = """# Claims of the papers, measured

<!-- Written by `python -m experiments.run --page` from experiments/. Do not edit. -->

Small experiments, each a file of experiments/ that says what is claimed, by whom, which arms show it and which direction and size are expected. `python -m experiments.run NAME` runs it ([compare](compare.md): equal starts, prompts and random numbers), in minutes on two CPU cores unless it says otherwise; the same command goes on where it was stopped. What came out stands here whatever it is.

A verdict holds for this model, task and budget: a transformer of two layers that adds digits is no proof about a model of 32 billion parameters. It says whether the mechanism acts where nothing else differs.

- **as claimed**, **the opposite**: the difference is separable (p < 0.05, two-sided, paired by seed, and by task for accuracy; Holm over the expectations of a claim). Two arms are alike, as claimed, where the whole interval is within the bounds that are named; a separable difference that may be larger is the opposite.
- **not seen**: not separable, though a difference of the expected size would have been seen with a chance of 80 %. That size is the published one, or a careful reading of a plot, as each claim says.
- Intervals are of 95 %. Measures other than accuracy are means over the last tenth of the steps ([metrics](metrics.md)). Shares of the second arm's mean are in percent with a sign.
"""


def whole(claims: Sequence[Claim]) -> str:
    found = [(claim, result(claim.name)) for claim in claims]
    rows = ["| claim | verdicts |", "|---|---|"]
    for claim, measured in found:
        if measured:
            said = "; ".join(_brief(entry) for entry in measured["expectations"])
            rows.append(f"| [{claim.name}](#{claim.name}) | {said} |")
        else:
            rows.append(f"| {claim.name} | not run yet |")
    parts = [INTRO, "\n".join(rows) + "\n"]
    parts += [section(claim, measured) for claim, measured in found if measured]
    return "\n".join(parts)


def result(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


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
        *(f"- {_sentence(entry)}" for entry in found["expectations"]),
    ]  # fmt: skip
    if "scaling" in found:
        lines += ["", *_scaling(found["scaling"])]
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
    start = next(iter(found.values()))["start"]
    return [*lines, "", f"Accuracy before training: {100 * start:.1f} %. ±: one standard error."]


def _cell(estimate: Mapping[str, Any] | None, measure: str) -> str:
    if estimate is None:
        return "–"
    mean, error = estimate["mean"], estimate["stderr"]
    if measure in ("accuracy", "area"):
        return f"{100 * mean:.1f} % ± {100 * error:.1f}"
    return f"{mean:.4g} ± {error:.2g}"


def _brief(entry: Mapping[str, Any]) -> str:
    sign = "=" if entry["alike"] else ">"
    return f"{entry['measure']}: {entry['more']} {sign} {entry['than']}: **{entry['verdict']}**"


def _sentence(entry: Mapping[str, Any]) -> str:
    """An expectation, the numbers, the verdict."""
    expected = "as much as" if entry["alike"] else "more than"
    said = f"`{entry['measure']}`, {entry['more']} {expected} {entry['than']}: "
    if "difference" not in entry:
        return f"{said}**{entry['verdict']}**."
    size = _amount(entry["size"], entry)
    bound = f"alike means within ±{size}" if entry["alike"] else f"expected {size}"
    interval = f"{_amount(entry['low'], entry)} to {_amount(entry['high'], entry)}"
    visible = _amount(entry["smallest_visible"], entry)
    return (
        f"{said}{_amount(entry['difference'], entry, sign=True)} ({interval}, "
        f"p = {_p(entry['p'])}; {bound}; smallest visible {visible}): **{entry['verdict']}**."
    )


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-4 else f"{value:.0e}"


def _amount(value: float, entry: Mapping[str, Any], *, sign: bool = False) -> str:
    plus = "+" if sign else ""
    if entry["relative"]:
        return f"{100 * value:{plus}.1f} %"
    if entry["measure"] in ("accuracy", "area"):
        return f"{100 * value:{plus}.1f} points"
    return f"{value:{plus}.3g}"


def _scaling(found: Mapping[str, Any]) -> list[str]:
    head = "".join(f" | {size} tokens" for size in found["budgets"])
    lines = [f"| forced to answer after{head} |", f"|---{'|---' * len(found['budgets'])}|"]
    for when in ("before", "after"):
        cells = [f"{100 * x['mean']:.1f} % ± {100 * x['stderr']:.1f}" for x in found[when]]
        lines.append(f"| {when} training | {' | '.join(cells)} |")
    return lines
