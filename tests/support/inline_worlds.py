"""Environments in this process, one after the other: for those that are quick and can't hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.envs.environment import Environment, Observation
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import in_short


class InlineWorlds(Worlds):
    """Asks each environment at once, and hands its answer in when it is asked for."""

    def __init__(
        self, make: Callable[[], Environment], tools: tuple[Mapping[str, Any], ...] = ()
    ) -> None:
        self.make, self.tools = make, tools
        self.there: dict[int, Environment] = {}
        self.ready: list[tuple[int, Answered | Fault]] = []

    def begin(self, episode: int, row: Mapping[str, Any]) -> None:
        self._answer(episode, lambda: self._made(episode).reset(row))

    def step(self, episode: int, text: str) -> None:
        self._answer(episode, lambda: self.there[episode].step(text))

    def finish(self, episode: int) -> None:
        self._answer(episode, lambda: Observation(), last=True)

    def drop(self, episode: int) -> None:
        self.ready = [each for each in self.ready if each[0] != episode]
        gone = self.there.pop(episode, None)
        if gone is not None:
            gone.close()

    def answers(self, wait: float) -> list[tuple[int, Answered | Fault]]:
        found, self.ready = self.ready, []
        return found

    def close(self) -> None:
        for episode in list(self.there):
            self.drop(episode)

    def _made(self, episode: int) -> Environment:
        self.there[episode] = self.make()
        return self.there[episode]

    def _answer(self, episode: int, call: Callable[[], Observation], *, last: bool = False) -> None:
        begun = time.monotonic()

        def seconds() -> float:
            return time.monotonic() - begun

        try:
            said = call()
            world = self.there[episode]
            outcome = world.outcome() if last else None
            answer: Answered | Fault = Answered(said, world.state(), outcome, seconds())
        except Exception as error:  # of the environment: its episode alone is over
            answer = Fault("error", in_short(error), seconds())
        if last or isinstance(answer, Fault):
            self.drop(episode)
        self.ready.append((episode, answer))
