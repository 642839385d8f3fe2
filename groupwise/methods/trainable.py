"""Which recipes can be trained here: what a method needs that this trainer does not hold yet.

The one place that says so: runs are refused by it, `explain` and `recipes --choose` tell it.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupwise.methods.method import Method


@dataclass(frozen=True)
class Lack:
    """Something that a recipe needs and the trainer does not hold, and what comes nearest."""

    what: str
    instead: tuple[str, ...]  # recipes, the nearest first
    why: str  # the nearest is near

    def __str__(self) -> str:
        article = "an" if self.what[0] in "aeiou" else "a"
        nearest, *others = self.instead
        rest = f" or {others[0]}" if others else ""
        return (
            f"needs {article} {self.what}, which this trainer does not hold yet. Take instead "
            f"{nearest} ({self.why}){rest}."
        )


ROUTER = Lack("router", ("gspo",), "its ratio per answer does not mind how experts are chosen")


def lacking(recipe: Method) -> tuple[Lack, ...]:
    """Return what keeps a recipe from being trained; nothing where it can be."""
    read = any("router" in name for name in (*recipe.streams, *recipe.outputs))
    replayed = any(slot.definition.traits.routing for slot in recipe.slots())
    return (ROUTER,) if read or replayed else ()
