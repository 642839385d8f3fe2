"""docs/settings.md: every setting with its default, what it may hold and what it is for."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple

from groupwise.config.changes import resume_rule
from groupwise.config.fields import Config, Forms
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import FIELDS
from groupwise.config.writing import comments, toml
from groupwise.methods.slots import Range

INTRO = """# Settings

Everything about a run that can be chosen is a setting, and this page has them all: what each is
for, what it may be and what it is if you say nothing. To begin you need five or six of them, which
`groupwise init mine.toml` writes down for you with their meaning; come here when you want to change
one. `groupwise settings WORD` finds them in the terminal.

Made from `groupwise/config/fields.py` by `groupwise docs`.

A setting is written in a TOML file (`engine.max_tokens = 256`, or `max_tokens = 256` under
`[engine]`), on the command line (`engine.max_tokens=256`), or in Python
(`load_config("mine.toml", **{"engine.max_tokens": 256})`). Later ones go over earlier ones. A key
that does not exist, and a knob that the recipe ignores, are errors; a name from TRL or verl is
answered with the name here ([migrate.md](migrate.md)). `groupwise train mine.toml --dry-run`
prints all of them as they would be used, and what follows from them.

*Later* says whether the setting may be changed when a run goes on from its checkpoint; what is
changed is printed, and a change that can't be continued is refused.

The method is `recipe.name` (default: `grpo`), and what is changed in its slots: `recipe.gate.high =
0.3`, or `recipe.gate = "clip(low=0.2, high=0.3)"`. `groupwise explain NAME` and
[algorithms.md](algorithms.md) list the slots of each. Numbers may change later, functions may not.
"""
HEAD = ("setting", "default", "may be", "what it is", "later")


def settings_page() -> str:
    """Return the whole of docs/settings.md."""
    parts = [INTRO.rstrip()]
    for table, (title, rows) in _tables().items():
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *cells)]
        heading = f"## `[{table}]`" if table else "## The run"
        parts.append(f"{heading}\n\n{title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _tables() -> dict[str, tuple[str, list[tuple[str, ...]]]]:
    """Return each table's purpose and rows, by its name."""
    return {
        name: (inspect.getdoc(kind) or "", [_row(each) for each in settings_in(name, kind)])
        for name, kind in tables().items()
    }


def _row(each: SettingInWords) -> tuple[str, ...]:
    return (f"`{each.name}`", f"`{each.default}`", each.may_be, each.purpose, each.later)


def tables() -> dict[str, type]:
    """Return the record of each table by its name, the run's own under ""."""
    found: dict[str, type] = {"": Config}
    for name, kind in typing.get_type_hints(Config).items():
        if is_dataclass(kind):
            found[name] = typing.cast(type, kind)
    return found


class SettingInWords(NamedTuple):
    """A setting in words: as the page of all settings has it."""

    name: str
    default: str
    may_be: str
    purpose: str
    later: str  # whether it may be changed when a run goes on: yes or no


def settings_in(table: str, kind: type) -> Iterator[SettingInWords]:
    """Yield the settings of one table, in the order of config/fields.py."""
    said = comments(kind)
    for each in fields(kind):
        key = f"{table}.{each.name}" if table else each.name
        if key in FIELDS:
            later = "yes" if resume_rule(key)[0] else "no"
            may = may_be(FIELDS[key])
            yield SettingInWords(key, toml(DEFAULTS[key]), may, said[each.name], later)


def settings_with(words: Sequence[str]) -> list[SettingInWords]:
    """Return the settings that have all of these words in name or purpose: names first."""
    every = [each for name, kind in tables().items() for each in settings_in(name, kind)]

    def has(text: str) -> bool:
        return all(word.lower() in text.lower() for word in words)

    named = [each for each in every if has(each.name)]
    purposes = [each for each in every if each not in named and has(f"{each.name} {each.purpose}")]
    return named + purposes


def may_be(hint: Any) -> str:
    """Describe the values of a field in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(map(may_be, args)))
    if origin is Annotated:
        kind, bounds = args
        if isinstance(bounds, Forms):
            return ", ".join(
                [f"`{word}`" for word in bounds.words]
                + [f"`{pattern}`" for pattern in bounds.patterns]
            )
        return f"{may_be(kind)} {bounds}" if bounds != Range() else may_be(kind)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in args)
    if origin is tuple:
        return "a list"
    if origin is dict:
        return "a table"
    return {int: "a whole number", float: "a number", bool: "`true`, `false`"}.get(hint, "a text")
