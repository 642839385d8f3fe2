"""Auxiliary terms over the answers of a group, and terms that imitate marked tokens.

`auxiliary(batch, prepared) -> scalar`. A loss that compares answers is no sum over rows. Its value
and its slope in each answer are found on the whole update, as that begins (`prepare`), and each row
gives its share: the gradient is that of the whole, in any micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.groups.statistics import group_sum, spread
from groupwise.losses.ratios import row_mean
from groupwise.methods.slots import NonNegative, Positive, auxiliary
from groupwise.records import TokenBatch

Prepared = Mapping[str, Tensor]


def row_advantage(batch: TokenBatch) -> Tensor:
    """Return the advantage of each answer, one number."""
    return batch.stream("advantage_NT").gather(1, batch.last_N[:, None])[:, 0]


def learned_rows(batch: TokenBatch) -> Tensor:
    """Return which rows have tokens that are learned from."""
    return batch.stream("learn_N") & (batch.length_N > 0)


def mean_log_ratio(batch: TokenBatch, name: str) -> Tensor:
    """Return mean_t(ℓ − ℓ°) of each row, ℓ being the stream of that name."""
    return row_mean((batch.stream(name) - batch.stream("old_logp_NT")) * batch.ones_NT, batch)[:, 0]


def _along(prepared: Prepared, moved_N: Tensor) -> Tensor:
    """Return the loss of the update's begin, and what its slopes make of the way since then."""
    shares_N = prepared["loss_N"] + prepared["slope_N"] * moved_N
    return (prepared["coefficient_N"] * shares_N).sum().to(moved_N.dtype)


# --- REAL ---------------------------------------------------------------------------------------


def _contrast(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return each group's loss in equal shares on its rows, its slope in each row's s, and s."""
    gather, tau = batch.world.gather, params["tau"]
    score_N = mean_log_ratio(batch, "now_logp_NT").double()
    counts_N, good_N = learned_rows(batch), row_advantage(batch) > 0
    sign_N = torch.where(good_N, -1.0, 1.0).double()
    raised_N = bounded_exp(sign_N * score_N / tau) * counts_N
    sides = [group_sum(gather(raised_N * side_N), batch) for side_N in (good_N, ~good_N)]
    sizes = [group_sum(gather((counts_N & side_N).double()), batch) for side_N in (good_N, ~good_N)]
    both_P = (sizes[0] > 0) & (sizes[1] > 0)
    groups = (sizes[0] + sizes[1] > 0).sum().clamp(min=1)
    loss_P = torch.where(both_P, sides[0].log1p() + sides[1].log1p(), 0.0) / groups
    share_N = spread(loss_P / (sizes[0] + sizes[1]).clamp(min=1), batch) * counts_N
    below_N = torch.where(good_N, *(spread(1.0 + side_P, batch) for side_P in sides))
    slope_N = spread(both_P.double(), batch) * sign_N * raised_N / (below_N * tau * groups)
    one_N = counts_N.double()
    return {"loss_N": share_N, "slope_N": slope_N, "score_N": score_N, "coefficient_N": one_N}


@auxiliary(
    prepare=_contrast,
    needs=("now_logp_NT", "old_logp_NT"),
    equation="+ (1/P)·Σ_g [log(1 + Σ_(A>0) e^(−s/{tau})) + log(1 + Σ_(A≤0) e^(s/{tau}))], s ="
    " mean_t(ℓ − ℓ°); groups of one class give 0",
    fixes="bounded gradients, whatever the ratio",
    breaks="how large a reward is does not count",
)
def group_contrast(batch: TokenBatch, prepared: Prepared, *, tau: Positive = 0.5) -> Tensor:
    """REAL (2602.05630): answers are classified as good or bad by their log-ratio."""
    moved_N = mean_log_ratio(batch, "logp_NT") - prepared["score_N"].to(batch.dtype)
    return _along(prepared, moved_N)


# --- GVPO ---------------------------------------------------------------------------------------


def total_log_ratio(batch: TokenBatch, name: str) -> Tensor:
    """Return Σ_t(ℓ − ℓ°) of each row, ℓ being the stream of that name."""
    return ((batch.stream(name) - batch.stream("old_logp_NT")) * batch.ones_NT).sum(1)


def _regression(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return each answer's residual, its share of the loss and the slope in Σ_t(ℓ − ℓ°)."""
    gather, counts_N = batch.world.gather, learned_rows(batch)
    total_N = total_log_ratio(batch, "now_logp_NT").double()
    size_P = group_sum(gather(counts_N.double()), batch)
    mean_P = group_sum(gather(total_N * counts_N), batch) / size_P.clamp(min=1)
    apart_N = params["beta"] * (total_N - spread(mean_P, batch)) - row_advantage(batch).double()
    several_N = counts_N & (spread(size_P, batch) > 1)
    residual_N = torch.where(several_N, apart_N, 0.0)
    divisor = (size_P - 1).clamp(min=0).sum().clamp(min=1)
    sum_P = group_sum(gather(residual_N), batch)
    centred_N = residual_N - several_N * spread(sum_P / size_P.clamp(min=1), batch)
    return {
        "residual_N": residual_N,
        "loss_N": 0.5 * residual_N.square() / divisor,
        "slope_N": params["beta"] * centred_N / divisor,
        "total_N": total_N,
        "coefficient_N": counts_N.double(),
    }


@auxiliary(
    prepare=_regression,
    needs=("now_logp_NT", "old_logp_NT"),
    equation="+ ½·Σ e²/Σ_g(G−1), e = {beta}·(Σ_t d − mean_g Σ_t d) − A",
    fixes="one optimum, whoever sampled: no ratio to bound",
    breaks="the square of a sum over an answer grows with its length",
)
def group_regression(batch: TokenBatch, prepared: Prepared, *, beta: Positive = 0.1) -> Tensor:
    """GVPO (2504.19599): log-ratios regressed on advantages, both centred in the group."""
    moved_N = total_log_ratio(batch, "logp_NT") - prepared["total_N"].to(batch.dtype)
    return _along(prepared, moved_N)


# --- FlowRL -------------------------------------------------------------------------------------


def _balance(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return each row's share 1/B, and what its log-probability and log Z are compared with."""
    counts_N = learned_rows(batch)
    rows = batch.world.gather(counts_N.long()).sum().clamp(min=1)
    ref_N = row_mean(batch.stream("ref_logp_NT"), batch)[:, 0]
    target_N = params["beta"] * row_advantage(batch) + ref_N
    weight_N = bounded_exp(total_log_ratio(batch, "now_logp_NT")).clamp(max=params["cap"])
    now_N = row_mean(batch.stream("now_logp_NT"), batch)[:, 0]
    share_N = counts_N.double() / rows
    found = {"coefficient_N": share_N, "target_N": target_N, "weight_N": weight_N, "now_N": now_N}
    return {name: x_N.to(batch.dtype) for name, x_N in found.items()}


def log_partition(value_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Return log Z of each row's prompt: the critic's value before the first own token."""
    first_N = batch.mask_NT.long().argmax(1)
    return value_NT.gather(1, first_N[:, None])[:, 0]


@auxiliary(
    prepare=_balance,
    needs=("now_logp_NT", "old_logp_NT", "ref_logp_NT", "old_value_NT"),
    equation="+ mean_i sg[min(Π r, {cap})]·(log Z + mean_t ℓ − {beta}·A − mean_t ℓ^ref)²",
    fixes="answers in proportion to e^(βA), not the best alone: modes stay",
    breaks="a reference, and a critic for log Z; losses in the hundreds",
)
def trajectory_balance(
    batch: TokenBatch, prepared: Prepared, *, beta: Positive = 15.0, cap: Positive = 10.0
) -> Tensor:
    """FlowRL (2509.15207): the policy's side; log Z is what the critic says of the prompt."""
    own_N = row_mean(batch.stream("logp_NT"), batch)[:, 0]
    log_z_N = log_partition(batch.stream("old_value_NT"), batch)
    apart_N = log_z_N + own_N - prepared["target_N"]
    return (prepared["coefficient_N"] * prepared["weight_N"] * apart_N.square()).sum()


@auxiliary(
    learns="critic",
    prepare=_balance,
    needs=("now_logp_NT", "old_logp_NT", "ref_logp_NT"),
    outputs=("value_NT",),
    equation="+ the same loss in log Z, the policy as it is when the update begins",
    fixes="learns log Z of each prompt",
    breaks="a second model for one number a prompt",
)
def partition_loss(
    batch: TokenBatch, prepared: Prepared, *, beta: Positive = 15.0, cap: Positive = 10.0
) -> Tensor:
    """Train the critic's value at the start of an answer to be log Z: FlowRL's other side."""
    log_z_N = log_partition(batch.stream("value_NT"), batch)
    apart_N = log_z_N + prepared["now_N"] - prepared["target_N"]
    return (prepared["coefficient_N"] * prepared["weight_N"] * apart_N.square()).sum()


# --- imitation of marked tokens -----------------------------------------------------------------


def _marked_mean(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return how much each token counts over the number of tokens that count at all."""
    mark_NT = batch.stream("lesson_NT")
    marked = batch.world.gather((mark_NT != 0).sum(1)).sum().clamp(min=1)
    return {"coefficient_NT": mark_NT / marked}


def lesson_weights(batch: TokenBatch, weight: str) -> Tensor:
    """Return DFT's π, CHORD's π(1−π) or 1 per token, detached."""
    probability_NT = bounded_exp(batch.stream("logp_NT").detach())
    if weight == "probability":
        return probability_NT
    return probability_NT * (1.0 - probability_NT) if weight == "phi" else batch.ones_NT


@auxiliary(
    prepare=_marked_mean,
    needs=("lesson_NT",),
    equation="− {coef}·Σ_t α_t·sg[w_t]·ℓ_t / #(α ≠ 0), w by {weight}: π, π(1−π) or 1",
    fixes="tokens of an expert, or of an environment, are learned beside the reward",
    breaks="two signals to balance; whatever is marked is imitated, noise included",
)
def weighted_nll(
    batch: TokenBatch,
    prepared: Prepared,
    *,
    coef: NonNegative = 1.0,
    weight: Literal["probability", "phi", "plain"] = "plain",
) -> Tensor:
    """Imitate marked tokens: DFT (2508.05629), CHORD's φ (2508.11408), ECHO (prime-rl).

    The mean is over the number of marked tokens, so that a mark α scales the loss.
    """
    weight_NT = lesson_weights(batch, weight)
    return -coef * (prepared["coefficient_NT"] * weight_NT * batch.stream("logp_NT")).sum()
