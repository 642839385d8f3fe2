"""`environment`: the reward that an episode's environment gave, for its turns and for the whole."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.graders.parts import Mark, SampleToGrade
from groupwise.records import Task

NAME = "environment"  # in reward.parts


class EnvironmentReward:
    """Hands on what the environment said; an episode with at least 1 counts as correct."""

    decides = True
    needs_answers = False
    of_episodes = True  # there is nothing to try before one is played

    def problem(self, task: Task) -> str:
        return ""

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        return [self._mark(sample) for sample in samples]

    def _mark(self, sample: SampleToGrade) -> Mark:
        if sample.episode is None or sample.episode.reward is None:
            return Mark(status="abstained", reason="the environment gave no reward")
        return Mark(sample.episode.reward)


def environment(ends: Sequence[str]) -> EnvironmentReward:
    return EnvironmentReward()
