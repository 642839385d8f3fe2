"""Rows that are learned as they stand, made ready: checked, encoded once, the too long left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from groupwise.config import Config
from groupwise.data.conversations import LessonReader, has_lesson, lesson_of, pieces_of, weight_of
from groupwise.data.on_disk import store_alike, tasks_at
from groupwise.data.prompts import Prepared, Wording
from groupwise.data.sources import LoadedTasks
from groupwise.errors import DataError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

SHOWN = 5  # bad rows that a message lists
PIECE = 300  # characters of a stretch that is shown of one row


@dataclass
class LearnedRows:
    """Tasks with the rows that are learned, and what was left out."""

    tasks: Sequence[Task]
    limit: int  # tokens that a row may have
    long: dict[int, int] = field(default_factory=dict)  # by id, their tokens
    bad: list[str] = field(default_factory=list)  # what is wrong, by row

    def notes(self, total: int, which: str = "rows") -> list[str]:
        """Return notes on the rows that were left out."""
        found = []
        if self.long:
            most = max(self.long, key=lambda number: self.long[number])
            found.append(
                f"{len(self.long):,} of {total:,} {which} are longer than {self.limit:,} tokens "
                f"and were dropped, as none is ever cut; the longest, row {most}, has "
                f"{self.long[most]:,}."
            )
        if self.bad:
            found.append(
                f"warning: {len(self.bad):,} of {total:,} {which} can't be learned and were left "
                f"out (data.drop_bad): {_listed(self.bad, ' ')}"
            )
        return found


def check_lessons(config: Config, tasks: Sequence[Task]) -> None:
    """Refuse rows that nothing can be learned from, before there is a model."""
    bad = [why for task in tasks if (why := _problem(config, task))]
    if bad:
        raise DataError(_refusal(bad, len(tasks)))


def without_bad_lessons(config: Config, found: LoadedTasks) -> LoadedTasks:
    """Drop the rows that nothing can be learned from; say how many, and why."""
    tasks = found.train
    problems = {n: why for n, task in enumerate(tasks) if (why := _problem(config, task))}
    if not problems or len(problems) == len(tasks):
        return found  # of all: not one row too many, but another recipe or column
    left = np.array([n for n in range(len(tasks)) if n not in problems])
    note = LearnedRows(tasks, 0, bad=list(problems.values())).notes(len(tasks))
    return replace(
        found,
        train=tasks_at(tasks, left),
        notes=[*found.notes, *note],
        dropped={**found.dropped, "data.train": len(problems)},
    )


def learned_rows(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, context: int
) -> LearnedRows:
    """Encode every row once, and leave out those that are too long: none is ever cut."""
    data = config.data
    limit = min(data.max_row_tokens or context, context)
    reader = LessonReader(
        tokenizer, Wording(data.template, data.system, data.instruction), data.turns
    )
    found = LearnedRows((), limit)

    def fitting() -> Iterator[Task]:
        for task in tasks:
            try:
                row = reader.row(task)
            except DataError as error:
                found.bad.append(str(error))
                continue
            over = data.max_prompt_tokens and len(row.prompt_ids) > data.max_prompt_tokens
            if row.tokens > limit or over:
                found.long[task.id] = row.tokens
            else:
                yield replace(task, token_ids=row.prompt_ids, row=row)

    found.tasks = store_alike(tasks, fitting())
    if found.bad and not (data.drop_bad and found.tasks):
        raise DataError(_refusal(found.bad, len(tasks)))
    if not found.tasks:
        raise DataError(
            f"All {len(tasks):,} rows are longer than {limit:,} tokens (the shortest has "
            f"{min(found.long.values()):,}). Raise data.max_row_tokens or data.max_prompt_tokens, "
            "or take a model with a longer context."
        )
    return found


def judged_rows(
    config: Config, sampled: Prepared | None, tasks: Sequence[Task], tokenizer: Tokenizer,
    context: int,
) -> LearnedRows:  # fmt: skip
    """Return held-out tasks: with prompts to sample from where they can be graded, and with rows
    whose likelihood is measured where they have one that fits.
    """
    data = config.data
    limit = min(data.max_row_tokens or context, context)
    wording = Wording(data.template, data.system, data.instruction)
    reader = LessonReader(tokenizer, wording, data.turns)
    prompts = {task.id: task.token_ids for task in (sampled.tasks if sampled else ())}
    found, judged = LearnedRows((), limit), []
    for task in tasks:
        try:
            row = reader.row(task) if has_lesson(task) else None
        except DataError as error:
            found.bad.append(str(error))
            continue
        if row is not None and row.tokens > limit:
            found.long[task.id], row = row.tokens, None
        ids = prompts.get(task.id, ())
        if row is not None or ids:
            judged.append(replace(task, token_ids=ids, row=row))
    if found.bad and not data.drop_bad:
        raise DataError(f"Held-out rows: {_refusal(found.bad, len(tasks))}")
    found.tasks = judged
    return found


def shown_row(tasks: Sequence[Task], tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the first row in pieces, each with whether it is learned, long ones cut in the
    middle: so that people see what the loss does.
    """
    row = tasks[0].row if tasks else None
    if row is None:
        return []
    found = []
    for text, learned in pieces_of(row, tokenizer):
        half = PIECE // 2
        text = text if len(text) <= PIECE else f"{text[:half]} ... {text[-half:]}"
        found.append((text, learned))
    return found


def _problem(config: Config, task: Task) -> str:
    try:
        lesson_of(task, config.data.turns)
        weight_of(task)
    except DataError as error:
        return str(error)
    return ""


def _refusal(bad: Sequence[str], total: int) -> str:
    if len(bad) == 1:
        return bad[0]
    return (
        f"{len(bad):,} of {total:,} rows can't be learned:\n{_listed(bad, chr(10))}\n"
        "Mend or delete them, or leave them out: data.drop_bad=true."
    )


def _listed(bad: Sequence[str], between: str) -> str:
    more = [f"And {len(bad) - SHOWN:,} more."] if len(bad) > SHOWN else []
    return between.join([*bad[:SHOWN], *more])
