"""What `data.train` and `data.eval` name: a generator, or a file."""

from __future__ import annotations

from dataclasses import dataclass

from groupwise import config
from groupwise.data.generators import GENERATORS, generate, split
from groupwise.data.tasks import SUFFIXES, prompt_text, read_jsonl
from groupwise.errors import DataError, nearest
from groupwise.records import Task


@dataclass(frozen=True)
class Loaded:
    train: list[Task]
    eval: list[Task]
    notes: list[str]  # what a person should know about them


def load(data: config.Data, *, seed: int, held_out: int, require_answers: bool = False) -> Loaded:
    """The tasks that the configuration names.

    `held_out` tasks of the training generator are kept for evaluation, unless another source is
    named for it. No prompt of a generator is in both.
    """
    if data.options and not _is_generator(data.train):
        raise DataError(
            f"data.options = {data.options} are a generator's, and data.train = {data.train!r} is "
            "a file. Remove them."
        )
    train, notes = _source(data, data.train, seed, data.size, require_answers)
    held: list[Task] = []
    if _is_generator(data.train) and data.eval in ("", data.train):
        train, held = split(train, held_out, seed)
    elif data.eval:
        held, more = _source(data, data.eval, seed, held_out, require_answers)
        seen = {prompt_text(task.prompt) for task in train}
        both = sum(prompt_text(task.prompt) in seen for task in held)
        notes += more
        if both:
            notes.append(
                f"{both} of the {len(held)} evaluation prompts are also trained on: accuracy on "
                "them says nothing about new ones."
            )
    return Loaded(train, held, notes)


def _is_generator(name: str) -> bool:
    """Whether the name is a generator's; an error if it is neither that nor a file's."""
    if name not in GENERATORS and "/" not in name and "." not in name:
        raise DataError(
            f"{name!r} is no generator and no {' or '.join(SUFFIXES)} file. "
            f"{nearest(name, GENERATORS)}"
        )
    return name in GENERATORS


def _source(
    data: config.Data, name: str, seed: int, size: int, require_answers: bool
) -> tuple[list[Task], list[str]]:
    if not _is_generator(name):
        tasks = read_jsonl(name, data.prompt_key, data.answer_key, require_answers=require_answers)
        return tasks, []
    tasks = generate(name, size, seed, data.options if name == data.train else {})
    if len(tasks) == size:
        return tasks, []
    return tasks, [f"{name} has only {len(tasks)} different prompts, {size} were asked for."]
