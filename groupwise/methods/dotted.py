"""Settings of a recipe as people write them: a slot's text, or one hyper-parameter by dotted path.

`gate = "clip(0.2, 0.3)"`, `gate.high = 0.3`, `advantage.group_zscore.eps = 0`: which slot and which
parameter is meant, and what is said where none is, or more than one.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any

from groupwise.errors import RecipeError, nearest
from groupwise.methods.slots import NOT_LITERAL, Slot, parse


def slots_of(kind: str, value: Any) -> tuple[Slot, ...]:
    """Read a slot, several, or their text form; None is empty."""
    if value is None:
        return ()
    if isinstance(value, str):
        return parse(kind, value)
    items = (value,) if isinstance(value, Slot) or not isinstance(value, Iterable) else tuple(value)
    slots: list[Slot] = []
    for item in items:
        if isinstance(item, str):
            slots.extend(parse(kind, item))
        elif isinstance(item, Slot) and item.kind == kind:
            slots.append(item)
        elif isinstance(item, Slot):
            raise RecipeError(f"{item} is a {item.kind}, not a {kind}. Put it there.")
        else:
            hint = f" Write {item.name}(...)." if hasattr(item, "parameters") else ""
            raise RecipeError(f"A {kind} must be a slot or its text, got {item!r}.{hint}")
    return tuple(slots)


def adjusted(
    name: str, kind: str, slots: tuple[Slot, ...], rest: list[str], value: Any
) -> tuple[Slot, ...]:
    """Return the slots of a kind with another value for one hyper-parameter of one of them."""
    owners = [(slot, path) for slot in slots if (path := _reach(slot, rest))]
    if not owners:
        known = [key for slot in slots for key, _ in slot.params]
        raise RecipeError(
            f"recipe.{kind}.{'.'.join(rest)}: {name!r} would ignore it, its {kind} is "
            f"{', '.join(map(str, slots)) or 'empty'}. "
            + (nearest(rest[-1], known) if known else f"Set recipe.{kind} itself.")
        )
    if len(owners) > 1:
        raise RecipeError(
            f"recipe.{kind}.{'.'.join(rest)} is in {' and '.join(s.name for s, _ in owners)}: "
            f"write recipe.{kind}.{owners[0][0].name}.{'.'.join(owners[0][1])}."
        )
    owner, path = owners[0]
    return tuple(_put(slot, path, value) if slot is owner else slot for slot in slots)


def _reach(slot: Slot, path: Sequence[str]) -> tuple[str, ...] | None:
    """Find the parameters that a dotted path goes through, names of slots left out; None: nowhere.

    `clip.high` and `high` of a clip are both `high`; `width.low` lies in a slot inside the slot.
    """
    for rest in (path, path[1:] if path[0] == slot.name else ()):
        if not rest or rest[0] not in slot:
            continue
        if len(rest) == 1:
            return (rest[0],)
        inner = slot[rest[0]]
        found = _reach(inner, rest[1:]) if isinstance(inner, Slot) else None
        if found:
            return (rest[0], *found)
    return None


def _put(slot: Slot, path: Sequence[str], value: Any) -> Slot:
    """Set another value at a path that `_reach` gave; text is read as a value."""
    key, *rest = path
    now = slot[key]
    if rest:
        value = _put(now, rest, value)
    elif isinstance(value, str) and isinstance(now, Slot):
        slots = parse(now.kind, value)
        value = slots[0] if len(slots) == 1 else value
    elif isinstance(value, str):  # command lines give text: 0.3, 'k3', k3
        try:
            value = ast.literal_eval(value.strip())
        except NOT_LITERAL:
            value = value.strip()
    return slot.replace(**{key: value})
