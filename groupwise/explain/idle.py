"""Idle slots of a recipe: those that can't act under given conditions, found by trying them.

With one update a batch and a sampler that is the learner, every ratio is exactly 1. A clip, a soft
gate, a mean of ratios or a correction then gives the very update that the plain policy gradient
gives, and a comparison of two of them compares nothing. Each slot that compares two policies is
tried on a toy batch against its neutral counterpart, in float64: it is idle where the gradients are
the same. A trial knows functions of the user's as well as the package's own, with their
hyper-parameters and the slots around them, and can't go stale as a declaration can; it takes some
milliseconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import RecipeError, RecipeWarning
from groupwise.groups.phase import batch_phase, passes
from groupwise.losses.gates import unclipped
from groupwise.losses.phase import token_phase
from groupwise.losses.ratios import token
from groupwise.methods.method import Method
from groupwise.methods.slots import Definition, Slot
from groupwise.testing.toy import Toy, extra_streams, learner_outputs, leaves, random_toy

# Log-probabilities by which a function compares two policies.
COMPARED = ("old_logp_NT", "sampler_logp_NT", "ref_logp_NT")
GROUPS, GROUP_SIZE, WIDTH = 16, 4, 16
# Of a token's gradient, and of none: float64 rounding is a million times smaller than the first.
SAME, TINY = 1e-9, 1e-15


@dataclass(frozen=True)
class Conditions:
    """The policies of one batch that may differ from each other."""

    moved: bool = False  # the policy from the one that was sampled from, by updates on this batch
    mismatch: bool = False  # the sampler's probabilities from the learner's of the same weights
    reference: bool = True  # the reference from the policy

    def missing(self) -> tuple[str, ...]:
        return tuple(each.name for each in fields(self) if not getattr(self, each.name))


@dataclass(frozen=True)
class Idle:
    """A slot that changes no update, and sets of conditions, each of which makes it act."""

    slot: Slot
    wakes: tuple[tuple[str, ...], ...]


def idle(recipe: Method, conditions: Conditions) -> list[Idle]:
    """Return the slots of a recipe that change no update here, and would under other conditions."""
    made_by = tuple(each for slot in recipe.slots() for each in slot.definitions)
    return list(_idle(recipe, made_by, conditions))


@lru_cache(maxsize=512)  # a process may open many runs, and pages tell it of every recipe
def _idle(
    recipe: Method, made_by: tuple[Definition, ...], conditions: Conditions
) -> tuple[Idle, ...]:
    trial, found = Trial(), list[Idle]()
    for slot in comparing(recipe):
        if not trial.acts(recipe, slot, conditions):
            wakes = trial.wakes(recipe, slot, conditions)
            found += [Idle(slot, wakes)] if wakes else []
    return tuple(found)


def acting(recipe: Method, conditions: Conditions) -> tuple[Slot, ...]:
    """Return the slots that act: recipes that have these in common make the same updates."""
    plain, trial = recipe, Trial()
    for slot in dict.fromkeys((*recipe.of("gate"), *comparing(recipe))):
        without = neutral(plain, slot)
        if without is not None and trial.same(plain, without, conditions):
            plain = without
    slots = plain.slots()
    if conditions.mismatch:
        return slots
    return tuple(
        s.replace(anchor="old") if s.kind == "ratio" and "anchor" in s else s for s in slots
    )


def comparing(recipe: Method) -> Iterator[Slot]:
    """Yield the slots that compare two policies, by a ratio or by the streams that they read."""
    if _has_ratio(recipe):
        yield from recipe.of("gate")
        yield from recipe.of("ratio")
    others = [recipe.of("shaping"), recipe.of("advantage")[1:]]
    others += [recipe.of(kind) for kind in ("correction", "penalty", "auxiliary")]
    for slot in (slot for kind in others for slot in kind):
        if set(COMPARED) & set(slot.needs):
            yield slot


def passes_of(recipe: Method) -> int:
    """Return how many passes the schedule makes over a batch; one where there is no schedule."""
    try:
        return sum(len(s(toy_under(Conditions()).build())) for s in recipe.of("schedule")) or 1
    except Exception:  # the user's code may fail in any way: training says how
        return 1


def updates_of(recipe: Method) -> int:
    """Return how many optimizer steps are made on one batch."""
    return recipe.updates * passes_of(recipe)


def neutral(recipe: Method, slot: Slot) -> Method | None:
    """Return the recipe with a slot that does nothing in a slot's place; None without such."""
    changes: dict[str, Any] = {slot.kind: tuple(x for x in recipe.of(slot.kind) if x != slot)}
    if slot.kind == "gate":
        changes = {"gate": unclipped()} | ({} if _has_ratio(recipe) else {"ratio": token()})
    elif slot.kind == "ratio":
        changes = {"ratio": token(anchor=slot.get("anchor", "old"))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        try:
            without = recipe.replace(**changes)
        except RecipeError:  # others of its slots want just this one
            return None
    return None if without.slots() == recipe.slots() else without


def _has_ratio(recipe: Method) -> bool:
    return recipe.level not in ("", "none")


# --- in words ---------------------------------------------------------------------------------

WAKES = {
    "moved": "several updates a batch (recipe.schedule.updates=4)",
    "mismatch": "a sampler that lags or is quantised (engine.weights=stale:1, int8)",
    "reference": "a reference that stays behind (reference.update=frozen)",
}
WHY = {
    "moved": "one update a batch, so the policy is compared with itself",
    "mismatch": "the sampler is the learner",
    "reference": "the reference is set to the policy at every step",
}


def told(found: Sequence[Idle]) -> list[str]:
    """Return a sentence for all slots that the same conditions would make act."""
    by_wakes: dict[tuple[tuple[str, ...], ...], list[Slot]] = {}
    for each in found:
        by_wakes.setdefault(each.wakes, []).append(each.slot)
    lines = []
    for wakes, slots in by_wakes.items():
        named = ", ".join(f"{slot.kind} {slot}" for slot in slots)
        why = "; ".join(WHY[name] for name in dict.fromkeys(n for names in wakes for n in names))
        by = " or ".join(" with ".join(WAKES[name] for name in names) for names in wakes)
        lines.append(f"{named} ({why}); woken by {by}")
    return lines


# --- the trial --------------------------------------------------------------------------------


class Trial:
    """A recipe and variants of it tried on the same toy batch, each once."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Tensor] | None] = {}

    def acts(self, recipe: Method, slot: Slot, conditions: Conditions) -> bool:
        """Return whether the update differs without the slot; True where that can't be tried."""
        if slot.kind == "ratio":
            # A gate may want just this ratio. Where it acts itself, so does what it reads.
            (gate,) = recipe.of("gate")
            plain = neutral(recipe, gate) or recipe
            if plain is not recipe and self.acts(recipe, gate, conditions):
                return True
            recipe = plain
        without = neutral(recipe, slot)
        return without is None or not self.same(recipe, without, conditions)

    def wakes(
        self, recipe: Method, slot: Slot, conditions: Conditions
    ) -> tuple[tuple[str, ...], ...]:
        """Return the fewest further conditions under which a slot acts; none if it never does."""
        missing = conditions.missing()
        for count in range(1, len(missing) + 1):
            found = [
                names
                for names in combinations(missing, count)
                if self.acts(recipe, slot, replace(conditions, **dict.fromkeys(names, True)))
            ]
            if found:
                return tuple(found)
        return ()

    def same(self, one: Method, other: Method, conditions: Conditions) -> bool:
        """Return whether two recipes give the same update; False if a function can't be tried."""
        found = [self._gradients(each, conditions) for each in (one, other)]
        if found[0] is None or found[1] is None:
            return False
        return all(_close(a, b) for a, b in zip(found[0], found[1], strict=True))

    def _gradients(self, recipe: Method, conditions: Conditions) -> list[Tensor] | None:
        key = recipe.slots(), conditions
        if key not in self._known:
            try:
                self._known[key] = gradients(recipe, toy_under(conditions))
            except Exception:  # the user's code may fail in any way: training says how
                self._known[key] = None
        return self._known[key]


def _close(a: Tensor, b: Tensor) -> bool:
    """Return whether gradients agree token by token: one exploded ratio would hide the rest."""
    gap, size = (x.abs().amax(-1) for x in (a - b, a))
    return bool((gap <= SAME * size + TINY).all())


def toy_under(conditions: Conditions) -> Toy:
    """Make a batch whose rows move by a thousandth of a nat to several: all ranges are left, or
    none.
    """
    sizes_N = torch.logspace(-3, 0.9, GROUP_SIZE, dtype=torch.float64).repeat(GROUPS)
    return random_toy(
        0,
        (GROUP_SIZE,) * GROUPS,
        WIDTH,
        spread=sizes_N,
        moved=float(conditions.moved),
        mismatch=float(conditions.mismatch),
        reference=float(conditions.reference),
    )


def gradients(recipe: Any, toy: Toy) -> list[Tensor]:
    """Return the gradients of the recipe's loss in everything that learns; update nothing."""
    leaf = leaves(toy)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # draws of plug-ins stay here
        done = batch_phase(recipe, toy.build(**extra_streams(recipe, leaf))).batch
        outputs = learner_outputs(recipe, toy, leaf)
        losses = [token_phase(recipe, part, **outputs).loss for part in passes(recipe, done)]
        found = torch.autograd.grad(torch.stack(losses).sum(), leaf.all(), allow_unused=True)
    pairs = zip(leaf.all(), found, strict=True)
    return [torch.zeros_like(x) if slope is None else slope for x, slope in pairs]
