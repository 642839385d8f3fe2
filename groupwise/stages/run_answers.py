"""Answers of earlier runs: nothing is sampled, and what was recorded is learned token by token."""

from __future__ import annotations

from typing import Any

import torch

from groupwise.config import Config
from groupwise.data.conversations import weight_of
from groupwise.data.cursor import TaskCursor
from groupwise.data.selection import RECORDED
from groupwise.errors import RecipeError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.records import Completion, Grade, Rollout, Task, Turn
from groupwise.stages.data_answers import DataAnswers
from groupwise.stages.parts import Parts
from groupwise.watch.clock import Clock


class RunAnswers:
    """Takes kept answers of data.runs, and those of the other rows that are mixed in."""

    sampled = False

    def __init__(self, config: Config, place: str) -> None:
        if place:
            raise RecipeError(
                f"recipe.source=run:{place}: write recipe.source=run, and name the folders in "
                f'data.runs=["{place}"].'
            )
        self.other = DataAnswers(config, "")

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the next answers, each a group of its own."""
        tokenizer = parts.loaded.tokenizer
        drawn = [(parts.tasks[d.task], d.number) for d in cursor.take(prompts)]
        return [
            [recorded_answer(task, number, tokenizer)]
            if RECORDED in task.columns
            else self.other.group(task, number, tokenizer)
            for task, number in drawn
        ]


def recorded_answer(task: Task, draw: int, tokenizer: Tokenizer) -> Rollout:
    """Return an answer as it was recorded; every kept one counts alike, whatever its reward was."""
    own = task.columns[RECORDED]
    ids = tuple(own["ids"])
    completion = Completion(
        ids,
        torch.full((len(ids),), float("nan")),  # the sampler's are of another policy
        own["finish"],
        version=-1,
        weights="run",
        mask_T=None if own["mask"] is None else torch.tensor(own["mask"]),
        turns=tuple(Turn(*turn) for turn in own["turns"]),
    )
    return Rollout(task, draw, 0, completion, tokenizer.decode(ids), Grade(weight_of(task)))
