"""A replay's figures as rows of tables, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.losses.measuring import RARE
from groupwise.watch.display import visible

LEGEND = (
    "groups and tokens that it learns from; silent: tokens without a weight; clipped, and rare "
    "ones among the clipped; +clip, −clip: tokens that it clips and the run does not, and the "
    "other way round; turned: pushed the other way than in the run; on rare: the share of all "
    "weight; cosine and norm: its weights per token beside the run's"
)
ANGLES = {
    "cosine": "cosine",
    "norms": "norm",
    "parameter_cosine": "cos ∇θ",
    "parameter_norms": "norm ∇θ",
    "moved_parameter_cosine": "cos ∇θ*",
    "moved_parameter_norms": "norm ∇θ*",
}
Table = tuple[Sequence[str], list[Sequence[str]]]


def scope(found: Mapping[str, Any]) -> str:
    steps, run = found["steps"], found["methods"][0]
    which = (
        f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    )
    return (
        f"{which}: {run['tokens']:,.0f} tokens of {run['groups']:,.0f} groups that were learned "
        f"from. run is its own recipe, {run['recipe']['name']}. Tokens below a probability of "
        f"{RARE} are rare."
    )


def methods(found: Mapping[str, Any]) -> Table:
    head = ["method", "groups", "tokens", "silent", "clipped", "rare", "+clip", "−clip", "turned",
            "on rare"]  # fmt: skip
    names, titles = _angles(found)
    return [*head, *titles], [_method(each, names) for each in found["methods"]]


def _angles(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the figures of angles that were computed, and their names."""
    there = [name for name in ANGLES if name in found["methods"][0]]
    return there, [ANGLES[name] for name in there]


def _method(each: Mapping[str, Any], angles: Sequence[str]) -> Sequence[str]:
    learned, weight = each["learned"], each["weight"]
    return [
        each["name"],
        f"{each['groups']:,.0f}",
        f"{learned:,.0f}",
        share(each["silent"], each["tokens"]),
        share(each["clipped"], learned),
        share(each["clipped_rare"], each["clipped"]),
        f"{each['newly_clipped']:,.0f}",
        f"{each['no_longer_clipped']:,.0f}",
        share(each["reversed"], each["tokens"]),
        share(each["weight_rare"], weight),
        *(figure(each[name]) for name in angles),
    ]


def pairs(found: Mapping[str, Any]) -> Table:
    names, titles = _angles(found)
    rows: list[Sequence[str]] = [
        [f"{pair['a']} | {pair['b']}", *(figure(pair[name]) for name in names)]
        for pair in found["pairs"]
    ]
    return ["methods", *titles], rows


def rare(found: Mapping[str, Any], most: int) -> Table:
    """Return a column for each method: the token's weight, or that it is clipped."""
    names = [each["name"] for each in found["methods"]]
    head = ["step/group/sample/token", "token", "probability", *names]
    rows: list[Sequence[str]] = []
    for token in found["rare_tokens"][:most]:
        place = "/".join(str(token[key]) for key in ("step", "group", "sample", "token"))
        shown = [_treated(token["methods"][name]) for name in names]
        rows.append([place, spelled(token["text"]), f"{token['probability']:.2g}", *shown])
    return head, rows


def _treated(token: Mapping[str, Any]) -> str:
    if token["clipped"]:
        return f"clipped at {token['ratio']:.2f}"
    return "0" if token["weight"] == 0 else f"{token['weight']:+.2g}"


def recipes(found: Mapping[str, Any]) -> Table:
    kinds = [kind for kind in found["methods"][0]["recipe"] if kind != "name"]
    differing = [
        kind for kind in kinds if len({each["recipe"][kind] for each in found["methods"]}) > 1
    ]
    rows: list[Sequence[str]] = [
        [each["name"], *(each["recipe"][kind] or "none" for kind in differing)]
        for each in found["methods"]
    ]
    return ["method", *differing], rows


def spelled(piece: str) -> str:
    """Return a token's text on one line, with visible spaces."""
    return visible(piece).replace("\n", "⏎").replace("\t", "→").replace(" ", "·")[:24]


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def share(part: float, whole: float) -> str:
    return "–" if not whole else f"{100 * part / whole:.1f} %"


def lines(rows: Table) -> list[str]:
    """Return aligned columns; the first ones are words, the rest figures."""
    head, body = rows
    widths = [max(len(row[at]) for row in (head, *body)) for at in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *body)
    ]
