"""Answers that the reference writes: the previous iterate of a method that plays against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.engine.protocol import Engine
from groupwise.errors import RecipeError
from groupwise.optim.assemble import Group
from groupwise.prepare.engines import judge_of
from groupwise.records import Rollout
from groupwise.stages.parts import Parts
from groupwise.stages.policy_answers import PolicyAnswers
from groupwise.watch.clock import Clock


class ReferenceAnswers(PolicyAnswers):
    """Samples from the reference, which stays the same until `reference.update` moves it on."""

    def __init__(self, config: Config, place: str) -> None:
        if place:
            raise RecipeError(
                f"recipe.source=reference:{place} would sample from this run's reference all the "
                "same. Write recipe.source=reference."
            )
        super().__init__(config, place)
        self._engine: Engine | None = None  # made once: the reference's weights stay in place

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the next prompts, answered by the reference and graded."""
        reference = parts.learner.roles["reference"]
        if self._engine is None:
            loaded = replace(parts.loaded, model=reference.model)
            self._engine = judge_of(self.config, loaded)
        self._engine.sync(reference.version(parts.learner.optimizer.steps))
        drawn = super().draw(replace(parts, engine=self._engine), cursor, prompts, clock)
        return [[_named(rollout) for rollout in group] for group in drawn]


def _named(rollout: Rollout) -> Rollout:
    return replace(rollout, completion=replace(rollout.completion, weights="reference"))
