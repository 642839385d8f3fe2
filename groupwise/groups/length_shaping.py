"""Reward shaping by length, and for how an answer came about: `shaping(reward_N, batch) -> ...`.

Same signature as in shaping.py. Lengths are of the policy's own tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.groups.shaping import Shaped
from groupwise.groups.statistics import group_stats
from groupwise.methods.slots import Count, NonNegative, Real, shaping
from groupwise.records import TokenBatch


def _own_length(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Return the length of each graded row, NaN for others: they are in no group's statistics."""
    return torch.where(reward_N.isnan(), torch.nan, batch.length_N.double())


def _share_of_longest(x_N: Tensor, reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Return x over the group's largest, which counts 1 at least."""
    stats = group_stats(torch.where(reward_N.isnan(), torch.nan, x_N.double()), batch)
    return x_N.double() / stats.high_N.clamp(min=1.0)


@shaping(
    lowers=True,
    needs=("context_tokens_N", "turns_N"),
    equation="R −= μ_g·({output}·n/max_g n + {context}·c/max_g c + {turns}·τ/max_g τ), maxima ≥ 1",
    fixes="pressure on length where the group can afford it: it grows with the pass rate",
    breaks="a negative mean reward pays for length",
)
def linear_length_penalty(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    output: NonNegative = 0.25,
    context: NonNegative = 0.1,
    turns: NonNegative = 0.1,
) -> Shaped:
    """Take off a share of the group's mean reward, by own tokens, tokens read, turns (prime-rl)."""
    measured = (
        (output, batch.length_N),
        (context, batch.stream("context_tokens_N")),
        (turns, batch.stream("turns_N")),
    )
    cost_N = sum(weight * _share_of_longest(x_N, reward_N, batch) for weight, x_N in measured)
    mean_N = group_stats(reward_N, batch).mean_N
    return (reward_N.double() - mean_N * cost_N).to(reward_N.dtype), None


def length_rewards(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Return λ = ½ − (n − min_g)/(max_g − min_g); for wrong answers no more than 0."""
    stats = group_stats(_own_length(reward_N, batch), batch)
    range_N = stats.high_N - stats.low_N
    ranged_N = range_N > 0
    place_N = (batch.length_N.double() - stats.low_N) / torch.where(ranged_N, range_N, 1.0)
    lam_N = torch.where(ranged_N, 0.5 - place_N, 0.0)
    return torch.where(batch.stream("correct_N"), lam_N, lam_N.clamp(max=0.0))


@shaping(
    lowers=True,
    needs=("correct_N",),
    equation="R += λ (right) or min(λ, 0) (wrong), λ = ½ − (n − min_g)/(max_g − min_g)",
    fixes="overthinking: the shorter of two right answers is better",
    breaks="one outlier sets the scale",
)
def kimi_length(reward_N: Tensor, batch: TokenBatch) -> Shaped:
    """Kimi-1.5's length reward (2501.12599): by rank of length within the group."""
    return reward_N + length_rewards(reward_N, batch).to(reward_N.dtype), None


@shaping(
    lowers=True,
    length="max_length",
    needs=("correct_N",),
    equation="R = v_long + ½(v_short − v_long)(1 + cos(π·min(n/{max_length}, 1))); v of right"
    " answers {right_short} to {right_long}, of wrong ones {wrong_short} to {wrong_long}",
    fixes="short right answers and long wrong ones are the better ones",
    breaks="the reward itself is replaced",
)
def cosine_length(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    max_length: Count = 4096,
    right_short: Real = 1.0,
    right_long: Real = 0.5,
    wrong_short: Real = -1.0,
    wrong_long: Real = -0.5,
) -> Shaped:
    """Set a reward by correctness and length (2502.03373); beyond max_length it stays."""
    right_N = batch.stream("correct_N")
    ones_N = torch.ones_like(batch.length_N, dtype=torch.float64)
    short_N = torch.where(right_N, right_short * ones_N, wrong_short * ones_N)
    long_N = torch.where(right_N, right_long * ones_N, wrong_long * ones_N)
    share_N = (batch.length_N.double() / max_length).clamp(max=1.0)
    value_N = long_N + 0.5 * (short_N - long_N) * (1.0 + torch.cos(math.pi * share_N))
    return torch.where(reward_N.isnan(), reward_N, value_N.to(reward_N.dtype)), None


@shaping(
    lowers=True,
    needs=("truncated_N",),
    equation="of an answer that was cut off: R ← {coef}·R",
    fixes="answers that never end",
    breaks="raises rewards below 0",
)
def stop_properly(reward_N: Tensor, batch: TokenBatch, *, coef: NonNegative = 0.0) -> Shaped:
    """Scale the reward of what was cut off (ProRL v2)."""
    cut_N = batch.stream("truncated_N")
    return torch.where(cut_N, coef * reward_N, reward_N), None


@shaping(
    lowers=True,
    needs=("truncated_N",),
    equation="of an answer that was cut off: R ← {reward}",
    fixes="answers that never end, whatever they were worth",
    breaks="tells no cut answer from another",
)
def cut_off_reward(reward_N: Tensor, batch: TokenBatch, *, reward: Real = -0.5) -> Shaped:
    """Set the reward of what was cut off (OpenRLHF)."""
    cut_N = batch.stream("truncated_N") & ~reward_N.isnan()
    return torch.where(cut_N, torch.full_like(reward_N, reward), reward_N), None


@shaping(
    lowers=True,
    needs=("correct_N", "flawed_N"),
    equation="R = 1 − {penalty}·1[flawed] for right answers, −1 for wrong ones",
    fixes="right answers by wrong reasoning count less, once there are clean ones",
    breaks="a judge has to find them; without clean answers they are still pushed up",
)
def flawed_positive_penalty(
    reward_N: Tensor, batch: TokenBatch, *, penalty: NonNegative = 1.0
) -> Shaped:
    """FAPO (2510.22543): the mark of a wrong answer does not count."""
    right_N = batch.stream("correct_N")
    found_N = torch.where(right_N, 1.0 - penalty * batch.stream("flawed_N").double(), -1.0)
    return torch.where(reward_N.isnan(), reward_N, found_N.to(reward_N.dtype)), None
