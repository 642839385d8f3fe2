"""A configuration of another tool as a commented TOML of ours, and what it leaves to the user."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from groupwise.config import Config, load
from groupwise.config.names import ELSEWHERE
from groupwise.config.values import TABLES
from groupwise.config.writing import toml
from groupwise.explain.peers.answer import Answer, Rest, rest, same_loss
from groupwise.explain.peers.beside import Beside, beside
from groupwise.explain.peers.extracted import extracted
from groupwise.explain.peers.reading import PeerConfig, read
from groupwise.explain.peers.translate import reader

WIDTH = 98
# Written even where it is our default: what a reader looks for first.
ALWAYS = ("prompts_per_step", "group_size", "steps", "epochs", "engine.max_tokens",
          "optim.learning_rate")  # fmt: skip


@dataclass(frozen=True)
class Migrated:
    """One configuration in our words."""

    where: str  # it was read
    text: str  # of the TOML
    functions: tuple[str, ...]  # reward functions of the script itself
    fill_in: Mapping[str, str]  # settings that the file does not say -> what to write there
    exact: bool  # nothing of the loss is left out


def migrated(path: Path, rewards: str) -> list[Migrated]:
    """Return every configuration of a file; its reward functions are looked for in `rewards`."""
    return [_one(config, path, rewards) for config in read(path)]


def reward_module(path: Path, found: Sequence[Migrated]) -> str:
    """Return a module of the script's own reward functions; "" where it has none."""
    names = list(dict.fromkeys(name for each in found for name in each.functions))
    return extracted(path.read_text("utf-8-sig"), names, str(path)) if names else ""


def _one(config: PeerConfig, path: Path, rewards: str) -> Migrated:
    theirs, make = reader(config)
    answer = make(theirs)
    found = beside(config, answer, path)
    own = f"{path.name}:"
    if "reward.parts" in found.settings:
        found.settings["reward.parts"] = {
            name.replace(own, f"{rewards}:", 1) if name.startswith(own) else name: weight
            for name, weight in found.settings["reward.parts"].items()
        }
    left = {name: x for name, x in theirs.left().items() if name not in found.read}
    unread = {name: said for name, said in config.unread.items() if name in theirs.defaults}
    said = {**answer.settings, **found.settings}
    kept = _telling(said, config, found)
    lines = [
        *_head(config, answer, said, unread),
        *_block("Fill in:", _pairs(found.fill_in)),
        "",
        *_settings(kept, _named(config, answer, found), found.fill_in),
        *_foot(answer, found, unread, rest(left)),
    ]
    text = "\n".join(lines) + "\n"
    load(tomllib.loads(text))  # what is written can be read
    exact = answer.whole and not unread
    return Migrated(config.where, text, tuple(found.functions), found.fill_in, exact)


# --- which settings, and what each was called ------------------------------------------------


def _telling(said: Mapping[str, Any], config: PeerConfig, found: Beside) -> dict[str, Any]:
    """Leave out what the file does not say and is the same here without a word."""
    usual = load({"recipe": {"name": said["recipe.name"]}})
    ours = load(_tree(said))
    given = {name.rpartition(".")[2] for name in config.values}
    kept = {}
    for name, value in said.items():
        table, _, key = name.rpartition(".")
        if table == "recipe" and key != "name":
            same = usual.recipe.of(key) == ours.recipe.of(key)
        else:
            same = name != "recipe.name" and _read(usual, name) == _read(ours, name)
        told = name in found.names or name in found.fill_in or name in ALWAYS or key in given
        told = told or any(ELSEWHERE.get(leaf) == name for leaf in given)
        if not same or (told and table != "recipe"):
            kept[name] = value
    return kept


def _read(config: Config, name: str) -> Any:
    at: Any = config
    for part in name.split("."):
        at = getattr(at, part)
    return at


def _named(config: PeerConfig, answer: Answer, found: Beside) -> dict[str, str]:
    """Return what each setting follows from in the file, or whose default it is.

    What follows from a name is what another answer would be without it.
    """
    follows: dict[str, list[str]] = {ours: [] for ours in answer.settings}
    for name in config.values:
        rest_of_it = {other: x for other, x in config.values.items() if other != name}
        theirs, make = reader(replace(config, values=rest_of_it))
        without = make(theirs).settings
        for ours, value in answer.settings.items():
            alike = ELSEWHERE.get(name.rpartition(".")[2]) == ours
            if alike or without.get(ours) != value:
                follows[ours].append(name)
    default = f"the default of {answer.version}"
    names = {
        ours: ", ".join(theirs) or ("" if ours.startswith("recipe.") else default)
        for ours, theirs in follows.items()
    }
    return names | found.names


# --- the text ---------------------------------------------------------------------------------


def _head(
    config: PeerConfig, answer: Answer, said: Mapping[str, Any], unread: Mapping[str, str]
) -> list[str]:
    names = same_loss(load(_tree(said)).recipe)
    alike = [name for name in names if "@" not in name] or names
    own = f"of no name: {said['recipe.name']} with what [recipe] says"
    loss = f"that of recipe {', '.join(alike)}" if alike else own
    if answer.missing or unread:
        loss += "; not all of theirs could be said, see below"
    return [
        f"# {config.where}, read for {answer.version}; nothing of it was run.",
        f"# The loss is {loss}.",
        "# `groupwise train THIS.toml --dry-run` says what is missing and what would run.",
    ]


def _settings(
    said: Mapping[str, Any], names: Mapping[str, str], fill_in: Mapping[str, str]
) -> Iterator[str]:
    """Write settings by table, in the order of the page, with their names over there."""
    top = {name: value for name, value in said.items() if "." not in name}
    tables = ["recipe", *(name for name in Config.__dataclass_fields__ if name in TABLES)]
    for name, value in top.items():
        yield _line(name, value, names.get(name, ""), name in fill_in)
    for table in tables:
        inside = {name: x for name, x in said.items() if name.partition(".")[0] == table}
        if not inside:
            continue
        yield ""
        if table == "reward":
            yield "[reward.parts]"
            marked = "reward.parts" in fill_in
            for part, weight in inside.pop("reward.parts", {}).items():
                yield _line(toml(part), weight, names.get("reward.parts", ""), marked)
            continue
        yield f"[{table}]"
        for name, value in inside.items():
            key = name.removeprefix(f"{table}.")
            yield _line(key, value, names.get(name, ""), name in fill_in)


def _line(key: str, value: Any, comment: str, marked: bool) -> str:
    comment = "FILL IN, see above" if marked else "" if comment == key else comment
    written = f"{key} = {_written(value)}"
    beside = f"{written:<39} # {comment}"
    if len(beside) > WIDTH:
        return f"# {comment}\n{written}"
    return beside if comment else written


def _written(value: Any) -> str:
    """Write a value: numbers that are kept as text, to the digit, stand bare."""
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return toml(value)
        return value
    return toml(value)


def _foot(answer: Answer, found: Beside, unread: Mapping[str, str], left: Rest) -> Iterator[str]:
    alone = {name: f"{ours} here" for name, ours in left.elsewhere.items()}
    blocks = (
        ("Not the same here:", _pairs(answer.missing)),
        ("Only a run could tell, so the tool's default stands above:", _pairs(unread)),
        ("To look at:", found.look_at),
        ("To know:", answer.differs),
        ("Set by hand where it matters (docs/migrate.md):", _pairs(alone)),
        ("Has no counterpart, and needs none:", _by_reason(left.nowhere)),
        ("Not known, and not looked at:", [", ".join(left.unknown)] if left.unknown else []),
    )
    for head, items in blocks:
        if block := _block(head, items):
            yield ""
            yield from block


def _block(head: str, items: list[str]) -> list[str]:
    """Write a list as comments; nothing where it is empty."""
    lines = [f"# {head}"] if items else []
    for item in items:
        lines += textwrap.wrap(
            item, WIDTH, initial_indent="#   - ", subsequent_indent="#     ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines


def _pairs(table: Mapping[str, str]) -> list[str]:
    return [f"{name}: {why}" for name, why in table.items()]


def _by_reason(table: Mapping[str, str]) -> list[str]:
    """Name together what has one reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in table.items():
        reasons.setdefault(why, []).append(name)
    return [f"{', '.join(names)}: {why}" for why, names in reasons.items()]


def _tree(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as the tables that a file would have."""
    return tomllib.loads("\n".join(f"{name} = {_written(value)}" for name, value in said.items()))
