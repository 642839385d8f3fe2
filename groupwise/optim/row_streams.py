"""Streams that single rollouts give: parts of rewards, roles, turns, columns of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import DataError
from groupwise.groups.trees import subtrees
from groupwise.optim.turn_streams import (
    outcome_rewards,
    result_starts,
    states,
    turn_rewards,
)
from groupwise.records import Rollout, Task

NONE = float("nan")
FLAWED = "flawed"  # the part of the reward that marks answers which are right for wrong reasons
EXPERT = "expert"  # whose weights wrote a lesson, in `Completion.weights`
ROLE, REFERENCE = "role", "reference_rewards"  # columns of the data
Weights = Mapping[str, float]


def streams_of_rows(
    wanted: Sequence[str], rows: Sequence[Rollout], mask_NT: Tensor, weights: Weights
) -> dict[str, Tensor]:
    """Return those of the wanted streams that rollouts give by themselves."""
    found = {name: make(rows, mask_NT) for name, make in MAKERS.items() if name in wanted}
    if "reward_part_NK" in wanted:
        found |= _parts(rows, weights)
    return found


def _parts(rows: Sequence[Rollout], weights: Weights) -> dict[str, Tensor]:
    """Return parts of rewards and their weights, in the order of their names."""
    names = sorted(weights or {name for row in rows for name in row.grade.parts})
    parts = [[row.grade.parts.get(name) for name in names] for row in rows]
    part_NK = torch.tensor([[NONE if x is None else x for x in row] for row in parts])
    weight_K = torch.tensor([float(weights.get(name, 1.0)) for name in names])
    shaped_NK = part_NK.reshape(len(rows), len(names))
    return {"reward_part_NK": shaped_NK, "part_weight_NK": weight_K.expand_as(shaped_NK).clone()}


def check_row_columns(wanted: Sequence[str], tasks: Sequence[Task]) -> None:
    """Refuse rows whose columns can't give the wanted streams, before anything is sampled."""
    for task in tasks if "role_N" in wanted else ():
        role_of(task)
    for task in tasks if "reference_reward_NK" in wanted else ():
        reference_rewards(task)


def role_of(task: Task) -> int:
    """Return the number in the column of roles; 0 without one."""
    role = task.columns.get(ROLE, 0)
    if not isinstance(role, int) or isinstance(role, bool):
        raise DataError(
            f"Row {task.id} has {role!r} in column {ROLE!r}, which takes the number of a role: 0, "
            "1, ..."
        )
    return role


def reference_rewards(task: Task) -> list[float]:
    """Return the rewards in the column of the reference's answers."""
    rewards: Any = task.columns.get(REFERENCE)
    numbers = isinstance(rewards, list | tuple) and rewards
    if not numbers or not all(isinstance(x, int | float) for x in rewards):
        raise DataError(
            f"Row {task.id} has {rewards!r} in column {REFERENCE!r}, which takes the rewards of "
            "answers that the reference gave, as [1, 0, 0, 1]. Sample them first: `groupwise "
            "collect MODEL --data DATA --out DIR`."
        )
    return [float(x) for x in rewards]


def ages(groups: Sequence[Sequence[Rollout]], version: int) -> Tensor:
    """Return how many updates ago each token was sampled, [N, T]; 0 behind a row's end."""
    rows = [
        torch.cat([torch.full((run.tokens,), version - run.version) for run in versions])
        for group in groups
        for row in group
        if (versions := row.completion.versions)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).clamp(min=0).float()


def _roles(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    return torch.tensor([role_of(row.task) for row in rows])


def _flawed(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    marks = [
        max((x or 0.0 for name, x in row.grade.parts.items() if is_flawed(name)), default=0.0)
        for row in rows
    ]
    return torch.tensor([mark > 0 for mark in marks])


def is_flawed(part: str) -> bool:
    """Tell whether a part of the reward, by its name or its function's, marks flawed answers."""
    return part.rpartition(":")[2] == FLAWED


def _context(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    read = [len(row.task.token_ids) + len(row.completion.token_ids) for row in rows]
    return torch.tensor(read) - mask_NT.sum(1).cpu()


def _turns(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return how many stretches the policy wrote."""
    begins_N = (mask_NT[:, 1:] & ~mask_NT[:, :-1]).sum(1) + mask_NT[:, 0].long()
    return begins_N.float()


def _of_reference(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return the rewards of the reference's answers, NaN where other prompts have more."""
    lists = [reference_rewards(row.task) for row in rows]
    width = max((len(rewards) for rewards in lists), default=1)
    return torch.tensor([[*rewards, *[NONE] * (width - len(rewards))] for rewards in lists])


def _peers(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Number the comparisons: answers of one role whose episodes began in one state."""
    numbers = dict[Any, int]()
    found = []
    for row in rows:
        episode = row.completion.episode
        begun = episode.turns[0].state if episode is not None and episode.turns else None
        found.append(numbers.setdefault((role_of(row.task), begun), len(numbers)))
    return torch.tensor(found)


def _lessons(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Mark the tokens of answers that an expert wrote: each counts 1."""
    wrote = torch.tensor([row.completion.weights == EXPERT for row in rows])
    return (mask_NT & wrote[:, None].to(mask_NT.device)).float()


def _tree(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return the subtrees of answers of a group, by the tokens that they begin with."""
    groups = [(row.task.id, row.draw) for row in rows]
    return subtrees([row.completion.token_ids for row in rows], groups)


MAKERS: dict[str, Callable[[Sequence[Rollout], Tensor], Tensor]] = {
    "role_N": _roles,
    "flawed_N": _flawed,
    "context_tokens_N": lambda rows, mask_NT: _context(rows, mask_NT).float(),
    "turns_N": _turns,
    "reference_reward_NK": _of_reference,
    "state_NT": states,
    "result_start_N": result_starts,
    "turn_reward_N": turn_rewards,
    "outcome_reward_N": outcome_rewards,
    "peer_N": _peers,
    "branch_NL": _tree,
    "lesson_NT": _lessons,
}
