"""Facts about a slot function beyond its equation, stated by its writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from groupwise.errors import RecipeError, nearest

Prepare = Callable[..., Mapping[str, Any]]
Refuses = Callable[[Mapping[str, Any]], str]
Level = Literal["none", "token", "segment", "sequence"]


def nothing(batch: Any, params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prepare nothing: of a slot that reads what it gets as it is."""
    return {}


def any_settings(params: Mapping[str, Any]) -> str:
    """Refuse nothing: every setting makes sense beside every other."""
    return ""


@dataclass(frozen=True)
class Traits:
    """Facts about a slot function; each is of the kinds of slot that its comment names."""

    action: Literal["refill", "zero", "mask"] = "mask"  # filter: what becomes of what it drops
    base: bool = False  # advantage: makes advantages from rewards, so that it stands first
    per_token: bool = False  # advantage, shaping: gives a number a token instead of one a row
    per_row: bool = False  # advantage: takes one number a row
    dense: bool = False  # advantage: reads rewards of single tokens
    outcome: bool = True  # advantage: reads the reward of the whole answer
    blind: bool = False  # advantage: reads no reward at all
    # Advantage, preference: from one step to the next.
    remembers: Literal[
        "", "visits", "reward_average", "pair_reward", "role_average", "prompt_beta"
    ] = ""
    step_means: bool = False  # advantage: adds up steps, each less a mean over steps
    ordered: bool = False  # advantage: goes by the order of rows
    # Filter, advantage: what it does with groups of equal rewards.
    uniform: Literal["", "drops", "teaches", "rescales"] = ""
    scales: bool = False  # advantage: divides by how far rewards or advantages are spread
    binary: bool = False  # advantage: made for rewards of 0 and 1
    lowers: bool = False  # shaping: brings rewards down to 0 and below
    kl: bool = False  # shaping, advantage, penalty, auxiliary: a KL to the reference
    length: str = ""  # shaping, aggregation: its setting for how long an answer may be
    margin: str = ""  # shaping: its setting for a stretch before that length
    level: Level = "token"  # ratio: over what it is one number; "none" compares with nothing
    averages: bool = False  # ratio: a mean over the answer, which moves little
    token_gradient: bool = False  # ratio: one number, and yet a gradient for each token
    ratio: Literal["", "none", "token", "segment"] = (
        ""  # gate: the only level of ratio that it fits
    )
    anchor: Literal["", "sampler"] = ""  # gate: the only anchor of the ratio that it fits
    mute: bool = False  # gate: leaves the policy's term out
    below_one: bool = False  # gate: `low` is how far below 1 a ratio may fall
    per_answer: bool = False  # gate, aggregation: an answer counts as one, whatever its length
    counts_tokens: bool = False  # gate, aggregation: an answer counts by its tokens, on purpose
    passes: int = 1  # schedule: how often it goes over the batch, some tokens each time
    weighs: bool = True  # correction: changes how much a token counts
    routing: bool = False  # correction: replays which experts a token visited
    learns: str = ""  # aggregation, auxiliary: the part with parameters of its own that it trains
    outputs: tuple[str, ...] = ()  # aggregation, auxiliary: streams of a forward pass that it reads
    # Auxiliary, gate, correction, penalty: what it makes of a whole update, in the batch phase.
    # Preference: what it reads of all pairs.
    prepare: Prepare = nothing
    # pairing: where pairs come from
    reads: Literal["", "labels", "answers", "grades", "judgements", "ranks"] = ""
    scores: bool = False  # preference: compares scores of a model, not log-probabilities
    refers: bool = True  # preference: measures from the reference
    unpaired: bool = False  # preference: of single answers with a label, not of pairs
    refuses: Refuses = any_settings  # every kind: what is wrong with its settings, in words
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
