"""Written steps of an answer: where they end, from where branches go on, and their values.

A branch is another answer that goes on from within an answer. The mean reward of several is the
value of the state that they begin in (VinePPO, 2410.01679).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.groups.segments import closes_sentence
from groupwise.methods.method import Method

ROOT = 0  # the position before the first token


@dataclass(frozen=True)
class Branching:
    """How branches are taken, as the settings of a recipe's slot say."""

    branches: int = 9  # from each position
    most_steps: int = 25  # positions of an answer, the root aside
    split: str = "line"  # where steps end, or "sentence"


def branching_of(recipe: Method) -> Branching | None:
    """Return how a recipe takes branches; None where it reads no values of steps."""
    for link in recipe.of("advantage"):
        if "step_value_NT" in link.needs:
            named = {key: x for key, x in link.params if key in Branching.__dataclass_fields__}
            return Branching(**named)
    return None


def step_ends(
    texts: Sequence[str], split: str = "line", own_T: Sequence[bool] | None = None
) -> list[int]:
    """Return the last token of each step, by the texts of the tokens; the last ends the last step.

    A token with a newline ends a step, with `split="sentence"` one that ends with punctuation, too;
    and the policy's last token before others write. White space behind a step belongs to it.
    """
    own = [t for t in range(len(texts)) if own_T is None or own_T[t]]
    ends: list[int] = []
    closed = written = False
    for before, t in zip([None, *own], own, strict=False):
        blank = not texts[t].strip()
        if before is not None and closed and not blank:
            ends.append(before)
            closed = written = False
        written = written or not blank
        others_follow = own_T is not None and t + 1 < len(texts) and not own_T[t + 1]
        ending = closes_sentence(texts[t]) if split == "sentence" else "\n" in texts[t]
        closed = written and (closed or ending or others_follow)
    return [*ends, *own[-1:]]


def positions(
    ends: Sequence[int], most: int, own_T: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Return where the steps behind the first begin: at most so many, evenly spread.

    A step begins with the policy's next token; what others wrote between is known there.
    """
    inner = list(ends[:-1])
    if len(inner) > most:
        inner = [inner[(2 * number + 1) * len(inner) // (2 * most)] for number in range(most)]
    if own_T is None:
        return tuple(end + 1 for end in inner)
    return tuple(next(t for t in range(end + 1, len(own_T)) if own_T[t]) for end in inner)


def mean_rewards(rewards: Mapping[int, Sequence[float | None]]) -> dict[int, float]:
    """Return the value of each position: the mean of its branches' rewards.

    A branch without a grade is left out. A position without any that has one is no position: the
    steps before and behind it are one.
    """
    known = {at: [x for x in found if x is not None] for at, found in rewards.items()}
    return {at: sum(found) / len(found) for at, found in sorted(known.items()) if found}


def root_value(
    own: float | None, others: Sequence[float | None], values: Mapping[int, float]
) -> float:
    """Return the value before the first token: the mean reward of the group's other answers.

    The answer's own is left out, which keeps the advantage unbiased. Without others it is the value
    of branches from there; without those that of the next position; without any the answer's own
    reward, so that nothing is learned from what nothing was compared with.
    """
    known = [x for x in others if x is not None]
    if known:
        return sum(known) / len(known)
    first = min(values, default=None)
    return (own or 0.0) if first is None else values[first]


def placed_values(
    own_T: Sequence[bool], root: float, values: Mapping[int, float]
) -> list[tuple[int, float]]:
    """Return the last token of each step, and the value of the state that the step begins in."""
    own = [t for t, mine in enumerate(own_T) if mine]
    inner = sorted(at for at in values if at > own[0])
    begins = [root, *(values[at] for at in inner)]
    last = [max(t for t in own if t < at) for at in inner]
    return list(zip([*last, own[-1]], begins, strict=True))
