"""Answers with their rewards and verdicts, written by hand."""

from __future__ import annotations

import torch

from groupwise.records import Completion, Grade, Rollout, Task, Turn


def rollout(
    tokens: str, reward: float | None, correct: bool | None = None, **changes: object
) -> Rollout:
    ids = tuple(map(ord, tokens))
    finish, version = changes.get("finish", "eos"), changes.get("version", 0)
    done = Completion(ids, torch.zeros(len(ids)), finish, version)
    return Rollout(Task(0, "q"), 0, 0, done, tokens, Grade(reward, correct=correct))


def interrupted(
    said: str, heard: str, last: str, reward: float | None, correct: bool | None = None
) -> Rollout:
    """The policy says something, a tool answers, the policy says its last."""
    turns: list[Turn] = []
    for role, text in (("assistant", said), ("tool", heard), ("assistant", last)):
        at = turns[-1].end if turns else 0
        turns.append(Turn(role, at, at + len(text)))
    ids = tuple(map(ord, said + heard + last))
    own_T = torch.tensor(
        [turn.role != "tool" for turn in turns for _ in range(turn.start, turn.end)]
    )
    done = Completion(ids, torch.zeros(len(ids)), "eos", 0, mask_T=own_T, turns=tuple(turns))
    grade = Grade(reward, correct=correct)
    return Rollout(Task(0, "q"), 0, 0, done, said + heard + last, grade, last)
