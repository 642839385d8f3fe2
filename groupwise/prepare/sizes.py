"""Sizes before anything is loaded: a model's shape, and the lengths of its prompts.

Of a model its configuration and its tokenizer are read, never its weights; of the data a sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupwise.config import Config
from groupwise.data import load as load_data
from groupwise.errors import GroupwiseError, ModelError
from groupwise.hub import local_model
from groupwise.model.config import ModelConfig
from groupwise.model.formats.checkpoint import stored_shape, stored_tokenizer
from groupwise.model.formats.tokenizer import Tokenizer, character_files
from groupwise.prepare.scored import fitting_rows, scored_answers
from groupwise.prepare.setup import TASKS_SEED, with_ids
from groupwise.prepare.tiny import hugging_face_config
from groupwise.records import Task

ASSUMED_PROMPT = 128  # tokens, where the data can't be read
READ_PROMPTS = 512  # of the data: more tell nothing new


@dataclass(frozen=True)
class Prompts:
    """Lengths in tokens, and where they come from."""

    mean: int
    longest: int
    source: str
    answers: int | None = None  # tokens of the data's, on average, where a model scores them


def sizes_of(config: Config) -> tuple[ModelConfig, Prompts]:
    """Return the model's shape and the prompts' lengths."""
    if config.model.path == "tiny":
        return _tiny(config)
    path = local_model(config.model.path, weights=False)
    shape = stored_shape(path)
    if shape is None:
        raise ModelError(
            f"{path} has no config.json that can be read, so its sizes are not known. Set "
            "model.path to a model's folder or a .gguf file; its configuration is enough, weights "
            "are not read."
        )
    if config.recipe.scores:
        shape = replace(shape, tied=True)  # without a head
    try:
        return shape, _prompts(config, _tasks(config), stored_tokenizer(path), shape)
    except (GroupwiseError, OSError) as error:
        why = " ".join(str(error).split())
        longest = max(ASSUMED_PROMPT, config.data.max_prompt_tokens)
        return shape, Prompts(ASSUMED_PROMPT, longest, f"assumed, as there is no telling: {why}")


def _tiny(config: Config) -> tuple[ModelConfig, Prompts]:
    """Derive the embedded model's shape from its tasks: a token is a character."""
    tasks = _tasks(config)
    texts = [str(x) for task in tasks for x in (task.prompt, task.columns.get("solution", ""))]
    tokenizer = Tokenizer.from_files(character_files("".join(sorted(set("".join(texts))))))
    longest = max(len(str(task.prompt)) for task in tasks) + config.engine.max_tokens
    shape = ModelConfig.from_hf(hugging_face_config(config.tiny, len(tokenizer), longest))
    return shape, _prompts(config, tasks, tokenizer, shape)


def _tasks(config: Config) -> Sequence[Task]:
    return load_data(config.data, seed=TASKS_SEED, held_out=config.eval.tasks).train


def _prompts(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, shape: ModelConfig
) -> Prompts:
    some = tasks[:: max(1, len(tasks) // READ_PROMPTS)][:READ_PROMPTS]
    if config.recipe.scores:
        return _scored(config, some, tokenizer, shape)
    prepared = with_ids(config, some, tokenizer, shape)
    lengths = [len(task.token_ids) for task in prepared.tasks]
    source = f"{len(lengths)} prompts of data.train read"
    return Prompts(round(statistics.mean(lengths)), max(lengths), source)


def _scored(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, shape: ModelConfig
) -> Prompts:
    """Return the lengths of rows that a model scores, answers too."""
    kept = fitting_rows(config, tasks, tokenizer, shape.context).tasks
    prompts = [len(task.token_ids) for task in kept]
    answers = [
        len(answer.token_ids)
        for task in kept
        for answer in scored_answers(config.recipe, task, tokenizer)
    ]
    source = f"{len(prompts)} rows of data.train read"
    mean = round(statistics.mean(prompts))
    return Prompts(mean, max(prompts), source, round(statistics.mean(answers)))
