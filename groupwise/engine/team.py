"""The engines of a team: one on every rank, each with its share of the requests, or one for all.

Samples are named by their keys, so they are those of one process, whoever draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.engine.batch import BatchEngine
from groupwise.engine.protocol import (
    Capabilities,
    Engine,
    Request,
    Sampling,
    State,
    WeightSource,
)
from groupwise.parallel.world import World
from groupwise.records import Completion


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

    def sync(self, version: int) -> None:
        self.deliver()
        self.own.sync(version)
        super().sync(version)

    def state(self) -> State:
        return self.own.state()

    def restore(self, state: State) -> None:
        self.own.restore(state)


class LeadEngine(BatchEngine):
    """An engine of the first rank alone, such as servers: it answers everybody's requests."""

    def __init__(
        self,
        make: Callable[[], Engine],
        can: Capabilities,
        world: World,
        deliver: Callable[[], None],
    ) -> None:
        self.capabilities, self.world, self.deliver = can, world, deliver
        self.own = world.together(lambda: make() if world.leads else None)

    @property
    def lead(self) -> Engine:
        """Return the engine, where there is one."""
        assert self.own is not None
        return self.own

    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self.world.first(lambda: self.lead.generate(requests, sampling))

    def sync(self, version: int) -> None:
        self.deliver()
        self.world.first(lambda: self.lead.sync(version))
        super().sync(version)

    def measures(self) -> dict[str, float]:
        return self.world.first(lambda: self.lead.measures())

    def state(self) -> State:
        return self.lead.state() if self.world.leads else {}

    def restore(self, state: State) -> None:
        if self.world.leads:
            self.lead.restore(state)
