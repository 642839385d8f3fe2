"""Prompts ahead of a team whose first rank alone asks the engine: the others hear what came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from groupwise.data.cursor import TaskCursor
from groupwise.optim.assemble import Group
from groupwise.parallel.world import World
from groupwise.stages.ahead import Ahead
from groupwise.watch.clock import Clock

T = TypeVar("T")


class LedAhead(Ahead):
    """The first rank's prompts ahead, for all ranks; `own` is None on the others.

    Its engine samples, and its grader judges, beside what all ranks do together.
    """

    def __init__(self, own: Ahead | None, cursor: TaskCursor, world: World) -> None:
        self.own, self.cursor, self.world = own, cursor, world

    def take(self, prompts: int, clock: Clock) -> list[Group]:
        return self._told(lambda own: own.take(prompts, clock))

    def admit(self) -> None:
        self._told(lambda own: own.admit())

    def give_back(self) -> None:
        self._told(lambda own: own.give_back())

    def before_update(self, clock: Clock) -> None:
        self._told(lambda own: own.before_update(clock))

    def before_sync(self, clock: Clock) -> None:
        self._told(lambda own: own.before_sync(clock))

    def after_sync(self, version: int) -> None:
        self._told(lambda own: own.after_sync(version))

    def rest(self) -> None:
        self._told(lambda own: own.rest())

    def measures(self) -> dict[str, float]:
        return self._told(lambda own: own.measures())

    def close(self) -> None:
        if self.own is not None:
            self.own.close()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what the first rank writes down; there is nothing to be had from the others."""
        return ({}, {}) if self.own is None else self.own.state()

    def restore(self, said: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> None:
        if self.own is not None:
            self.own.restore(said, tensors)

    def _told(self, ask: Callable[[Ahead], T]) -> T:
        """Return what the first rank's says; all go on from where it left the prompts."""

        def asked() -> tuple[T, dict[str, Any]]:
            assert self.own is not None, "asked for on the first rank alone"
            return ask(self.own), self.cursor.state()

        found, place = self.world.first(asked)
        if self.own is None:
            self.cursor.restore(place)
        return found
