"""An expert's answers beside the policy's own: the written answer of each prompt's row (CHORD)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.errors import DataError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.optim.row_streams import EXPERT
from groupwise.prepare.answers import answer_ids, answer_text
from groupwise.records import Completion, Grade, Rollout, Task

COLUMN = "completion"  # or `solution`, as in supervised learning
READS = "lesson_NT"  # a recipe that reads it learns from lessons


def check_lessons_there(streams: Sequence[str], tasks: Sequence[Task]) -> None:
    """Refuse rows without an expert's answer, before anything is sampled."""
    for task in tasks if READS in streams else ():
        answer_text(task, COLUMN)


def lessons_of(groups: Sequence[Group], tokenizer: Tokenizer, room: int) -> list[Rollout]:
    """Return the written answer to each group's prompt: without a grade, as it is no sample."""
    found = []
    for group in groups:
        task, draw = group[0].task, group[0].draw
        ids = answer_ids(task, COLUMN, tokenizer)
        if len(task.token_ids) + len(ids) > room:
            raise DataError(
                f"Row {task.id}: the prompt with its written answer has "
                f"{len(task.token_ids) + len(ids)} tokens, and the model holds {room}. Drop such "
                "rows, or take a model with a longer context."
            )
        done = Completion(ids, torch.zeros(len(ids)), "eos", -1, EXPERT)
        graded = Grade(None, status="abstained", reason="a written answer is learned as it stands")
        found.append(Rollout(task, draw, len(group), done, tokenizer.decode(ids), graded))
    return found


def with_lessons(groups: Sequence[Group], lessons: Sequence[Rollout]) -> list[Group]:
    """Return the groups with their lessons as last rows."""
    if not lessons:
        return list(groups)
    return [[*group, lesson] for group, lesson in zip(groups, lessons, strict=True)]


def own_rows(groups: Sequence[Group]) -> Tensor | None:
    """Return the numbers of rows that the policy wrote; None: all of them."""
    own = [row.completion.weights != EXPERT for group in groups for row in group]
    return None if all(own) else torch.tensor(own).nonzero()[:, 0]


def without_lessons(
    streams: dict[str, Tensor | None], own_N: Tensor | None
) -> dict[str, Tensor | None]:
    """Return what is said of the policy's own rows."""
    if own_N is None:
        return streams
    return {name: None if x is None else x[own_N.to(x.device)] for name, x in streams.items()}
