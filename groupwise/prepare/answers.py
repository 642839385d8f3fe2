"""Answers of the data that a recipe learns from: whether they are there, and as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.errors import DataError, ModelError
from groupwise.methods.method import Method
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

SHOWN = 40  # characters of an answer that is quoted
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


def solution_notes(recipe: Method, tasks: Sequence[Task]) -> list[str]:
    """Say what is learned where the data have a worked solution beside the answer."""
    if "answer" not in recipe.columns:
        return []
    bare = [t.answer for t in tasks if t.columns.get("solution", t.answer) not in (None, t.answer)]
    if not bare:
        return []
    shown = repr(bare[0]) if len(repr(bare[0])) <= SHOWN else f"{repr(bare[0])[:SHOWN]} ..."
    return [
        f"{recipe.name} learns the bare `answer` ({shown}), not the worked `solution` that "
        f"{len(bare):,} of {len(tasks):,} rows have beside it"
    ]


def answer_ids(task: Task, column: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return an answer of the data as the policy would have written it, end token included."""
    try:
        return (*tokenizer.encode(answer_text(task, column)), tokenizer.eos_ids[0])
    except ModelError as error:
        raise DataError(f"Row {task.id}, column {column!r}: {error}") from error


def answer_text(task: Task, column: str) -> str:
    """Return an answer of the data as it stands there; refuse a row without it."""
    instead = INSTEAD.get(column, column)
    text = (
        task.answer if column == "answer" else task.columns.get(column, task.columns.get(instead))
    )
    if not isinstance(text, str) or not text:
        either = f"{column!r}" + (f" or {instead!r}" if instead != column else "")
        raise DataError(
            f"Row {task.id} has no text in column {either}, which this recipe learns from. Add "
            "it, or take a recipe that learns from rewards."
        )
    return text
