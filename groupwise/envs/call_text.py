"""Pieces of a turn that may be calls: thoughts set aside, JSON read, values given their types.

What is wrong with a piece is raised as a ValueError, in words for the policy.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
DEEPEST = 64  # levels of arguments: what is deeper can't be handed on safely
SHOWN = 40  # characters of a text that is quoted
WORDS = {"True": "true", "False": "false", "None": "null"}  # as Python has them
KINDS: Mapping[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def spoken(text: str) -> str:
    """Return what stands outside of thoughts; a thought without an end goes on to the text's."""
    for opens, closes in THOUGHTS:
        first, end = text.find(opens), text.find(closes)
        if end >= 0 and not 0 <= first < end:  # the prompt has opened it
            text = text[end + len(closes) :]
        pieces, at = [], 0
        while (start := text.find(opens, at)) >= 0:
            pieces.append(text[at:start])
            end = text.find(closes, start)
            at = end + len(closes) if end >= 0 else len(text)
        text = "".join([*pieces, text[at:]])
    return text


def after(text: str, mark: str, start: int) -> int:
    """Return where the text goes on behind the next mark; `start` where there is none."""
    found = text.find(mark, start)
    return start if found < 0 else found + len(mark)


def skip_blank(text: str, at: int) -> int:
    """Return the place of the next character that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def read_json(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins here, and where the next thing behind it begins."""
    try:
        found, end = _JSON.raw_decode(text, skip_blank(text, start))
    except json.JSONDecodeError as error:
        at = text[error.pos : error.pos + SHOWN].partition("\n")[0]
        raise ValueError(f"its JSON is broken: {error.msg}, at {at!r}") from None
    except RecursionError:
        raise ValueError("its JSON has too many brackets within each other") from None
    except ValueError as error:
        raise ValueError(f"its JSON can't be read: {str(error).partition(';')[0]}") from None
    return found, skip_blank(text, end)


def read_whole(text: str) -> Any:
    """Return the JSON value that a text is."""
    found, end = read_json(text, 0)
    if end < len(text):
        raise ValueError(f"there is more behind its JSON: {text[end : end + SHOWN]!r}")
    return found


def named_call(found: Any) -> tuple[str, dict[str, Any]]:
    """Return the name and arguments of a call that is a JSON object."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]  # as OpenAI's protocol has it
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    name = found.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ValueError('it has no "name" of a tool')
    given = next((found[key] for key in ("arguments", "parameters") if key in found), None)
    if isinstance(given, str):
        given = read_whole(given)
    return sound_call(name, {} if given is None else given)


def sound_call(name: str, arguments: Any) -> tuple[str, dict[str, Any]]:
    """Return a call whose arguments are an object that can be handed on."""
    if not isinstance(arguments, dict):
        raise ValueError("its arguments are no JSON object")
    level: list[Any] = [name.strip(), arguments]
    for _ in range(DEEPEST):
        if any(isinstance(value, str) and not _is_whole(value) for value in level):
            raise ValueError("a text in it holds half of a character")
        level = [part for value in level for part in _parts(value)]
        if not level:
            return name.strip(), arguments
    raise ValueError(f"its arguments are deeper than {DEEPEST} levels")


def typed(key: str, text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return the value of an argument that is written as bare text, by its schema if there is one.

    Without a schema a number, a truth value, a list or an object becomes one, all else is text.
    """
    kinds = _kinds(schema)
    if "string" in kinds:
        return text
    try:
        value = read_whole(WORDS.get(text.strip(), text.strip()))
    except ValueError:
        if not kinds:
            return text
        raise ValueError(f"{key} must be {_either(kinds)}, not {text[:SHOWN]!r}") from None
    if isinstance(value, str) and not kinds:
        return text  # with its quotes: nothing says that they are not meant
    if isinstance(value, float) and value.is_integer() and kinds == {"integer"}:
        return int(value)
    fits = any(isinstance(value, KINDS[k]) for k in kinds if k in KINDS)
    truth = isinstance(value, bool)  # which Python counts among the integers
    if kinds and (not fits or (truth and "boolean" not in kinds)):
        raise ValueError(f"{key} must be {_either(kinds)}, not {text[:SHOWN]!r}")
    return value


def parameters_of(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a tool's name and the schema of each of its parameters, from its own schema."""
    function = tool.get("function", tool)
    given = function.get("parameters") or {}
    return str(function.get("name", "")), dict(given.get("properties") or {})


def _kinds(schema: Mapping[str, Any] | None) -> set[str]:
    """Return the types that a schema allows; none where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds: set[str] = set()
    for part in [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        named = part.get("type") if isinstance(part, Mapping) else None
        kinds |= {named} if isinstance(named, str) else set(named or ())
    return kinds if kinds <= {*KINDS, "string"} else set()


def _either(kinds: Collection[str]) -> str:
    return " or ".join(sorted(kinds))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return value if isinstance(value, list) else ()


def _is_whole(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)
