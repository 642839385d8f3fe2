"""Branches of a step's answers, for a recipe that reads values of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config import Config
from groupwise.groups.steps import ROOT, Branching, positions, step_ends
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.prepare.branches import Point, grade_branches, write_branches
from groupwise.prepare.setup import sampling_of
from groupwise.records import Completion
from groupwise.stages.parts import Parts
from groupwise.watch.clock import Clock


def branches_of(
    config: Config, parts: Parts[Any], groups: Sequence[Group], how: Branching, clock: Clock
) -> list[Group]:
    """Return the branches of each group's answers, in the order of samples and positions."""
    tokenizer = parts.loaded.tokenizer
    texts = token_texts(tokenizer, [r.completion for group in groups for r in group])
    drop = config.overlong == "drop"
    points: list[list[Point]] = [
        [
            (rollout, at)
            for rollout in group
            if rollout.grade.reward is not None and not (drop and rollout.completion.truncated)
            for at in points_of(rollout.completion, texts, how, alone=len(group) == 1)
        ]
        for group in groups
    ]
    with clock("rollout"):
        every = [point for group in points for point in group]
        written = write_branches(parts.engine, every, how.branches, sampling_of(config))
    with clock("grade"):
        graded = iter(grade_branches(parts.grader, tokenizer, written, parts.known))
    return [[branch for _ in group for branch in next(graded)] for group in points]


def points_of(
    completion: Completion, texts: Mapping[int, str], how: Branching, *, alone: bool
) -> tuple[int, ...]:
    """Return the positions of an answer that branches begin at.

    An answer that is `alone` has no others whose mean would be the value before its first token.
    """
    own_T = None if completion.mask_T is None else completion.mask_T.tolist()
    ends = step_ends([texts[i] for i in completion.token_ids], how.split, own_T)
    return (*([ROOT] if alone else []), *positions(ends, how.most_steps, own_T))


def token_texts(tokenizer: Tokenizer, completions: Sequence[Completion]) -> dict[int, str]:
    """Return the text of every token that is there; an end token has none, and is no step."""
    ids = sorted({i for completion in completions for i in completion.token_ids})
    texts = dict(zip(ids, tokenizer.decode_all([[i] for i in ids]), strict=True))
    return texts | dict.fromkeys(tokenizer.eos_ids, "")
