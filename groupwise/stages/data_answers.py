"""Answers that stand in the data: nothing is sampled, nothing graded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from groupwise.config import Config
from groupwise.data.conversations import weight_of
from groupwise.data.cursor import TaskCursor
from groupwise.errors import DataError, RecipeError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.prepare.answers import answer_ids
from groupwise.records import Completion, Grade, Rollout, Task
from groupwise.stages.parts import Parts
from groupwise.watch.clock import Clock

# By column: how good the answer is. Every other one is as good as its row's `weight` says.
REWARDS = {"chosen": 1.0, "rejected": 0.0}


class DataAnswers:
    """Takes the answers of each row from the columns that the recipe learns from."""

    sampled = False

    def __init__(self, config: Config, place: str) -> None:
        if place:
            raise RecipeError(
                f"recipe.source=data:{place} would read data.train all the same. Write "
                "recipe.source=data, and name the file in data.train."
            )
        self.columns = config.recipe.columns

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the answers of the next rows, a group each."""
        drawn = [(parts.tasks[d.task], d.number) for d in cursor.take(prompts)]
        return [self.group(task, number, parts.loaded.tokenizer) for task, number in drawn]

    def group(self, task: Task, draw: int, tokenizer: Tokenizer) -> Group:
        """Return the answers of one row."""
        return [
            _rollout(task, draw, number, column, tokenizer)
            for number, column in enumerate(self.columns)
        ]


def _rollout(task: Task, draw: int, number: int, column: str, tokenizer: Tokenizer) -> Rollout:
    row, nobodys = task.row, float("nan")  # no sampler gave it a probability
    if row is not None:  # encoded once, with its holes
        ids, mask_T = row.token_ids, row.mask_T
        task, turns = replace(task, token_ids=row.prompt_ids), row.turns
    else:
        ids, mask_T, turns = answer_ids(task, column, tokenizer), None, ()
    logp_T = torch.full((len(ids),), nobodys)
    completion = Completion(ids, logp_T, "eos", -1, "data", mask_T=mask_T, turns=turns)
    reward = REWARDS[column] if column in REWARDS else weight_of(task)
    return Rollout(task, draw, number, completion, tokenizer.decode(ids), Grade(reward))


def check_weights(tasks: Sequence[Task]) -> None:
    """Refuse weights that are no numbers, or all 0, before anything is learned with them."""
    if tasks and not sum(weight_of(task) for task in tasks):
        raise DataError(
            "The column `weight` is 0 in every row, so no row counts and nothing would be learned. "
            "Give some rows a weight, or leave the column out."
        )
