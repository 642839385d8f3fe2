"""The embedded model's start: an ordinary supervised stage on the solutions of its tasks.

A policy that never gives a right answer has nothing to learn from. A short supervised course gives
it a start; reinforcement does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.common.progress import phase
from groupwise.config import Config, Model, Optim
from groupwise.config.fields import Adapter, EngineSettings
from groupwise.data.cursor import Cursor
from groupwise.errors import DataError
from groupwise.graders.rubric import Grader
from groupwise.model.formats.checkpoint import Loaded
from groupwise.optim.roles import ROLES
from groupwise.optim.schedules import LearningRates, learning_rate
from groupwise.parallel.world import ALONE
from groupwise.prepare import tiny
from groupwise.prepare.engines import engine_of
from groupwise.recipes import recipe
from groupwise.records import Memory, Task
from groupwise.stages import stage_of
from groupwise.stages.parts import Parts
from groupwise.stages.stage import StepUpdates
from groupwise.training.signals import Stopped
from groupwise.watch.clock import Clock

WARMUP, PAST = 50, 0.9  # steps; weight of the past in an average
COLD_START = "cold_start"  # the folder of the embedded model as it was before reinforcement


def cold_started(
    config: Config,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    asked: threading.Event | None = None,
) -> Loaded:
    """Make the embedded model and teach it until samples would be right often enough.

    Where it is `asked` to end on the way, it raises `Stopped`: nothing of it is kept.
    """
    if not tasks or any("solution" not in task.columns for task in tasks):
        raise DataError(
            'model.path = "tiny" is taught on solutions first, which these tasks do not have. Use '
            'a generator (data.train = "arithmetic", "chain" or "countdown"), add a column '
            "'solution', or set model.path to a model."
        )
    turns = config.turns if config.turns.used else None
    longest = config.engine.max_tokens
    loaded = tiny.make(config.tiny, tasks, held_out, longest, config.seed, turns)
    prompts = [
        replace(task, token_ids=tuple(loaded.tokenizer.prompt(str(task.prompt)))) for task in tasks
    ]
    for name in config.recipe.roles:  # which is known now, and not only behind the course
        ROLES[name].check_tokens(config, prompts, loaded.tokenizer)
    teach(config, loaded, prompts, asked)
    return loaded


def teach(
    config: Config, loaded: Loaded, tasks: Sequence[Task], asked: threading.Event | None = None
) -> None:
    """Take steps of the recipe `sft` until whole solutions are likely enough.

    When that is varies with the last bits of the arithmetic, so a number of steps would start
    another run from another policy on every kind of machine. The tasks have token ids.
    """
    course = _cold_start_config(config)
    stage = stage_of(course)
    parts = Parts(
        loaded=loaded,
        tasks=tasks,
        held_out=[],
        grader=Grader({"exact": 1.0}),  # answers of the data ask neither for a grade
        engine=engine_of(course, loaded),  # nor for this
        learner=stage.learner(loaded.model, {}, ALONE),
    )
    cursor, memory = Cursor(tasks, config.seed), Memory()
    right = 0.0  # probability of the whole solution, averaged over recent batches
    with phase("cold start", things="steps") as told:
        for step in range(course.steps):
            told(step)
            if asked is not None and asked.is_set():
                raise Stopped("stopped before step 1; the same command begins with it")
            rate = learning_rate(
                step,
                base=course.optim.learning_rate,
                schedule=course.optim.schedule,
                warmup_steps=WARMUP,
                total_steps=course.steps,
            )
            collected = stage.collect(parts, cursor, _ignore, Clock())
            updates = stage.teach(parts, memory, collected, LearningRates(rate), _ignore, Clock())
            right = PAST * right + (1 - PAST) * _likely(updates)
            if right >= config.tiny.cold_start_accuracy:
                return


def _cold_start_config(config: Config) -> Config:
    """Return the configuration of the supervised stage; it runs where the model is made."""
    return replace(
        config,
        recipe=recipe("sft"),
        steps=config.tiny.cold_start_steps,
        prompts_per_step=config.tiny.cold_start_batch,
        model=Model(path="tiny", device="cpu", dtype="float32"),
        optim=Optim(learning_rate=config.tiny.cold_start_rate, clip_norm=1.0, weight_decay=0.0),
        adapter=Adapter(),
        engine=EngineSettings(max_tokens=config.engine.max_tokens),
        overlong="recipe",
    )


def _likely(updates: StepUpdates) -> float:
    """Return the mean probability of the batch's answers before the update."""
    logp_NT = updates.streams["learner_logp"]
    assert isinstance(logp_NT, Tensor) and updates.batch is not None
    return float(torch.where(updates.batch.mask_NT, logp_NT, 0.0).sum(1).exp().mean())


def _ignore(kind: str, text: str, *, shown: bool = True, **fields: Any) -> None:
    """Take no notice: a course this short has nothing to tell."""
