"""A look before training: how often prompts pass under the model as it is, and what groups teach.

Prompts are those that training would draw first. Every one is sampled a number of times for each
template and temperature, a few prompts at a time, so that what was sampled so far can be reported
whenever it is stopped. Samples depend on the seed alone.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from groupwise import config as configuration
from groupwise.config import Config
from groupwise.data.cursor import cursor_of
from groupwise.data.templates import check_template
from groupwise.engine.native import SLOTS
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError
from groupwise.graders.by_row import ROW
from groupwise.graders.rubric import Grader
from groupwise.model.checkpoint import Loaded
from groupwise.model.policy import load_policy
from groupwise.opening import MakeEngine, starting_model
from groupwise.records import Grade, Rollout, Task
from groupwise.rollouts import failed, grade, write
from groupwise.setup import (
    Bench,
    check_room,
    engine_of,
    learns_from_labels,
    on_gpu,
    sampling_of,
    set_up,
)
from groupwise.validate.estimates import SUBSETS, Count, Estimate, Rates, all_alike, over_prompts
from groupwise.watch.folder import RunFolder

PROMPTS, LEAST_SAMPLES = 32, 8
PASS_AT = 8
GROUPS = (2, 4, 8, 16, 32, 64)
GPU_SLOTS = 1024
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}


@dataclass(frozen=True)
class Asked:
    """What to try; nothing asked is what the configuration has."""

    templates: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = ()
    prompts: int = PROMPTS
    samples: int = 0  # of each prompt; 0: a group, and 8 at least
    threshold: float | None = None  # reward that passes; None: the full mark


@dataclass(frozen=True)
class Passing:
    """What counts as a pass, and in words."""

    words: str
    passed: Callable[[Grade], bool]


@dataclass(frozen=True)
class Finding:
    """What one template and temperature gave. Samples whose reward failed are left out of all but
    the lengths; shares are of graded samples unless their names say otherwise."""

    template: str
    temperature: float
    prompts: int
    sampled: int
    passing: Estimate
    pass_at: Estimate
    useful: Estimate  # groups with passes and failures, of the configuration's size
    useful_by_group: dict[int, Estimate]
    spread: Estimate  # groups whose rewards differ, of `spread_group` samples
    spread_group: int
    binary: bool  # whether rewards have two values at most
    histogram: dict[str, int]  # prompts by pass rate
    reward: float
    parts: dict[str, float]  # means, before weights
    format_share: float | None  # None: no part of the reward looks at the format
    lengths: dict[str, int]
    truncated_share: float  # of all samples
    failed: int  # samples whose reward failed
    abstained: int  # samples that the reward says nothing about
    reason: str  # why they failed, most often
    example: dict[str, Any]  # one that did not pass, or else one that did

    @property
    def name(self) -> str:
        return f"{self.template} at {self.temperature:g}"

    @property
    def never(self) -> int:
        return self.histogram["never"]

    @property
    def always(self) -> int:
        return self.histogram["always"]

    @property
    def signal(self) -> Estimate:
        """Groups that teach something: by passes, or by rewards where those have more values."""
        return self.useful if self.binary else self.spread


@dataclass
class Sampled:
    """One template and temperature: its prompts as the model reads them, and what was written."""

    template: str
    temperature: float
    tasks: list[Task]
    groups: list[list[Rollout]] = field(default_factory=list)


@dataclass(frozen=True)
class Probe:
    """All that was found, setting by setting, in the order asked for."""

    config: Config
    passing: Passing
    samples: int  # of each prompt
    findings: list[Finding]
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
class Ready:
    """Loaded and checked; `run` samples."""

    config: Config
    bench: Bench
    engine: Engine
    passing: Passing
    samples: int
    rollouts: list[Sampled]
    notes: list[str]

    @property
    def prompts(self) -> int:
        return max(len(each.tasks) for each in self.rollouts)

    @property
    def at_once(self) -> int:
        """Prompts in one call of the engine: enough to fill its slots."""
        slots = self.config.engine.slots or (GPU_SLOTS if on_gpu(self.config) else SLOTS)
        return max(1, slots // self.samples)

    def run(self, show: Callable[[int, int], None] = lambda done, tokens: None) -> Probe:
        """`show` gets the number of prompts done, of all settings, and of tokens so far.

        Stopped by Ctrl-C, it reports on what there is: all settings have come as far.
        """
        interrupted, done, tokens = False, 0, 0
        try:
            for first in range(0, self.prompts, self.at_once):
                for each in self.rollouts:
                    some = each.tasks[first : first + self.at_once]
                    if not some:
                        continue
                    groups = self._sample(each, some)
                    each.groups += groups
                    done += len(some)
                    tokens += sum(len(r.completion.token_ids) for group in groups for r in group)
                    show(done, tokens)
        except KeyboardInterrupt:
            if not done:
                raise
            interrupted = True
        sampled = [each for each in self.rollouts if each.groups]
        shape = self.bench.loaded.model.config
        longest = min(shape.position_limit or shape.max_positions, shape.max_positions)
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
        written = write(self.engine, named, self.samples, sampling, stream="probe")
        return grade(self.bench.grader, self.bench.loaded.tokenizer, written)


def probe(config: Config, asked: Asked | None = None, engine: MakeEngine | None = None) -> Probe:
    """Sample and judge; `engine` as in `train`."""
    return ready(config, asked, engine=engine).run()


def ready(
    config: Config,
    asked: Asked | None = None,
    *,
    checkpoint: Path | None = None,
    engine: MakeEngine | None = None,
) -> Ready:
    """Everything that can fail, before anything is sampled. `checkpoint`: another model than the
    configuration's."""
    asked = asked or Asked()
    templates = asked.templates or (config.data.template,)
    temperatures = asked.temperatures or (config.engine.temperature,)
    check(config, templates, temperatures, asked)
    configs = {t: replace(config, data=replace(config.data, template=t)) for t in templates}
    bench = set_up(configs[templates[0]], lambda *tasks: _policy(config, checkpoint, *tasks))
    chosen = _chosen(config, bench, asked.prompts)
    notes, by_template = list(bench.notes), {templates[0]: chosen}
    for template in templates[1:]:
        other = set_up(configs[template], lambda *tasks: bench.loaded)
        wanted = {task.id for task in chosen}
        known = {task.id: task for task in other.tasks if task.id in wanted}
        by_template[template] = [known[task.id] for task in chosen if task.id in known]
        notes += [f"with template {template}: {x}" for x in other.notes if x not in notes]
    return Ready(
        config=config,
        bench=bench,
        engine=(engine or (lambda loaded: engine_of(config, loaded)))(bench.loaded),
        passing=passing(bench.grader, asked.threshold),
        samples=asked.samples or max(LEAST_SAMPLES, config.group_size),
        rollouts=[Sampled(t, x, by_template[t]) for t, x in product(templates, temperatures)],
        notes=notes,
    )


def check(
    config: Config, templates: Sequence[str], temperatures: Sequence[float], asked: Asked
) -> None:
    """Refuse what would tell nothing, before a model is loaded."""
    configuration.check(config)
    if learns_from_labels(config):
        raise ConfigError(
            f"recipe {config.recipe.name} learns from labelled pairs: nothing is sampled in "
            "training, so there is nothing to probe. Set recipe=dr_grpo to look at this model on "
            "prompts."
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


def _policy(
    config: Config, checkpoint: Path | None, tasks: list[Task], held_out: list[Task]
) -> Loaded:
    if checkpoint is not None:
        check_room(config, checkpoint, training=False)
        return load_policy(checkpoint, getattr(torch, config.model.dtype), config.model.device)
    with tempfile.TemporaryDirectory() as scratch:  # where the embedded model is made
        return starting_model(config, RunFolder(scratch), tasks, held_out)


def _chosen(config: Config, bench: Bench, prompts: int) -> list[Task]:
    """The first that training would draw, each once."""
    cursor = cursor_of(bench.tasks, bench.mixture, config.seed, config.data.shuffle)
    drawn = cursor.take(min(prompts, len(bench.tasks)))
    return [bench.tasks[place] for place in dict.fromkeys(draw.task for draw in drawn)]


# --- figures ----------------------------------------------------------------------------------


def passing(grader: Grader, threshold: float | None = None) -> Passing:
    """A reward of the threshold or more; else what the reward calls correct; else the full mark."""
    if threshold is None and grader.decider is not None:
        judge = "its row's grader" if grader.decider == ROW else grader.decider
        return Passing(f"{judge} gives 1", lambda grade: bool(grade.correct))
    if threshold is None:
        threshold = sum(max(weight, 0.0) for weight in grader.weights.values())
        words = f"a reward of {threshold:g}, which all parts give together, or more"
    else:
        words = f"a reward of {threshold:g} or more"
    least = threshold - 1e-9  # parts are added up in floating point

    def passed(grade: Grade) -> bool:
        return grade.reward is not None and grade.reward >= least

    return Passing(words, passed)


def finding(sampled: Sampled, passing: Passing, group: int) -> Finding:
    """All figures of one setting."""
    rows = [rollout for rollouts in sampled.groups for rollout in rollouts]
    graded = [[r for r in rollouts if r.grade.reward is not None] for rollouts in sampled.groups]
    counts = [Count(len(g), sum(passing.passed(r.grade) for r in g)) for g in graded]
    rates = Rates(counts)
    if not rates.counts:
        raise ConfigError(
            f"None of {len(rows)} samples has a reward; most often: {_reason(rows) or 'no reason'}."
            " Mend reward.parts."
        )
    rewards = [[r.grade.reward for r in g] for g in graded]
    usual = min(group, max(map(len, rewards)))
    differ = [1 - all_alike(values, usual) for values in rewards if len(values) >= usual]
    ok = [r for g in graded for r in g]
    parts = {name: _mean([r.grade.parts.get(name) for r in ok]) for name in rows[0].grade.parts}
    formats = [name for name in parts if name.startswith("format(")]
    return Finding(
        template=sampled.template,
        temperature=sampled.temperature,
        prompts=len(sampled.groups),
        sampled=len(rows),
        passing=rates.passing,
        pass_at=rates.pass_at(PASS_AT),
        useful=rates.useful(group),
        useful_by_group={size: rates.useful(size) for size in sorted({*GROUPS, group})},
        spread=over_prompts(differ, len(ok) // usual, SUBSETS),
        spread_group=usual,
        binary=len({r.grade.reward for r in ok}) <= 2,
        histogram=histogram(rates.counts),
        reward=sum(r.grade.reward or 0.0 for r in ok) / len(ok),
        parts=parts,
        format_share=_format_share(ok, formats),
        lengths=quantiles([len(r.completion.token_ids) for r in rows]),
        truncated_share=sum(r.completion.truncated for r in rows) / len(rows),
        failed=sum(failed(r.grade) for r in rows),
        abstained=sum(r.grade.status == "abstained" for r in rows),
        reason=_reason(rows),
        example=_example(ok, passing),
    )


def histogram(counts: Sequence[Count]) -> dict[str, int]:
    """Prompts by the share of their samples that passed."""
    bins = {"never": 0, "to 25 %": 0, "to 50 %": 0, "to 75 %": 0, "to 100 %": 0, "always": 0}
    names = list(bins)
    for samples, passed in counts:
        if passed == 0:
            bins["never"] += 1
        elif passed == samples:
            bins["always"] += 1
        else:  # up to a quarter, a half, three quarters, and less than all
            bins[names[-(-4 * passed // samples)]] += 1
    return bins


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """The least length that so large a share is no longer than."""
    ordered = sorted(lengths)
    return {
        name: ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
        for name, share in QUANTILES.items()
    }


def _mean(values: Sequence[float | None]) -> float:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else 0.0


def _format_share(rows: Sequence[Rollout], formats: Sequence[str]) -> float | None:
    """Samples that every part about the format is content with."""
    if not formats:
        return None
    return sum(all((r.grade.parts[f] or 0) >= 1 for f in formats) for r in rows) / len(rows)


def _reason(rows: Sequence[Rollout]) -> str:
    found = Counter(r.grade.reason for r in rows if failed(r.grade))
    found = found or Counter(r.grade.reason for r in rows if r.grade.status == "abstained")
    return found.most_common(1)[0][0] if found else ""


def _example(rows: Sequence[Rollout], passing: Passing) -> dict[str, Any]:
    shown = next((r for r in rows if not passing.passed(r.grade)), rows[0])
    return {
        "prompt_id": shown.task.id,
        "answer": shown.task.answer,
        "completion": shown.text,
        "reward": shown.grade.reward,
        "finish": shown.completion.finish,
    }
