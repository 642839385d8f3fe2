"""Answers of the data that a recipe learns from: whether they are there, and as tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from groupwise.data.judged import answer_said
from groupwise.data.on_disk import tasks_at
from groupwise.errors import DataError, ModelError
from groupwise.methods.method import Method
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

INSTEAD = {"completion": "solution"}  # the column that is read where a row has not the first


def check_columns(recipe: Method, tasks: Sequence[Task]) -> None:
    """Refuse data without the answers that the recipe learns from, before there is a model."""
    for column in recipe.columns:
        for task in tasks:
            answer_text(task, column)


def check_answers(
    recipe: Method, tasks: Sequence[Task], tokenizer: Tokenizer, longest: int
) -> None:
    """Refuse data without the answers that the recipe learns from, and answers that don't fit."""
    for column in recipe.columns:
        for task in tasks:
            tokens = len(task.token_ids) + len(answer_ids(task, column, tokenizer))
            if tokens > longest:
                raise DataError(
                    f"Row {task.id}: the prompt with its {column!r} has {tokens} tokens, and the "
                    f"model holds {longest}. Drop such rows, or take a model with a longer context."
                )


def fitting_answers(
    recipe: Method,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    longest: int,
    dropped: list[int],
    notes: list[str],
) -> Sequence[Task]:
    """Return the rows whose answers the model holds; note those that it does not: none is cut."""
    sizes: dict[int, int] = {}
    fitting: list[int] = []
    for number, task in enumerate(tasks):
        there = has_answers(task, recipe.columns)
        answers = [answer_ids(task, x, tokenizer) for x in recipe.columns] if there else []
        tokens = len(task.token_ids) + max(map(len, answers), default=0)
        if tokens > longest:
            sizes[task.id] = tokens
        else:
            fitting.append(number)
    if not sizes:
        return tasks
    most = max(sizes, key=lambda number: sizes[number])
    if not fitting:
        raise DataError(
            f"All {len(tasks):,} rows are too long: a prompt with its answer may have {longest:,} "
            f"tokens, what the model holds, and the longest, row {most}, has {sizes[most]:,}. Take "
            "a model with a longer context."
        )
    dropped += sizes
    notes.append(
        f"{len(sizes):,} of {len(tasks):,} rows are too long for the model's {longest:,} tokens "
        f"and were dropped; the longest, row {most}, has {sizes[most]:,}."
    )
    return tasks_at(tasks, np.array(fitting))


def has_answers(task: Task, columns: Sequence[str]) -> bool:
    """Tell whether a row has something in all of these columns."""
    return all(_found(task, column) is not None for column in columns)


def answer_ids(task: Task, column: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return an answer of the data as the policy would have written it, end token included."""
    try:
        return (*tokenizer.encode(answer_text(task, column)), tokenizer.eos_ids[0])
    except ModelError as error:
        raise DataError(f"Row {task.id}, column {column!r}: {error}") from error


def answer_text(task: Task, column: str) -> str:
    """Return an answer of the data as it stands there, or as its one message says it.

    A row without it is refused.
    """
    text = _found(task, column)
    if isinstance(text, list | tuple) and text and all(isinstance(x, Mapping) for x in text):
        return answer_said(task, column, text)
    if not isinstance(text, str) or not text:
        instead = INSTEAD.get(column, column)
        either = f"{column!r}" + (f" or {instead!r}" if instead != column else "")
        raise DataError(
            f"Row {task.id} has no text in column {either}, which this recipe learns from. Add "
            "it, or take a recipe that learns from rewards."
        )
    return text


def _found(task: Task, column: str) -> Any:
    if column == "answer":
        return task.answer
    return task.columns.get(column, task.columns.get(INSTEAD.get(column, column)))
