"""Functions as tools: the schema that a policy is shown, and arguments that fit it.

Both are read from the function's types and docstring, so that they can't disagree.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from groupwise.errors import WorldError, nearest

SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):\s*$", re.M)
ENTRY = re.compile(r"^(\s*)(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
YES_NO = {"true": True, "false": False}


class Unfit(ValueError):
    """Arguments that a function does not take, said to the policy."""


def schema_of(function: Callable[..., Any], name: str = "") -> dict[str, Any]:
    """Return a function's schema as chat templates show it. Refuses one that says too little."""
    name = name or function.__name__
    text = inspect.getdoc(function) or ""
    if not text.strip():
        raise WorldError(
            f"The tool {name} has no docstring, and the policy is told by it what the tool does. "
            'Write one: """Return the sum of two numbers."""'
        )
    described = _described(text)
    properties, required = {}, []
    for key, (kind, default) in parameters_of(function, name).items():
        known = _schema(kind, f"{name}: {key}")
        if key in described:
            known["description"] = described[key]
        if default is inspect.Parameter.empty:
            required.append(key)
        elif default is None or isinstance(default, (str, int, float, bool, list, dict)):
            known["default"] = default
        properties[key] = known
    parameters = {"type": "object", "properties": properties, "required": required}
    about = " ".join(SECTION.split(text)[0].split())
    told = {"name": name, "description": about, "parameters": parameters}
    return {"type": "function", "function": told}


def parameters_of(function: Callable[..., Any], name: str) -> dict[str, tuple[Any, Any]]:
    """Return the type and the default of each parameter. Refuses what no call can be made with."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise WorldError(f"The types of the tool {name} can't be read: {error}.") from None
    found = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise WorldError(
                f"The tool {name} takes {parameter}: a policy can't be told what that may be. Give "
                "each argument a name and a type."
            )
        if key not in hints:
            raise WorldError(
                f"The argument {key} of the tool {name} has no type, so no schema can be made of "
                f"it. Write {key}: str, or whatever it is."
            )
        found[key] = (hints[key], parameter.default)
    return found


def fitted(
    function: Callable[..., Any], given: Mapping[str, Any], name: str = ""
) -> dict[str, Any]:
    """Return the arguments as the function's types have them. Raises `Unfit`."""
    known = parameters_of(function, name or function.__name__)
    for key in given:
        if key not in known:
            raise Unfit(f"there is no argument {key!r}. {nearest(key, known) if known else ''}")
    for key, (_, default) in known.items():
        if default is inspect.Parameter.empty and key not in given:
            raise Unfit(f"the argument {key!r} is missing")
    return {key: fit(value, known[key][0], key) for key, value in given.items()}


# --- schemas


def _described(text: str) -> dict[str, str]:
    """Return what the section Args of a docstring says of each argument."""
    parts = SECTION.split(text)
    found: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if not title.startswith(("Arg", "Param")):
            continue
        last, depth = "", None
        for line in body.splitlines():
            entry = ENTRY.match(line)
            if entry and (depth is None or len(entry[1]) <= depth):
                depth, last = len(entry[1]), entry[2]
                found[last] = entry[3].strip()
            elif last and line.strip():
                found[last] = f"{found[last]} {line.strip()}".strip()
    return found


def _schema(kind: Any, place: str) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return {"type": PLAIN[kind]}
    if kind is Any:
        return {}
    if origin is Annotated:
        notes = [note for note in inner[1:] if isinstance(note, str)]
        return {**_schema(inner[0], place), **({"description": notes[0]} if notes else {})}
    if origin is Literal:
        return {"enum": list(inner)}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [each.value for each in kind]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(each, place) for each in inner]}
    if kind in (list, tuple, set, Sequence) or origin in (list, tuple, set, Sequence):
        items = [each for each in get_args(kind) if each is not ...]
        one = len(set(map(str, items))) == 1
        return {"type": "array", **({"items": _schema(items[0], place)} if one else {})}
    if kind in (dict, Mapping) or origin in (dict, Mapping):
        values = {"additionalProperties": _schema(inner[1], place)} if inner else {}
        return {"type": "object", **values}
    made = _record(kind)
    if made is not None:
        names = {key: _schema(each, f"{place}.{key}") for key, (each, _) in made.items()}
        needed = [key for key, (_, required) in made.items() if required]
        return {"type": "object", "properties": names, "required": needed}
    raise WorldError(
        f"{place} has the type {_shown(kind)}, which no schema has a word for. Use str, int, "
        "float, bool, list, dict, Literal, Optional, a dataclass or a TypedDict."
    )


def _record(kind: Any) -> dict[str, tuple[Any, bool]] | None:
    """Return type and need of each field of a dataclass or a TypedDict; None for others."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind, include_extras=True)
        return {
            each.name: (
                hints[each.name],
                each.default is MISSING and each.default_factory is MISSING,
            )
            for each in fields(kind)
            if each.init
        }
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        return {key: (each, key in kind.__required_keys__) for key, each in hints.items()}
    return None


# --- arguments


def fit(value: Any, kind: Any, place: str) -> Any:
    """Return a value of JSON as a type has it; numbers as texts are read. Raises `Unfit`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if kind in PLAIN:
        return _plain(value, kind, place)
    if origin is Annotated:
        return fit(value, inner[0], place)
    if origin is Literal:
        return _one_of(value, inner, place)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind(_one_of(value, [each.value for each in kind], place))
    if origin in (Union, types.UnionType):
        return _any_of(value, inner, place)
    if kind in (list, tuple, set, Sequence) or origin in (list, tuple, set, Sequence):
        return _several(value, kind, place)
    if kind in (dict, Mapping) or origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise Unfit(f"{place} must be an object, not {shown(value)}")
        return {
            str(key): fit(each, inner[1] if inner else Any, f"{place}.{key}")
            for key, each in value.items()
        }
    return _filled(value, kind, place)


def _plain(value: Any, kind: Any, place: str) -> Any:
    if kind is type(None):
        if value is None:
            return None
        raise Unfit(f"{place} must be null, not {shown(value)}")
    if type(value) is kind:
        return value
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is str and number:
        return str(value)
    if kind is float and number:
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is bool and isinstance(value, str) and value.strip().lower() in YES_NO:
        return YES_NO[value.strip().lower()]
    if kind in (int, float) and isinstance(value, str) and len(value) <= 400:
        try:
            return kind(value.strip())
        except ValueError:
            pass
    raise Unfit(f"{place} must be {WORDS[kind]}, not {shown(value)}")


def _one_of(value: Any, known: Sequence[Any], place: str) -> Any:
    for each in known:
        if value == each and type(value) is type(each):
            return each
    for each in known:  # as texts: formats without types write "2" for 2
        if isinstance(value, str) and value.strip() == str(each):
            return each
    raise Unfit(f"{place} must be one of {json.dumps(list(known))}, not {shown(value)}")


def _any_of(value: Any, kinds: Sequence[Any], place: str) -> Any:
    exact = [kind for kind in kinds if type(value) is kind]
    whys = []
    for kind in [*exact, *kinds]:
        try:
            return fit(value, kind, place)
        except Unfit as error:
            whys.append(str(error))
    raise Unfit("; or ".join(dict.fromkeys(whys)))


def _several(value: Any, kind: Any, place: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise Unfit(f"{place} must be a list, not {shown(value)}")
    inner, whole = get_args(kind), get_origin(kind) or kind
    if whole is tuple and inner and ... not in inner:
        if len(value) != len(inner):
            raise Unfit(f"{place} must have {len(inner)} entries, not {len(value)}")
        each_kind: Sequence[Any] = inner
    else:
        each_kind = [inner[0] if inner else Any] * len(value)
    found = [
        fit(each, one, f"{place}[{at}]")
        for at, (each, one) in enumerate(zip(value, each_kind, strict=True))
    ]
    return found if whole in (list, Sequence) else whole(found)


def _filled(value: Any, kind: Any, place: str) -> Any:
    known = _record(kind) or {}
    if not isinstance(value, Mapping):
        raise Unfit(f"{place} must be an object, not {shown(value)}")
    for key in value:
        if key not in known:
            raise Unfit(f"{place} has no {key!r}. {nearest(str(key), known)}")
    for key, (_, required) in known.items():
        if required and key not in value:
            raise Unfit(f"{place} lacks {key!r}")
    found = {key: fit(each, known[key][0], f"{place}.{key}") for key, each in value.items()}
    return found if typing.is_typeddict(kind) else kind(**found)


def shown(value: Any, width: int = 80) -> str:
    """Return a value as JSON has it, in short."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= width else f"{text[:width]}..."


def _shown(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
