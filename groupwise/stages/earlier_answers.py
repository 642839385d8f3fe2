"""Each prompt's previous answer: how far the policy has moved on it since then (SPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.optim.assemble import Group
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import Sequences
from groupwise.records import Memory, StoredAnswer

READS = "drift_N"


def earlier(memory: Memory, groups: Sequence[Group]) -> Sequences | None:
    """Return the previous answers to these prompts as rows; None where there is none."""
    known = [
        (group[0].task, memory.answers[group[0].task.id])
        for group in groups
        if group[0].task.id in memory.answers
    ]
    if not known:
        return None
    return Sequences([task.token_ids for task, _ in known], [x.token_ids for _, x in known])


def drift_of(
    learner: PolicyLearner, memory: Memory, groups: Sequence[Group], found: Sequences | None
) -> Tensor:
    """Return the mean |ℓ then − ℓ now| over each prompt's previous answer; 0 without one."""
    moved = dict[int, float]()
    if found is not None:
        every = list(range(len(found.completions)))
        logp_NT = learner.score(learner.model, found, [every]).double().cpu()
        asked = [g[0].task.id for g in groups if g[0].task.id in memory.answers]
        for row, prompt in enumerate(asked):
            then_T = torch.tensor(memory.answers[prompt].logp, dtype=torch.float64)
            apart_T = (logp_NT[row, : len(then_T)] - then_T).abs()
            moved[prompt] = float(apart_T[~apart_T.isnan()].mean())
    return torch.tensor([moved.get(group[0].task.id, 0.0) for group in groups for _ in group])


def with_answers(memory: Memory, groups: Sequence[Group], logp_NT: Tensor) -> Memory:
    """Return the memory with the first answer of each group, as the policy saw it before.

    Tokens of others, and rows that only a policy which had moved has read, are NaN there.
    """
    answers, row = dict(memory.answers), 0
    for group in groups:
        done = group[0].completion
        logp_T = logp_NT[row, : len(done.token_ids)].double().cpu()
        if done.mask_T is not None:
            logp_T = logp_T.masked_fill(~done.mask_T, float("nan"))
        if not logp_T.isnan().all():
            answers[group[0].task.id] = StoredAnswer(done.token_ids, tuple(logp_T.tolist()))
        row += len(group)
    return replace(memory, answers=answers)
