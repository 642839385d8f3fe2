"""Turns of a team: the first rank plays, and all ranks write what the policy says."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.engine.protocol import Done, Engine, Sampling
from groupwise.engine.team import LedEngine, TeamEngine
from groupwise.prepare.episodes import Turns
from groupwise.prepare.rollouts import SampledGroup
from groupwise.records import Task


class TeamTurns(Turns):
    """Environments are opened once, and hear each episode from one side: the first rank's."""

    def __init__(self, own: Turns) -> None:
        self.__dict__ |= vars(own)

    def sample(
        self,
        engine: Engine,
        prompts: Sequence[tuple[Task, int]],
        samples: int,
        sampling: Sampling,
        stream: str,
        done: Done | None = None,
    ) -> list[SampledGroup]:
        assert isinstance(engine, TeamEngine | LedEngine)
        play = super().sample
        return engine.led(lambda own: play(own, prompts, samples, sampling, stream, done))
