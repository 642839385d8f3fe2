"""Advantages that compare an answer with others than its group's plain mean.

Links of the advantage chain, one number a row: by parts of the reward, by length, with the second
best, with a role's or a prompt's own past, with a subtree, with answers of the reference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.advantages import centred
from groupwise.groups.statistics import (
    batch_stats,
    group_stats,
    group_sum,
    keyed_stats,
    spread,
)
from groupwise.methods.slots import Ddof, Fraction, NonNegative, Positive, advantage
from groupwise.records import TokenBatch


@advantage(
    base=True,
    needs=("reward_part_NK",),
    equation="S = Σ_k w_k·(r_k − μ_gk)/(σ_gk + {eps}) over the parts of the reward, σ with"
    " ddof={ddof}",
    fixes="a loud part of the reward does not drown the others",
    breaks="a part that hardly varies counts as much as the task",
)
def group_zscore_per_part(
    reward_N: Tensor, batch: TokenBatch, *, ddof: Ddof = 1, eps: NonNegative = 1e-4
) -> Tensor:
    """GDPO (2601.05242): each part by itself, then their weighted sum; whiten it afterwards.

    A part that is missing leaves its own statistics; a row without any leaves the whitening.
    """
    part_NK = batch.stream("reward_part_NK").double()
    weight_NK = batch.find("part_weight_NK")
    graded_N = ~reward_N.isnan()
    total_N = torch.zeros_like(part_NK[:, 0])
    for k in range(part_NK.shape[1]):
        own_N = torch.where(graded_N, part_NK[:, k], torch.nan)
        stats = group_stats(own_N, batch)
        scale_N = stats.std_N(ddof) + eps
        z_N = centred(own_N, stats) / torch.where(scale_N == 0, 1.0, scale_N)
        weight_N = 1.0 if weight_NK is None else weight_NK[:, k].double()
        total_N = total_N + weight_N * z_N.nan_to_num(0.0)
    return torch.where(graded_N & ~part_NK.isnan().all(1), total_N, torch.nan)


@advantage(
    base=True,
    equation="A = R − Σ_j n_j·R_j / Σ_j n_j over the group",
    fixes="less variance where answers differ in length",
    breaks="the answer itself is in its baseline; gradients need not grow with length",
)
def length_weighted_mean(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """OPO (2505.23585): the baseline of least variance where a gradient's square goes by length."""
    stats, graded_N = group_stats(reward_N, batch), ~reward_N.isnan()
    length_N = torch.where(graded_N, batch.length_N, 0).double()
    paid_N = length_N * reward_N.double().nan_to_num(0.0)
    paid_P, length_P = (group_sum(batch.world.gather(x), batch) for x in (paid_N, length_N))
    mean_N = spread(paid_P / length_P.clamp(min=1), batch)
    return torch.where(stats.uniform_N, 0.0, reward_N.double() - mean_N)


@advantage(
    base=True,
    equation="A = R_max − R_second for the best answer (scale by {scale}, ddof={ddof}, ε={eps}),"
    " 0 for the others",
    fixes="trains the best of the group: pass@k",
    breaks="one answer of a group learns, and none where two are best",
)
def best_minus_second(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    scale: Literal["none", "group"] = "none",
    ddof: Ddof = 1,
    eps: NonNegative = 1e-6,
) -> Tensor:
    """GRPO for pass@k (2503.19595): max_j R_j − max_(j≠i) R_j, which is 0 but for the best."""
    stats = group_stats(reward_N, batch)
    best_N = reward_N.double() == stats.high_N
    others = group_stats(torch.where(best_N, torch.nan, reward_N.double()), batch)
    only_N = group_stats(torch.where(best_N, 1.0, torch.nan), batch).count_N == 1
    leads_N = best_N & only_N & (others.count_N > 0)
    gain_N = torch.where(leads_N, stats.high_N - others.high_N, 0.0)
    gain_N = torch.where(reward_N.isnan(), torch.nan, gain_N)
    return gain_N if scale == "none" else gain_N / (stats.std_N(ddof) + eps)


@advantage(
    uniform="teaches",
    base=True,
    equation="A = R − mean of the batch",
    fixes="one answer a prompt is enough, and nothing is scaled",
    breaks="a prompt's difficulty stays in its advantage",
)
def batch_mean(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Centred over the batch (FlashREINFORCE)."""
    return reward_N.double() - batch_stats(reward_N, batch, 0)[0]


@advantage(
    base=True,
    needs=("peer_N",),
    equation="A = R − mean over the answers of the group with the same peer number",
    fixes="answers of different kinds in one group are not compared with each other",
    breaks="few peers, noisy means",
)
def group_mean_of_peers(reward_N: Tensor, batch: TokenBatch) -> Tensor:
    """Hierarchical GRPO: a role is compared in its group, or within its episode.

    Who makes the batch numbers the comparisons: same number, same role (and episode).
    """
    gather = batch.world.gather
    key_M2 = torch.stack([batch.groups.index_M, gather(batch.stream("peer_N"))], 1)
    reward_M = gather(reward_N).double()
    return batch.world.own(keyed_stats(reward_M, key_M2).centred(reward_M))


# --- a role's and a prompt's own past ---------------------------------------------------------


def role_walk(
    reward_N: Tensor, batch: TokenBatch, decay: float
) -> tuple[Tensor, Mapping[int, float]]:
    """Return R − b of each row, b its role's mean before it, and the means behind the last row."""
    gather, means = batch.world.gather, dict(batch.memory.role_average)
    found = []
    rows = zip(gather(batch.stream("role_N")).tolist(), gather(reward_N).tolist(), strict=True)
    for role, reward in rows:
        if math.isnan(reward):
            found.append(reward)
            continue
        before = means.get(role, 0.0)
        found.append(reward - before)
        means[role] = decay * before + (1.0 - decay) * reward
    found_M = torch.tensor(found, dtype=torch.float64, device=reward_N.device)
    return batch.world.own(found_M), means


@advantage(
    uniform="teaches",
    base=True,
    ordered=True,
    remembers="role_average",
    needs=("role_N",),
    equation="in the order of rows: A = R − b_role, then b_role ← {decay}·b + (1−{decay})·R",
    fixes="self-play of several roles: what a role expects is its own",
    breaks="the order of rows matters, and baselines begin at 0",
)
def role_moving_mean(reward_N: Tensor, batch: TokenBatch, *, decay: Fraction = 0.95) -> Tensor:
    """Role-conditioned advantage estimation (RAE, SPIRAL, 2506.24119)."""
    return role_walk(reward_N, batch, decay)[0]


def beta_after(
    reward_N: Tensor, batch: TokenBatch, half_life: float, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ρ, and α and β behind this step: what is known fades as the policy moves."""
    alpha_N, beta_N = prompt_beta(batch)
    rho_N = torch.exp2(-batch.stream("drift_N").double() / half_life).clamp(low, high)
    reward_N = reward_N.double()
    return rho_N, rho_N * alpha_N + reward_N, rho_N * beta_N + 1.0 - reward_N


def prompt_beta(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return α and β of each row's prompt: ½ and ½ where nothing is known of it."""
    known = [batch.memory.prompt_beta.get(int(g), (0.5, 0.5)) for g in batch.group_N.tolist()]
    found_N2 = torch.tensor(known, dtype=torch.float64, device=batch.group_N.device).reshape(-1, 2)
    return found_N2[:, 0], found_N2[:, 1]


@advantage(
    uniform="teaches",
    base=True,
    remembers="prompt_beta",
    needs=("drift_N",),
    equation="A = R − α/(α+β) of the prompt; then α ← ρα + R, β ← ρβ + 1 − R,"
    " ρ = clamp(2^(−D/{half_life}), {low}, {high})",
    fixes="one answer a prompt, no dead groups",
    breaks="state per prompt, and a forward pass over each prompt's previous answer",
)
def prompt_beta_mean(
    reward_N: Tensor,
    batch: TokenBatch,
    *,
    half_life: Positive = 0.06,
    low: Fraction = 0.875,
    high: Fraction = 0.96,
) -> Tensor:
    """SPO (2509.13232): what a prompt is expected to give, from its past, which fades.

    D is how far the policy has moved on the prompt's previous answer. Rewards are in [0, 1].
    """
    alpha_N, beta_N = prompt_beta(batch)
    return reward_N.double() - alpha_N / (alpha_N + beta_N)


# --- answers of the reference, subtrees -------------------------------------------------------


def optimal_value(batch: TokenBatch, beta: float) -> Tensor:
    """Return V* = β·log mean_j e^(R_j/β) of the reference's answers to each row's prompt."""
    reward_NK = batch.stream("reference_reward_NK").double()
    known_NK = ~reward_NK.isnan()
    scaled_NK = torch.where(known_NK, reward_NK / beta, -torch.inf)
    return beta * (scaled_NK.logsumexp(1) - known_NK.sum(1).double().log())


@advantage(
    uniform="teaches",
    base=True,
    needs=("reference_reward_NK",),
    equation="A = R − {beta}·log mean_j e^(R_j/{beta}) over answers of the reference",
    fixes="one answer a prompt in training: its baseline was sampled before",
    breaks="the baseline is of the reference, and never learns",
)
def optimal_value_baseline(reward_N: Tensor, batch: TokenBatch, *, beta: Positive = 0.5) -> Tensor:
    """A*-PO (2505.20686): the optimal value of the KL-regularised problem, estimated once."""
    return reward_N.double() - optimal_value(batch, beta)


@advantage(
    base=True,
    needs=("branch_NL",),
    equation="A = mean over the subtrees that hold the answer, by {weight}, of R − mean of the"
    " subtree; below the root only subtrees of two answers or more",
    fixes="credit at the places where answers part",
    breaks="needs answers that were sampled as a tree",
)
def tree_mean(
    reward_N: Tensor, batch: TokenBatch, *, weight: Literal["size", "average"] = "size"
) -> Tensor:
    """TreePO (2508.17445): compared in every subtree from the root to the last branching."""
    gather = batch.world.gather
    reward_M, branch_ML = gather(reward_N).double(), gather(batch.stream("branch_NL"))
    total_M, weight_M = torch.zeros_like(reward_M), torch.zeros_like(reward_M)
    for level in range(branch_ML.shape[1]):
        key_M3 = torch.stack(
            [batch.groups.index_M, torch.full_like(branch_ML[:, 0], level), branch_ML[:, level]], 1
        )
        stats = keyed_stats(reward_M, key_M3)
        counts_M = (branch_ML[:, level] >= 0) & ((stats.count_X >= 2) | (level == 0))
        share_M = counts_M * (stats.count_X if weight == "size" else 1.0)
        total_M += share_M * stats.centred(reward_M)
        weight_M += share_M
    return batch.world.own(total_M / weight_M.clamp(min=1))
