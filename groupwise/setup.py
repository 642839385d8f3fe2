"""What a configuration names, ready for use: data, reward, model, prompts as token ids.

In the order of cost: a mistake in the data or the reward is found before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from groupwise.composition import PairRecipe
from groupwise.config import Config
from groupwise.data import load as load_data
from groupwise.data.prompts import prepare
from groupwise.engine.native import NativeEngine
from groupwise.engine.protocol import Sampling
from groupwise.errors import ConfigError
from groupwise.graders.rubric import Grader, check
from groupwise.model.checkpoint import Loaded
from groupwise.optim.pairs import check_data
from groupwise.records import Task

# Tasks are data: the same in every run, so that runs with other seeds can be compared.
TASKS_SEED = 0


@dataclass(frozen=True)
class Bench:
    """All that sampling and grading need."""

    loaded: Loaded
    tasks: list[Task]
    held_out: list[Task]
    grader: Grader
    notes: list[str]  # what a person should know about them


def set_up(config: Config, model_for: Callable[[list[Task], list[Task]], Loaded]) -> Bench:
    """`model_for` gives the model, which may be made for these tasks and held-out ones."""
    check_device(config.model.device)
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    graded = not learns_from_labels(config)
    parts = Grader(config.reward.parts)
    found = load_data(
        config.data,
        seed=TASKS_SEED,
        held_out=config.eval.tasks,
        require_answers=graded and parts.needs_answers,
    )
    notes = [*found.notes]
    if graded:
        notes += check(parts, found.train)
        notes += check(parts, found.eval) if found.eval else []
    loaded = model_for(found.train, found.eval)
    tokenizer, shape = loaded.tokenizer, loaded.model.config
    longest = min(shape.position_limit or shape.max_positions, shape.max_positions)
    room = longest - config.engine.max_tokens
    if room < 1:
        raise ConfigError(
            f"engine.max_tokens={config.engine.max_tokens} leaves no room for a prompt: the model "
            f"holds {longest} tokens in all. Lower engine.max_tokens."
        )
    ready: list[list[Task]] = []
    for some in (found.train, found.eval):
        if not some:
            ready.append([])
            continue
        prepared = prepare(
            some,
            tokenizer,
            template=config.data.template,
            system=config.data.system,
            instruction=config.data.instruction,
            max_prompt_tokens=config.data.max_prompt_tokens,
            room=room,
        )
        notes += prepared.notes
        ready.append(prepared.tasks)
    tasks, held_out = ready
    if isinstance(config.recipe, PairRecipe):
        check_data(config.recipe, tasks, tokenizer, longest)
    ends = [tokenizer.decode([number]) for number in tokenizer.eos_ids]
    grader = Grader(config.reward.parts, [*ends, *config.engine.stop])
    if not graded:  # such data has answers for some of the rows, or for none
        held_out = [task for task in held_out if task.answer is not None]
    return Bench(loaded, tasks, held_out[: config.eval.tasks], grader, list(dict.fromkeys(notes)))


def check_device(name: str) -> None:
    """Refuse a device that this machine or this PyTorch does not have."""
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")
        raise ConfigError(
            f"model.device={name!r} can't be used here: {reason}. Set model.device=cpu, or run "
            "where PyTorch has that device."
        ) from error


def learns_from_labels(config: Config) -> bool:
    """Pairs that the data labels: nothing is sampled, nothing graded."""
    recipe = config.recipe
    return isinstance(recipe, PairRecipe) and recipe.reads == "labels"


def engine_of(config: Config, loaded: Loaded, weights: str = "shared") -> NativeEngine:
    """That samples from the policy itself, or from a copy of it."""
    return NativeEngine(
        loaded.model,
        loaded.tokenizer,
        seed=config.seed,
        slots=config.engine.slots,
        weights=weights,
    )


def sampling_of(config: Config, **changes: Any) -> Sampling:
    """How answers are sampled for training, or with changes."""
    engine = config.engine
    asked: dict[str, Any] = {
        "max_tokens": engine.max_tokens,
        "min_tokens": engine.min_tokens,
        "temperature": engine.temperature,
        "top_p": engine.top_p,
        "top_k": engine.top_k,
        "stop": tuple(engine.stop),
    }
    return Sampling(**(asked | changes))
