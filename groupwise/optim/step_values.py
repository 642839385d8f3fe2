"""Values of steps from branches: the streams that a recipe with step differences reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.groups.steps import mean_rewards, placed_values, root_value
from groupwise.optim.assemble import Group, sequences_of
from groupwise.records import Rollout


def value_streams(
    groups: Sequence[Group], branches: Sequence[Group], *, drop_truncated: bool = False
) -> dict[str, Tensor]:
    """Return `step_value_NT` and `step_end_NT` of the answers, by the rewards of their branches.

    `branches` are those of each group, in any order. What `drop_truncated` says of answers that
    were cut off holds for branches, too: they have no reward.
    """
    mask_NT = sequences_of(groups).mask()
    value_NT, end_NT = torch.zeros(mask_NT.shape), torch.zeros_like(mask_NT)
    row = 0
    for group, of_group in zip(groups, branches, strict=True):
        rewards = [_reward(rollout, drop_truncated) for rollout in group]
        for number, rollout in enumerate(group):
            found: dict[int, list[float | None]] = {}
            for branch in of_group:
                if branch.branch is not None and branch.sample == rollout.sample:
                    found.setdefault(branch.branch.at, []).append(_reward(branch, drop_truncated))
            values = mean_rewards(found)
            others = rewards[:number] + rewards[number + 1 :]
            root = root_value(rewards[number], others, values)
            for at, value in placed_values(mask_NT[row].tolist(), root, values):
                value_NT[row, at], end_NT[row, at] = value, True
            row += 1
    return {"step_value_NT": value_NT, "step_end_NT": end_NT}


def _reward(rollout: Rollout, drop_truncated: bool) -> float | None:
    return None if drop_truncated and rollout.completion.truncated else rollout.grade.reward
