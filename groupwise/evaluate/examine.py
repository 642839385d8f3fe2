"""Models on suites, one model at a time on all of them.

Samples depend on the seed, the task and the weights, never on what is sampled beside them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from groupwise.common.progress import phase
from groupwise.config import Config, load
from groupwise.data.cursor import fingerprint as data_fingerprint
from groupwise.engine.native.engine import SLOTS
from groupwise.engine.protocol import Engine
from groupwise.evaluate.budgets import at_budget, room
from groupwise.evaluate.request import OWN, Basis, Candidate, Entry, EvalRequest, check_budgets
from groupwise.evaluate.results import Result
from groupwise.evaluate.scores import TaskOutcome, values_of
from groupwise.evaluate.suites import Forcing, Suite
from groupwise.evaluate.votes import ballots
from groupwise.model.fingerprint import fingerprint
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.policy import load_policy
from groupwise.prepare.engines import judge_of
from groupwise.prepare.rollouts import failed, grade, sample_groups, verdict
from groupwise.prepare.setup import Setup, check_room, on_gpu, prepare_tasks, sampling_of
from groupwise.records import Rollout, Task

GPU_SLOTS = 1024


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
class SuiteEvaluation:
    """The evaluation of one model on one suite; `run` samples and grades."""

    entry: Entry
    setup: Setup
    engine: Engine
    config: Config
    asked: EvalRequest
    forcing: Forcing
    notes: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        """Return all settings that samples and verdicts depend on, beside weights and tasks."""
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
            "reward_code": self.setup.grader.code(),
            "prompts": _digest(self.setup.tasks),
            "at": list(asked.sizes),
        }
        if config.engine.backend != "native":
            found["backend"] = config.engine.backend
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
        """Return how many tasks go into one call of the engine: enough to fill its slots."""
        slots = self.config.engine.slots or (GPU_SLOTS if on_gpu(self.config) else SLOTS)
        return max(1, slots // self.asked.samples)

    @property
    def data(self) -> str:
        return data_fingerprint(self.entry.tasks)

    def run(self, model: dict[str, Any], title: str = "") -> tuple[Result, list[list[Rollout]]]:
        """Sample and grade all tasks; `title` is for whoever waits."""
        begun, tokens = time.perf_counter(), 0
        groups: list[list[Rollout]] = []
        tasks = self.setup.tasks
        with phase(title, len(tasks), "tasks") as told:
            for first in range(0, len(tasks), self.at_once):
                some = self.sample(tasks[first : first + self.at_once])
                groups += some
                tokens += sum(r.completion.own_length for group in some for r in group)
                told(len(groups), tokens)
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
        written = sample_groups(self.engine, named, self.asked.samples, sampling, stream="eval")
        return grade(self.setup.grader, self.setup.loaded.tokenizer, written)

    def _outcomes(self, groups: Sequence[Sequence[Rollout]]) -> list[TaskOutcome]:
        graded = [[r for r in group if not failed(r.grade)] or list(group) for group in groups]
        tokenizer = self.setup.loaded.tokenizer
        ends = [*(tokenizer.decode([x]) for x in tokenizer.eos_ids), *self.config.engine.stop]
        votes = ballots(graded, self.setup.grader.decider, ends)
        values = values_of([group[0].task.columns for group in groups], self.asked.by)
        budgets = {
            size: at_budget(
                self.engine,
                tokenizer,
                self.setup.grader,
                groups,
                size,
                self.forcing,
                self.asked.force_tokens,
            )
            for size in sorted(self.asked.budgets)
        }
        return [
            TaskOutcome(
                key=self.entry.keys[group[0].task.id],
                id=group[0].task.id,
                correct=tuple(verdict(r.grade) for r in group),
                tokens=tuple(r.completion.own_length for r in group),
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
    """Hash the prompts as the model reads them: a chat template that was edited shows here."""
    found = hashlib.sha256()
    for task in tasks:
        found.update(f"{list(task.token_ids)}".encode())
    return found.hexdigest()[:16]


def prepare_suites(
    suites: Sequence[Entry], loaded: Loaded, basis: Basis, asked: EvalRequest
) -> list[SuiteEvaluation]:
    """Prepare the suites' tasks as this model reads them; one engine for all."""
    engine = judge_of(basis.config, loaded)
    return [_prepare_suite(entry, loaded, engine, basis, asked) for entry in suites]


def _prepare_suite(
    entry: Entry, loaded: Loaded, engine: Engine, basis: Basis, asked: EvalRequest
) -> SuiteEvaluation:
    suite, config = entry.suite, entry.config
    notes: list[str] = []
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    if suite.source and not basis.written:
        longest = shape.context
        config, notes = _with_suite_defaults(
            config, basis, suite, longest, chats=tokenizer.template
        )
    forcing = suite.forcing if asked.force is None else replace(suite.forcing, text=asked.force)
    most = config.engine.max_tokens
    check_budgets(asked, most)
    extra = room(tokenizer, forcing, asked.force_tokens) if asked.budgets else 0
    # What a run learns from is no matter here; pairs would be looked for in the tasks.
    wide = replace(config.engine, max_tokens=most + extra)
    setup = prepare_tasks(replace(config, engine=wide, recipe=load().recipe), entry.found, loaded)
    notes = list(dict.fromkeys([*setup.notes, *notes]))
    return SuiteEvaluation(entry, setup, engine, config, asked, forcing, notes)


def _with_suite_defaults(
    config: Config, basis: Basis, suite: Suite, longest: int, *, chats: str | None
) -> tuple[Config, list[str]]:
    """Fill in what nobody has set: the chat template if there is one, the suite's words, and the
    suite's usual length of an answer.
    """
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
