"""From a file of another tool to the recipe that computes the same loss, as data and as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from groupwise.explain.explain import slot_differences
from groupwise.explain.peers import openrlhf, prime_rl, trl, trl_rows, verl
from groupwise.explain.peers.answer import Answer, Settings, configured, rest, same_loss
from groupwise.explain.peers.reading import PeerConfig, read
from groupwise.explain.render import bullets
from groupwise.methods.registry import RECIPES

MOST = 12  # settings beside the loss that are listed before the rest is counted


def translated(path: Path) -> list[dict[str, Any]]:
    """Return the answer to every configuration in a file."""
    return [_answered(config) for config in read(path)]


def _answered(config: PeerConfig) -> dict[str, Any]:
    theirs, make = reader(config)
    answer = make(theirs)
    recipe = configured(answer).recipe
    paper = RECIPES[answer.paper]
    found = rest(theirs.left())
    unread = {name: said for name, said in config.unread.items() if name in theirs.defaults}
    return {
        "tool": answer.version,
        "where": config.where,
        "exact": answer.whole and not unread,
        "same_as": same_loss(recipe),
        "settings": dict(answer.settings),
        "paper": {"recipe": paper.name, "id": paper.about.paper},
        "differs_from_paper": {
            kind: {"theirs": apart["b"], "paper": apart["a"]}
            for kind, apart in slot_differences(paper, recipe).items()
            if kind != "schedule"
        },
        "missing": dict(answer.missing),
        "unread": unread,
        "notes": list(answer.differs),
        "elsewhere": dict(found.elsewhere),
        "nowhere": dict(found.nowhere),
        "unknown": list(found.unknown),
    }


TRL = {
    "GRPOConfig": (trl.GRPO, trl.grpo),
    "RLOOConfig": (trl.RLOO, trl.rloo),
    "SFTConfig": (trl_rows.SFT, trl_rows.sft),
    "DPOConfig": (trl_rows.DPO, trl_rows.dpo),
}


def reader(config: PeerConfig) -> tuple[Settings, Callable[[Settings], Answer]]:
    """Return a configuration over its tool's defaults, and who answers it."""
    if config.tool == "trl":
        defaults, make = TRL[config.method]
        return Settings(config, defaults), make
    if config.tool == "openrlhf":
        renamed = {openrlhf.EARLIER.get(name, name): x for name, x in config.values.items()}
        named = PeerConfig(config.tool, config.where, renamed, config.unread)
        return Settings(named, openrlhf.DEFAULTS), openrlhf.openrlhf
    if config.tool == "verl":
        return Settings(config, verl.DEFAULTS), verl.verl
    return Settings(config, prime_rl.DEFAULTS), prime_rl.prime_rl


def translation_text(data: dict[str, Any], width: int) -> str:
    """Return an answer for the terminal: a configuration, then what differs and what is missing."""
    lines = [f"# {data['tool']}: {data['where']}"]
    names = [name for name in data["same_as"] if "@" not in name] or data["same_as"]
    lines.append(
        f"# the loss of recipe {', '.join(names)}"
        if names
        else "# a loss without a name of its own"
    )
    lines += [f"{name} = {_toml(value)}" for name, value in data["settings"].items()]
    paper = data["paper"]
    apart = [
        f"{kind}: {x['theirs'] or 'none'}; the paper has {x['paper'] or 'none'}"
        for kind, x in data["differs_from_paper"].items()
    ]
    head = f"Its loss differs from {paper['recipe']} ({paper['id']}):"
    alike = ["", f"Its loss is that of {paper['recipe']} ({paper['id']})."]
    lines += bullets(head, apart, width) or alike
    lines += bullets("Not the same here:", _pairs(data["missing"]), width)
    lines += bullets(
        "Only a run could tell, so the tool's default stands above:", _pairs(data["unread"]), width
    )
    lines += bullets("To know:", data["notes"], width)
    elsewhere = [f"{theirs} is {ours} here" for theirs, ours in data["elsewhere"].items()]
    lines += bullets("Set these yourself (docs/migrate.md):", _first(elsewhere), width)
    lines += bullets("Has no counterpart:", _first(_pairs(data["nowhere"])), width)
    unknown = [", ".join(_first(data["unknown"]))] if data["unknown"] else []
    lines += bullets("Not known, and not looked at:", unknown, width)
    return "\n".join(lines)


def _first(items: list[str]) -> list[str]:
    """Return the first of a long list, and how many more there are."""
    more = len(items) - MOST
    return [*items[:MOST], f"and {more} more"] if more > 0 else items


def _pairs(table: dict[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in table.items()]


def _toml(value: Any) -> str:
    """Write a value as it stands in a configuration: numbers are bare, texts in quotes."""
    try:
        float(str(value))
    except ValueError:
        return f'"{value}"'
    return str(value)
