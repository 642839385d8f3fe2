"""A configuration as TOML that `load` reads back to an equal one, with every field's comment."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from groupwise.config.fields import Config
from groupwise.config.values import TABLES
from groupwise.methods.method import Method


def text(config: Config) -> str:
    """Return the resolved configuration: what was set, and the default of everything else."""
    lines = [*_lines(config), "", "[recipe]", f"name = {toml(_name(config.recipe))}"]
    lines += [f"{kind} = {toml(slots)}" for kind, slots in config.recipe.text().items()]
    for name in (key for key in vars(config) if key in TABLES):
        table = getattr(config, name)
        lines += ["", f"[{name}]  # {inspect.getdoc(table)}", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Any) -> list[str]:
    said = comments(table.__class__)
    return [
        f"{name} = {toml(each)}" + (f"  # {said[name]}" if name in said else "")
        for name, each in vars(table).items()
        if name != "recipe" and not is_dataclass(each)
    ]


def toml(thing: Any) -> str:
    """Write one value in TOML."""
    if isinstance(thing, bool):
        return "true" if thing else "false"
    if isinstance(thing, str):  # TOML's escapes are JSON's, and it wants one more
        return json.dumps(thing, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(toml, thing))}]"
    if isinstance(thing, Mapping):
        inside = ", ".join(f"{_key(key)} = {toml(each)}" for key, each in thing.items())
        return f"{{ {inside} }}" if inside else "{}"
    if is_dataclass(thing) and not isinstance(thing, type):  # what was said in it
        usual = vars(type(thing)())
        return toml({key: each for key, each in vars(thing).items() if each != usual[key]})
    return repr(thing)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def _name(recipe: Method) -> str:
    """Return the recipe's name, with the file that its slots come from if they are the user's."""
    for slot in recipe.slots():
        function = slot.definition.function
        if function.__module__.startswith("groupwise_plugin_"):
            return f"{function.__code__.co_filename}:{recipe.name}"
    return recipe.name


@cache
def comments(kind: type[Any]) -> dict[str, str]:
    """Return the comment of each field in config/fields.py, behind it or above it."""
    found: dict[str, str] = {}
    above = ""
    for line in inspect.getsource(kind).splitlines():
        comment = line.partition("# ")[2].strip()
        if line.strip().startswith("# "):
            above = f"{above} {comment}".strip()
        elif field := re.match(r"    (\w+): ", line):
            if comment or above:
                found[field[1]] = comment or above
            above = ""
    return found
