"""Baselines of single tokens, and advantages that a teacher's probabilities make.

Links of the advantage chain. Sums run over a row's own tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.advantages import per_token
from groupwise.groups.credit import dense_reward
from groupwise.groups.kl import VALUES, bounded_exp
from groupwise.groups.selection import everywhere
from groupwise.groups.statistics import (
    close_holes,
    discounted_suffix_sums,
    reopen_holes,
)
from groupwise.methods.slots import Fraction, NonNegative, advantage
from groupwise.records import TokenBatch
from groupwise.records.masks import above


def token_baseline(
    reward_N: Tensor, batch: TokenBatch, tail: str, weighing: str, eps: float
) -> tuple[Tensor, Tensor]:
    """Return G_t and b_t of each own token, the holes closed, in float64."""
    graded_N1 = ~reward_N.isnan()[:, None]
    return_NT = discounted_suffix_sums(dense_reward(reward_N, batch), 1.0, batch)
    score_NT = 1.0 - 2.0 * batch.stream("old_logp_NT").exp() + batch.stream("old_square_mass_NT")
    if weighing == "sampler":
        gap_NT = batch.stream("old_logp_NT") - batch.stream("sampler_logp_NT")
        score_NT = score_NT * bounded_exp(gap_NT).square()
    own_NT = (close_holes(batch.ones_NT, batch) * graded_N1).double()
    weight_NT = close_holes(batch.valid(score_NT), batch).double().cumsum(1).mul_(own_NT)
    return_NT, index_M = close_holes(return_NT.double(), batch), batch.groups.index_M

    def per_group(x_NT: Tensor) -> Tensor:
        """Sum over the rows of a group, position by position, on each of its rows."""
        wide_MT = everywhere(x_NT, batch, otherwise=0.0)
        sum_PT = wide_MT.new_zeros(len(batch.groups), wide_MT.shape[1])
        sum_PT = sum_PT.index_put_((index_M,), wide_MT, accumulate=True)
        return batch.world.own(sum_PT[index_M])[:, : x_NT.shape[1]]

    baseline_NT = per_group(return_NT * weight_NT).div_(per_group(weight_NT).add_(eps))
    if tail == "zero":
        baseline_NT = torch.where(above(per_group(own_NT), 1.0).bool(), baseline_NT, 0.0)
    return return_NT, baseline_NT.mul_(own_NT)


@advantage(
    uniform="teaches",
    base=True,
    per_token=True,
    dense=True,
    needs=("old_logp_NT", "old_square_mass_NT"),
    equation="b_t = Σ_j G_jt·W_jt/(Σ_j W_jt + {eps}) over the group's answers that reach own token"
    " t, W_t = Σ_(s≤t) w_s, w = 1 − 2π + Σπ² (weighing: {weighing}); one answer alone: {tail};"
    " A_t = G_t − b_t",
    fixes="least variance at every token",
    breaks="the answer is in its own baseline; Σπ² from the forward pass",
)
def optimal_token_baseline(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    tail: Literal["zero", "own"] = "zero",
    weighing: Literal["none", "sampler"] = "none",
    eps: NonNegative = 1e-8,
) -> Tensor:
    """OTB (2602.07078): own tokens are numbered, so that what tools wrote does not count.

    w is the squared norm of a token's score. Where one answer alone goes on, the baseline is 0
    (`tail="zero"`, and the answer learns from its whole return there) or its own return. A group
    of one learns nothing.
    """
    return_NT, baseline_NT = token_baseline(reward_N, batch, tail, weighing, eps)
    graded = torch.where(reward_N.isnan(), 0.0, 1.0).double()
    index_M = batch.groups.index_M
    size_P = graded.new_zeros(len(batch.groups))
    size_P = size_P.index_put((index_M,), batch.world.gather(graded), accumulate=True)
    several_N1 = batch.world.own(size_P[index_M])[:, None] > 1
    found_NT = torch.where(several_N1, return_NT.sub_(baseline_NT), 0.0)
    return reopen_holes(found_NT.to(batch.dtype), batch)


def _teacher_gap(batch: TokenBatch, of: str) -> Tensor:
    """Return ℓ − ℓ^T per token, ℓ of the sampler or of the policy as it is now, detached."""
    own = "sampler_logp_NT" if of == "sampler" else "now_logp_NT"
    return batch.valid(batch.stream(own) - batch.stream("teacher_logp_NT"))


def _with_discount(x_NT: Tensor, gamma: float, batch: TokenBatch) -> Tensor:
    """Return Σ_(s≥t) γ^(s−t) x_s."""
    if gamma == 0.0:
        return x_NT
    return discounted_suffix_sums(x_NT.clone(), gamma, batch)


@advantage(
    per_token=True,
    needs=("now_logp_NT", "teacher_logp_NT"),
    equation="A_t = A − {coef}·Σ_(s≥t) {gamma}^(s−t)·{estimator}(ℓ_s − ℓ^T_s), ℓ of the policy as"
    " it is now",
    fixes="a signal at every token, of the policy itself where its sampler differs",
    breaks="k3 is never negative, so that every token is pushed down, and is not KL's gradient",
)
def minus_teacher_return(
    x: Tensor,
    batch: TokenBatch,
    *,
    coef: NonNegative = 1.0,
    gamma: Fraction = 0.0,
    estimator: Literal["k1", "k3"] = "k1",
) -> Tensor:
    """Distil on-policy with a discount; k3 is verl's default."""
    apart_NT = VALUES[estimator](_teacher_gap(batch, "policy"))
    to_come_NT = _with_discount(batch.valid(apart_NT), gamma, batch)
    return per_token(x, batch) - coef * to_come_NT


def teacher_return(batch: TokenBatch, gamma: float, length: str, current: str) -> Tensor:
    """Return MiniLLM's advantage: discounted ℓ^T − ℓ of the tokens to come."""
    reward_NT = -_teacher_gap(batch, "policy")
    ones_NT = batch.ones_NT.to(reward_NT.dtype)
    sum_NT, weight_NT = (_with_discount(x, gamma, batch) for x in (reward_NT, ones_NT))
    if current == "left_out":  # the next token's sums
        sum_NT, weight_NT = (
            reopen_holes(torch.nn.functional.pad(close_holes(x, batch)[:, 1:], (0, 1)), batch)
            for x in (sum_NT, weight_NT)
        )
    if length == "mean":
        sum_NT = sum_NT / torch.where(weight_NT == 0, 1.0, weight_NT)
    return batch.valid(sum_NT)


@advantage(
    per_token=True,
    needs=("now_logp_NT", "teacher_logp_NT"),
    equation="A_t = A + Σ_(s≥t) {gamma}^(s−t)·(ℓ^T_s − ℓ_s), as a {length}; the token itself:"
    " {current}",
    fixes="a token is judged by what the teacher makes of what follows",
    breaks="noisy; with the single-step term the current token may count twice",
)
def plus_teacher_return(
    x: Tensor,
    batch: TokenBatch,
    *,
    gamma: Fraction = 1.0,
    length: Literal["mean", "sum"] = "mean",
    current: Literal["counted", "left_out"] = "left_out",
) -> Tensor:
    """MiniLLM (2306.08543): the long part of its gradient, as an advantage."""
    return per_token(x, batch) + teacher_return(batch, gamma, length, current)
