"""Rows of models that score, as token ids: prompts and answers as `rm` and `prm` will read them.

Prompt and answer are encoded apart, as a policy has them. A tokenizer with a chat template reads
every prompt through it; what a user asks as a text is a message then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from groupwise.config import Config
from groupwise.data.judged import check_ranked, check_stepwise, ranked, stepwise, text_of
from groupwise.data.on_disk import store_alike
from groupwise.data.steps import last_tokens, step_ends
from groupwise.data.tasks import prompt_text, turns_of
from groupwise.errors import DataError, ModelError
from groupwise.methods.method import Method
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """An answer as its model reads it, and where its score, or those of its steps, are read."""

    text: str
    token_ids: Ids
    places: tuple[int, ...]  # of tokens
    ends: tuple[int, ...] = ()  # of steps, in characters


@dataclass(frozen=True)
class FittingRows:
    """Rows with the token ids of their prompts, without those that are too long."""

    tasks: Sequence[Task]
    dropped: list[int]  # their ids
    notes: list[str]


def check_judged(recipe: Method, tasks: Sequence[Task]) -> None:
    """Refuse rows that a model that scores can't learn from, before there is one."""
    if recipe.scores == "answers":
        check_ranked(tasks)
    else:
        check_stepwise(tasks, separator_of(recipe))


def check_held_out(recipe: Method, tasks: Sequence[Task]) -> None:
    """Refuse held-out rows that can't be read; what they say may be the same of all."""
    for task in tasks:
        if recipe.scores == "answers":
            ranked(task)
        else:
            stepwise(task, separator_of(recipe))


def scored_answers(recipe: Method, task: Task, tokenizer: Tokenizer) -> list[Scored]:
    """Return the answers of a row."""
    read: dict[str, Callable[[Method, Task, Tokenizer], list[Scored]]] = {
        "answers": _whole,
        "steps": _in_steps,
    }
    try:
        return read[recipe.scores](recipe, task, tokenizer)
    except ModelError as error:
        raise DataError(f"Row {task.id}: {error}") from error


def fitting_rows(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, context: int
) -> FittingRows:
    """Return the rows whose prompts and answers the model holds: none is ever cut."""
    dropped: dict[int, int] = {}
    limit = min(config.data.max_prompt_tokens or context, context)

    def fitting() -> Iterator[Task]:
        for task in tasks:
            ids = prompt_ids(task, tokenizer)
            longest = max(len(x.token_ids) for x in scored_answers(config.recipe, task, tokenizer))
            if len(ids) > limit or len(ids) + longest > context:
                dropped[task.id] = len(ids) + longest
            else:
                yield replace(task, token_ids=ids)

    kept = store_alike(tasks, fitting())
    if not dropped:
        return FittingRows(kept, [], [])
    most = max(dropped, key=lambda number: dropped[number])
    if not kept:
        raise DataError(
            f"All {len(tasks):,} rows are too long: a prompt may have {limit:,} tokens, and with "
            f"its answer {context:,}, what the model holds. Raise data.max_prompt_tokens, or take "
            "a model with a longer context."
        )
    note = (
        f"{len(dropped):,} of {len(tasks):,} rows are too long for the model's {context:,} tokens "
        f"(prompts: {limit:,}) and were dropped; the longest, row {most}, has {dropped[most]:,}."
    )
    return FittingRows(kept, list(dropped), [note])


def prompt_ids(task: Task, tokenizer: Tokenizer) -> Ids:
    """Return a prompt as `rm` and `prm` read it."""
    asked = task.prompt
    try:
        if tokenizer.template is None:
            return tuple(tokenizer.prompt(prompt_text(asked)))
        return tuple(tokenizer.prompt(turns_of(asked)))
    except ModelError as error:
        raise DataError(f"Row {task.id}: {error}") from error


def _whole(recipe: Method, task: Task, tokenizer: Tokenizer) -> list[Scored]:
    """Return answers with the end token, at which they are scored."""
    found = []
    for text in ranked(task).answers:
        ids = (*tokenizer.encode(text), tokenizer.eos_ids[0])
        found.append(Scored(text, ids, (len(ids) - 1,)))
    return found


def _in_steps(recipe: Method, task: Task, tokenizer: Tokenizer) -> list[Scored]:
    """Return the one answer, scored at the last token of each step."""
    separator = separator_of(recipe)
    text = text_of(stepwise(task, separator).steps, separator)
    ids, starts = tokenizer.encode_placed(text)
    ends = step_ends(text, separator)
    return [Scored(text, tuple(ids), tuple(last_tokens(starts, ends, separator)), tuple(ends))]


def separator_of(recipe: Method) -> str:
    """Return what stands between two steps."""
    return recipe.fixed["separator"]
