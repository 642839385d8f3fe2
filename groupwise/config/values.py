"""Single values: the settings that exist, and what each may hold."""

from __future__ import annotations

import ast
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal

from groupwise.config.fields import Config, Forms
from groupwise.errors import ConfigError, nearest
from groupwise.methods.slots import NOT_LITERAL, Range


def _leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if is_dataclass(hint):
            yield from _leaves(typing.cast(type, hint), f"{prefix}{name}.")
        elif prefix + name != "recipe":  # a tree of its own
            yield prefix + name, hint


# Dotted name -> type, in the order of config/fields.py; `recipe` stands apart.
FIELDS: dict[str, Any] = dict(_leaves(Config))
TABLES = {name.partition(".")[0] for name in FIELDS if "." in name}
# Fields whose entries the user names: reward.parts, data.options.
OPEN = tuple(name for name, hint in FIELDS.items() if typing.get_origin(hint) is dict)


def flat(config: Config) -> dict[str, Any]:
    """Return the value of every field, by its dotted name."""
    found: dict[str, Any] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in TABLES:
            found |= {f"{item.name}.{key}": each for key, each in vars(value).items()}
        elif item.name != "recipe":
            found[item.name] = value
    return found


class Raw(str):
    """A value as typed on a command line: its type depends on the field."""

    def read(self) -> Any:
        """Read a TOML value, a Python literal, or else the text itself."""
        try:
            found = tomllib.loads(f"value = {self}")
        except tomllib.TOMLDecodeError:
            found = {}
        if found.keys() == {"value"} and isinstance(
            found["value"], str | bool | int | float | list | dict
        ):
            return found["value"]
        try:
            return ast.literal_eval(self.strip())
        except NOT_LITERAL:
            return str(self)


def checked(where: str, hint: Any, value: Any) -> Any:
    """Return the value as its field holds it, or raise an error that says what the field holds."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return checked(where, _form(where, args, value), value)
    if is_dataclass(hint):
        return _record(where, typing.cast(type, hint), value)
    kind, bounds = args if origin is Annotated else (hint, Range())
    texts = kind is str or origin is Literal
    if isinstance(value, Raw):
        typed = value.read()
        value = typed if isinstance(typed, str) or not texts else str(value)
    if origin is Literal:
        return _choice(where, args, value)
    if kind in (int, float):
        return _number(where, kind, bounds, value)
    if kind is str:
        return _text(where, bounds if isinstance(bounds, Forms) else None, value)
    if kind is bool:
        return _of_type(where, bool, "true or false", value)
    if origin is tuple:
        _of_type(where, (list, tuple), 'a list such as ["a", "b"]', value)
        return tuple(checked(where, args[0], each) for each in value)
    if origin is dict:
        _of_type(where, Mapping, "a table such as { name = 1.0 }", value)
        return {str(key): checked(f"{where}.{key}", args[1], each) for key, each in value.items()}
    return _plain(where, value)


def _form(where: str, forms: tuple[Any, ...], value: Any) -> Any:
    """Choose the form of a setting that has several: a table, a list, a word, or the first."""
    if isinstance(value, Raw):
        value = value.read()
    if isinstance(value, bool) and bool in forms:
        return bool
    words = [form for form in forms if typing.get_origin(form) is Literal]
    if words and isinstance(value, str):
        options = typing.get_args(words[0])
        if value not in options:
            listed = ", ".join(map(repr, options))
            raise ConfigError(f"{where}={value!r} is unknown. Give a number, or {listed}.")
        return words[0]
    records = [form for form in forms if is_dataclass(form)]
    if records and (isinstance(value, Mapping) or is_dataclass(value)):
        return records[0]
    for kind, given in ((dict, Mapping), (tuple, (list, tuple))):
        fitting = [form for form in forms if typing.get_origin(form) is kind]
        if fitting and isinstance(value, given):
            return fitting[0]
    return forms[0]


def _record(where: str, kind: type, value: Any) -> Any:
    """Read a table whose entries are the fields of a record."""
    if isinstance(value, kind):
        return value
    hints = typing.get_type_hints(kind, include_extras=True)
    _of_type(where, Mapping, f"a table with {', '.join(hints)}", value)
    for name in value:
        if name not in hints:
            raise ConfigError(f"{where} has no entry {name!r}. {nearest(name, hints)}")
    return kind(**{name: checked(f"{where}.{name}", hints[name], x) for name, x in value.items()})


def _shown(value: Any) -> str:
    return "a table (quote keys that have dots)" if isinstance(value, Mapping) else repr(value)


def _of_type(where: str, kinds: Any, words: str, value: Any) -> Any:
    if not isinstance(value, kinds):
        raise ConfigError(f"{where} must be {words}, got {_shown(value)}.")
    return value


def _choice(where: str, options: tuple[Any, ...], value: Any) -> Any:
    if value not in options:
        listed = ", ".join(map(repr, options))
        raise ConfigError(f"{where}={value!r} is unknown. Choose one of {listed}.")
    return value


def _number(where: str, kind: type, bounds: Range, value: Any) -> Any:
    words = "a whole number" if kind is int else "a number"
    limits = "" if bounds == Range() else f" {bounds}"
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ConfigError(f"{where} must be {words}{limits}, got {_shown(value)}.")
    try:
        number = kind(value)
        finite = math.isfinite(number)  # a whole number of 400 digits is not
    except OverflowError:
        finite = False
    if not finite or not bounds.admits(number):
        raise ConfigError(f"{where}={value!r} is out of range: it must be {words}{limits}.")
    return number


def _text(where: str, forms: Forms | None, value: Any) -> str:
    text: str = _of_type(where, str, "a text", value)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{where}={text!r} is no valid text: it can't be written down.") from None
    if forms is not None and not forms.admits(text):
        meant = forms.nearest(text)
        hint = f"Did you mean {meant!r}? It is" if meant else "Choose"
        raise ConfigError(f"{where}={text!r} is unknown. {hint} one of {forms}.")
    return str(text)


def _plain(where: str, value: Any) -> Any:
    """Return a value that TOML can hold."""
    if isinstance(value, str):
        return _text(where, None, value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(where, type(value), Range(), value)
    if isinstance(value, list | tuple):
        return [_plain(where, each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{where}.{key}", each) for key, each in value.items()}
    raise ConfigError(
        f"{where}={value!r} can't be written down. Use texts, numbers, booleans, lists, tables."
    )
