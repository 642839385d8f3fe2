"""What the package knows of a slot function beyond its equation: facts that its writer states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from groupwise.errors import RecipeError, nearest

Prepare = Callable[..., Mapping[str, Any]]
Level = Literal["none", "token", "segment", "sequence"]


def nothing(batch: Any, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prepare nothing: of an auxiliary term that reads the batch as it is."""
    return {}


@dataclass(frozen=True)
class Traits:
    """Facts about a slot function; each is of the kinds of slot that its comment names."""

    action: Literal["refill", "zero", "mask"] = "mask"  # filter: what becomes of what it drops
    base: bool = False  # advantage: makes advantages from rewards, so that it stands first
    per_token: bool = False  # advantage: gives one number a token instead of one a row
    per_row: bool = False  # advantage: takes one number a row
    dense: bool = False  # advantage: reads rewards of single tokens
    outcome: bool = True  # advantage: reads the reward of the whole answer
    remembers: Literal["", "visits", "reward_average"] = ""  # advantage: from one batch to the next
    level: Level = "token"  # ratio: over what it is one number; "none" compares with nothing
    ratio: Literal["", "none", "segment"] = ""  # gate: the only level of ratio that it fits
    anchor: Literal["", "sampler"] = ""  # gate: the only anchor of the ratio that it fits
    weighs: bool = True  # correction: changes how much a token counts
    routing: bool = False  # correction: replays which experts a token visited
    learns: str = ""  # aggregation, auxiliary: the part with parameters of its own that it trains
    outputs: tuple[str, ...] = ()  # aggregation, auxiliary: streams of a forward pass that it reads
    prepare: Prepare = nothing  # auxiliary: makes its targets, in the batch phase
    reads: Literal["", "labels", "answers", "grades"] = ""  # pairing: where pairs come from
    # shaping, aggregation: settings that stand for the longest answer of a run, as shares of it
    lengths: Mapping[str, float] = field(default_factory=dict)
    breaks_at: Mapping[str, str] = field(default_factory=dict)  # gate: drawbacks by level of ratio


KNOWN = tuple(each.name for each in fields(Traits))
REQUIRED = {"filter": "action", "ratio": "level", "pairing": "reads"}  # what can't be guessed


def traits(kind: str, name: str, given: Mapping[str, Any]) -> Traits:
    """Return the traits that a decorator states; a word that is none is refused."""
    for key in given:
        if key not in KNOWN:
            raise RecipeError(
                f"{kind} {name}: {key}= is no fact that is known of a slot. {nearest(key, KNOWN)}"
            )
    required = REQUIRED.get(kind)
    if required is not None and required not in given:
        raise RecipeError(f"{kind} {name} must say its {required}: {_choices(required)}.")
    return Traits(**given)


def _choices(key: str) -> str:
    words = [word for word in get_args(get_type_hints(Traits)[key]) if word]
    return " or ".join(f'{key}="{word}"' for word in words)
