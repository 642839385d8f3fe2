"""The token phase: one micro-batch of whole sequences, with gradient -> its share of the loss.

    L = −Σ u·w·S + Σ u·penalty + auxiliary terms

Sum the losses of all micro-batches and ranks (average nothing): the denominators in u are those of
the whole batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import BatchError, RecipeError
from groupwise.groups.phase import batch_slots, returned
from groupwise.losses.measures import Tally
from groupwise.losses.measuring import measure
from groupwise.methods.composition import Recipe
from groupwise.methods.slots import Slot
from groupwise.records import TokenBatch
from groupwise.streams import STREAMS


@dataclass(frozen=True)
class TokenResult:
    """A micro-batch's share of the loss, and what happened to its tokens."""

    loss: Tensor  # differentiable; add up over micro-batches
    terms: dict[str, Tensor]  # its parts by slot: policy, penalty names, auxiliary names
    objective_NT: Tensor  # S, before weights; detached
    log_ratio_NT: Tensor  # detached
    weight_NT: Tensor | None  # product of corrections, None without any
    clipped_NT: Tensor  # bool: where the gate took the gradient away
    tally: Tally  # merge over micro-batches and ranks, then read
    # Of a mixture, by the learner whose pass it was: layers whose experts are others than at
    # sampling, a share.
    rerouted_NT: Tensor | None = None


def token_phase(
    recipe: Recipe, batch: TokenBatch, *, apart: Collection[str] = (), **outputs: Tensor
) -> TokenResult:
    """Differentiable log-probabilities (and what else the recipe reads) -> loss and measures.

    `batch` comes from the batch phase (or is a `select`ion of its rows). `outputs` are the
    learner's: logp_NT always; entropy_NT, topk_logp_NTK, value_NT, router_NTLK, ... by recipe.
    Terms that train the roles named in `apart` are left to `role_phase`.
    """
    others = [term for role in apart for term in recipe.terms_of(role)]
    batch = _attach(recipe, batch, outputs, others)
    coefficient_NT = _coefficient(batch)
    log_ratio_NT = returned(recipe.ratio, recipe.ratio(batch), batch.mask_NT)
    advantage_NT = batch.stream("advantage_NT")
    gated = recipe.gate(log_ratio_NT, advantage_NT, batch)
    if not isinstance(gated, tuple):
        raise RecipeError(f"gate {recipe.gate.name} must return (objective_NT, clipped_NT).")
    objective_NT, clipped_NT = (returned(recipe.gate, x, batch.mask_NT) for x in gated)
    weight_NT = _weights(recipe, batch)
    weighted_NT = objective_NT if weight_NT is None else objective_NT * weight_NT
    terms = {"policy": -(coefficient_NT * weighted_NT).sum()}
    for penalty in recipe.penalty:
        loss_NT = returned(penalty, penalty(batch), batch.mask_NT)
        terms[penalty.name] = (coefficient_NT * loss_NT).sum()
    for term in recipe.auxiliary:
        if term not in others:
            terms[term.name] = term(batch, batch.prepared[term.name])
    loss = torch.stack(list(terms.values())).sum() if len(terms) > 1 else terms["policy"]
    return TokenResult(
        loss=loss,
        terms={name: term.detach() for name, term in terms.items()},
        objective_NT=objective_NT.detach(),
        log_ratio_NT=log_ratio_NT.detach(),
        weight_NT=weight_NT,
        clipped_NT=clipped_NT,
        tally=measure(batch, log_ratio_NT.detach(), clipped_NT, weight_NT),
    )


def role_phase(
    recipe: Recipe, batch: TokenBatch, role: str, **outputs: Tensor
) -> tuple[TokenBatch, dict[str, Tensor]]:
    """Return the micro-batch with a role's outputs, and the terms of the loss that train it."""
    held = batch.with_outputs(**outputs)
    terms = {term.name: term(held, held.prepared[term.name]) for term in recipe.terms_of(role)}
    return held, terms


def _attach(
    recipe: Recipe, batch: TokenBatch, outputs: dict[str, Tensor], others: Sequence[Slot]
) -> TokenBatch:
    if batch.coefficient_NT is None or batch.advantage_NT is None:
        raise BatchError("The token phase needs a batch from the batch phase: call that first.")
    elsewhere = {name for term in others for name in term.definition.traits.outputs}
    for name in recipe.outputs:
        if name not in outputs and name not in elsewhere:
            raise BatchError(
                f"Recipe {recipe.name!r} reads {name} ({STREAMS[name]}): pass it to the token "
                f"phase as {name}=...."
            )
    if batch.made_by != batch_slots(recipe):
        raise BatchError(
            f"The batch comes from the batch phase of another recipe than {recipe.name!r}: its "
            "advantages or coefficients are others. Run batch_phase with the same recipe."
        )
    for term in recipe.auxiliary:
        if term.name not in batch.prepared:
            raise BatchError(
                f"The batch was not prepared for auxiliary {term.name}: it comes from the batch "
                f"phase of another recipe. Run batch_phase with {recipe.name!r}."
            )
    if "length_exponent" in outputs and batch.length_exponent is None:
        raise BatchError(
            "length_exponent must be in the batch as well: the batch phase weighs answers by it. "
            "Pass it to TokenBatch.build."
        )
    batch = batch.with_outputs(**outputs)
    logp_NT = batch.stream("logp_NT")
    if batch.old_logp_NT is None:  # the first update: the policy is its own anchor
        batch = replace(batch, old_logp_NT=logp_NT.detach())
    dtype = logp_NT.dtype
    same = batch.stream("advantage_NT").dtype == dtype
    return batch if same else _cast(batch, dtype)


def _cast(batch: TokenBatch, dtype: torch.dtype) -> TokenBatch:
    """Cast what the batch phase made to the precision of the log-probabilities."""
    changes: dict[str, Any] = {
        name: None if x is None else x.to(dtype)
        for name in ("ones_NT", "advantage_NT", "coefficient_NT", "coefficient_slope_NT")
        for x in [getattr(batch, name)]
    }
    return replace(batch, **changes)


def _coefficient(batch: TokenBatch) -> Tensor:
    """Return u; for a learnable aggregation with its exact gradient in λ."""
    coefficient_NT = batch.stream("coefficient_NT")
    slope_NT, exponent, weighed = (
        batch.coefficient_slope_NT,
        batch.length_exponent,
        batch.weighed_exponent,
    )
    if slope_NT is None or exponent is None or weighed is None:
        return coefficient_NT
    return coefficient_NT + slope_NT * (exponent - weighed)


def _weights(recipe: Recipe, batch: TokenBatch) -> Tensor | None:
    weight_NT = None
    for correction in recipe.correction:
        with torch.no_grad():
            factor_NT = returned(correction, correction(batch), batch.mask_NT)
            weight_NT = factor_NT if weight_NT is None else weight_NT * factor_NT
    return weight_NT
