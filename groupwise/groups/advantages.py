"""Advantages: a chain of `(tensor, batch) -> tensor` from reward_N to advantage_NT.

The first link is a baseline; modifiers (`whiten_tokens`, `reweight_by_probability`, ...) follow.
A link may work on one number per row or per token; the batch phase spreads rows over tokens at the
end. Groups of one row have no baseline: every group link gives them 0 (smooth_cumulative compares
them with the prompt's earlier visits).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.groups.statistics import (
    GroupStats,
    batch_stats,
    centred_tokens,
    dead_groups,
    discounted_suffix_sums,
    group_stats,
)
from groupwise.methods.slots import Ddof, Fraction, NonNegative, Positive, Real, advantage
from groupwise.records import TokenBatch, Visit


def centred(x_N: Tensor, stats: GroupStats) -> Tensor:
    """Return x − μ_g in float64; exactly 0 in a uniform group."""
    return torch.where(stats.uniform_N, 0.0, x_N.double() - stats.mean_N)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, and 0 where the scale is 0 (the numerator is 0 there as well)."""
    return torch.where(scale == 0, 0.0, x / torch.where(scale == 0, 1.0, scale))


def per_token(x: Tensor, batch: TokenBatch) -> Tensor:
    """Spread one number per row over its valid tokens; token streams pass."""
    return batch.valid(x.nan_to_num(0.0) if x.dim() == 1 else x)


@advantage(
    base=True,
    equation="A = R",
    fixes="unbiased",
    breaks="huge variance",
)
def raw(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Take rewards without a baseline (REINFORCE)."""
    return reward_N


@advantage(
    base=True,
    equation="A = max(R, 0)",
    fixes="only good answers teach: a filter instead of a baseline",
    breaks="the policy's entropy falls fast",
)
def positive_part(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Take rewards above 0, and nothing of the others (RAFT++, 2504.11343)."""
    return reward_N.clamp(min=0.0)


@advantage(
    base=True,
    blind=True,
    outcome=False,
    equation="A = 0",
    fixes="rewards are not needed: something else teaches",
    breaks="teaches nothing by itself",
)
def unrewarded(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Start from nothing, whatever the reward: for distillation."""
    return torch.zeros_like(reward_N)


@advantage(
    base=True,
    equation="A = R − μ_g",
    fixes="no critic",
    breaks="(G−1)/G of the true gradient, as under a learning rate that much smaller",
)
def group_mean(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Centred in the group (Dr.GRPO, 2503.20783)."""
    return centred(reward_N, group_stats(reward_N, batch))


@advantage(
    base=True,
    equation="A = R − mean_{{j≠i}} R_j",
    fixes="unbiased without a critic",
    breaks="needs groups of two or more",
)
def leave_one_out(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """RLOO (2402.14740): G/(G−1)·(R − μ_g)."""
    stats = group_stats(reward_N, batch)
    return centred(reward_N, stats) * stats.count_N / (stats.count_N - 1).clamp(min=1)


@advantage(
    scales=True,
    base=True,
    equation="A = (R − μ_g) / (σ_g + {eps}), σ_g with ddof={ddof}",
    fixes="free of the reward's scale",
    breaks="weighs prompts by 1/σ_g: very easy and very hard ones count more",
)
def group_zscore(
    reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """GRPO (2402.03300). Identical rewards give exactly 0."""
    stats = group_stats(reward_N, batch)
    return _over(centred(reward_N, stats), stats.std_N(ddof) + eps)


@advantage(
    scales=True,
    base=True,
    equation="A = (R − mean_{{j≠i}} R_j) / (σ_{{j≠i}} + {eps}), σ with ddof={ddof}",
    fixes="free of scale; neither baseline nor scale contains the sample's own reward",
    breaks="spikes when the others almost agree (when they do, nothing is scaled)",
)
def leave_one_out_zscore(
    reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """Mean and std of the other rows of the group; where their std is 0, A is not scaled."""
    stats = group_stats(reward_N, batch)
    centred_N = centred(reward_N, stats)
    others_N = (stats.count_N - 1).clamp(min=1)
    # Without row i the squares about the new mean are S − (R−μ)²·G/(G−1).
    squares_N = stats.squares_N - centred_N.square() * stats.count_N / others_N
    std_N = (squares_N.clamp(min=0.0) / (others_N - ddof).clamp(min=1)).sqrt()
    tiny_N = std_N <= 1e-7 * stats.squares_N.sqrt()  # what rounding leaves of a zero
    loo_N = centred_N * stats.count_N / others_N
    return torch.where(tiny_N, loo_N, loo_N / (std_N + eps).clamp(min=1e-30))


@advantage(
    scales=True,
    base=True,
    equation="A = (R − μ_g) / (σ_batch + {eps}), σ_batch of raw rewards with ddof={ddof}",
    fixes="one scale for all prompts",
    breaks="depends on the batch's mix of prompts",
)
def group_mean_batch_std(
    reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """Lite PPO (2508.08221)."""
    _, std = batch_stats(reward_N, batch, ddof)
    return _over(centred(reward_N, group_stats(reward_N, batch)), std + eps)


@advantage(
    binary=True,
    base=True,
    equation="A = (R − μ_g) / (μ_g + {eps}), 0 where μ_g = 0",
    fixes="weight 1/p on hard prompts: the likelihood of success, not its mean",
    breaks="made for binary rewards",
)
def maxrl(reward_N: Tensor, batch: TokenBatch, *, eps: NonNegative = 0.0) -> Tensor:
    """MaxRL (2602.02710)."""
    stats = group_stats(reward_N, batch)
    scale_N = torch.where(stats.mean_N == 0, 0.0, stats.mean_N + eps)
    return _over(centred(reward_N, stats), scale_N)


@advantage(
    base=True,
    needs=("greedy_reward_N",),
    equation="A = R − R(greedy completion)",
    fixes="a baseline from one sample per prompt",
    breaks="one extra decode; a noisy baseline",
)
def greedy_baseline(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """ReMax (2310.10505)."""
    return reward_N - batch.stream("greedy_reward_N")


Which = Literal["all", "all_wrong"]


def _blend(reward_N: Tensor, batch: TokenBatch, common: Tensor, mix: float, groups: str) -> Tensor:
    stats = group_stats(reward_N, batch)
    shift_N = mix * (stats.mean_N - common)
    if groups == "all_wrong":
        shift_N = torch.where(stats.high_N <= 0, shift_N, 0.0)
    blended_N = centred(reward_N, stats) + shift_N
    return torch.where(stats.count_N > 1, blended_N, 0.0)


@advantage(
    uniform="teaches",
    base=True,
    equation="A = R − [(1−{mix})·μ_g + {mix}·μ_batch] in {groups} groups",
    fixes="groups that are all wrong still push down what failed",
    breaks="a prompt's difficulty leaks into its advantage",
)
def group_and_batch_mean(
    reward_N: Tensor, batch: TokenBatch, *, mix: Fraction = 0.1, groups: Which = "all"
) -> Tensor:
    """Subtract a cross-prompt baseline: the group's mean mixed with the batch's."""
    mean, _ = batch_stats(reward_N, batch, 0)
    return _blend(reward_N, batch, mean, mix, groups)


def moving_average(batch: TokenBatch, reward_N: Tensor, decay: float) -> float:
    """Return the running mean of rewards after this batch; the first batch starts it."""
    mean = float(batch_stats(reward_N, batch, 0)[0])
    before = batch.memory.reward_average
    return mean if before is None else decay * before + (1.0 - decay) * mean


@advantage(
    uniform="teaches",
    base=True,
    remembers="reward_average",
    equation="A = R − [(1−{mix})·μ_g + {mix}·b], b ← {decay}·b + (1−{decay})·μ_batch",
    fixes="as group_and_batch_mean, with a baseline that small batches do not shake",
    breaks="lags behind when the policy improves fast",
)
def group_and_moving_mean(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    mix: Fraction = 0.1,
    decay: Fraction = 0.9,
    groups: Which = "all",
) -> Tensor:
    """Subtract the group's mean mixed with a moving average over earlier batches."""
    common = batch.memory.reward_average
    if common is None:
        common = moving_average(batch, reward_N, decay)
    return _blend(reward_N, batch, torch.tensor(common, dtype=torch.float64), mix, groups)


@advantage(
    scales=True,
    uniform="teaches",
    base=True,
    remembers="visits",
    equation="A = the smaller of ((i−1)·A_new + A_tot)/i and (A_new + (i−1)·A_tot)/i at visit i,"
    " ddof={ddof}",
    fixes="a prompt that was ever mixed still teaches when all its answers agree",
    breaks="state per prompt; old policies in the statistics",
)
def smooth_cumulative(reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1) -> Tensor:
    """Smooth advantage standardisation (DCPO, 2509.02333).

    A_new standardises with this visit, A_tot with all visits: μ the mean over all of them and
    s² = mean_k[var_k + (μ_k − μ)²], visits weighing by their size.
    """
    stats = group_stats(reward_N, batch)
    new_N = _over(centred(reward_N, stats), stats.std_N(ddof))
    merged = [
        _merge(batch.memory.visits.get(int(g), ()), size, mean, var)
        for g, size, mean, var in zip(
            batch.group_N.tolist(),
            stats.count_N.tolist(),
            stats.mean_N.tolist(),
            stats.std_N(ddof).square().tolist(),
            strict=True,
        )
    ]
    visit_N, mean_N, std_N = new_N.new_tensor(merged).reshape(-1, 3).unbind(1)
    total_N = _over(torch.where(std_N == 0, 0.0, reward_N.double() - mean_N), std_N)
    early_N = ((visit_N - 1) * new_N + total_N) / visit_N
    late_N = (new_N + (visit_N - 1) * total_N) / visit_N
    return torch.where(early_N.abs() <= late_N.abs(), early_N, late_N)


def _merge(
    visits: Sequence[Visit], size: float, mean: float, var: float
) -> tuple[float, float, float]:
    """Visit number, mean and standard deviation over this visit and all earlier ones."""
    parts = [*((v.size, v.mean, v.var) for v in visits), (size, mean, var)]
    total = max(sum(n for n, _, _ in parts), 1)
    grand = mean if all(m == mean for _, m, _ in parts) else sum(n * m for n, m, _ in parts) / total
    spread = sum(n * (v + (m - grand) ** 2) for n, m, v in parts) / total
    return len(parts), grand, spread**0.5


@advantage(
    scales=True,
    per_token=True,
    equation="A ← (A − mean) / (√(var + {eps_in_var}) + {eps}) over all valid tokens, ddof={ddof}",
    fixes="one scale whatever the reward",
    breaks="long answers dominate the statistics",
)
def whiten_tokens(
    x: Tensor,
    batch: TokenBatch,
    *,
    ddof: Ddof = 1,
    eps_in_var: NonNegative = 1e-8,
    eps: NonNegative = 0.0,
) -> Tensor:
    """Take z-scores over all tokens of the batch that are learned from."""
    x_NT = x if x.dim() == 2 else per_token(x, batch)
    centred_NT, count = centred_tokens(x_NT, batch)
    far_N = torch.linalg.vector_norm(batch.learned(centred_NT), dim=1)
    var = batch.world.gather(far_N).double().square().sum() / (count - ddof).clamp(min=1)
    scale = (var + eps_in_var).sqrt() + eps
    if scale == 0:
        return torch.zeros_like(x_NT)
    return batch.valid(centred_NT.div_(scale.to(x_NT.dtype)))


@advantage(
    scales=True,
    per_row=True,
    equation="A ← (A − mean) / (std + {eps}) over all rows, ddof={ddof}",
    fixes="one scale whatever the reward",
    breaks="a second normalisation on top of the group's",
)
def whiten_sequences(
    x_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """Take z-scores over all rows of the batch."""
    mean, std = batch_stats(x_N, batch, ddof)
    return _over(x_N.double() - mean, std + eps)


@advantage(
    uniform="rescales",
    equation="A ← A · P/(P−M), M of P prompts uniform",
    fixes="the step's size does not shrink with dead groups",
    breaks="noisy when almost all groups are dead",
)
def rescale_for_dead_groups(x: Tensor, batch: TokenBatch) -> Tensor:
    """GPG (2504.02546). With nothing alive the factor is 1."""
    return x * dead_group_factor(batch)


def dead_group_factor(batch: TokenBatch) -> float:
    """Return α = P/(P−M)."""
    found = dead_groups(batch)
    alive = found.groups - found.dead
    return found.groups / alive if alive else 1.0


@advantage(
    equation="A ← clamp(A, ±{bound})",
    fixes="one odd group can't dominate a step",
    breaks="hides how odd it was",
)
def limit(x: Tensor, batch: TokenBatch, *, bound: Positive = 10.0) -> Tensor:
    """Hold advantages in a range."""
    return x.clamp(-bound, bound)


@advantage(
    kl=True,
    per_token=True,
    needs=("old_logp_NT", "ref_logp_NT"),
    equation="A_t ← A_t − {coef}·Σ_{{s≥t}} clamp(ℓ°_s − ℓ^ref_s, ±{bound})",
    fixes="KL with credit per token for recipes with a group baseline",
    breaks="the baseline does not see it: a constant drift is not centred away",
)
def minus_kl_to_go(
    x: Tensor, batch: TokenBatch, *, coef: NonNegative = 0.01, bound: Positive = 10.0
) -> Tensor:
    """Subtract KL (k1), outside baseline and scale, as a sum over the tokens to come."""
    drift_NT = batch.stream("old_logp_NT") - batch.stream("ref_logp_NT")
    to_go_NT = discounted_suffix_sums(drift_NT.clamp(-bound, bound), 1.0, batch)
    return per_token(x, batch) - coef * to_go_NT


def _nothing_left(params: Mapping[str, Any]) -> str:
    if params["by"] != 0:
        return ""
    return " makes every advantage 0: nothing would be learned. Take it out."


@advantage(
    refuses=_nothing_left,
    equation="A ← {by} · A",
    fixes="a fixed scale",
    breaks="a learning rate in disguise",
)
def scale(x: Tensor, batch: TokenBatch, *, by: Real = 1.0) -> Tensor:
    """Multiply by a constant factor."""
    return x * by


@advantage(
    per_token=True,
    needs=("old_logp_NT",),
    equation="A ← [{alpha}·π_old + (1−{alpha})] · A",
    fixes="rare tokens, whose gradients are largest, do not drown the rest",
    breaks="slower on exactly the tokens that explore",
)
def reweight_by_probability(x: Tensor, batch: TokenBatch, *, alpha: Fraction = 0.3) -> Tensor:
    """Advantage reweighting (2505.12929)."""
    old_NT = batch.stream("old_logp_NT")
    return per_token(x, batch) * (alpha * old_NT.exp() + (1.0 - alpha))
