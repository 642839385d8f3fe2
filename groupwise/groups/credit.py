"""Advantages per token: returns, a critic's, and process rewards. Links of the advantage chain.

Sums run over the valid tokens still to come; a tool's output between them does not count.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.advantages import centred, per_token
from groupwise.groups.statistics import (
    close_holes,
    discounted_suffix_sums,
    group_stats,
    group_token_stats,
    reopen_holes,
    suffix_sums,
)
from groupwise.groups.step_table import divide
from groupwise.methods.slots import Count, Ddof, Fraction, NonNegative, Positive, advantage
from groupwise.records import TokenBatch


def dense_reward(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Reward per token: the sequence's reward on its last token, token rewards everywhere."""
    pays_N = (batch.length_N > 0) & ~reward_N.isnan()
    final_N = torch.where(pays_N, reward_N, 0.0).to(batch.dtype)
    dense_NT = final_N.new_zeros(batch.mask_NT.shape)
    if batch.token_reward_NT is not None:
        dense_NT = batch.token_reward_NT.clone()
    return dense_NT.scatter_add_(1, batch.last_N[:, None], final_N[:, None])


@advantage(
    base=True,
    per_token=True,
    dense=True,
    equation="A_t = Σ_{{s≥t}} {gamma}^(s−t) · r_s, r_n ∋ R",
    fixes="works with one sample per prompt",
    breaks="no baseline of its own: whiten it",
)
def return_to_go(reward_N: Tensor, batch: TokenBatch, *, gamma: Fraction = 1.0) -> Tensor:
    """Discounted sum of the rewards still to come (REINFORCE++, 2501.03262)."""
    return discounted_suffix_sums(dense_reward(reward_N, batch), gamma, batch)


def gae_advantages(
    reward_N: Tensor, batch: TokenBatch, gamma: float, lam: Tensor | float
) -> Tensor:
    """Return `A_t = Σ_l (γλ)^l δ_{t+l}`, `δ_t = r_t + γV_{t+1} − V_t`, V = 0 after the end."""
    value_NT = close_holes(batch.stream("old_value_NT"), batch)
    delta_NT = close_holes(dense_reward(reward_N, batch), batch).sub_(value_NT)
    delta_NT[:, :-1].add_(value_NT[:, 1:], alpha=gamma)  # 0 behind the last token
    return reopen_holes(suffix_sums(delta_NT, gamma * lam), batch)


def gae_with_one_lambda(reward_N: Tensor, batch: TokenBatch, gamma: float, lam: float) -> Tensor:
    """Compute the same for one λ; advantage and critic target often ask for the same."""
    of = [x for x in (reward_N, batch.token_reward_NT, batch.old_value_NT) if x is not None]
    return batch.once(("gae", gamma, lam), of, lambda: gae_advantages(reward_N, batch, gamma, lam))


@advantage(
    base=True,
    per_token=True,
    dense=True,
    needs=("old_value_NT",),
    equation="A_t = Σ_l ({gamma}·{lam})^l δ_{{t+l}}, δ_t = r_t + {gamma}·V_{{t+1}} − V_t",
    fixes="credit per token",
    breaks="the critic's error, and its memory",
)
def gae(
    reward_N: Tensor, batch: TokenBatch, *, gamma: Fraction = 1.0, lam: Fraction = 0.95
) -> Tensor:
    """Generalised advantage estimation (PPO, 1707.06347)."""
    return gae_with_one_lambda(reward_N, batch, gamma, lam)


def length_adaptive_lambda(length_N: Tensor, alpha: float) -> Tensor:
    """Return λ = 1 − 1/(α·n), held in [0, 1]: below 1/α tokens it would be negative."""
    return (1.0 - 1.0 / (alpha * length_N.double().clamp(min=1))).clamp(0.0, 1.0)


@advantage(
    base=True,
    per_token=True,
    dense=True,
    needs=("old_value_NT",),
    equation="A = GAE with λ_i = clamp(1 − 1/({alpha}·n_i), 0, 1), γ={gamma}",
    fixes="the final reward reaches the early tokens of long answers",
    breaks="λ = 0 for answers of 1/α tokens or fewer",
)
def gae_length_adaptive(
    reward_N: Tensor, batch: TokenBatch, *, alpha: Positive = 0.05, gamma: Fraction = 1.0
) -> Tensor:
    """VAPO (2504.05118)."""
    lam_N = length_adaptive_lambda(batch.length_N, alpha)
    return gae_advantages(reward_N, batch, gamma, lam_N)


@advantage(
    per_token=True,
    needs=("sampler_logp_NT", "teacher_logp_NT"),
    equation="A_t = A − {coef}·(ℓ^μ_t − {scale}·ℓ^T_t), detached",
    fixes="a signal at every token, from the policy's own answers",
    breaks="one sampled token says little of the teacher's distribution: noisy",
)
def minus_teacher_kl(
    x: Tensor, batch: TokenBatch, *, coef: NonNegative = 1.0, scale: Positive = 1.0
) -> Tensor:
    """Pay for the sampled token's log-odds to a teacher (on-policy distillation).

    Its expected gradient is that of −coef·KL(π‖teacher) at each visited prefix; what comes later
    is not discounted in. A scale above 1 goes beyond the teacher (ExOPD, 2602.12125).
    """
    gap_NT = batch.stream("sampler_logp_NT") - scale * batch.stream("teacher_logp_NT")
    return per_token(x, batch) - coef * batch.valid(gap_NT)


def implicit_reward(batch: TokenBatch, beta: float) -> Tensor:
    """Return r_φ(y_t) = β·(ℓ^φ_t − ℓ^ref_t), detached."""
    prm_NT = batch.stream("prm_logp_NT").detach()
    return beta * (prm_NT - batch.stream("ref_logp_NT"))


@advantage(
    base=True,
    per_token=True,
    needs=("prm_logp_NT", "ref_logp_NT"),
    equation="A_t = Σ_{{s≥t}} {gamma}^(s−t)·[r_φ(y_s) − mean_{{j≠i}} r̄_φ(y^j)] + R −"
    " mean_{{j≠i}} R_j,"
    " r_φ = {beta}·(ℓ^φ − ℓ^ref)",
    fixes="dense credit without step labels",
    breaks="the implicit reward model can be hacked",
)
def process_rloo(
    reward_N: Tensor, batch: TokenBatch, *, beta: Positive = 0.05, gamma: Fraction = 1.0
) -> Tensor:
    """PRIME (2502.01456), equation 5: leave-one-out for process and outcome apart, then added."""
    process_NT = implicit_reward(batch, beta)
    has_tokens_N = batch.length_N > 0
    average_N = process_NT.sum(1).double() / batch.length_N.clamp(min=1)
    # Rows without a token or a grade have no average: NaN keeps them out of the others' mean.
    average_N = torch.where(has_tokens_N & ~reward_N.isnan(), average_N, torch.nan)
    stats = group_stats(average_N, batch)
    own_N = average_N.nan_to_num(0.0)
    others_N = (stats.mean_N * stats.count_N - own_N) / (stats.count_N - 1).clamp(min=1)
    compared_NT = batch.mask_NT & (stats.count_N > 1)[:, None]
    centred_NT = torch.where(compared_NT, process_NT - others_N.to(batch.dtype)[:, None], 0.0)
    process_NT = discounted_suffix_sums(centred_NT, gamma, batch)
    graded = group_stats(reward_N, batch)
    outcome_N = centred(reward_N, graded) * graded.count_N / (graded.count_N - 1).clamp(min=1)
    total_NT = process_NT + per_token(outcome_N, batch)
    return torch.where((graded.count_N > 1)[:, None], total_NT, 0.0)


@advantage(
    base=True,
    per_token=True,
    needs=("prm_logp_NT", "ref_logp_NT"),
    equation="r = {beta}·(ℓ^φ − ℓ^ref) / max_batch |Σ_{{s≥t}} r_s|; A_t = {weight}·Σ_{{s≥t}}"
    " [K·r_s − Σ_j r̄_j]/(K−1) + {weight}·(R − mean_{{j≠i}} R_j)",
    fixes="process and outcome rewards of one size",
    breaks="one long answer sets the scale for all",
)
def process_rloo_release(
    reward_N: Tensor, batch: TokenBatch, *, beta: Positive = 0.05, weight: Positive = 5.0
) -> Tensor:
    """Return what PRIME's released code computes instead of equation 5, before its whitening.

    A token's own answer is in the mean that is subtracted, and K/(K−1) makes up for it: beside
    equation 5 that leaves (r_t − r̄_i)/(K−1).
    """
    counted_N = (batch.length_N > 0) & ~reward_N.isnan()
    reward_NT = implicit_reward(batch, beta) * counted_N[:, None]
    to_go_NT = discounted_suffix_sums(reward_NT.clone(), 1.0, batch)  # it sums in place
    largest = batch.world.gather(to_go_NT.abs_().amax(1)).max()
    reward_NT = reward_NT / torch.where(largest > 0, largest, 1.0)
    average_N = reward_NT.sum(1).double() / batch.length_N.clamp(min=1)
    stats = group_stats(torch.where(counted_N, average_N, torch.nan), batch)
    others_N = (stats.count_N - 1).clamp(min=1)
    base_N = (stats.mean_N * stats.count_N / others_N).nan_to_num(0.0)
    scale_N = stats.count_N / others_N
    scale_N1, base_N1 = (x_N[:, None].to(batch.dtype) for x_N in (scale_N, base_N))
    centred_NT = batch.valid(reward_NT.mul_(scale_N1).sub_(base_N1))
    process_NT = discounted_suffix_sums(centred_NT, 1.0, batch)
    graded = group_stats(reward_N, batch)
    outcome_N = centred(reward_N, graded) * graded.count_N / (graded.count_N - 1).clamp(min=1)
    total_NT = weight * (process_NT + per_token(outcome_N, batch))
    return torch.where((graded.count_N > 1)[:, None], total_NT, 0.0)


def _zscore_and_sum(
    x_NT: Tensor, select_NT: Tensor, batch: TokenBatch, ddof: int, eps: float
) -> Tensor:
    """Take z-scores over all selected tokens of the group, then sum over those to come."""
    stats = group_token_stats(x_NT, select_NT, batch)
    dead_N = stats.uniform_N | (group_stats(batch.task_reward_N, batch).count_N <= 1)
    scale_N = torch.where(dead_N, 1.0, stats.std_N(ddof) + eps)
    mean_N1, scale_N1 = stats.mean_N[:, None].to(x_NT.dtype), scale_N[:, None].to(x_NT.dtype)
    z_NT = torch.where(select_NT & ~dead_N[:, None], (x_NT - mean_N1) / scale_N1, 0.0)
    return discounted_suffix_sums(z_NT, 1.0, batch)


@advantage(
    scales=True,
    base=True,
    per_token=True,
    outcome=False,
    step_means=True,
    needs=("step_reward_NT", "step_end_NT"),
    equation="z = (r_step − μ_g) / (σ_g + {eps}) over all steps of the group; A_t = Σ_(steps"
    " ending ≥ t) z",
    fixes="GRPO with a reward per step",
    breaks="step noise; more steps, more weight",
)
def group_process_zscore(
    reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-6
) -> Tensor:
    """GRPO with process supervision (2402.03300, section 4.1.3)."""
    step_NT = batch.stream("step_reward_NT")
    end_NT = batch.stream("step_end_NT")
    select_NT = end_NT & ~reward_N.isnan()[:, None]
    return _zscore_and_sum(step_NT, select_NT, batch, ddof, eps)


@advantage(
    base=True,
    per_token=True,
    needs=("step_value_NT", "step_end_NT"),
    equation="A_t = R·1[k is the last] + V̂(s_{{k+1}}) − V̂(s_k) for all tokens of step k; V̂(s) ="
    " mean reward of {branches} answers that go on from s, 0 behind the end; V̂(s_1) ="
    " mean_{{j≠i}} R_j; steps by {split}, {most_steps} + 1 at the most",
    fixes="credit per step without a critic: unbiased, however few branches",
    breaks="samples many times the tokens that it learns from; one number for all tokens of a step",
)
def step_difference(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    branches: Count = 9,
    most_steps: Count = 25,
    split: Literal["line", "sentence"] = "line",
) -> Tensor:
    """Take the difference of Monte-Carlo values around each step (VinePPO, 2410.01679).

    `step_value_NT` has at the last token of a step the value of the state that it begins in.
    """
    own_NT = close_holes(batch.mask_NT, batch)
    value_NT = close_holes(batch.stream("step_value_NT"), batch)
    end_NT = own_NT & close_holes(batch.stream("step_end_NT"), batch)
    last_N1, written_N1 = (batch.length_N - 1).clamp(min=0)[:, None], (batch.length_N > 0)[:, None]
    end_NT = end_NT.scatter(1, last_N1, end_NT.gather(1, last_N1) | written_N1)
    steps = divide(end_NT)
    most = int(steps.count_N.max()) if batch.rows else 0
    value_NK = steps.at_ends(value_NT, most + 1)  # 0 behind the last step
    gain_NK = value_NK[:, 1:] - value_NK[:, :-1]
    paid_N1 = reward_N.nan_to_num(0.0).to(gain_NK.dtype)[:, None]
    is_last_NK = torch.arange(most, device=end_NT.device) == steps.count_N[:, None] - 1
    return reopen_holes(steps.spread(gain_NK + paid_N1 * is_last_NK), batch)


def mixed_reward(reward_N: Tensor, batch: TokenBatch, mix: float) -> Tensor:
    """Return mix·(ℓ° − ℓ^ref) on every token, (1−mix)·R on the last."""
    drift_NT = batch.stream("old_logp_NT") - batch.stream("ref_logp_NT")
    return mix * drift_NT + (1.0 - mix) * dense_reward(reward_N, batch)


@advantage(
    scales=True,
    base=True,
    per_token=True,
    needs=("old_logp_NT", "ref_logp_NT"),
    equation="x_t = {mix}·(ℓ°_t − ℓ^ref_t) + (1−{mix})·R·1[t=n]; z-score over the group's tokens;"
    " A_t = Σ_{{s≥t}} z_s",
    fixes="nothing: an ablation of a popular misreading of PRIME",
    breaks="pays the policy for drifting away from the reference",
)
def drift_as_process_reward(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    mix: Fraction = 0.5,
    ddof: Ddof = 1,
    eps: NonNegative = 1e-6,
) -> Tensor:
    """Do the simplified PRIME of several articles: the policy is its own reward model."""
    x_NT = mixed_reward(reward_N, batch, mix)
    select_NT = batch.mask_NT & ~reward_N.isnan()[:, None]
    return _zscore_and_sum(x_NT, select_NT, batch, ddof, eps)
