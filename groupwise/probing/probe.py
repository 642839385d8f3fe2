"""The probe: how often prompts pass under the model as it is, and which groups are useful.

Prompts are those that training would draw first. Every one is sampled a number of times for each
template and temperature, a few prompts at a time, so that what was sampled so far can be reported
whenever it is stopped. Samples depend on the seed alone.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from groupwise.common.progress import phase
from groupwise.config import Config
from groupwise.data.cursor import cursor_of
from groupwise.data.templates import check_template
from groupwise.engine.native.engine import SLOTS
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.policy import load_policy
from groupwise.prepare.engines import MakeEngine, judge_of
from groupwise.prepare.placing import placed
from groupwise.prepare.rollouts import grade, sample_groups
from groupwise.prepare.setup import (
    Setup,
    check_room,
    on_gpu,
    sampling_of,
    set_up,
)
from groupwise.probing.findings import PassRule, Sampled, SettingFigures, finding, passing
from groupwise.records import Rollout, Task
from groupwise.runfiles.folder import RunFolder
from groupwise.stages.checks import check_config
from groupwise.training.opening import starting_model

PROMPTS, LEAST_SAMPLES = 32, 8
GPU_SLOTS = 1024


@dataclass(frozen=True)
class ProbeRequest:
    """The prompts, samples and settings to try; what is left out is the configuration's."""

    templates: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    prompts: int = PROMPTS
    samples: int = 0  # of each prompt; 0: a group, and 8 at least
    threshold: float | None = None  # reward that passes; None: the full mark


Asked = ProbeRequest  # files of users import it by this name


@dataclass(frozen=True)
class Probe:
    """All findings, setting by setting, in the order asked for."""

    config: Config
    passing: PassRule
    samples: int  # of each prompt
    findings: list[SettingFigures]
    notes: list[str]
    interrupted: bool
    most_tokens: int  # that an answer can have with this model and these prompts
    rollouts: list[Sampled]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.config.model.path,
            "seed": self.config.seed,
            "group_size": self.config.group_size,
            "max_tokens": self.config.engine.max_tokens,
            "samples_per_prompt": self.samples,
            "pass": self.passing.words,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "settings": [asdict(finding) for finding in self.findings],
        }


@dataclass
class PreparedProbe:
    """A probe that is loaded and checked; `run` samples."""

    config: Config
    setup: Setup
    engine: Engine
    passing: PassRule
    samples: int
    rollouts: list[Sampled]
    notes: list[str]

    @property
    def prompts(self) -> int:
        return max(len(each.tasks) for each in self.rollouts)

    @property
    def at_once(self) -> int:
        """Return the prompts in one call of the engine: enough to fill its slots."""
        slots = self.config.engine.slots or (GPU_SLOTS if on_gpu(self.config) else SLOTS)
        return max(1, slots // self.samples)

    def run(self) -> Probe:
        """Sample. Stopped by Ctrl-C, it reports on what there is: all settings have come as far."""
        interrupted, done = False, 0
        prompts = sum(len(each.tasks) for each in self.rollouts)
        try:
            with phase("probing", prompts, "prompts") as told:
                for first in range(0, self.prompts, self.at_once):
                    for each in self.rollouts:
                        some = each.tasks[first : first + self.at_once]
                        if some:
                            each.groups += self._sample(each, some)
                            done += len(some)
                            told(done)
        except KeyboardInterrupt:
            if not done:
                raise
            interrupted = True
        sampled = [each for each in self.rollouts if each.groups]
        shape = self.setup.loaded.model.config
        longest = shape.context
        prompt = max(len(task.token_ids) for each in sampled for task in each.tasks)
        return Probe(
            config=self.config,
            passing=self.passing,
            samples=self.samples,
            findings=[finding(each, self.passing, self.config.group_size) for each in sampled],
            notes=self.notes,
            interrupted=interrupted,
            most_tokens=longest - prompt,
            rollouts=sampled,
        )

    def _sample(self, each: Sampled, tasks: Sequence[Task]) -> list[list[Rollout]]:
        sampling = sampling_of(self.config, temperature=each.temperature)
        named = [(task, 0) for task in tasks]
        written = sample_groups(
            self.engine, named, self.samples, sampling, "probe", turns=self.setup.turns
        )
        return grade(self.setup.grader, self.setup.loaded.tokenizer, written)


def probe(
    config: Config, asked: ProbeRequest | None = None, engine: MakeEngine | None = None
) -> Probe:
    """Sample and judge; `engine` as in `train`."""
    return prepare_probe(config, asked, engine=engine).run()


def prepare_probe(
    config: Config,
    asked: ProbeRequest | None = None,
    *,
    checkpoint: Path | None = None,
    engine: MakeEngine | None = None,
) -> PreparedProbe:
    """Prepare everything that can fail, before anything is sampled. `checkpoint`: another model
    than the configuration's.
    """
    asked, config = asked or ProbeRequest(), placed(config)
    templates = asked.templates or (config.data.template,)
    temperatures = asked.temperatures or (config.engine.temperature,)
    check(config, templates, temperatures, asked)
    configs = {t: replace(config, data=replace(config.data, template=t)) for t in templates}
    setup = set_up(configs[templates[0]], lambda *tasks: policy_for(config, checkpoint, *tasks))
    chosen = first_prompts(config, setup, asked.prompts)
    notes, by_template = list(setup.notes), {templates[0]: chosen}
    for template in templates[1:]:
        other = set_up(configs[template], lambda *tasks: setup.loaded)
        wanted = {task.id for task in chosen}
        known = {task.id: task for task in other.tasks if task.id in wanted}
        by_template[template] = [known[task.id] for task in chosen if task.id in known]
        notes += [f"with template {template}: {x}" for x in other.notes if x not in notes]
    return PreparedProbe(
        config=config,
        setup=setup,
        engine=judge_of(config, setup.loaded, engine),
        passing=passing(setup.grader, asked.threshold),
        samples=asked.samples or max(LEAST_SAMPLES, config.group_size),
        rollouts=[Sampled(t, x, by_template[t]) for t, x in product(templates, temperatures)],
        notes=notes,
    )


def check(
    config: Config, templates: Sequence[str], temperatures: Sequence[float], asked: ProbeRequest
) -> None:
    """Refuse what would tell nothing, before a model is loaded."""
    check_config(config)
    if not config.recipe.samples:
        raise ConfigError(
            f"recipe {config.recipe.name} learns from {config.recipe.learns_from} and samples none "
            "in training, so there is nothing to probe. Set recipe=dr_grpo to look at this model "
            "on prompts."
        )
    for name, values in (("template", templates), ("temperature", temperatures)):
        twice = [value for value, times in Counter(values).items() if times > 1]
        if twice:
            raise ConfigError(f"--{name} {twice[0]} is given twice. Name each once.")
    for template in templates:
        check_template(template)
    for temperature in temperatures:
        if not 0 < temperature < float("inf"):
            raise ConfigError(
                f"--temperature {temperature:g}: all samples of a prompt would be the same. Take "
                "one above 0."
            )
    for name, value, least in (("prompts", asked.prompts, 1), ("samples", asked.samples or 2, 2)):
        if value < least:
            raise ConfigError(f"--{name} {value} is too few. Take {least} or more.")


def policy_for(
    config: Config, checkpoint: Path | None, tasks: Sequence[Task], held_out: Sequence[Task]
) -> Loaded:
    """Return the model that a configuration starts from, or that of a checkpoint."""
    if checkpoint is not None:
        check_room(config, checkpoint, training=False)
        return load_policy(checkpoint, getattr(torch, config.model.dtype), config.model.device)
    with tempfile.TemporaryDirectory() as scratch:  # where the embedded model is made
        return starting_model(config, RunFolder(scratch), tasks, held_out)


def first_prompts(config: Config, setup: Setup, prompts: int) -> list[Task]:
    """Return the first prompts that training would draw, each once."""
    cursor = cursor_of(setup.tasks, setup.mixture, config.seed, config.data.shuffle)
    drawn = cursor.take(min(prompts, len(setup.tasks)))
    return [setup.tasks[place] for place in dict.fromkeys(draw.task for draw in drawn)]
