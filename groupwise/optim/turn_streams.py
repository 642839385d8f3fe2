"""Streams that episodes give: the states in which turns begin, and what a first call was worth."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.records import POLICY, Completion, Episode, Rollout

# Of episodes alone: what no answer of one turn has.
OF_EPISODES = ("state_NT", "peer_N", "turn_reward_N", "outcome_reward_N", "result_start_N")


def states(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return the number of the state that each token's turn begins in; 0 where nobody turned.

    States are equal where the environment gives them one name; where it names none, where the
    policy has just been told the same.
    """
    numbers: dict[str, int] = {}
    state_NT = torch.zeros(mask_NT.shape, dtype=torch.long)
    for row, rollout in enumerate(rows):
        completion, episode = rollout.completion, rollout.completion.episode
        if episode is None:
            continue
        for turn, name in zip(completion.own_turns, state_names(episode), strict=True):
            number = numbers.setdefault(name, len(numbers) + 1)
            state_NT[row, turn.start : turn.end] = number
    return state_NT * mask_NT.cpu()


def state_names(episode: Episode) -> list[str]:
    """Return a text for the state that each turn of the policy begins in."""
    told: list[list[object]] = [[]]  # nothing before the first: the prompt is the group's own
    for message in episode.messages:
        if message.get("role") == POLICY:
            told.append([])
        else:
            told[-1].append(message)
    return [
        f"state {facts.state}" if facts.state is not None else f"told {json.dumps(said)}"
        for facts, said in zip(episode.turns, told, strict=False)
    ]


def result_starts(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return how many own tokens stand before the first words of others; -1 without any."""
    return torch.tensor([_result_start(row.completion) for row in rows])


def _result_start(completion: Completion) -> int:
    first = completion.turns[0]
    return first.end - first.start if len(completion.turns) > 1 else -1


def turn_rewards(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return the reward of each episode's first turn."""
    return torch.tensor([_first_reward(row) for row in rows])


def outcome_rewards(rows: Sequence[Rollout], mask_NT: Tensor) -> Tensor:
    """Return the reward of all that came behind the first turn, and of the whole."""
    return torch.tensor(
        [
            float("nan") if row.grade.reward is None else row.grade.reward - _first_reward(row)
            for row in rows
        ]
    )


def _first_reward(row: Rollout) -> float:
    """Return what the first turn has given; all of it is the outcome's where there is one turn."""
    if _result_start(row.completion) < 0 or not row.grade.steps:
        return 0.0
    return row.grade.steps[0][1]
