"""Accuracy against tokens: the same samples, cut off at growing budgets and made to answer.

A sample that ended within the budget stands as it is. A longer one keeps its first tokens; a text
that asks for the answer goes behind them (thoughts that are open are closed first, and so is a
program where another is asked for), and the model writes a few more tokens, greedily.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.engine.protocol import Engine, Request, Sampling
from groupwise.errors import ModelError
from groupwise.evaluate.suites import Forcing
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.rollouts import verdict
from groupwise.records import Rollout

THOUGHTS, THOUGHTS_END = "<think>", "</think>"
FENCE = "```"


@dataclass(frozen=True)
class Cut:
    """A sample that is longer than a budget, as the model reads it again."""

    rollout: Rollout
    ids: tuple[int, ...]  # of the completion: what is left of it, and the text that asks

    @property
    def prompt(self) -> tuple[int, ...]:
        return (*self.rollout.task.token_ids, *self.ids)


def at_budget(
    engine: Engine,
    tokenizer: Tokenizer,
    grader: Grader,
    groups: Sequence[Sequence[Rollout]],
    budget: int,
    forcing: Forcing,
    tokens: int,
) -> list[tuple[bool | None, ...]]:
    """Return which samples of each task are right with so many tokens, and a few for the answer."""
    verdicts: list[list[bool | None]] = [[verdict(r.grade) for r in group] for group in groups]
    places = [
        (at, number)
        for at, group in enumerate(groups)
        for number, rollout in enumerate(group)
        if too_long(rollout, budget)
    ]
    if not places:
        return [tuple(each) for each in verdicts]
    cuts = [cut(groups[at][number], budget, forcing, tokenizer) for at, number in places]
    requests = [
        Request(each.prompt, 1, prompt_id=number, draw=0, stream="eval")
        for number, each in enumerate(cuts)
    ]
    sampling = Sampling(max_tokens=tokens, temperature=0.0, stop=forcing.stop)
    answers = [group[0] for group in engine.generate(requests, sampling)]
    ids = [(*one.ids, *answer.token_ids) for one, answer in zip(cuts, answers, strict=True)]
    texts = tokenizer.decode_all(ids)
    grades = grader.grade(
        [
            (one.rollout.task, text, own, answer.finish)
            for one, text, own, answer in zip(cuts, texts, ids, answers, strict=True)
        ]
    )
    for (at, number), grade in zip(places, grades, strict=True):
        verdicts[at][number] = verdict(grade)
    return [tuple(each) for each in verdicts]


def too_long(rollout: Rollout, budget: int) -> bool:
    """Return whether a sample exceeds the budget, or hit the limit of tokens within it."""
    length = len(rollout.completion.token_ids)
    return length > budget or rollout.completion.truncated


def cut(rollout: Rollout, budget: int, forcing: Forcing, tokenizer: Tokenizer) -> Cut:
    kept = rollout.completion.token_ids[:budget]
    before = tokenizer.decode((*rollout.task.token_ids, *kept))
    closing = ""
    if before.rfind(THOUGHTS) > before.rfind(THOUGHTS_END):
        closing = f"\n{THOUGHTS_END}"
    elif FENCE in forcing.text and _in_program(tokenizer.decode(kept)):
        closing = f"\n{FENCE}"
    return Cut(rollout, (*kept, *tokenizer.encode(closing + forcing.text)))


def _in_program(text: str) -> bool:
    """Return whether a fence is open: one more would be a line of that program."""
    lines = text.rpartition(THOUGHTS_END)[2].split("\n")
    return sum(line.lstrip().startswith(FENCE) for line in lines) % 2 == 1


def room(tokenizer: Tokenizer, forcing: Forcing, tokens: int) -> int:
    """Return the tokens that a forced answer takes after the longest budget, at most."""
    closing = 0
    for end in (THOUGHTS_END, FENCE):
        # A vocabulary without such characters opens no thoughts and no program either.
        with contextlib.suppress(ModelError):
            closing = max(closing, len(tokenizer.encode(f"\n{end}")))
    return closing + len(tokenizer.encode(forcing.text)) + tokens
