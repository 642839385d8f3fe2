"""Rows with labelled steps: answers of the data or the model, and others that go on from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from groupwise.config import Config
from groupwise.engine.protocol import Engine, Sampling
from groupwise.errors import ConfigError, DataError
from groupwise.groups.steps import step_ends
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.answers import answer_ids, answer_text
from groupwise.prepare.branches import Point, grade_branches, write_branches
from groupwise.prepare.engines import MakeEngine, judge_of
from groupwise.prepare.placing import placed
from groupwise.prepare.rollouts import SampledGroup, grade, sample_groups
from groupwise.prepare.setup import Setup, sampling_of, set_up
from groupwise.probing.findings import PassRule, passing
from groupwise.probing.probe import ProbeRequest, check, first_prompts, policy_for
from groupwise.probing.step_labels import (
    KINDS,
    Search,
    Verdicts,
    any_right,
    first_error,
    hard_labels,
    labels_up_to,
    soft_labels,
)
from groupwise.records import Completion, Rollout, Task

BRANCHES, PROMPTS = 8, 32

TOO_LONG = "the answer has as many tokens as engine.max_tokens or more: none is left to go on with"
BLANK = "the answer is blank: it has no steps"
OTHER_TEXT = "its steps do not join to its text: the tokenizer writes it otherwise"
UNGRADED = "a step has no graded answer behind it"
HOPELESS = "no answer of the model to its prompt is right, or one could not be graded"


@dataclass(frozen=True)
class LabelRequest:
    """Which answers get which labels."""

    kind: str = "hard"  # one of `KINDS`
    branches: int = BRANCHES  # answers that go on behind a step
    split: str = "line"
    prompts: int = PROMPTS
    column: str = ""  # of the data, with the answers; "": the model writes them
    samples: int = 1  # of the model to each prompt


@dataclass(frozen=True)
class LabelledRow:
    """Steps of an answer, up to where labels go, and a label for each.

    They are written without the white space around them: what stands between two steps is the
    separator of whoever learns from them, and a step that ended in one would be two.
    """

    prompt: Any
    completions: list[str]
    labels: Sequence[bool | float]

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "completions": [step.strip() for step in self.completions],
            "labels": list(self.labels),
        }


@dataclass
class Labelled:
    """The rows, what was left out and why, and what it took."""

    rows: list[LabelledRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    branches: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class SteppedAnswer:
    """An answer with the last token of each of its steps, and their texts."""

    rollout: Rollout
    ends: list[int]
    texts: list[str]

    @property
    def steps(self) -> int:
        return len(self.ends)


@dataclass
class PreparedLabels:
    """Labels in the making: all that they are made with, loaded and checked. `run` samples."""

    asked: LabelRequest
    setup: Setup
    engine: Engine
    passing: PassRule
    tasks: list[Task]
    sampling: Sampling

    def run(self) -> Labelled:
        """Answer, split, go on from steps, label."""
        made, tokenizer = Labelled(), self.setup.loaded.tokenizer
        answers = list(self._split(self._answers(), made.left_out))
        if self.asked.kind == "first-error":
            self._search(answers, made)
            return made
        make = hard_labels if self.asked.kind == "hard" else soft_labels
        points = [(each.rollout, end + 1) for each in answers for end in each.ends[:-1]]
        verdicts = iter(self._verdicts(points, tokenizer, made))
        for each in answers:
            own = [self.passing.passed(each.rollout.grade)]
            labels = make([*(next(verdicts) for _ in each.ends[:-1]), own])
            if labels is None:
                made.left_out[UNGRADED] += 1
            else:
                made.rows.append(LabelledRow(each.rollout.task.prompt, each.texts, labels))
        return made

    def _answers(self) -> list[Rollout]:
        grader, loaded = self.setup.grader, self.setup.loaded
        if not self.asked.column:
            named = [(task, 0) for task in self.tasks]
            written = sample_groups(
                self.engine, named, self.asked.samples, self.sampling, stream="probe"
            )
        else:
            written = [
                SampledGroup(task, 0, [data_answer(task, self.asked.column, loaded.tokenizer)])
                for task in self.tasks
            ]
        groups = grade(grader, loaded.tokenizer, written)
        return [rollout for group in groups for rollout in group]

    def _split(self, answers: Sequence[Rollout], left_out: Counter[str]) -> Iterator[SteppedAnswer]:
        for rollout in answers:
            if self.asked.column and rollout.completion.own_length > self.sampling.max_tokens:
                left_out[TOO_LONG] += 1
                continue
            split = stepped(rollout, self.setup.loaded.tokenizer, self.asked.split)
            whole = "".join(split.texts)
            own = self.asked.column and answer_text(rollout.task, self.asked.column)
            if own and whole != own:
                left_out[OTHER_TEXT] += 1
            elif not whole.strip():
                left_out[BLANK] += 1
            else:
                yield split

    def _search(self, answers: Sequence[SteppedAnswer], made: Labelled) -> None:
        """Search all answers at once, a question of each at a time: the engine is kept busy."""
        tokenizer = self.setup.loaded.tokenizer
        running: dict[int, tuple[Search, int]] = {}
        for number, each in enumerate(answers):
            begun = first_error(each.steps)
            running[number] = (begun, next(begun))
        found: dict[int, int | None] = {}
        while running:
            asked = {n: at for n, (_, at) in running.items() if at < answers[n].steps}
            points = [
                (answers[n].rollout, answers[n].ends[at - 1] + 1 if at else 0)
                for n, at in asked.items()
            ]
            seen = dict(zip(asked, self._verdicts(points, tokenizer, made), strict=True))
            for n, (searching, _) in list(running.items()):
                own = [self.passing.passed(answers[n].rollout.grade)]
                try:
                    running[n] = (searching, searching.send(any_right(seen.get(n, own))))
                except StopIteration as end:
                    found[n] = end.value
                    del running[n]
        for n, each in enumerate(answers):
            right = found[n]
            if right is None:
                made.left_out[HOPELESS] += 1
                continue
            labels = labels_up_to(right, each.steps)
            prompt, kept = each.rollout.task.prompt, each.texts[: len(labels)]
            made.rows.append(LabelledRow(prompt, kept, labels))

    def _verdicts(
        self, points: Sequence[Point], tokenizer: Tokenizer, made: Labelled
    ) -> list[Verdicts]:
        written = write_branches(self.engine, points, self.asked.branches, self.sampling)
        graded = grade_branches(self.setup.grader, tokenizer, written)
        made.branches += sum(map(len, graded))
        made.tokens += sum(r.completion.own_length for group in graded for r in group)
        return [[self.passing.passed(r.grade) for r in group] for group in graded]


def prepare_labels(
    config: Config,
    asked: LabelRequest,
    *,
    checkpoint: Path | None = None,
    engine: MakeEngine | None = None,
) -> PreparedLabels:
    """Prepare everything that can fail, before anything is sampled."""
    config = placed(config)
    check_request(config, asked)

    def model_for(tasks: Sequence[Task], held_out: Sequence[Task]) -> Loaded:
        if asked.column:
            check_answers(tasks, asked.column)
        return policy_for(config, checkpoint, tasks, held_out)

    setup = set_up(config, model_for, learns=False)
    return PreparedLabels(
        asked=asked,
        setup=setup,
        engine=judge_of(config, setup.loaded, engine),
        passing=passing(setup.grader, None),
        tasks=first_prompts(config, setup, asked.prompts),
        sampling=sampling_of(config),
    )


def check_request(config: Config, asked: LabelRequest) -> None:
    """Refuse what would label nothing, before a model is loaded."""
    check(config, (config.data.template,), (config.engine.temperature,), ProbeRequest())
    if asked.kind not in KINDS:
        raise ConfigError(f"--labels {asked.kind} is unknown. Choose one of {', '.join(KINDS)}.")
    counts = {"branches": asked.branches, "prompts": asked.prompts, "samples": asked.samples}
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"--{name} {value} is too few. Take 1 or more.")
    if asked.column and asked.samples > 1:
        raise ConfigError(
            f"--samples {asked.samples} would be ignored: --answers {asked.column} takes the one "
            "answer that each row has. Leave one of the two out."
        )


def check_answers(tasks: Sequence[Task], column: str) -> None:
    """Refuse rows without the answers that were asked for, before there is a model."""
    for task in tasks:
        try:
            answer_text(task, column)
        except DataError:
            has = ", ".join(sorted(task.columns)) or "none"
            raise DataError(
                f"Row {task.id} has no text in column {column!r}, which --answers names (its other "
                f"columns: {has}). Name the column with the answers, or leave --answers out: then "
                "the model writes them."
            ) from None


def data_answer(task: Task, column: str, tokenizer: Tokenizer) -> Completion:
    """Return an answer of the data as if it had been sampled, without its probabilities."""
    ids = answer_ids(task, column, tokenizer)
    return Completion(ids, torch.zeros(len(ids)), "eos", version=-1, weights="data")


def stepped(rollout: Rollout, tokenizer: Tokenizer, split: str) -> SteppedAnswer:
    """Split an answer at the ends of its steps; an end token has no text of its own."""
    ids = list(rollout.completion.token_ids)
    while ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    if not ids:
        return SteppedAnswer(rollout, [], [])
    ends = step_ends(tokenizer.decode_all([[number] for number in ids]), split)
    whole = tokenizer.decode_all([ids[: end + 1] for end in ends])
    texts = [after[len(before) :] for before, after in pairwise(["", *whole])]
    return SteppedAnswer(rollout, ends, texts)
