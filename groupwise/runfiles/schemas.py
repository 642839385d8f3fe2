"""Schemas of the files of a run: checked once, where they are read, so that nobody else has to.

A schema says in words what is wrong with a value, or "" where it fits. Entries that it does not
name may be anything: another version of groupwise may have written them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from groupwise.runfiles.catalogue import find

Schema = Callable[[Any], str]

MOST_STEPS = 2**53  # beyond it a page's script can't tell two steps apart
DEEPEST = 20  # lists and tables within one another; groupwise writes five at most


def _unless(fits: bool, value: Any, wanted: str) -> str:
    called = {bool: "a truth value", str: "a text", list: "a list", dict: "an object"}
    is_ = "null" if value is None else called.get(type(value), "a number")
    return "" if fits else f"{is_} in place of {wanted}"


def text(value: Any) -> str:
    return _unless(isinstance(value, str), value, "a text")


def truth(value: Any) -> str:
    return _unless(isinstance(value, bool), value, "true or false")


def number(value: Any) -> str:
    return _unless(type(value) in (int, float), value, "a number")


def count(value: Any) -> str:
    fits = type(value) is int and 0 <= value < MOST_STEPS
    return _unless(fits, value, "a whole number from 0 on")


def anything(value: Any, levels: int = DEEPEST) -> str:
    """Accept anything that is not nested too deep for a page or a command."""
    if not isinstance(value, list | dict):
        return ""
    if not levels:
        return f"more than {DEEPEST} levels of lists and objects"
    inside = value.values() if isinstance(value, dict) else value
    return next((wrong for one in inside if (wrong := anything(one, levels - 1))), "")


def or_null(schema: Schema) -> Schema:
    return lambda value: "" if value is None else schema(value)


def each(schema: Schema) -> Schema:
    """Accept a list of such values."""

    def checked(value: Any) -> str:
        if not isinstance(value, list):
            return _unless(False, value, "a list")
        found = ((at, schema(one)) for at, one in enumerate(value, start=1))
        return next((f"entry {at} is {wrong}" for at, wrong in found if wrong), "")

    return checked


def table(
    known: Mapping[str, Schema], needed: Collection[str] = (), other: Schema = anything
) -> Schema:
    """Accept an object: schemas of its known entries, required ones, and those of others."""

    def checked(value: Any) -> str:
        if not isinstance(value, dict):
            return _unless(False, value, "an object")
        missing = next((name for name in needed if name not in value), None)
        if missing is not None:
            return f"without {missing!r}"
        found = ((name, known.get(name, other)(one)) for name, one in value.items())
        return next((f"{name[:80]!r} is {wrong}" for name, wrong in found if wrong), "")

    return checked


def metrics(value: Any) -> str:
    """Accept a step, and numbers or texts: a text only where the catalogue has one, or no entry."""
    wrong = line(value)
    if wrong:
        return wrong
    for name, one in value.items():
        if isinstance(one, list | dict):
            return f"{name[:80]!r} is {_unless(False, one, 'a number or a text')}"
        entry = find(name) if isinstance(one, str) else None
        if entry is not None and entry.unit != "text":
            return f"{name[:80]!r} is {number(one)}"
    return ""


line = table({"step": count}, needed=["step"], other=lambda value: "")
_numbers = each(or_null(number))
_texts = table({}, other=text)
any_object = table({})

events = table(
    {
        "step": count,
        "kind": text,
        "text": text,
        "start": count,
        "rule": text,
        "metric": text,
        "first_bad_step": count,
        "value": or_null(number),
        "limit": or_null(number),
    },
    needed=["step"],
)
evaluations = table({"step": count}, needed=["step"], other=_numbers)
starts = table(
    {
        "step": count,
        "config": text,
        "origin": or_null(_texts),
        "threads": or_null(count),
        "changed": or_null(each(table({"what": text}, needed=["what", "old", "new"]))),
        "inferred": or_null(truth),
    },
    needed=["step", "config"],
)
manifest = table(
    {
        "versions": any_object,
        "hardware": any_object,
        "git": or_null(any_object),
        "origin": _texts,
        "hub": any_object,
        "dropped_rows": any_object,
        "threads": or_null(count),
        "earlier": each(any_object),
        "cost": table({"seconds": number, "tokens": number}, needed=["seconds", "tokens"]),
    }
)
_sample = table(
    {
        "prompt": text,
        "before": text,
        "after": text,
        "correct_before": or_null(truth),
        "correct_after": or_null(truth),
    },
    needed=["prompt", "before", "after"],
)
_summary = table(
    {
        "steps": count,
        "seconds": or_null(number),
        "samples": each(_sample),
        "budget": or_null(any_object),
        "scores_before": _numbers,
        "scores_after": _numbers,
        **{
            f"{name}_{side}": or_null(number)
            for name in ("accuracy", "stderr", "reward")
            for side in ("before", "after")
        },
    },
    needed=["steps"],
)


def _plain_name(value: Any) -> str:
    """Accept the name of a folder beside the file, which leads nowhere else."""
    fits = isinstance(value, str) and not (set(value) & set("/\\\0")) and value[:1] not in ("", ".")
    return _unless(fits, value, "the name of a folder")


stages = table(
    {
        "name": text,
        "place": text,
        "going": each(_plain_name),
        "stages": each(
            table(
                {
                    "name": text,
                    "folder": _plain_name,
                    "recipe": text,
                    "start": text,
                    "state": text,
                    "config": text,
                    "data": text,
                    "weights": _texts,
                },
                needed=["name", "folder", "recipe", "start", "state"],
            )
        ),
    },
    needed=["name", "place", "stages"],
)


def summary(value: Any) -> str:
    """Accept a summary; an empty one says no more than none."""
    return "" if value == {} else _summary(value)
