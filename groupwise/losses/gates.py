"""Gates: `gate(log_ratio_NT, advantage_NT, batch) -> (objective_NT, clipped_NT)`.

The objective is what the policy maximises, token by token. `clipped_NT` (bool) says where the gate
took the gradient away; A = 0 is never clipped. Which side it was is the sign of the log-ratio.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from groupwise.groups.kl import at_least, at_most, bounded_exp
from groupwise.losses.ratios import row_mean, segment_mean
from groupwise.methods.slots import AboveOne, NonNegative, Positive, Slot, gate, width
from groupwise.records import TokenBatch
from groupwise.records.masks import equal

Gated = tuple[Tensor, Tensor]


def nothing_clipped(batch: TokenBatch) -> Tensor:
    return torch.zeros_like(batch.mask_NT)


def clip_within(
    ratio_NT: Tensor, advantage_NT: Tensor, low: Tensor | float, high: Tensor | float
) -> Gated:
    """Return min(r·A, clip(r, low, high)·A): only the side towards which A pushes is bounded."""
    fixed_NT = ratio_NT.detach()
    bounded_NT = fixed_NT.clamp(max=high).mul_(advantage_NT.clamp(min=0))
    bounded_NT.add_(fixed_NT.clamp(min=low).mul_(advantage_NT.clamp(max=0)))
    return bounded_by(bounded_NT, ratio_NT, advantage_NT)


def bounded_by(bounded_NT: Tensor, ratio_NT: Tensor, advantage_NT: Tensor) -> Gated:
    """Return an objective that is r·A where its value is, with r's gradient, else a constant.

    So a bound on either side may hold, downwards by min or upwards by a dual clip, and one product
    carries the gradient.
    """
    free_NT = equal(ratio_NT.detach() * advantage_NT, bounded_NT)
    constant_NT = bounded_NT.mul_(1.0 - free_NT)
    return ratio_NT * (advantage_NT * free_NT) + constant_NT, ~free_NT.bool()


@gate(
    ratio="none",
    equation="S = A·ℓ",
    fixes="the policy gradient itself",
    breaks="no trust region",
)
def score(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Gated:
    """Score function (REINFORCE): gradient A·∇log π."""
    objective_NT = advantage_NT * batch.stream("logp_NT")
    return objective_NT, nothing_clipped(batch)


@gate(
    ratio="none",
    equation="S = A·sg[π(y)]·ℓ",
    fixes="answers of the data that the policy holds for unlikely no longer rule the gradient",
    breaks="what it holds for impossible is never learned: no cold start",
)
def score_by_probability(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Gated:
    """DFT (2508.05629): the score function, each token weighed by its own probability."""
    logp_NT = batch.stream("logp_NT")
    objective_NT = advantage_NT * bounded_exp(logp_NT.detach()) * logp_NT
    return objective_NT, nothing_clipped(batch)


@gate(
    equation="S = r·A",
    fixes="unbiased off-policy",
    breaks="no trust region",
)
def unclipped(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Gated:
    """Plain importance sampling."""
    objective_NT = bounded_exp(log_ratio_NT) * advantage_NT
    return objective_NT, nothing_clipped(batch)


@gate(
    below_one=True,
    equation="S = min(r·A, clip(r, 1−{low}, 1+{high})·A)",
    fixes="a cheap trust region; high > low leaves room to explore (clip-higher)",
    breaks="beyond the range nothing is learned, though what else is learned may carry it on",
    breaks_at={
        "token": "below it, those are mostly rare tokens of worse answers; above it common ones, "
        "against what is often said (measured: docs/claims.md, j)",
        "sequence": "a whole answer falls silent at once",
    },
)
def clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
) -> Gated:
    """PPO (1707.06347); with high > low the clip-higher of DAPO (2503.14476).

    Dead (no gradient) iff A > 0 and r > 1+high, or A < 0 and r < 1−low.
    """
    return clip_within(bounded_exp(log_ratio_NT), advantage_NT, 1.0 - low, 1.0 + high)


@gate(
    below_one=True,
    equation="S = min(r·A, clip(r, 1−{low}, 1+{high})·A); for A < 0 at least {bound}·A",
    fixes="bounds the loss of a bad token whose ratio exploded",
    breaks="one more knob; such tokens are not pushed back",
)
def dual_clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
    bound: AboveOne = 3.0,
) -> Gated:
    """Dual-clip PPO (1912.09729)."""
    ratio_NT = bounded_exp(log_ratio_NT)
    fixed_NT = ratio_NT.detach()
    bounded_NT = fixed_NT.clamp(max=1.0 + high).mul_(advantage_NT.clamp(min=0))
    held_NT = fixed_NT.clamp(min=1.0 - low).clamp_(max=bound)
    return bounded_by(
        bounded_NT.addcmul_(held_NT, advantage_NT.clamp(max=0)), ratio_NT, advantage_NT
    )


def dynamic_bounds(
    old_prob_NT: Tensor, low: float, high: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Solve |(r−1)·r·q| ≤ ε for r: ½+½√max(1−4·low/q, 0) and min(½+½√(1+4·high/q), cap)."""
    four_over_q_NT = 4.0 / old_prob_NT.clamp(min=1e-30)
    low_NT = 0.5 + 0.5 * (1.0 - low * four_over_q_NT).clamp(min=0.0).sqrt()
    high_NT = (0.5 + 0.5 * (1.0 + high * four_over_q_NT).sqrt()).clamp(max=cap)
    return low_NT, high_NT


@gate(
    needs=("old_logp_NT",),
    equation="clip with r between ½+½√max(1−4·{low}/q, 0) and min(½+½√(1+4·{high}/q), {cap}), q ="
    " π_old;"
    " for A < 0 at least {bound}·A",
    fixes="a wider range for rare tokens, whose ratio a small move of probability shifts far",
    breaks="almost no limit as q → 0",
)
def dynamic_clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.16,
    high: NonNegative = 0.2,
    cap: AboveOne = 10.0,
    bound: AboveOne = 10.0,
) -> Gated:
    """DCPO (2509.02333)."""
    old_prob_NT = batch.stream("old_logp_NT").exp()
    low_NT, high_NT = dynamic_bounds(old_prob_NT, low, high, cap)
    ratio_NT = bounded_exp(log_ratio_NT)
    held_NT = ratio_NT.detach().clamp(min=low_NT).clamp_(max=bound)
    bounded_NT = advantage_NT.clamp(min=0) * ratio_NT.detach().clamp(max=high_NT)
    return bounded_by(bounded_NT + advantage_NT.clamp(max=0) * held_NT, ratio_NT, advantage_NT)


def geometric_weight(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch, limit: float
) -> Tensor:
    """Return s_i = exp(mean_t e_t), e the log-ratio within ±limit on A's side, [N, 1]."""
    up_NT, down_NT = (x.to(log_ratio_NT.dtype) for x in (advantage_NT > 0, advantage_NT < 0))
    bounded_NT = up_NT * at_most(log_ratio_NT, limit) + down_NT * at_least(log_ratio_NT, -limit)
    bounded_NT = bounded_NT + (1.0 - up_NT - down_NT) * log_ratio_NT
    return bounded_exp(row_mean(bounded_NT, batch))


@gate(
    per_answer=True,
    equation="S = exp(mean_t e_t)·A, e = min(log r, {limit}) for A > 0, max(log r, −{limit}) for"
    " A < 0",
    fixes="outliers: a geometric mean over the answer, wide and symmetric in log space",
    breaks="clipped tokens still move the answer's weight",
)
def geometric_clip(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch, *, limit: Positive = 0.4
) -> Gated:
    """GMPO (2507.20673)."""
    weight_N1 = geometric_weight(log_ratio_NT, advantage_NT, batch, limit)
    above_NT = (advantage_NT > 0) & (log_ratio_NT > limit)
    below_NT = (advantage_NT < 0) & (log_ratio_NT < -limit)
    return weight_N1 * advantage_NT, above_NT | below_NT


def _floor_above_cap(params: Mapping[str, Any]) -> str:
    if params["floor"] <= params["cap"]:
        return ""
    return ": the floor lies above the cap, so every weight would be one. Lower it."


@gate(
    refuses=_floor_above_cap,
    equation="S = sg[clamp(r, {floor}, {cap})]·A·ℓ",
    fixes="every token keeps a gradient",
    breaks="no trust region; the loss value means nothing: log the ratio",
)
def weight_cap(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    cap: Positive,
    floor: NonNegative = 0.0,
) -> Gated:
    """CISPO (2506.13585): caps the importance weight, not the gradient. `cap` is absolute."""
    weight_NT = bounded_exp(log_ratio_NT.detach()).clamp(floor, cap)
    objective_NT = weight_NT * advantage_NT * batch.stream("logp_NT")
    return objective_NT, nothing_clipped(batch)


def soft_temperature(advantage_NT: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """Return τ by the advantage's sign (A = 0 counts as negative; its objective is 0 anyway)."""
    return torch.where(advantage_NT > 0, advantage_NT.new_tensor(tau_pos), tau_neg)


@gate(
    equation="S = (4/τ)·σ(τ(r−1))·A, τ = {tau_pos} for A > 0, else {tau_neg}",
    fixes="smooth: no edge at which a gradient dies",
    breaks="never fully off; the value at r = 1 is 2A/τ",
)
def soft(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> Gated:
    """SAPO (2511.20347). Gradient weight r·sech²(τ(r−1)/2), 1 at r = 1."""
    tau_NT = soft_temperature(advantage_NT, tau_pos, tau_neg)
    gate_NT = torch.sigmoid(tau_NT * (bounded_exp(log_ratio_NT) - 1.0))
    objective_NT = gate_NT * (4.0 * advantage_NT / tau_NT)
    return objective_NT, nothing_clipped(batch)


@width(equation="ε = {low}/{high} everywhere", needs=())
def constant(
    segment_entropy_NT: Tensor | None, *, low: NonNegative = 0.2, high: NonNegative = 0.2
) -> tuple[float, float]:
    """Take the same clip range for every segment."""
    return low, high


@gate(
    ratio="segment",
    equation="S = min(s·A, clip(s, 1−ε_low, 1+ε_high)·A), ε by {width}",
    fixes="a clip range that can follow a sub-sentence's entropy",
    breaks="the paper's own entropy rule is not public: bring yours as a width",
)
def segment_clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    width: Slot = constant(),  # noqa: B008 - a frozen record
) -> Gated:
    """SSPO (2511.04256). `width(segment_entropy_NT) -> (low, high)` may read mean entropies."""
    entropy_NT = None
    if batch.entropy_NT is not None:
        segment_NT = batch.stream("segment_NT")
        entropy_NT = segment_mean(batch.entropy_NT.detach(), segment_NT, batch.mask_NT)
    low, high = width(entropy_NT)
    return clip_within(bounded_exp(log_ratio_NT), advantage_NT, 1.0 - low, 1.0 + high)
