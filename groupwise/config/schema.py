"""A JSON schema of configurations, for editors that complete and check TOML while one types.

It knows names, types, ranges and choices. What one setting means for another is for `load`.
"""

from __future__ import annotations

import math
import re
import types
import typing
from dataclasses import is_dataclass
from typing import Annotated, Any, Literal

from groupwise.config.fields import Config, Forms
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import FIELDS
from groupwise.config.writing import comments
from groupwise.methods.slots import KINDS, Range
from groupwise.recipes import RECIPES

NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """Return the schema of a configuration, and of a pipeline, whose stages are such tables."""
    run = _record(Config)["properties"]
    model = {"anyOf": [{"type": "string"}, run["model"]]}  # a stage may name it alone
    stage = {"type": "object", "properties": {**run, "model": model}}  # and what chains stages
    return {
        "$schema": DIALECT,
        "title": "groupwise",
        "type": "object",
        "properties": {
            **run,
            "name": {"type": "string", "description": "of a pipeline: what its folder is called"},
            "stage": {"type": "array", "items": stage},
        },
        "additionalProperties": {"type": "object"},  # of a pipeline: settings of one stage
    }


def _record(kind: type, table: str = "") -> dict[str, Any]:
    """Return the schema of a table: its entries, and no others."""
    said, made = comments(kind), {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        key = f"{table}.{name}" if table else name
        if key == "recipe":
            made[name] = _recipe()
        elif is_dataclass(hint) and not table:
            made[name] = _record(typing.cast(type, hint), name)
        else:
            made[name] = {**value(hint), "description": said.get(name, "")}
            if key in FIELDS:
                made[name]["default"] = _plain(DEFAULTS[key])
    return {"type": "object", "additionalProperties": False, "properties": made}


def _recipe() -> dict[str, Any]:
    """Return the schema of a recipe: a name, or a table of a name and what is changed of it."""
    name = {"anyOf": [{"enum": sorted(RECIPES)}, {"type": "string"}]}  # or file.py:name
    slot = {"type": ["string", "object", "array"]}
    kinds = [kind for kind in KINDS if kind != "control"]  # which stand in train.coefs
    slots = dict.fromkeys((*kinds, "source"), slot)
    return {"anyOf": [name, {"type": "object", "properties": {"name": name, **slots}}]}


def value(hint: Any) -> dict[str, Any]:
    """Return the schema of what a setting of this type may hold."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [value(each) for each in args]}
    if origin is Annotated:
        kind, bounds = args
        if isinstance(bounds, Forms):
            return _forms(bounds)
        return {"type": NAMES[kind], **_bounds(bounds)}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        return {"type": "array", "items": value(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": value(args[1])}
    if is_dataclass(hint):
        return _record(typing.cast(type, hint), "entry")
    return {"type": NAMES[hint]} if hint in NAMES else {}


def _bounds(bounds: Range) -> dict[str, float]:
    lowest = "exclusiveMinimum" if bounds.above else "minimum"
    ends = {lowest: bounds.low, "maximum": bounds.high}
    return {name: end for name, end in ends.items() if math.isfinite(end)}


def _forms(forms: Forms) -> dict[str, Any]:
    """Return words as choices; those with numbers as a pattern."""
    numbered = "|".join(
        re.escape(word) + ":[^:]+" * len(numbers) for word, *numbers in forms.numbered
    )
    words = {"enum": list(forms.words)}
    return (
        {"anyOf": [words, {"type": "string", "pattern": f"^({numbered})$"}]} if numbered else words
    )


def _plain(thing: Any) -> Any:
    """Return a default as JSON has it."""
    if isinstance(thing, tuple):
        return [_plain(each) for each in thing]
    return dict(thing) if isinstance(thing, dict) else thing
