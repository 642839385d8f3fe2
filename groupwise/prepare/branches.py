"""Answers that go on from within other answers: sampled, graded as a whole, and counted apart.

Their randomness is named by seed, prompt, draw, sample, position and number alone: what else is
sampled changes nothing about a branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.common.progress import phase
from groupwise.engine.protocol import Engine, Request, Sampling, branch_stream
from groupwise.graders.recorded_verdicts import Ledger
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.rollouts import SampledGroup, grade
from groupwise.records import POLICY, Completion, Rollout, Turn

Point = tuple[Rollout, int]  # an answer, and how many of its tokens branches of it begin with


def write_branches(
    engine: Engine, points: Sequence[Point], branches: int, sampling: Sampling
) -> list[SampledGroup]:
    """Return so many whole answers for each point: its beginning, and what the policy goes on with.

    An answer has as many tokens as any: a branch gets what its beginning leaves.
    """
    requests = [
        Request(
            prompt=(*rollout.task.token_ids, *rollout.completion.token_ids[:at]),
            samples=branches,
            prompt_id=rollout.task.id,
            draw=rollout.draw,
            stream=branch_stream(rollout.sample, at),
            begun=_own_before(rollout.completion, at),
        )
        for rollout, at in points
    ]
    with phase("sampling", branches * len(requests), "branches") as told:
        groups = engine.generate(requests, sampling, wrote=told) if requests else []
    return [
        SampledGroup(
            rollout.task,
            rollout.draw,
            [joined(rollout.completion, at, more) for more in group],
            (rollout.sample, at),
        )
        for (rollout, at), group in zip(points, groups, strict=True)
    ]


def grade_branches(
    grader: Grader,
    tokenizer: Tokenizer,
    written: Sequence[SampledGroup],
    known: Ledger | None = None,
) -> list[list[Rollout]]:
    """Return every branch with its grade, point by point, as rollouts that own their end alone.

    Graders see whole answers; lengths, costs and files count what was written for the branch.
    """
    return [
        [replace(each, completion=_own_part(each.completion, at)) for each in group]
        for group, (_, at) in zip(
            grade(grader, tokenizer, written, known), (x.of or (0, 0) for x in written), strict=True
        )
    ]


def joined(answer: Completion, at: int, more: Completion) -> Completion:
    """Return a whole answer: another's first tokens, and what was written behind them."""
    ids = answer.token_ids[:at] + more.token_ids
    logp_T = torch.cat((answer.logp_T[:at], more.logp_T))
    mask_T = None
    if answer.mask_T is not None or more.mask_T is not None:
        mask_T = torch.cat((_mask(answer)[:at], _mask(more)))
    turns = [turn._replace(end=min(turn.end, at)) for turn in answer.turns if turn.start < at]
    turns += [Turn(turn.role, turn.start + at, turn.end + at) for turn in more.turns]
    return replace(
        more,
        token_ids=ids,
        logp_T=logp_T,
        topk_id_TK=None,
        topk_logp_TK=None,
        mask_T=mask_T,
        turns=_merged(turns),
    )


def _merged(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """Return the turns with those of the policy as one that lie next to each other."""
    found: list[Turn] = []
    for turn in turns:
        if found and found[-1].role == turn.role == POLICY:
            turn = found.pop()._replace(end=turn.end)
        found.append(turn)
    return tuple(found)


def _own_part(completion: Completion, at: int) -> Completion:
    """Return the completion with a mask that leaves its beginning out."""
    own_T = _mask(completion).clone()
    own_T[:at] = False
    return replace(completion, mask_T=own_T)


def _mask(completion: Completion) -> Tensor:
    mask_T = completion.mask_T
    return torch.ones(len(completion.token_ids), dtype=torch.bool) if mask_T is None else mask_T


def _own_before(completion: Completion, at: int) -> int:
    return at if completion.mask_T is None else int(completion.mask_T[:at].sum())
