"""Answers that the policy writes, graded by the run's reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.data.group_sizes import group_sizes
from groupwise.errors import RecipeError
from groupwise.optim.assemble import Group
from groupwise.prepare.rollouts import ConcurrentGrading, grade, sample_groups
from groupwise.prepare.setup import sampling_of
from groupwise.stages.parts import Parts
from groupwise.watch.clock import Clock


class PolicyAnswers:
    """Samples `group_size` answers to each prompt, or as many as its pass rate asks for."""

    sampled = True

    def __init__(self, config: Config, place: str) -> None:
        if place:
            raise RecipeError(
                f"recipe.source=policy:{place} would sample from this run's policy all the same. "
                "Write recipe.source=policy."
            )
        self.config = config

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the next prompts, answered and graded."""
        if parts.ahead is not None:
            return parts.ahead.take(prompts, clock)
        chosen = [(parts.tasks[d.task], d.number) for d in cursor.take(prompts)]
        sampling = sampling_of(
            self.config,
            record_top_k=parts.learner.sampler_top_k,
            record_routes=self.config.engine.record_routes or parts.learner.replays_sampler,
        )
        beside = ConcurrentGrading(parts.grader, parts.loaded.tokenizer, chosen, parts.known)
        with clock("rollout"), beside:
            samples = self._samples([cursor.rate(task) for task, _ in chosen])
            written = sample_groups(
                parts.engine, chosen, samples, sampling, done=beside.take, turns=parts.turns
            )
        with clock("grade"):
            return beside.rollouts(written)

    def _samples(self, rates: Sequence[float | None]) -> int | list[int]:
        """Return how many answers each prompt gets."""
        size, rule = self.config.group_size, self.config.curriculum
        if rule.group_sizes == "equal":
            return size
        return group_sizes(rates, size, least=rule.least, most=rule.most)


def greedy(config: Config, parts: Parts[Any], groups: Sequence[Group], clock: Clock) -> list[Group]:
    """Return each group's greedy completion, for a recipe whose baseline it is."""
    # Its number is -1: beside the group's own.
    prompts = [(group[0].task, group[0].draw) for group in groups]
    with clock("rollout"):
        likeliest = sampling_of(config, temperature=0.0)
        written = sample_groups(parts.engine, prompts, 1, likeliest, turns=parts.turns)
    with clock("grade"):
        return grade(parts.grader, parts.loaded.tokenizer, written, parts.known, first=-1)
