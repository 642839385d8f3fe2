"""Filters: which groups and rows a batch learns from. `filter(batch) -> keep_N`.

The trait `action` says what happens to the rest: `refill` (the group leaves, another is wanted;
in a batch already given its advantage is 0), `zero` (advantage 0, its tokens stay in the
denominators), `mask` (its tokens leave the loss and the denominators; its reward stays in the
group's statistics).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.groups.statistics import dead_groups, group_stats
from groupwise.methods.slots import Fraction, filter_
from groupwise.records import TokenBatch

Drawing = Literal["pow", "max_min", "max_random"]
LEAST = 1e-8  # of a row's weight when rows are drawn


@filter_(
    uniform="drops",
    action="refill",
    equation="keep g iff max_g R > min_g R",
    fixes="no compute on groups whose gradient is zero",
    breaks="needs more rollouts per step; hides how hard the data is",
)
def zero_variance(batch: TokenBatch) -> Tensor:
    """Dynamic sampling (DAPO, 2503.14476): drop groups whose task rewards are all equal.

    Compares the task reward before shaping, exactly.
    """
    return ~group_stats(batch.task_reward_N, batch).uniform_N


@filter_(
    action="refill",
    equation="keep g iff {low} ≤ mean_g R ≤ {high}",
    fixes="keeps prompts of middling difficulty",
    breaks="throws away hard prompts that are about to be solved",
)
def accuracy_band(batch: TokenBatch, *, low: Fraction = 0.2, high: Fraction = 0.8) -> Tensor:
    """Online prompt filter (PRIME, 2502.01456): mean task reward within [low, high]."""
    mean_N = group_stats(batch.task_reward_N, batch).mean_N
    return (mean_N >= low) & (mean_N <= high)


@filter_(
    action="refill",
    equation="keep all while at least {share} of the groups are mixed, else only the mixed ones",
    fixes="bounded resampling: stops when enough groups teach something",
    breaks="dead groups stay in the batch up to the bound",
)
def enough_mixed(batch: TokenBatch, *, share: Fraction = 0.6) -> Tensor:
    """Resample until the valid share is reached (GPG, 2504.02546)."""
    found = dead_groups(batch)
    mixed_N = ~group_stats(batch.task_reward_N, batch).uniform_N
    return mixed_N | (found.groups - found.dead >= share * found.groups)


@filter_(
    uniform="drops",
    action="zero",
    equation="A = 0 where max_g R = min_g R; denominators unchanged",
    fixes="all-right and all-wrong prompts can't push a recipe without a baseline",
    breaks="wasted rollouts dilute the step",
)
def reject(batch: TokenBatch) -> Tensor:
    """Reinforce-Rej (2504.11343): zero uniform groups; their tokens stay in the denominators."""
    return ~group_stats(batch.task_reward_N, batch).uniform_N


@filter_(
    action="mask",
    needs=("truncated_N",),
    equation="m_it = 0 where the completion was cut off; R_i stays in μ_g, σ_g",
    fixes="cut-off completions are not punished for what they did not get to say",
    breaks="nothing teaches the model to stop",
)
def overlong(batch: TokenBatch) -> Tensor:
    """Overlong filtering (DAPO, 2503.14476): truncated rows leave the loss, not the statistics."""
    return ~batch.stream("truncated_N")


@filter_(
    action="zero",
    needs=("reference_reward_NK",),
    equation="keep prompts whose answers of the reference have rewards that do not add up to 0",
    fixes="prompts that the reference never solves have no value to compare with",
    breaks="the hardest prompts are never learned; rewards of both signs may cancel",
)
def scored_by_reference(batch: TokenBatch) -> Tensor:
    """A*-PO's filter (2505.20686)."""
    return batch.stream("reference_reward_NK").double().nan_to_num(0.0).sum(1) != 0


def draw_weights(reward_N: Tensor, how: Drawing, power: float) -> Tensor:
    """Return the weight of each row when rows are drawn anew by their reward (PF-PPO, 2409.06957).

    `pow`: |R|^power; `max_min`: 1 for the largest and smallest; `max_random`: 0.4 for the largest
    and 0.1 for the rest. A little is added, so that no weight is 0.
    """
    reward_N = reward_N.double()
    if how == "pow":
        return reward_N.abs().pow(power) + LEAST
    high_N, low_N = reward_N == reward_N.max(), reward_N == reward_N.min()
    if how == "max_min":
        return (high_N | low_N).double() + LEAST
    return torch.where(high_N, 0.4, 0.1).double() + LEAST
