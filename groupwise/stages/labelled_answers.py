"""Answers of the data with judgements on them: for models that score, which read and write none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.errors import RecipeError
from groupwise.methods.method import Method
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.prepare.scored import scored_answers
from groupwise.records import Completion, Grade, Rollout, Task
from groupwise.stages.parts import Parts
from groupwise.watch.clock import Clock


class LabelledAnswers:
    """Takes all answers of each row; what they are worth is not known before a model says so."""

    sampled = False

    def __init__(self, config: Config, place: str) -> None:
        if place:
            raise RecipeError(
                f"recipe.source=labels:{place} would read data.train all the same. Name the file "
                "in data.train."
            )
        self.recipe = config.recipe

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the answers of the next rows, a group each."""
        drawn = [(parts.tasks[d.task], d.number) for d in cursor.take(prompts)]
        return [answers_of(self.recipe, *each, parts.loaded.tokenizer) for each in drawn]


def answers_of(recipe: Method, task: Task, draw: int, tokenizer: Tokenizer) -> Group:
    """Return the answers of a row as rollouts without a grade."""
    found = []
    for number, answer in enumerate(scored_answers(recipe, task, tokenizer)):
        nobodys_T = torch.full((len(answer.token_ids),), float("nan"))
        done = Completion(answer.token_ids, nobodys_T, "eos", version=-1, weights="data")
        text = tokenizer.decode(answer.token_ids)
        found.append(Rollout(task, draw, number, done, text, Grade(None)))
    return found


def groups_of(recipe: Method, tasks: Sequence[Task], tokenizer: Tokenizer) -> list[Group]:
    """Return the answers of held-out rows."""
    return [answers_of(recipe, task, 0, tokenizer) for task in tasks]
