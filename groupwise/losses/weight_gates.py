"""Gates S = sg[w]·A·ℓ: a detached weight from the ratio decides how much a token teaches.

Same signature as in gates.py: `(log_ratio_NT, advantage_NT, batch) -> (objective_NT, clipped_NT)`.
A token whose weight is 0 counts as clipped.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.losses.gates import Gated
from groupwise.methods.slots import Fraction, NonNegative, gate
from groupwise.records import TokenBatch


def _weighed(weight_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Gated:
    """Return sg[w]·A·ℓ, and the tokens that it leaves out."""
    weight_NT = weight_NT.detach()
    silent_NT = (weight_NT == 0) & (advantage_NT != 0) & batch.mask_NT
    return weight_NT * advantage_NT * batch.stream("logp_NT"), silent_NT


def gamma_weights(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    good: tuple[float, float],
    bad: tuple[float, float],
) -> Tensor:
    """Return φ(r) = r^k·e^(λ(1−r)), (k, λ) by the sign of A; φ(1) = 1."""
    ratio_NT = bounded_exp(log_ratio_NT.detach())
    k_NT, slope_NT = (
        torch.where(advantage_NT >= 0, advantage_NT.new_tensor(x), y)
        for x, y in zip(good, bad, strict=True)
    )
    return bounded_exp(k_NT * ratio_NT.log() + slope_NT * (1.0 - ratio_NT))


@gate(
    counts_tokens=True,
    equation=(
        "S = sg[φ(r)]·A·ℓ, φ = r^k·e^(λ(1−r)); k = {k_pos}, λ = {lambda_pos} for A ≥ 0, "
        "else k = {k_neg}, λ = {lambda_neg}"
    ),
    fixes="a smooth weight of whole answers instead of a clip",
    breaks="long answers of another policy fall silent: φ goes to 0 on both sides",
)
def gamma_weight(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    k_pos: NonNegative = 2.0,
    lambda_pos: NonNegative = 3.0,
    k_neg: NonNegative = 3.0,
    lambda_neg: NonNegative = 2.0,
) -> Gated:
    """VESPO (2602.10693), with the authors' code's values."""
    good, bad = (k_pos, lambda_pos), (k_neg, lambda_neg)
    return _weighed(gamma_weights(log_ratio_NT, advantage_NT, good, bad), advantage_NT, batch)


@gate(
    equation="S = sg[r·1[1−{low} < r < 1+{high}]]·A·ℓ",
    fixes="no pass for the policy before the update: the ratio is to the sampler",
    breaks="tokens that should be pushed back into the band are dropped, too",
)
def band_mask(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
) -> Gated:
    """GLM-5's rollout importance mask (2602.15763): both sides, whatever the sign of A."""
    ratio_NT = bounded_exp(log_ratio_NT)
    inside_NT = (ratio_NT > 1.0 - low) & (ratio_NT < 1.0 + high)
    return _weighed(ratio_NT * inside_NT, advantage_NT, batch)


@gate(
    counts_tokens=True,
    equation=(
        "S = sg[α]·A·ℓ, α = {positive} for good answers, {negative}·min(r, 1) for others, told "
        "apart by their {split}"
    ),
    fixes="bad answers that the policy has left behind stop pushing",
    breaks="good ones are never corrected for who wrote them",
)
def taper(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    positive: NonNegative = 1.0,
    negative: NonNegative = 1.0,
    split: Literal["advantage", "reward"] = "advantage",
) -> Gated:
    """TOPR (2503.14286); `split` says by what an answer is good: its advantage or its reward."""
    if split == "advantage":
        good_NT = advantage_NT > 0
    else:
        good_NT = (batch.stream("reward_N") > 0)[:, None].expand_as(advantage_NT)
    tapered_NT = negative * bounded_exp(log_ratio_NT).clamp(max=1.0)
    full_NT = torch.full_like(tapered_NT, positive)
    return _weighed(torch.where(good_NT, full_NT, tapered_NT), advantage_NT, batch)


def _band(ratio_NT: Tensor, low: float, high: float) -> Tensor:
    return (ratio_NT >= 1.0 - low) & (ratio_NT <= 1.0 + high)


def _one_side(ratio_NT: Tensor, advantage_NT: Tensor, low: float, high: float) -> Tensor:
    """Tell where PPO's clip leaves a gradient."""
    good_NT = (advantage_NT >= 0) & (ratio_NT <= 1.0 + high)
    return good_NT | ((advantage_NT <= 0) & (ratio_NT >= 1.0 - low))


@gate(
    equation="S = sg[w·1[1−{low} ≤ r ≤ 1+{high}]]·A·ℓ, w by {weight}",
    fixes="a policy gradient on other policies' answers, as long as they are near",
    breaks="a token falls silent at once, on either side",
)
def score_band(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
    weight: Literal["none", "importance_sampling"] = "none",
) -> Gated:
    """REC's two-sided clip (2509.24203)."""
    ratio_NT = bounded_exp(log_ratio_NT)
    kept_NT = _band(ratio_NT, low, high)
    return _weighed(_by_weight(ratio_NT, weight) * kept_NT, advantage_NT, batch)


@gate(
    equation="S = sg[w]·A·ℓ where r ≤ 1+{high} for A ≥ 0, r ≥ 1−{low} for A ≤ 0, w by {weight}",
    fixes="what PPO's clip leaves out, without its ratio",
    breaks="a token falls silent at once",
)
def score_one_side(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
    weight: Literal["none", "importance_sampling"] = "none",
) -> Gated:
    """REC's one-sided clip (2509.24203); weighed by r it has PPO's gradient."""
    ratio_NT = bounded_exp(log_ratio_NT)
    kept_NT = _one_side(ratio_NT, advantage_NT, low, high)
    return _weighed(_by_weight(ratio_NT, weight) * kept_NT, advantage_NT, batch)


@gate(
    equation=(
        "S = sg[w·m]·A·ℓ, m: 1−{low} ≤ r ≤ 1+{high}, or A ≥ 0 and r ≤ 1−{outer_low}, or A ≤ 0 and "
        "r ≥ 1+{outer_high}; w by {weight}"
    ),
    fixes="tokens that are far off on the harmless side are learned again",
    breaks="discontinuous at four edges",
)
def score_ring(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
    outer_low: Fraction = 0.6,
    outer_high: NonNegative = 2.0,
    weight: Literal["none", "importance_sampling"] = "none",
) -> Gated:
    """REC's ring (2509.24203)."""
    ratio_NT = bounded_exp(log_ratio_NT)
    kept_NT = _band(ratio_NT, low, high)
    kept_NT = kept_NT | ((advantage_NT >= 0) & (ratio_NT <= 1.0 - outer_low))
    kept_NT = kept_NT | ((advantage_NT <= 0) & (ratio_NT >= 1.0 + outer_high))
    return _weighed(_by_weight(ratio_NT, weight) * kept_NT, advantage_NT, batch)


def _by_weight(ratio_NT: Tensor, weight: str) -> Tensor:
    return torch.ones_like(ratio_NT) if weight == "none" else ratio_NT
