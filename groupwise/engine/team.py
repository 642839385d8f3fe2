"""Engines of a team: one on every rank, each with its share of the requests; or one of the first.

Samples are named by their keys, so they are those of one process, whoever draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import Capabilities, Engine, Request, Sampling, State, WeightSource
from groupwise.parallel.world import World
from groupwise.records import Completion

T = TypeVar("T")
Asked = tuple[Sequence[Request], Sampling]


class TeamEngine(BatchEngine):
    """Shares requests out to the ranks' engines, whose model is whole; `deliver` makes it new."""

    def __init__(self, own: Engine, world: World, deliver: Callable[[], None]) -> None:
        self.own, self.world, self.deliver = own, world, deliver
        self.capabilities = own.capabilities

    @property
    def places(self) -> int:  # type: ignore[override]
        """Return how many sequences are in flight at a time, on all ranks."""
        return self.own.places * self.world.size

    @property
    def source(self) -> WeightSource | None:  # type: ignore[override]
        """Return the weights of this rank's engine."""
        return self.own.source

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        mine = range(self.world.rank, len(requests), self.world.size)

        def answered() -> list[list[Completion]]:
            asked = [requests[number] for number in mine]
            return self.own.generate(asked, sampling) if asked else []

        return self.world.merge(dict(zip(mine, self.world.together(answered), strict=True)))

    def led(self, play: Callable[[Engine], T]) -> T:
        """Return what the first rank makes of all ranks' engines: it alone says what to write."""

        def write(asked: Asked) -> list[list[Completion]]:
            return self.generate(*asked)

        return self.world.led(lambda ask: play(AskedEngine(self, ask)), write)

    def sync(self, version: int) -> None:
        self.deliver()
        self.own.sync(version)
        super().sync(version)

    def state(self) -> State:
        return self.own.state()

    def restore(self, state: State) -> None:
        self.own.restore(state)

    def close(self) -> None:
        self.own.close()


class AskedEngine(BatchEngine):
    """All ranks' engines as the first one sees them while it leads: `ask` has all of them write."""

    def __init__(self, team: TeamEngine, ask: Callable[[Asked], list[list[Completion]]]) -> None:
        self.ask, self.capabilities = ask, team.capabilities

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.ask((requests, sampling))


class LedEngine(BatchEngine):
    """The first rank's engine: servers, or copies that are kept elsewhere, are asked by one alone.

    `own` is None on the other ranks, which are told what it answered. The whole weights are
    brought together on every rank before it takes them.
    """

    def __init__(self, own: Engine | None, world: World, deliver: Callable[[], None]) -> None:
        self.own, self.world, self.deliver = own, world, deliver
        self.capabilities: Capabilities = world.first(lambda: self._own.capabilities)
        self.places: int = world.first(lambda: self._own.places)

    @property
    def _own(self) -> Engine:
        assert self.own is not None, "asked for on the first rank alone"
        return self.own

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        found, self.places = self.world.first(
            lambda: (self._own.generate(requests, sampling), self._own.places)
        )
        return found

    def sync(self, version: int) -> None:
        self.deliver()
        self.world.first(lambda: self._own.sync(version))
        super().sync(version)

    def led(self, play: Callable[[Engine], T]) -> T:
        """Return what the first rank makes of its engine."""
        return self.world.first(lambda: play(self._own))

    def measures(self) -> dict[str, float]:
        return self.world.first(lambda: self._own.measures())

    def state(self) -> State:
        return self.world.first(lambda: self._own.state())

    def restore(self, state: State) -> None:
        self.world.first(lambda: self._own.restore(state))

    def close(self) -> None:
        if self.own is not None:
            self.own.close()


def team_engine(
    make: Callable[[], Engine], world: World, deliver: Callable[[], None], *, led: bool
) -> Engine:
    """Return who samples for all ranks; `led` is said of engines that the first rank alone has."""
    if world.size == 1:
        return make()
    if not led:
        return TeamEngine(make(), world, deliver)
    return LedEngine(world.together(lambda: make() if world.leads else None), world, deliver)
