"""Held-out accuracy: the same tasks, sampled the same way, before, during and after training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config
from groupwise.engine.protocol import Engine, Sampling
from groupwise.errors import DataError
from groupwise.graders.rubric import Grader
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.policy import load_policy
from groupwise.prepare.engines import judge_of
from groupwise.prepare.episodes import Turns, ended
from groupwise.prepare.placing import placed
from groupwise.prepare.rollouts import failed, grade, sample_groups, verdict
from groupwise.prepare.setup import check_room, sampling_of, set_up
from groupwise.records import Rollout, Task
from groupwise.sync.export import checkpoint_in

SHOWN = 6  # examples kept for people to read
PART = "eval/part/"


@dataclass(frozen=True)
class Evaluation:
    """Means over tasks: None without tasks; no accuracy where nothing says what is correct."""

    accuracy: float | None
    stderr: float | None  # of the accuracy, from the spread between tasks
    reward: float | None
    length: float | None
    truncated_share: float | None
    failed_share: float | None
    tasks: int
    samples: int
    examples: tuple[dict[str, Any], ...]
    # accuracy and reward of each of several sources, by its name
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    # of each task, in order: accuracy, or reward where nothing says what is correct
    scores: tuple[float | None, ...] = ()
    # the same of every metric that is a mean over tasks, by its name
    by_task: dict[str, list[float | None]] = field(default_factory=dict)
    # further metrics, by name: of a model that scores
    others: dict[str, float] = field(default_factory=dict)
    # mean of each part of a reward that has several, before its weight
    parts: dict[str, float] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        found: dict[str, float | None] = {
            **self.others,
            "eval/accuracy": self.accuracy,
            "eval/accuracy_stderr": self.stderr,
            "eval/reward": self.reward,
            "eval/length": self.length,
            "eval/truncated_share": self.truncated_share,
            "eval/failed_share": self.failed_share,
        }
        for source, values in self.sources.items():
            found |= {f"eval/source/{source}/{name}": x for name, x in values.items()}
        found |= {f"{PART}{name}": value for name, value in self.parts.items()}
        return {name: value for name, value in found.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return all but the values by task, which a run has in a separate file."""
        return {name: value for name, value in asdict(self).items() if name != "by_task"}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> Evaluation:
        lists = {name: tuple(stored.get(name, ())) for name in ("examples", "scores")}
        return cls(**(stored | lists))


def evaluate(
    engine: Engine,
    tokenizer: Tokenizer,
    grader: Grader,
    tasks: Sequence[Task],
    sampling: Sampling,
    samples: int,
    turns: Turns | None = None,
) -> Evaluation:
    """Sample every task `samples` times, and measure the answers."""
    groups = held_out_answers(engine, tokenizer, grader, tasks, sampling, samples, turns)
    return measured(tasks, groups, samples)


def held_out_answers(
    engine: Engine,
    tokenizer: Tokenizer,
    grader: Grader,
    tasks: Sequence[Task],
    sampling: Sampling,
    samples: int,
    turns: Turns | None = None,
) -> list[list[Rollout]]:
    """Return graded answers to every task. The draw number is always 0: evaluations compare."""
    if not tasks:
        return []
    named = [(task, 0) for task in tasks]
    written = sample_groups(engine, named, samples, sampling, "eval", turns=turns)
    return grade(grader, tokenizer, written)


def measured(
    tasks: Sequence[Task], groups: Sequence[Sequence[Rollout]], samples: int
) -> Evaluation:
    """Return means over tasks, of their answers."""
    if not tasks:
        return Evaluation(None, None, None, None, None, None, 0, samples, ())
    rows = [rollout for group in groups for rollout in group]
    right = [_mean([verdict(r.grade) for r in group]) for group in groups]
    rewards = [_mean([r.grade.reward for r in group]) for group in groups]
    known = [x for x in right if x is not None]
    accuracy = _mean(known)
    by_part = _by_part(groups)
    stderr = None
    if accuracy is not None and len(known) > 1:
        spread = sum((x - accuracy) ** 2 for x in known) / (len(known) - 1)
        stderr = math.sqrt(spread / len(known))
    return Evaluation(
        accuracy=accuracy,
        stderr=stderr,
        reward=_mean(rewards),
        length=sum(r.completion.own_length for r in rows) / len(rows),
        truncated_share=sum(r.completion.truncated for r in rows) / len(rows),
        failed_share=sum(failed(r.grade) for r in rows) / len(rows),
        tasks=len(tasks),
        samples=samples,
        examples=tuple(_example(group[0]) for group in groups[:SHOWN]),
        sources=_by_source(tasks, right, rewards),
        scores=tuple(rewards if accuracy is None else right),
        by_task=_by_task(tasks, groups, right, rewards)
        | {f"{PART}{name}": values for name, values in by_part.items()},
        parts={name: x for name, own in by_part.items() if (x := _mean(own)) is not None},
    )


def _by_part(groups: Sequence[Sequence[Rollout]]) -> dict[str, list[float | None]]:
    """Return each task's value of each part of the reward; none where the one part is all of it."""
    names = dict.fromkeys(name for group in groups for r in group for name in r.grade.parts)
    if len(names) < 2:
        return {}
    return {
        name: [_mean([r.grade.parts.get(name) for r in group]) for group in groups]
        for name in names
    }


def _by_task(
    tasks: Sequence[Task],
    groups: Sequence[Sequence[Rollout]],
    right: Sequence[float | None],
    rewards: Sequence[float | None],
) -> dict[str, list[float | None]]:
    """Return the values by task that each metric is the mean of; None where a task has none."""
    found = {
        "eval/accuracy": list(right),
        "eval/reward": list(rewards),
        "eval/length": [_mean([r.completion.own_length for r in group]) for group in groups],
        "eval/truncated_share": [_mean([r.completion.truncated for r in own]) for own in groups],
        "eval/failed_share": [_mean([failed(r.grade) for r in own]) for own in groups],
    }
    for source in sorted({task.source for task in tasks if task.source}):
        for name, values in (("accuracy", right), ("reward", rewards)):
            own = [
                x if task.source == source else None for task, x in zip(tasks, values, strict=True)
            ]
            found[f"eval/source/{source}/{name}"] = own
    return {name: own for name, own in found.items() if any(x is not None for x in own)}


def _by_source(
    tasks: Sequence[Task], right: Sequence[float | None], rewards: Sequence[float | None]
) -> dict[str, dict[str, float]]:
    """Return means over the tasks of each source, where there are several."""
    rows: dict[str, list[int]] = {}
    for row, task in enumerate(tasks):
        if task.source:
            rows.setdefault(task.source, []).append(row)
    found: dict[str, dict[str, float]] = {}
    for source, own in sorted(rows.items()):
        means = {
            "accuracy": _mean([right[i] for i in own]),
            "reward": _mean([rewards[i] for i in own]),
        }
        found[source] = {name: mean for name, mean in means.items() if mean is not None}
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(x) for x in values if x is not None]
    return sum(known) / len(known) if known else None


def _example(rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.task.prompt
    return {
        "prompt": prompt if isinstance(prompt, str) else prompt[-1].get("content", ""),
        "answer": rollout.task.answer,
        "completion": rollout.text,
        "reward": rollout.grade.reward,
        "correct": rollout.grade.correct,
    }


def evaluate_path(path: str | Path, config: Config) -> Evaluation:
    """Evaluate a model's folder or file, a checkpoint, or a run (its best checkpoint, else its
    latest).
    """
    model, config = checkpoint_in(path), placed(config, path=path)

    def policy(tasks: Sequence[Task], held_out: Sequence[Task]) -> Loaded:
        check_held_out(held_out[: config.eval.tasks])  # a look before the model is loaded
        check_room(config, model, training=False)
        return load_policy(model, getattr(torch, config.model.dtype), config.model.device)

    setup = set_up(config, policy, learns=False)
    check_held_out(setup.held_out)
    sampling = sampling_of(config, temperature=config.eval.temperature)
    engine = judge_of(config, setup.loaded)
    with ended(setup.turns):
        return evaluate(
            engine,
            setup.loaded.tokenizer,
            setup.grader,
            setup.held_out,
            sampling,
            config.eval.samples,
            setup.turns,
        )


def check_held_out(tasks: Sequence[Task]) -> None:
    if not tasks:
        raise DataError(
            "There are no held-out tasks to evaluate on. Set data.eval to a .jsonl file or to a "
            "generator, and eval.tasks to how many."
        )
