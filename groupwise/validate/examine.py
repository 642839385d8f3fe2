"""Models on suites: read and check everything first, then one model at a time on all suites.

Tasks of a suite that is too large are chosen by their text, so that fewer are always a part of
more. Samples depend on the seed, the task and the weights, never on what is sampled beside them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config, load
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.engine.native import SLOTS
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError, DataError, ModelError, nearest
from groupwise.hub import local_model, names_model
from groupwise.model.checkpoint import Loaded
from groupwise.model.peft_files import is_adapter
from groupwise.model.policy import base_of, load_policy
from groupwise.records import Rollout, Task
from groupwise.rollouts import failed, grade, verdict, write
from groupwise.setup import (
    Bench,
    Gathered,
    check_room,
    engine_of,
    gather,
    learns_from_labels,
    on_gpu,
    sampling_of,
    seat,
)
from groupwise.sync.export import checkpoint_in
from groupwise.sync.fingerprint import fingerprint
from groupwise.validate.budgets import at_budget, room
from groupwise.validate.results import Result, key_of
from groupwise.validate.scores import Outcome, values_of
from groupwise.validate.suites import Forcing, Suite, check_names, config_of, find
from groupwise.validate.votes import ballots

GPU_SLOTS = 1024
FORCE_TOKENS = 32
# What a suite says itself where no configuration is given.
OWN = {"max_tokens": "engine.max_tokens", "template": "data.template", "text": "data.instruction"}


@dataclass(frozen=True)
class Asked:
    """What to measure."""

    tasks: int = 0  # of each suite; 0: all, or 100 of a generator
    samples: int = 1
    temperature: float = 0.0
    at: tuple[int, ...] = ()  # k of pass@k and maj@k; (): powers of two, and the samples
    by: tuple[str, ...] = ()  # columns; (): level, subject and their like
    budgets: tuple[int, ...] = ()  # tokens
    force: str | None = None  # the text that asks for an answer; None: the suite's
    force_tokens: int = FORCE_TOKENS

    @property
    def sizes(self) -> tuple[int, ...]:
        if self.at:
            return tuple(sorted(self.at))
        powers = [2**i for i in range(1, self.samples.bit_length()) if 2**i < self.samples]
        return (*powers, self.samples) if self.samples > 1 else ()


@dataclass(frozen=True)
class Basis:
    """The configuration that holds for all, and which of its settings somebody has set."""

    config: Config
    written: bool = False  # in a file or by a run: all of it holds
    given: tuple[str, ...] = ()  # names on the command line

    def set_by_user(self, name: str) -> bool:
        return self.written or any(name == x or name.startswith(f"{x}.") for x in self.given)


@dataclass(frozen=True)
class Entry:
    """A suite whose tasks are read and chosen."""

    suite: Suite
    config: Config
    found: Gathered
    keys: dict[int, str]  # by the tasks' ids

    @property
    def tasks(self) -> Sequence[Task]:
        return self.found.train


@dataclass(frozen=True)
class Candidate:
    """A model to look at."""

    name: str
    path: str  # as it was given
    source: str | Path  # a folder, a file or an id


# --- before anything expensive ----------------------------------------------------------------


def check(asked: Asked, config: Config) -> None:
    """Refuse what would tell nothing."""
    for name, value, least in (
        ("tasks", asked.tasks, 0),
        ("samples", asked.samples, 1),
        ("force-tokens", asked.force_tokens, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} is too few. Take {least or 1} or more.")
    if not 0 <= asked.temperature < float("inf"):
        raise ConfigError(f"--temperature {asked.temperature:g}: take 0 (greedy) or more.")
    if asked.temperature == 0 and (asked.samples > 1 or max(asked.at, default=1) > 1):
        most = max(asked.samples, *asked.at, 1)
        raise ConfigError(
            f"At temperature 0 all {most} samples of a task are the same, so pass@k and maj@k "
            "would say no more than accuracy. Set --temperature above 0, or take --samples 1."
        )
    for k in asked.at:
        if not 1 <= k <= asked.samples:
            raise ConfigError(
                f"--at {k}: pass@{k} and maj@{k} need {k} samples of each task, and there are "
                f"{asked.samples}. Set --samples {max(k, 1)} or more, or a k from 1 to "
                f"{asked.samples}."
            )
    if any(size < 1 for size in asked.budgets):
        raise ConfigError(f"--budgets {min(asked.budgets)}: a budget is 1 token or more.")
    if config.engine.weights != "shared":
        raise ConfigError(
            f"engine.weights={config.engine.weights} samples from a copy, to study training. "
            "Evaluate with engine.weights=shared."
        )


def candidates(paths: Sequence[str]) -> list[Candidate]:
    """What each path is: a model, a run (its best checkpoint, else its latest), a checkpoint.

    An adapter needs its base: that it is there is seen now, and not behind the first model.
    """
    found: list[Candidate] = []
    for path in paths:
        source = checkpoint_in(path)
        if not names_model(str(source)):
            folder = local_model(source)
            if not folder.exists():
                raise ModelError(f"There is no model, run or checkpoint {path!r}.")
            if is_adapter(folder):
                base_of(folder)
            elif folder.is_dir() and not (folder / "config.json").is_file():
                raise ModelError(
                    f"{path} is neither a model (it has no config.json) nor a run with checkpoints."
                )
        found.append(Candidate(_name(path, source, [each.name for each in found]), path, source))
    return found


def _name(path: str, source: str | Path, taken: Sequence[str]) -> str:
    """Short, and no two alike: `mine/step_40` of a run's checkpoint, else the last part."""
    parts = Path(source).parts
    if "checkpoints" in parts[-2:-1]:
        name = "/".join((*parts[-3:-2], parts[-1]))
    else:
        name = Path(path).name or str(path)
    count = sum(each == name or each.startswith(f"{name}#") for each in taken)
    return f"{name}#{count + 1}" if count else name


def entries(names: Sequence[str], folder: Path | None, basis: Basis, asked: Asked) -> list[Entry]:
    """All suites, read and checked, their tasks chosen."""
    check_names(names)
    found = []
    for name in names:
        suite = find(name, folder)
        config = config_of(suite, basis.config, asked.tasks, own_options=basis.written)
        said = basis.set_by_user(OWN["max_tokens"]) or not suite.source
        _check_budgets(asked, config.engine.max_tokens if said else suite.max_tokens)
        found.append(_entry(suite, config, asked))
    labels = [entry.suite.name for entry in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"Two suites are called {label!r}. Rename a file, or drop one.")
    return found


def _check_budgets(asked: Asked, most: int) -> None:
    if asked.budgets and max(asked.budgets) > most:
        raise ConfigError(
            f"--budgets {max(asked.budgets)} is more than engine.max_tokens={most}: no answer is "
            "longer than that. Raise it, or lower the budget."
        )


def _entry(suite: Suite, config: Config, asked: Asked) -> Entry:
    gathered = gather(config)
    every = gathered.train if suite.source else gathered.held_out
    tasks = [task for task in every if suite.keep(task)]
    if learns_from_labels(config):  # such data has answers for some of the rows, or for none
        tasks = [task for task in tasks if task.answer is not None]
    if not tasks:
        raise DataError(f"{suite.name}: {suite.source or 'data.eval'} has no tasks of this suite.")
    keys = {task.id: key_of(task) for task in tasks}
    if asked.tasks and asked.tasks < len(tasks):
        chosen = sorted(keys, key=lambda number: keys[number])[: asked.tasks]
        keys = {number: keys[number] for number in sorted(chosen)}
        tasks = [task for task in tasks if task.id in keys]
    names = {name for task in tasks for name in task.columns}
    for column in asked.by:
        if column not in names:
            raise ConfigError(
                f"--by {column}: no task of {suite.name} has such a column. "
                f"{nearest(column, names)}"
            )
    return Entry(suite, config, replace(gathered, train=tasks, held_out=[]), keys)


# --- one model --------------------------------------------------------------------------------


def load_candidate(candidate: Candidate, config: Config) -> Loaded:
    check_room(config, candidate.source, training=False)
    dtype = getattr(torch, config.model.dtype)
    return load_policy(candidate.source, dtype, config.model.device)


def described(candidate: Candidate, loaded: Loaded) -> dict[str, Any]:
    return {
        "name": candidate.name,
        "path": str(candidate.path),
        "weights": fingerprint(loaded.model.named_parameters()),
    }


@dataclass
class Sitting:
    """One model in front of one suite; `run` samples and grades."""

    entry: Entry
    bench: Bench
    engine: Engine
    config: Config
    asked: Asked
    forcing: Forcing
    notes: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        """All that samples and verdicts depend on, beside weights and tasks."""
        config, asked = self.config, self.asked
        found: dict[str, Any] = {
            "samples": asked.samples,
            "temperature": asked.temperature,
            "max_tokens": config.engine.max_tokens,
            "min_tokens": config.engine.min_tokens,
            "top_p": config.engine.top_p,
            "top_k": config.engine.top_k,
            "stop": list(config.engine.stop),
            "template": config.data.template,
            "system": config.data.system,
            "instruction": config.data.instruction,
            "seed": config.seed,
            "dtype": config.model.dtype,
            "device": config.model.device,
            "exact": config.engine.exact,
            "reward": dict(config.reward.parts),
            "reward_code": self.bench.grader.code(),
            "prompts": _digest(self.bench.tasks),
            "at": list(asked.sizes),
        }
        if asked.by:
            found["by"] = list(asked.by)
        if asked.budgets:
            found |= {
                "budgets": sorted(asked.budgets),
                "force": self.forcing.text,
                "force_tokens": asked.force_tokens,
            }
        return found

    @property
    def at_once(self) -> int:
        """Tasks in one call of the engine: enough to fill its slots."""
        slots = self.config.engine.slots or (GPU_SLOTS if on_gpu(self.config) else SLOTS)
        return max(1, slots // self.asked.samples)

    @property
    def data(self) -> str:
        return data_fingerprint(self.entry.tasks)

    def run(
        self, model: dict[str, Any], show: Callable[[int, int], None] = lambda done, tokens: None
    ) -> tuple[Result, list[list[Rollout]]]:
        """`show` gets the number of tasks done and of tokens so far."""
        begun, tokens = time.perf_counter(), 0
        groups: list[list[Rollout]] = []
        tasks = self.bench.tasks
        for first in range(0, len(tasks), self.at_once):
            some = self.sample(tasks[first : first + self.at_once])
            groups += some
            tokens += sum(len(r.completion.token_ids) for group in some for r in group)
            show(len(groups), tokens)
        outcomes = self._outcomes(groups)
        seconds = time.perf_counter() - begun
        suite = {
            "name": self.entry.suite.name,
            "source": self.entry.suite.source or "data.eval",
            "data": self.data,
            "tasks": len(tasks),
            "dropped": len(self.entry.tasks) - len(tasks),
        }
        clock = {"seconds": seconds, "tokens_per_second": tokens / seconds}
        return Result(model, suite, self.settings, outcomes, self.notes, clock), groups

    def sample(self, tasks: Sequence[Task]) -> list[list[Rollout]]:
        sampling = sampling_of(self.config, temperature=self.asked.temperature)
        named = [(task, 0) for task in tasks]
        written = write(self.engine, named, self.asked.samples, sampling, stream="eval")
        return grade(self.bench.grader, self.bench.loaded.tokenizer, written)

    def _outcomes(self, groups: Sequence[Sequence[Rollout]]) -> list[Outcome]:
        graded = [[r for r in group if not failed(r.grade)] or list(group) for group in groups]
        tokenizer = self.bench.loaded.tokenizer
        ends = [*(tokenizer.decode([x]) for x in tokenizer.eos_ids), *self.config.engine.stop]
        votes = ballots(graded, self.bench.grader.decider, ends)
        values = values_of([group[0].task.columns for group in groups], self.asked.by)
        budgets = {
            size: at_budget(
                self.engine,
                tokenizer,
                self.bench.grader,
                groups,
                size,
                self.forcing,
                self.asked.force_tokens,
            )
            for size in sorted(self.asked.budgets)
        }
        return [
            Outcome(
                key=self.entry.keys[group[0].task.id],
                id=group[0].task.id,
                correct=tuple(verdict(r.grade) for r in group),
                tokens=tuple(len(r.completion.token_ids) for r in group),
                truncated=tuple(r.completion.truncated for r in group),
                failed=sum(failed(r.grade) for r in group),
                votes=None if vote is None else tuple(vote) if known else (),
                groups=value or None,
                budgets={size: each[at] for size, each in budgets.items()} or None,
            )
            for at, (group, vote, value) in enumerate(zip(groups, votes, values, strict=True))
            for known in [any(not failed(r.grade) for r in group)]
        ]


def _digest(tasks: Sequence[Task]) -> str:
    """Of prompts as the model reads them: a chat template that was edited shows here."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(f"{list(task.token_ids)}".encode())
    return found.hexdigest()[:16]


def sit(suites: Sequence[Entry], loaded: Loaded, basis: Basis, asked: Asked) -> list[Sitting]:
    """The suites' tasks as this model reads them; one engine for all."""
    engine = engine_of(basis.config, loaded)
    return [_sit(entry, loaded, engine, basis, asked) for entry in suites]


def _sit(entry: Entry, loaded: Loaded, engine: Engine, basis: Basis, asked: Asked) -> Sitting:
    suite, config = entry.suite, entry.config
    notes: list[str] = []
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    if suite.source and not basis.written:
        longest = shape.context
        config, notes = _as_the_suite_says(config, basis, suite, longest, chats=tokenizer.template)
    forcing = suite.forcing if asked.force is None else replace(suite.forcing, text=asked.force)
    most = config.engine.max_tokens
    _check_budgets(asked, most)
    extra = room(tokenizer, forcing, asked.force_tokens) if asked.budgets else 0
    # What a run learns from is no matter here; pairs would be looked for in the tasks.
    wide = replace(config.engine, max_tokens=most + extra)
    bench = seat(replace(config, engine=wide, recipe=load().recipe), entry.found, loaded)
    notes = list(dict.fromkeys([*bench.notes, *notes]))
    return Sitting(entry, bench, engine, config, asked, forcing, notes)


def _as_the_suite_says(
    config: Config, basis: Basis, suite: Suite, longest: int, *, chats: str | None
) -> tuple[Config, list[str]]:
    """Where nobody has said otherwise: the chat template if there is one, the suite's words, and
    room for an answer of its usual length."""
    data, engine, notes = config.data, config.engine, []
    if chats and not basis.set_by_user(OWN["template"]):
        data = replace(data, template="chat")
        if suite.instruction != data.instruction and not basis.set_by_user(OWN["text"]):
            data = replace(data, instruction=suite.instruction)
    if not basis.set_by_user(OWN["max_tokens"]):
        engine = replace(engine, max_tokens=min(suite.max_tokens, longest // 2))
    for name, value, before in (
        (OWN["template"], data.template, config.data.template),
        (OWN["text"], data.instruction, config.data.instruction),
        (OWN["max_tokens"], engine.max_tokens, config.engine.max_tokens),
    ):
        if value != before:
            notes.append(f"{suite.name}: {name}={value!r}, as nothing else was said.")
    return replace(config, data=data, engine=engine), notes
