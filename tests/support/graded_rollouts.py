"""Answers with their rewards and verdicts, written by hand."""

from __future__ import annotations

import torch

from groupwise.records import Completion, Grade, Rollout, Task


def rollout(
    tokens: str, reward: float | None, correct: bool | None = None, **changes: object
) -> Rollout:
    ids = tuple(map(ord, tokens))
    done = Completion(
        ids, torch.zeros(len(ids)), changes.get("finish", "eos"), changes.get("version", 0)
    )
    return Rollout(Task(0, "q"), 0, 0, done, tokens, Grade(reward, correct=correct))
