"""A trial of a user's own slots on a toy batch, before anything is loaded.

What a slot returns is looked at where it is returned: shape, finite values, and whether a gradient
comes through. Then the loss of the whole batch must be the sum over any micro-batches.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import GroupwiseError, RecipeError, RecipeWarning, nearest
from groupwise.groups.phase import batch_phase, passes
from groupwise.losses.pairs import Choice, PairLoss, Pairs
from groupwise.losses.phase import token_phase
from groupwise.losses.scores import LabelledSteps, ScoredPairs
from groupwise.losses.unpaired import AnswerLoss, CalledAnswers
from groupwise.methods.composition import PairRecipe, Recipe, UnpairedRecipe
from groupwise.methods.method import Method
from groupwise.methods.scoring import ProcessRewardModelRecipe, RewardModelRecipe
from groupwise.methods.slots import Slot
from groupwise.records import TokenBatch
from groupwise.streams import STREAMS
from groupwise.testing.toy import Leaves, Toy, extra_streams, learner_outputs, leaves, random_toy

SEED = 0
SPREADS = (0.0, 0.02, 0.5)  # of the new policy from the old: the first update, and later ones
PARTS = (range(5), range(5, 10), range(10, 12))  # micro-batches; they cut groups in two
CLOSE = 1e-4  # of the largest gradient, in float32
TOKEN_KINDS = ("ratio", "gate", "correction", "penalty", "auxiliary")


def try_slots(recipe: Method) -> list[str]:
    """Refuse a faulty slot that is not the package's, whatever the recipe learns from."""
    tried: dict[str, Callable[[Any], list[str]]] = {
        "groups": try_groups,
        "pairs": try_pairs,
        "unpaired": try_unpaired,
        "reward_model": try_scores,
        "process_reward_model": try_labels,
    }
    return tried[recipe.STAGE](recipe)


def try_groups(recipe: Recipe) -> list[str]:
    """Refuse a faulty slot that is not the package's, by name; return doubts as texts."""
    if not any(_is_own(slot) for slot in recipe.slots()):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)  # its doubts are told elsewhere
        return _try_recipe(recipe)


def _try_recipe(recipe: Recipe) -> list[str]:
    watch = SlotWatch()
    watched = watch.over(recipe)
    flows = False
    for spread in SPREADS:
        toy = random_toy(SEED, dtype=torch.float32, spread=spread)
        _check_needs(recipe, toy)
        whole = _loss(watched, toy, [range(toy.rows)])
        _check_finite(recipe, whole)
        seen = watch.forget()
        _same(recipe, whole, _loss(watched, toy, PARTS), seen, watch.forget())
        flows = flows or bool(whole.gradient.any())
    if not flows:
        raise RecipeError(
            f"Recipe {recipe.name} learns nothing: on a toy batch the gradient of its loss is 0, "
            f"whatever the rewards. Your own in it: {_own(recipe)}."
        )
    return _without_a_grade(recipe, watched, watch)


def _without_a_grade(recipe: Recipe, watched: Recipe, watch: SlotWatch) -> list[str]:
    """Try a batch where one answer has no reward: the others must not be lost with it."""
    toy = random_toy(SEED, dtype=torch.float32)
    toy.streams["reward_N"][0] = torch.nan
    try:
        _check_finite(recipe, _loss(watched, toy, [range(toy.rows)]))
    except RecipeError as error:
        return [
            f"with one answer without a reward (NaN in reward_N) {error} A grader that fails once "
            "would cost the whole batch: leave such rows out of sums and means."
        ]
    finally:
        watch.forget()
    return []


# --- a loss, whole and in parts -----------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    value: float
    gradient: Tensor  # in the logits


def _loss(recipe: Recipe, toy: Toy, parts: Sequence[range]) -> Loss:
    leaf = leaves(toy)
    try:
        total = _sum(recipe, toy, leaf, parts)
        (gradient,) = torch.autograd.grad(total, [leaf.logits_NTV], allow_unused=True)
    except GroupwiseError:
        raise
    except Exception as error:  # the boundary to the user's code
        raise RecipeError(
            f"Recipe {recipe.name} fails on a toy batch: {type(error).__name__}: {error}."
        ) from error
    gradient = torch.zeros_like(leaf.logits_NTV) if gradient is None else gradient
    return Loss(float(total.detach()), gradient)


def _check_finite(recipe: Recipe, found: Loss) -> None:
    if not found.gradient.isfinite().all():
        raise RecipeError(
            f"Recipe {recipe.name}: on a toy batch its loss is finite and its gradient is not. "
            f"Look for a root, a logarithm or a division at 0 in your own: {_own(recipe)}."
        )


def _sum(recipe: Recipe, toy: Toy, leaf: Leaves, parts: Sequence[range]) -> Tensor:
    done = batch_phase(recipe, toy.build(**extra_streams(recipe, leaf))).batch
    total = torch.zeros(())
    for one_pass in passes(recipe, done):
        for part in parts:
            rows = torch.as_tensor(list(part))
            outputs = learner_outputs(recipe, toy, leaf, rows)
            found = token_phase(recipe, one_pass.select(rows), **outputs)
            total = total + found.loss
    return total


def _same(
    recipe: Recipe,
    whole: Loss,
    split: Loss,
    seen: dict[str, list[Tensor]],
    parts: dict[str, list[Tensor]],
) -> None:
    """Refuse a token phase that depends on which rows are computed together."""
    scale = float(whole.gradient.abs().max())
    off = float((whole.gradient - split.gradient).abs().max())
    if off <= CLOSE * scale + 1e-7 and abs(whole.value - split.value) <= CLOSE + CLOSE * abs(
        whole.value
    ):
        return
    own = [slot for slot in recipe.slots() if _is_own(slot) and slot.kind in TOKEN_KINDS]
    guilty = [slot for slot in own if _differs(seen.get(str(slot)), parts.get(str(slot)))] or own
    named = ", ".join(f"{slot.kind} {_place(slot)}" for slot in guilty) or f"recipe {recipe.name}"
    raise RecipeError(
        f"{named}: the gradient of a toy batch is another one when the batch is split into "
        f"micro-batches (off by {off / max(scale, 1e-30):.0%} of its largest entry), so that "
        "optim.micro_tokens, or running out of memory, would change the update. It looks at "
        "several answers at once, or draws random numbers: what needs the whole batch belongs in "
        "an advantage, a filter or an aggregation, which see all of it."
    )


def _differs(whole: list[Tensor] | None, parts: list[Tensor] | None) -> bool:
    if not whole or not parts:
        return False
    if whole[0].dim() == 0:
        return not torch.allclose(torch.stack(whole).sum(), torch.stack(parts).sum(), rtol=1e-3)
    a, b = torch.cat(whole), torch.cat(parts)
    return a.shape != b.shape or not torch.allclose(a, b, rtol=1e-3, atol=1e-6)


# --- what a slot returns ------------------------------------------------------------------------


@dataclass
class SlotWatch:
    """A watcher of all that a user's slots return, which keeps the values of the token phase."""

    seen: dict[str, list[Tensor]] = field(default_factory=dict)

    def forget(self) -> dict[str, list[Tensor]]:
        """Return what was seen since the last time, and forget it."""
        seen, self.seen = self.seen, {}
        return seen

    def over(self, recipe: Recipe) -> Recipe:
        """Return the recipe with its own slots watched."""
        changes: dict[str, Any] = {}
        for kind in recipe.KINDS:
            slots = tuple(self._slot(slot) if _is_own(slot) else slot for slot in recipe.of(kind))
            changes[kind] = slots if isinstance(getattr(recipe, kind), tuple) else slots[0]
        return recipe.replace(name=recipe.name, about=recipe.about, **changes)

    def _slot(self, slot: Slot) -> Slot:
        definition = copy.copy(slot.definition)
        function = slot.definition.function

        def called(*arguments: Any, **params: Any) -> Any:
            value = call_slot(slot, function, *arguments, **params)
            batch = next(each for each in arguments if isinstance(each, TokenBatch))
            main = _looked_at(slot, value, batch)
            if slot.kind in TOKEN_KINDS:
                self.seen.setdefault(str(slot), []).append(main.detach())
            return value

        definition.function = called
        prepare = definition.traits.prepare
        definition.traits = replace(
            definition.traits, prepare=lambda *arguments: call_slot(slot, prepare, *arguments)
        )
        return replace(slot, definition=definition)


def call_slot(slot: Slot, function: Callable[..., Any], *arguments: Any, **params: Any) -> Any:
    """Call the slot's function; report what it raises with its line."""
    try:
        return function(*arguments, **params)
    except Exception as error:  # the boundary to the user's code
        file = function.__code__.co_filename
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == file]
        at = f" in line {lines[-1]}" if lines else ""
        raise _fault(slot, f"raises {type(error).__name__}{at}: {error}") from error


def _looked_at(slot: Slot, value: Any, batch: TokenBatch) -> Tensor:
    """Return the slot's main tensor, after checks of shape, finite values and gradient."""
    rows, tokens = batch.task_reward_N, batch.mask_NT
    kind = slot.kind
    if kind == "schedule":
        if not isinstance(value, list) or not value:
            raise _fault(slot, f"returned {_shape(value)} instead of a list of masks")
        for each in value:
            _shaped(slot, each, [tokens], flags=True)
        return value[0]
    if kind == "filter":
        return _shaped(slot, value, [rows], flags=True)
    if kind == "shaping":
        if not isinstance(value, tuple) or len(value) != 2:
            said = f"returned {_shape(value)} instead of (reward_N, rewards per token or None)"
            raise _fault(slot, said)
        if value[1] is not None:
            _finite(slot, _shaped(slot, value[1], [tokens]), tokens)
        return _finite(slot, _shaped(slot, value[0], [rows]), ~rows.isnan())
    if kind == "advantage":
        found = _shaped(slot, value, [rows, tokens])
        graded = ~rows.isnan()
        return _finite(slot, found, graded if found.dim() == 1 else tokens & graded[:, None])
    if kind == "gate":
        if not isinstance(value, tuple) or len(value) != 2:
            raise _fault(slot, f"returned {_shape(value)} instead of (objective_NT, clipped_NT)")
        _shaped(slot, value[1], [tokens], flags=True)
        value = value[0]
    if kind == "aggregation" and isinstance(value, tuple):
        value = value[0]
    if kind == "auxiliary":
        found = _shaped(slot, value, [torch.zeros(())])
        everywhere = torch.ones((), dtype=torch.bool)
    else:
        found = _shaped(slot, value, [tokens])
        everywhere = torch.ones_like(tokens)  # 0 · NaN is NaN: padding must be finite, too
    _finite(slot, found, everywhere)
    unmoving = kind == "ratio" and slot.definition.traits.level == "none"
    if kind in ("ratio", "gate", "penalty", "auxiliary") and not (found.requires_grad or unmoving):
        raise _fault(
            slot,
            "returned a tensor without a gradient, so the policy learns nothing from it: something "
            "in it is detached, or computed under no_grad, or goes through numpy or .item()",
        )
    return found


def _shaped(slot: Slot, value: Any, likes: Sequence[Tensor], flags: bool = False) -> Tensor:
    shapes = [like.shape for like in likes]
    if not isinstance(value, Tensor) or value.shape not in shapes:
        promised = " or ".join(str(tuple(shape)) for shape in shapes)
        raise _fault(
            slot,
            f"returned {_shape(value)} where its signature promises a tensor {promised} "
            f"({_in_words(shapes)})",
        )
    if flags and value.dtype != torch.bool:
        raise _fault(slot, f"returned {value.dtype} where True or False is promised")
    return value


def _in_words(shapes: Sequence[Sequence[int]]) -> str:
    names = {0: "one number", 1: "one a row", 2: "rows x tokens"}
    return " or ".join(names[len(shape)] for shape in shapes)


def _finite(slot: Slot, found: Tensor, where: Tensor) -> Tensor:
    bad = found.detach()[where]
    bad = bad[~bad.isfinite()]
    if len(bad):
        raise _fault(slot, f"returned {float(bad[0])} in {len(bad)} of {found.numel()} places")
    return found


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if value is None:
        return "None (did you forget return?)"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple) else repr(value)


def _fault(slot: Slot, what: str) -> RecipeError:
    end = "" if what.endswith(("?", ".")) else "."
    return RecipeError(
        f"{slot.kind} {_place(slot)} {what}{end} Found on a toy batch, before a model is loaded. "
        "CONTRIBUTING.md has the signature of every slot."
    )


def _place(slot: Slot) -> str:
    """Return the slot's name, with the file and the line that it is written in."""
    own = next((s for s in (slot, *_within(slot)) if not _of_package(s)), slot)
    code = own.definition.function.__code__
    inside = f" with {own.name}" if own is not slot else ""
    return f"{slot.name}{inside} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _own(recipe: Recipe) -> str:
    return ", ".join(f"{slot.kind} {_place(slot)}" for slot in recipe.slots() if _is_own(slot))


def _within(slot: Slot) -> list[Slot]:
    return [value for _, value in slot.params if isinstance(value, Slot)]


def _of_package(slot: Slot) -> bool:
    return slot.definition.function.__module__.startswith("groupwise.")


def _is_own(slot: Slot) -> bool:
    return not all(_of_package(each) for each in (slot, *_within(slot)))


def _check_needs(recipe: Recipe, toy: Toy) -> None:
    """Refuse a slot that reads what nothing provides."""
    for slot in recipe.slots():
        for name in slot.needs if _is_own(slot) else ():
            if name not in toy.streams and name not in recipe.outputs:
                raise _fault(
                    slot,
                    f"needs {name!r}, which nothing in training brings. {nearest(name, STREAMS)}",
                )


# --- pairs --------------------------------------------------------------------------------------


def try_pairs(recipe: PairRecipe) -> list[str]:
    """Refuse a faulty pairing or preference that is not the package's, by name."""
    g = torch.Generator().manual_seed(SEED)
    logp = [torch.randn(6, generator=g) - 5 for _ in range(4)]
    policy = [x.requires_grad_() for x in logp[:2]]
    slot = recipe.preference
    if _is_own(slot):
        found = call_slot(slot, slot, toy_pairs(policy, logp[2:]))
        if not isinstance(found, PairLoss):
            raise _fault(slot, f"returned {_shape(found)} instead of a PairLoss")
        _finite(slot, _shaped(slot, found.loss_N, [logp[0]]), torch.ones(6, dtype=torch.bool))
        if not found.loss_N.requires_grad:
            raise _fault(slot, "returned a loss without a gradient: something in it is detached")
    for slot in recipe.likelihood:
        if _is_own(slot):
            _try_loss(slot, toy_pairs(policy, logp[2:]), logp[2])
    slot = recipe.pairing
    if _is_own(slot):
        choice = call_slot(slot, slot, torch.tensor([0.0, 1.0, 0.5, 0.25]))
        if not isinstance(choice, Choice) or not {choice.chosen, choice.rejected} <= {
            0,
            1,
            2,
            3,
        }:
            raise _fault(slot, f"returned {choice!r} instead of a Choice of two of the candidates")
    return []


def toy_pairs(policy: Sequence[Tensor], reference: Sequence[Tensor]) -> Pairs:
    """Return pairs with all that a preference may read."""
    count = len(policy[0])
    chosen_N, rejected_N = torch.arange(2.0, 2 + count), torch.arange(3.0, 3 + count)
    (one, two), (ref_one, ref_two) = policy, reference
    return Pairs(one, two, ref_one, ref_two, chosen_N, rejected_N, float(chosen_N.mean()))


def try_unpaired(recipe: UnpairedRecipe) -> list[str]:
    """Refuse a faulty preference of labelled answers that is not the package's, by name."""
    g = torch.Generator().manual_seed(SEED)
    logp_N, ref_N = torch.randn(6, generator=g) - 5, torch.randn(6, generator=g) - 5
    slot = recipe.preference
    if _is_own(slot):
        good_N = torch.tensor([True, False] * 3)
        given = CalledAnswers(logp_N.requires_grad_(), ref_N, good_N, torch.tensor(0.5))
        found = call_slot(slot, slot, given)
        if not isinstance(found, AnswerLoss):
            raise _fault(slot, f"returned {_shape(found)} instead of an AnswerLoss")
        _finite(slot, _shaped(slot, found.loss_N, [ref_N]), torch.ones(6, dtype=torch.bool))
        if not found.loss_N.requires_grad:
            raise _fault(slot, "returned a loss without a gradient: something in it is detached")
    return []


def try_scores(recipe: RewardModelRecipe) -> list[str]:
    """Refuse a faulty pairing or preference of scores that is not the package's, by name."""
    g = torch.Generator().manual_seed(SEED)
    chosen_N, rejected_N = (torch.randn(6, generator=g).requires_grad_() for _ in range(2))
    if _is_own(recipe.preference):
        pairs = ScoredPairs(chosen_N, rejected_N, torch.zeros(6))
        _try_loss(recipe.preference, pairs, chosen_N)
    slot = recipe.pairing
    if _is_own(slot):
        found = call_slot(slot, slot, torch.tensor([0.0, 1.0, 0.5, 0.25]))
        several = isinstance(found, tuple | list) and all(isinstance(x, Choice) for x in found)
        places = {n for x in found for n in (x.chosen, x.rejected)} if several else set()
        if not several or not places <= {0, 1, 2, 3}:
            raise _fault(slot, f"returned {found!r} instead of Choices of two of the candidates")
    return []


def try_labels(recipe: ProcessRewardModelRecipe) -> list[str]:
    """Refuse a faulty labelling that is not the package's, by name."""
    score_N = torch.randn(6, generator=torch.Generator().manual_seed(SEED)).requires_grad_()
    if _is_own(recipe.labelling):
        _try_loss(recipe.labelling, LabelledSteps(score_N, torch.linspace(0, 1, 6)), score_N)
    return []


def _try_loss(slot: Slot, given: Any, like_N: Tensor) -> None:
    loss_N = call_slot(slot, slot, given)
    _finite(slot, _shaped(slot, loss_N, [like_N]), torch.ones(len(like_N), dtype=torch.bool))
    if not loss_N.requires_grad:
        raise _fault(slot, "returned a loss without a gradient: something in it is detached")
