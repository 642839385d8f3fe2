"""Corrections: `correction(batch) -> weight_NT`, detached; several multiply.

ρ = π_old(learner) / μ(sampler) of the same weights: 1 if the two engines agreed. The weight
multiplies the policy term, not the penalties, and a token with weight 0 stays in the denominator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.groups.statistics import discounted_suffix_sums
from groupwise.losses.distribution_gates import another_token
from groupwise.losses.ratios import anchor_logp, interpolated, row_mean
from groupwise.losses.whole_update import entropy_quantile, kept_mismatches
from groupwise.methods.slots import (
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Stream,
    correction,
)
from groupwise.records import TokenBatch, masks


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
    needs=("sampler_logp_NT",),
    equation="w_t = clamp(ρ_t, {low}, {high})",
    fixes="calm on both sides",
    breaks="biased on both sides",
)
def tis_clamped(batch: TokenBatch, *, low: NonNegative = 0.5, high: Positive = 2.0) -> Tensor:
    """Truncated importance sampling per token, with a floor (decoupled PPO, 2505.24298)."""
    return bounded_exp(mismatch(batch)).clamp(low, high)


@correction(
    weighs=False,
    needs=("sampler_logp_NT",),
    equation="w_t = 1[{low} ≤ ρ_t ≤ {high}]",
    fixes="drops the tokens on which the engines disagree; leaves the others unweighted",
    breaks="they teach nothing",
)
def mask_token(batch: TokenBatch, *, low: NonNegative = 0.5, high: Positive = 2.0) -> Tensor:
    """Mask as IcePop does, without its weight."""
    rho_NT = bounded_exp(mismatch(batch))
    return ((rho_NT >= low) & (rho_NT <= high)).to(rho_NT.dtype)


@correction(
    weighs=False,
    needs=("sampler_logp_NT",),
    equation="w = 1[{low} ≤ ρ_t ≤ {high} for every t]",
    fixes="answers with a token that one engine would hardly have sampled are dropped",
    breaks="long answers are likelier to hold one",
)
def mask_outliers(batch: TokenBatch, *, low: NonNegative = 1e-4, high: Positive = 100.0) -> Tensor:
    """Drop whole answers for one outlier (SkyRL; slime's veto has the lower side alone)."""
    rho_NT = bounded_exp(mismatch(batch))
    outside_NT = ((rho_NT < low) | (rho_NT > high)) & batch.mask_NT
    kept_N1 = ~outside_NT.any(1, keepdim=True)
    return kept_N1.to(rho_NT.dtype).expand_as(rho_NT)


def largest_binary_kl(first_NT: Tensor, second_NT: Tensor) -> Tensor:
    """Return the larger of KL(p‖q) and KL(q‖p) of 'this token or another'."""
    (rest_p_NT, log_p_NT), (rest_q_NT, log_q_NT) = map(another_token, (first_NT, second_NT))
    apart_NT, rest_apart_NT = first_NT - second_NT, log_p_NT.sub_(log_q_NT)
    forward_NT = first_NT.exp() * apart_NT + rest_p_NT * rest_apart_NT
    backward_NT = second_NT.exp() * apart_NT + rest_q_NT * rest_apart_NT
    return torch.maximum(forward_NT, -backward_NT)


@correction(
    needs=("sampler_logp_NT",),
    equation="w_t = ρ_t · 1[max(KL₂(π_old‖μ), KL₂(μ‖π_old)) ≤ {bound}]",
    fixes="drops tokens by how much the two distributions differ there, not by a ratio",
    breaks="they teach nothing",
)
def binary_kl_mask(batch: TokenBatch, *, bound: NonNegative = 0.05) -> Tensor:
    """Mask by the binary KL, in both directions (KPop)."""
    old_NT, sampler_NT = anchor_logp(batch, "old"), batch.stream("sampler_logp_NT")
    dropped_NT = masks.above(largest_binary_kl(old_NT, sampler_NT), bound)
    return bounded_exp(mismatch(batch)) * (1.0 - dropped_NT)


@correction(
    weighs=False,
    needs=("sampler_logp_NT",),
    equation=(
        "k_t = KL₂(μ‖π_old); w_t = ρ_t · 1[mean_t k_t ≤ {delta}]; probabilities within "
        "[1e-6, 1 − 1e-6]"
    ),
    fixes="answers on which the engines disagree are dropped; the others are weighed",
    breaks="ignores which way an answer is pushed",
)
def sequence_kl_mask(batch: TokenBatch, *, delta: NonNegative = 3e-3) -> Tensor:
    """Drop answers by their mean binary KL to the sampler (FlashREINFORCE)."""
    kept_N1 = row_mean(clamped_binary_kl(batch), batch) <= delta
    return bounded_exp(mismatch(batch)) * kept_N1


def clamped_binary_kl(batch: TokenBatch) -> Tensor:
    """Return KL₂(μ‖π_old) per token, 0 where masked, of probabilities within [1e-6, 1 − 1e-6]."""
    p_NT, q_NT = (
        x.exp().clamp(1e-6, 1 - 1e-6)
        for x in (batch.stream("sampler_logp_NT"), anchor_logp(batch, "old"))
    )
    return batch.valid(p_NT * (p_NT / q_NT).log() + (1 - p_NT) * ((1 - p_NT) / (1 - q_NT)).log())


@correction(
    weighs=False,
    prepare=kept_mismatches,
    needs=("old_logp_NT", "sampler_logp_NT"),
    equation="w_t = 0 for the largest (ℓ° − ℓ^μ)² of the update, until the mean of the others is"
    " within {budget}",
    fixes="the few tokens on which the engines disagree most are dropped",
    breaks="a statistic of the update; knows neither A nor the policy",
)
def second_moment_mask(batch: TokenBatch, *, budget: NonNegative = 0.04) -> Tensor:
    """Mask as AReaL does under the name of M2PO, which is another method; one token stays."""
    return batch.prepared["second_moment_mask"]["keep_NT"]


@correction(
    weighs=False,
    prepare=entropy_quantile,
    needs=("now_entropy_NT",),
    equation="w_t = 1[H_t ≥ the (1−{fraction}) quantile over all tokens of the update]",
    fixes="learns where the answer forks",
    breaks="most tokens teach nothing",
)
def top_entropy(batch: TokenBatch, *, fraction: PositiveFraction = 0.2) -> Tensor:
    """Learn from tokens of high entropy alone (2506.01939); equal ones at the bound stay."""
    threshold_N = batch.prepared["top_entropy"]["threshold_N"]
    entropy_NT = batch.stream("now_entropy_NT").double()
    return (entropy_NT >= threshold_N[:, None]).to(batch.ones_NT.dtype)


@correction(
    weighs=False,
    needs=("taught_N",),
    equation="w_i = 1 where a teacher could look at an answer of the group, else 0",
    fixes="answers without a demonstration are left out",
    breaks="groups without a success teach nothing",
)
def taught(batch: TokenBatch) -> Tensor:
    """Leave out what nobody could teach (SDPO, 2601.20802)."""
    return batch.valid(batch.stream("taught_N"))


@correction(
    weighs=False,
    equation="w = {by}",
    fixes="the policy's term beside another one that is weighed by the rest",
    breaks="a learning rate in disguise",
)
def share(batch: TokenBatch, *, by: PositiveFraction = 1.0) -> Tensor:
    """Weigh the policy's term as a whole."""
    return by * batch.ones_NT


@correction(
    needs=("sampler_logp_NT", "age_NT"),
    equation="w_t = ρ_t·1[ρ_t ≤ {cap}], ρ = e^(α·(sg ℓ − ℓ^μ)), α as in the ratio",
    fixes="corrects for the sampler without a pass for the anchor",
    breaks="the anchor is a guess between two policies",
)
def interpolated_mask(batch: TokenBatch, *, cap: Positive = 5.0) -> Tensor:
    """Weigh an interpolated anchor against the sampler (AReaL)."""
    gap_NT = (interpolated(batch) - batch.stream("sampler_logp_NT")).detach()
    rho_NT = bounded_exp(gap_NT)
    return rho_NT * (rho_NT <= cap)


def mean_fall(batch: TokenBatch, anchor: str) -> Tensor:
    """Return mean_t(ℓ^anchor − sg ℓ) of each answer, [N, 1]."""
    logp_NT = batch.stream("logp_NT").detach()
    return row_mean(anchor_logp(batch, anchor) - logp_NT, batch)


@correction(
    weighs=False,
    equation="w_i = 0 iff A_i < 0 and mean_t(ℓ^{anchor} − ℓ) > {delta}",
    fixes="failures that the policy has left behind stop pushing",
    breaks="one-sided: an answer that has become likelier passes",
)
def negative_sequence_mask(
    batch: TokenBatch, *, delta: NonNegative = 1e-4, anchor: Stream = "old"
) -> Tensor:
    """DeepSeek-V3.2's mask of stale failures (2512.02556)."""
    bad_N1 = row_mean(batch.stream("advantage_NT"), batch) < 0
    dropped_N1 = bad_N1 & (mean_fall(batch, anchor) > delta)
    return (~dropped_N1).to(batch.stream("logp_NT").dtype).expand_as(batch.mask_NT)


def future_log_ratio(batch: TokenBatch, half_life: float, dual: float) -> Tensor:
    """Return F_t = Σ_{s≥t} γ^{s−t} d_s over a row's own tokens, γ = 2^(−1/half_life).

    Tokens whose ratio lies above `dual` leave the sum.
    """
    d_NT = (batch.stream("logp_NT") - anchor_logp(batch, "old")).detach()
    kept_NT = d_NT * (1.0 - masks.above(bounded_exp(d_NT), dual))
    return discounted_suffix_sums(kept_NT, 2.0 ** (-1.0 / half_life), batch)


@correction(
    weighs=False,
    needs=("old_logp_NT",),
    equation=(
        "w_t = clip(e^F_t, 1−{below}, 1+{above}), F_t = Σ_(s≥t) γ^(s−t) (ℓ_s − ℓ_old,s) of "
        "tokens with r ≤ {dual}, γ = 2^(−1/{half_life}); for A < 0 and r > {safety} within "
        "[1−{above}, 1]"
    ),
    fixes="credit per token without a critic: what the update did behind it",
    breaks="rewards whatever the optimizer did last; nothing in the first update",
)
def future_influence(
    batch: TokenBatch,
    *,
    half_life: Positive = 32.0,
    below: Fraction = 0.0,
    above: Fraction = 0.2,
    safety: Positive = 4.0,
    dual: Positive = 1e9,
) -> Tensor:
    """FIPO (2603.19835): a weight only grows; documented with `below` like `above`.

    A bad token whose ratio is above `safety` counts no more than others, and may count less.
    """
    factor_NT = bounded_exp(future_log_ratio(batch, half_life, dual))
    ratio_NT = bounded_exp((batch.stream("logp_NT") - anchor_logp(batch, "old")).detach())
    bad_NT = masks.below(batch.stream("advantage_NT"), 0.0)
    unsafe_NT = bad_NT.mul_(masks.above(ratio_NT, safety))
    return torch.where(
        unsafe_NT.bool(),
        factor_NT.clamp(1.0 - above, 1.0),
        factor_NT.clamp(1.0 - below, 1.0 + above),
    )


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
