"""Corrections: `correction(batch) -> weight_NT`, detached; several multiply.

ρ = π_old(learner) / μ(sampler) of the same weights: 1 if the two engines agreed. The weight
multiplies the policy term, not the penalties, and a token with weight 0 stays in the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.losses.ratios import anchor_logp, row_mean
from groupwise.methods.slots import NonNegative, Positive, correction
from groupwise.records import TokenBatch


def mismatch(batch: TokenBatch) -> Tensor:
    """Return log ρ per token, detached, 0 where masked."""
    sampler_NT = batch.stream("sampler_logp_NT")
    return (anchor_logp(batch, "old") - sampler_NT).detach()


def _sequence(log_weight_N1: Tensor, batch: TokenBatch) -> Tensor:
    return bounded_exp(log_weight_N1).expand_as(batch.mask_NT)


@correction(
    needs=("sampler_logp_NT",),
    equation="w_t = min(ρ_t, {cap})",
    fixes="calm",
    breaks="biased",
)
def tis_token(batch: TokenBatch, *, cap: Positive = 2.0) -> Tensor:
    """Truncated importance sampling per token."""
    return bounded_exp(mismatch(batch)).clamp(max=cap)


@correction(
    needs=("sampler_logp_NT",),
    equation="w = min(Π_t ρ_t, {cap})",
    fixes="principled",
    breaks="high variance on long answers",
)
def tis_sequence(batch: TokenBatch, *, cap: Positive = 2.0) -> Tensor:
    """Truncated importance sampling per sequence."""
    total_N1 = mismatch(batch).sum(1, keepdim=True)
    return _sequence(total_N1, batch).clamp(max=cap)


@correction(
    needs=("sampler_logp_NT",),
    equation="w_t = ρ_t · 1[{low} ≤ ρ_t ≤ {high}]",
    fixes="drops the tails instead of capping them",
    breaks="the tokens that disagree most teach nothing",
)
def icepop(batch: TokenBatch, *, low: NonNegative = 0.5, high: Positive = 5.0) -> Tensor:
    """Mask tokens outside the band (IcePop)."""
    rho_NT = bounded_exp(mismatch(batch))
    return rho_NT * ((rho_NT >= low) & (rho_NT <= high))


@correction(
    needs=("sampler_logp_NT",),
    equation="w = Π_t ρ_t · 1[{low} ≤ Π_t ρ_t ≤ {high}]",
    fixes="whole answers that one engine would not have given are dropped",
    breaks="long answers are dropped first",
)
def mis_sequence(batch: TokenBatch, *, low: NonNegative = 0.0, high: Positive = 2.0) -> Tensor:
    """Masked importance sampling per sequence."""
    rho_NT = _sequence(mismatch(batch).sum(1, keepdim=True), batch)
    return rho_NT * ((rho_NT >= low) & (rho_NT <= high))


@correction(
    needs=("sampler_logp_NT",),
    equation="w_t = ρ_t · 1[{low} ≤ (Π ρ)^(1/n) ≤ {high}]",
    fixes="a mask that is fair to long answers",
    breaks="weights inside the mask are not capped",
)
def mis_geometric(batch: TokenBatch, *, low: NonNegative = 0.5, high: Positive = 2.0) -> Tensor:
    """Masked by the sequence's geometric mean, weighted per token."""
    log_rho_NT = mismatch(batch)
    mean_N1 = bounded_exp(row_mean(log_rho_NT, batch))
    return torch.where((mean_N1 >= low) & (mean_N1 <= high), bounded_exp(log_rho_NT), 0.0)


@correction(
    weighs=False,
    needs=("sampler_logp_NT",),
    equation="w_t = 1[{low} ≤ Π_t ρ_t ≤ {high}]",
    fixes="drops answers the engines disagree on; leaves the others unweighted",
    breaks="long answers are dropped first",
)
def mask_sequence(batch: TokenBatch, *, low: NonNegative = 0.0, high: Positive = 3.0) -> Tensor:
    """Sequence mask without a weight."""
    rho_NT = _sequence(mismatch(batch).sum(1, keepdim=True), batch)
    return ((rho_NT >= low) & (rho_NT <= high)).to(rho_NT.dtype)


@correction(
    routing=True,
    equation="w = 1; the forward pass uses experts recorded by the {source} (gates: Σ-normalised"
    " over them)",
    fixes="removes the cause of the mismatch in mixtures of experts",
    breaks="the sampler's routing (R3) changes the policy that is trained",
)
def replay_routing(
    batch: TokenBatch, *, source: Literal["learner", "sampler"] = "learner"
) -> Tensor:
    """Routing replay: R2 takes the learner's experts at π_old, R3 the sampler's.

    The work is in the model's forward pass (`losses.routing.replay_gates`); no weight is left.
    """
    return torch.ones_like(batch.stream("logp_NT"))
