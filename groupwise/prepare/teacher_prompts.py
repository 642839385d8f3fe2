"""Prompts that a teacher reads in place of the policy's: with the solution in them, for example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from groupwise.config import Config
from groupwise.data.on_disk import store_alike
from groupwise.data.prompts import prepare
from groupwise.data.templates import PROMPT, filled
from groupwise.errors import DataError
from groupwise.model.config import ModelConfig
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

SIBLING = "sibling"  # in teacher.prompt: an answer of the group that succeeded


def with_teacher_ids(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, shape: ModelConfig
) -> tuple[Sequence[Task], list[str]]:
    """Return the tasks with what their teacher reads as token ids, and what was left out."""
    asked, data = config.teacher, config.data
    try:
        made = prepare(
            [teacher_task(config, task) for task in tasks],
            tokenizer,
            template=asked.template or data.template,
            system=data.system,
            instruction=data.instruction,
            room=shape.context - config.engine.max_tokens,
        )
    except DataError as error:
        raise DataError(f"What the teacher reads (teacher.prompt, .template): {error}") from error
    ids = {task.id: task.token_ids for task in made.tasks}

    def taught() -> Iterator[Task]:
        for task in tasks:
            if task.id in ids:
                yield replace(task, teacher_ids=ids[task.id])

    lost = len(tasks) - len(ids)
    notes = [f"{lost} tasks left out: what the teacher reads is too long"] if lost else []
    return store_alike(tasks, taught()), notes


def teacher_task(config: Config, task: Task) -> Task:
    """Return the task with what its teacher reads as the prompt."""
    asked = config.teacher.prompt
    if not asked:
        return task
    if isinstance(task.prompt, str):
        return replace(task, prompt=filled("teacher.prompt", asked, task, task.prompt))
    *before, last = task.prompt
    content = filled("teacher.prompt", asked, task, str(last["content"]))
    return replace(task, prompt=(*before, {**last, "content": content}))


def with_sibling(task: Task, text: str) -> Task:
    """Return the task with an answer of its group as one more column."""
    return replace(task, columns={**task.columns, SIBLING: text})


def shows_siblings(config: Config) -> bool:
    """Tell whether the teacher reads answers of the group, which only a step knows."""
    return "taught_N" in config.recipe.streams


def check_teacher_prompts(config: Config, tasks: Sequence[Task]) -> None:
    """Refuse rows without what the teacher is to read, before there is a model."""
    asked = config.teacher.prompt
    if not asked:
        return
    if shows_siblings(config):
        tasks = [with_sibling(task, "...") for task in tasks]
    if PROMPT not in asked:
        raise DataError(
            f"teacher.prompt = {asked!r} leaves the prompt out. Write {PROMPT} where it goes."
        )
    for task in tasks:
        teacher_task(config, task)
