"""Data, reward, model and prompts as token ids: a configuration made ready for use.

In the order of cost: a mistake in the data or the reward is found before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from groupwise.common.progress import phase
from groupwise.common.sizes import size
from groupwise.config import Config
from groupwise.data import load as load_data
from groupwise.data.on_disk import tasks_at
from groupwise.data.prompts import Prepared, prepare
from groupwise.data.selection import KeptAnswers
from groupwise.data.sources import LoadedTasks as LoadedData
from groupwise.data.tasks import SHOWN
from groupwise.engine.protocol import Sampling
from groupwise.errors import ConfigError, DataError, ModelError
from groupwise.graders.by_row import ROW
from groupwise.graders.pool import START_SECONDS
from groupwise.graders.rubric import Grader, check
from groupwise.model import room as device_room
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Frozen, cache_bytes, lora
from groupwise.model.formats.checkpoint import Loaded, stored_shape
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.equip import check_precision, equip
from groupwise.model.memory import device_bytes
from groupwise.model.policy import spec_of
from groupwise.optim.roles import ROLES, role_sizes
from groupwise.parallel.started import ranks_here
from groupwise.prepare.answers import check_answers, fitting_answers, has_answers
from groupwise.prepare.earlier import fitted, load_earlier, without_long, wording_notes
from groupwise.prepare.episodes import Turns
from groupwise.prepare.episodes_setup import tools_of, turns_of
from groupwise.prepare.placing import check_device, place
from groupwise.prepare.scored import check_held_out, fitting_rows
from groupwise.prepare.supervised import judged_rows, learned_rows, without_bad_lessons
from groupwise.prepare.teacher_prompts import shows_siblings, with_teacher_ids
from groupwise.records import Task

# Tasks are data: the same in every run, so that runs with other seeds can be compared.
TASKS_SEED = 0


@dataclass(frozen=True)
class Setup:
    """All that sampling and grading need."""

    loaded: Loaded
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    grader: Grader
    notes: list[str]  # what a person should know about them
    mixture: dict[str, float]  # weights of the sources, by name; empty without a mixture
    dropped: dict[str, int]  # malformed rows that were left out, by file or setting
    selection: KeptAnswers | None = None  # of answers of earlier runs, where they are learned from
    turns: Turns | None = None  # who answers the policy, where anybody does


@dataclass(frozen=True)
class CheckedData:
    """Tasks and reward of a configuration, checked, before there is a model."""

    train: Sequence[Task]
    held_out: Sequence[Task]
    notes: list[str]
    mixture: dict[str, float]
    dropped: dict[str, int]
    selection: KeptAnswers | None = None
    tools: tuple[Mapping[str, Any], ...] = ()  # what an environment lets the policy call


def set_up(
    config: Config,
    model_for: Callable[[Sequence[Task], Sequence[Task]], Loaded],
    *,
    learns: bool = True,
    answered: bool = True,
) -> Setup:
    """Set up what a configuration names; `model_for` may make the model for these tasks."""
    with phase("reading data"):
        found = check_data(config, learns=learns, answered=answered)
    return prepare_tasks(config, found, model_for(found.train, found.held_out))


def check_data(config: Config, *, learns: bool = True, answered: bool = True) -> CheckedData:
    """Check all that can be checked without a model; `learns`: also what the recipe needs.

    Not `answered` are prompts whose answers to compare with are still to be sampled.
    """
    model = place(config.model)
    check_device(model.device)
    check_precision(model.device, model.dtype)
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    tools = tools_of(config)
    with phase("loading reward functions", limit=START_SECONDS):
        parts, found = read_data(config, answered=answered)
    notes = [*found.notes]
    if config.recipe.scores and learns:
        check_held_out(config.recipe, found.eval)
    if config.recipe.verified and answered:
        streams = config.recipe.streams if learns else ()
        notes += check(parts, found.train, streams=streams)
        notes += check(parts, found.eval, data="data.eval") if found.eval else []
    return CheckedData(
        found.train, found.eval, notes, found.weights, found.dropped, found.selection, tools
    )


def read_data(config: Config, *, answered: bool = True) -> tuple[Grader, LoadedData]:
    """Read the reward and the tasks that it can grade; no answer is graded."""
    graded = config.recipe.verified
    parts = Grader(config.reward.parts, graders=config.data.graders, timeout=config.reward.timeout)
    if config.data.grader_key and ROW not in parts.parts:
        raise ConfigError(
            f"data.grader_key={config.data.grader_key!r} has no effect: reward.parts has no part "
            f'"{ROW}" that would ask the graders that rows name. Add it, or remove the key.'
        )
    if config.data.runs:
        return parts, load_earlier(config, TASKS_SEED)
    found = load_data(
        config.data,
        seed=TASKS_SEED,
        held_out=config.eval.tasks,
        require_answers=parts.needs_answer if graded and answered else False,
        conversations=config.recipe.supervised,
    )
    if config.data.drop_bad and graded:
        found = without_ungradable(found, parts)
    if config.data.drop_bad and config.recipe.supervised:
        found = without_bad_lessons(config, found)
    return parts, found


def without_ungradable(found: LoadedData, grader: Grader) -> LoadedData:
    """Drop the rows that a part of the reward can't grade; say how many, and why."""
    notes, dropped = [*found.notes], dict(found.dropped)
    left = {}
    for setting, tasks in (("data.train", found.train), ("data.eval", found.eval)):
        problems = {n: why for n, task in enumerate(tasks) if (why := grader.problem(task))}
        left[setting] = tasks
        if not problems:
            continue
        if len(problems) == len(tasks):
            continue  # not one row too many, but another reward or column: `check` says so
        left[setting] = tasks_at(
            tasks, np.array([n for n in range(len(tasks)) if n not in problems])
        )
        shown = [f"row {tasks[n].id}: {why}" for n, why in list(problems.items())[:SHOWN]]
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        notes.append(
            f"warning: the reward can't grade {len(problems):,} of {len(tasks):,} tasks of "
            f"{setting}, which were left out (data.drop_bad): {'; '.join(shown)}{more}."
        )
        dropped[setting] = len(problems)
    sources = {task.source for task in found.train} - {t.source for t in left["data.train"]}
    if sources:
        raise DataError(
            f"No task of {min(sources)} is left to train on: the reward can grade none of them. "
            "Remove it from data.train, or set data.answer_key."
        )
    return replace(
        found, train=left["data.train"], eval=left["data.eval"], notes=notes, dropped=dropped
    )


def prepare_tasks(config: Config, found: CheckedData, loaded: Loaded) -> Setup:
    """Prepare the tasks as this model reads them."""
    with phase("preparing kernels" if on_gpu(config) else "preparing the model"):
        notes = [*found.notes, *equip(loaded.model, exact=config.engine.exact)]
    tokenizer, shape = loaded.tokenizer, loaded.model.config
    notes += check_ending(config, tokenizer)
    turns = turns_of(config, found.train, tokenizer, shape.context, found.tools)
    if found.selection is not None:
        answers, selection, told = fitted(found.train, found.selection, tokenizer)
        found = replace(found, train=answers, selection=selection)
        notes += told
    with phase("preparing prompts"):
        fitting = fitting_tasks(config, found, tokenizer, shape)
    if found.selection is not None:
        selection, answers = without_long(found.selection, fitting.train)
        found, fitting = replace(found, selection=selection), replace(fitting, train=answers)
        notes.append(selection.line())
    for name in config.recipe.roles:
        ROLES[name].check_tokens(config, fitting.train, tokenizer)
    otherwise = any(ROLES[name].reads_otherwise(config) for name in config.recipe.roles)
    if otherwise and not shows_siblings(config):
        train, left_out = with_teacher_ids(config, fitting.train, tokenizer, shape)
        fitting, notes = replace(fitting, train=train), [*notes, *left_out]
    if not config.recipe.supervised:  # such rows were encoded with all that is checked there
        check_answers(config.recipe, fitting.train, tokenizer, shape.context)
    notes += wording_notes(fitting.train) if found.selection is not None else []
    ends = [tokenizer.decode([number]) for number in tokenizer.eos_ids]
    ends += config.engine.stop
    grader = Grader(config.reward.parts, ends, config.data.graders, timeout=config.reward.timeout)
    notes = list(dict.fromkeys([*notes, *fitting.notes]))
    return Setup(
        loaded,
        fitting.train,
        fitting.held_out,
        grader,
        notes,
        found.mixture,
        _added(found.dropped, fitting.left_out),
        found.selection,
        turns,
    )


def _added(some: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    return {name: some.get(name, 0) + more.get(name, 0) for name in {**some, **more}}


@dataclass(frozen=True)
class FittingTasks:
    """Tasks with token ids: those whose prompts leave room for an answer."""

    train: Sequence[Task]
    held_out: Sequence[Task]
    dropped: list[int]  # ids of those to train on whose prompts do not fit
    limit: int  # tokens that a prompt may have
    notes: list[str]
    left_out: dict[str, int] = field(default_factory=dict)  # rows, for the manifest


def fitting_tasks(
    config: Config, found: CheckedData, tokenizer: Tokenizer, shape: ModelConfig
) -> FittingTasks:
    """Choose what a run trains on and is judged on; needs no weights."""
    if config.recipe.scores:
        return _fitting_rows(config, found, tokenizer, shape)
    if config.recipe.supervised:
        return _fitting_lessons(config, found, tokenizer, shape)
    check_answer(config, shape)
    train = with_ids(config, found.train, tokenizer, shape)
    held_out = with_ids(config, found.held_out, tokenizer, shape) if found.held_out else None
    judged: Sequence[Task] = held_out.tasks if held_out else []
    if not config.recipe.verified:  # such data has answers for some of the rows, or for none
        judged = [task for task in judged if _can_be_judged(config, task)]
    dropped = [row.task for row in train.dropped]
    notes = train.notes + (held_out.notes if held_out else [])
    tasks = train.tasks
    if config.recipe.judges_held_out:
        tasks, judged = (
            fitting_answers(config.recipe, some, tokenizer, shape.context, dropped, notes)
            for some in (tasks, judged)
        )
    return FittingTasks(tasks, judged[: config.eval.tasks], dropped, train.limit, notes)


def _can_be_judged(config: Config, task: Task) -> bool:
    """Tell whether a held-out row has an answer to verify, or labels to be told apart."""
    labelled = config.recipe.judges_held_out and has_answers(task, config.recipe.columns)
    return task.answer is not None or labelled


def _fitting_rows(
    config: Config, found: CheckedData, tokenizer: Tokenizer, shape: ModelConfig
) -> FittingTasks:
    """Choose the rows of a model that scores: with their answers they must fit."""
    train, held_out = (
        fitting_rows(config, tasks, tokenizer, shape.context)
        for tasks in (found.train, found.held_out)
    )
    judged = held_out.tasks[: config.eval.tasks]
    notes = train.notes + held_out.notes
    return FittingTasks(train.tasks, judged, train.dropped, shape.context, notes)


def _fitting_lessons(
    config: Config, found: CheckedData, tokenizer: Tokenizer, shape: ModelConfig
) -> FittingTasks:
    """Choose rows that are learned as they stand: encoded once, without those that are too long."""
    train = learned_rows(config, found.train, tokenizer, shape.context)
    first = found.held_out[: config.eval.tasks]
    graded = [task for task in first if task.answer is not None]
    if graded:
        check_answer(config, shape)
    sampled = with_ids(config, graded, tokenizer, shape) if graded else None
    judged = judged_rows(config, sampled, first, tokenizer, shape.context)
    notes = train.notes(len(found.train)) + (sampled.notes if sampled else [])
    notes += judged.notes(len(first), "held-out rows")
    if judged.tasks and not graded:
        notes.append(
            "held-out rows have no answer that could be graded: nothing is sampled from them, and "
            "eval/nll and eval/token_accuracy say how well they are known"
        )
    left_out = {
        "data.train": len(train.bad),
        "too long": len(train.long),
        "held out": len(judged.bad) + len(judged.long),
    }
    return FittingTasks(
        train.tasks,
        judged.tasks,
        list(train.long),
        train.limit,
        notes,
        {name: count for name, count in left_out.items() if count},
    )


def with_ids(
    config: Config, tasks: Sequence[Task], tokenizer: Tokenizer, shape: ModelConfig
) -> Prepared:
    """Return prompts as the model sees them, without those that leave no room for an answer."""
    room = shape.context - config.engine.max_tokens
    if room < 1:
        raise ConfigError(
            f"engine.max_tokens={config.engine.max_tokens} leaves no room for a prompt: the model "
            f"holds {shape.context} tokens in all. Lower engine.max_tokens."
        )
    return prepare(
        tasks,
        tokenizer,
        template=config.data.template,
        system=config.data.system,
        instruction=config.data.instruction,
        max_prompt_tokens=config.data.max_prompt_tokens,
        room=room,
    )


def check_ending(config: Config, tokenizer: Tokenizer) -> list[str]:
    """Refuse answers that nothing could end; a note where only stop strings do."""
    if tokenizer.eos_ids:
        return []
    lacking = "the tokenizer has no EOS: nothing in its files names the token that ends an answer"
    if config.engine.stop and not config.recipe.ends_answers:
        return [f"{lacking}, so only engine.stop does."]
    raise ModelError(
        f"{lacking[0].upper()}{lacking[1:]}, and every answer would run to engine.max_tokens. Add "
        '"eos_token" to tokenizer_config.json or "eos_token_id" to generation_config.json'
        + ("." if config.recipe.ends_answers else ", or set engine.stop.")
    )


def check_room(config: Config, path: str | Path, *, training: bool) -> None:
    """Refuse a model that a GPU has no room for, before its weights are read."""
    shape = stored_shape(path) if on_gpu(config) else None
    if shape is not None:
        why = device_room.refusal(
            demand_of(config, shape, training=training), bytes_for(config, training=training)
        )
        if why:
            raise ModelError(why)


def check_answer(config: Config, shape: ModelConfig) -> None:
    """Refuse answers whose keys and values alone are more than all of the machine's memory.

    A CPU's memory has no sharper limit: other programs come and go, and pages can be swapped out.
    """
    there, tokens = device_bytes(config.model.device), config.engine.max_tokens
    needed = cache_bytes(shape, 1, tokens, 1, 1, weight_bytes(config))
    if needed > there and not on_gpu(config):
        raise ConfigError(
            f"engine.max_tokens={tokens}: keys and values of one such answer take "
            f"{size(needed)}, and this machine has {size(there)} in all. "
            "Lower engine.max_tokens, or take a smaller model."
        )


def demand_of(config: Config, shape: ModelConfig, *, training: bool) -> device_room.Demand:
    return device_room.Demand(
        shape,
        max_tokens=config.engine.max_tokens,
        training=training,
        recompute=config.optim.recompute,
        roles=role_sizes(config, weight_bytes(config)),
        width=weight_bytes(config),
        frozen=frozen_of(config, shape),
        ranks=ranks_here() if training else 1,
        offload=config.optim.offload,
    )


def frozen_of(config: Config, shape: ModelConfig) -> Frozen | None:
    """Return what stays and what learns; None where all weights are trained."""
    if not config.adapter.used:
        return None
    return lora(shape, spec_of(config), config.model.quantize)


def micro_tokens_of(config: Config, shape: ModelConfig) -> int:
    """Return the configuration's number, or what suits the device."""
    if config.optim.micro_tokens:
        return config.optim.micro_tokens
    if not on_gpu(config):
        return device_room.CPU_TOKENS
    demand = demand_of(config, shape, training=True)
    return device_room.automatic_tokens(demand, bytes_for(config, training=True))


def bytes_for(config: Config, *, training: bool) -> float:
    """Return the device's memory for the learner: what a sampler beside it leaves there."""
    engine, there = config.engine, device_bytes(config.model.device)
    beside = training and engine.servers > 0 and engine.backend == "native" and on_gpu(config)
    return there * (1 - device_room.SAMPLER_SHARE) if beside else there


def on_gpu(config: Config) -> bool:
    return torch.device(config.model.device).type == "cuda"


def weight_bytes(config: Config) -> int:
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    return dtype.itemsize


def sampling_of(config: Config, **changes: Any) -> Sampling:
    """Return how answers are sampled for training, or with changes."""
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
