"""Environments that are the row's: one of several by a column, or made of the row by a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from groupwise.envs.answering import AsyncEnvironment, settle
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError, nearest

COLUMN = "environment"


class ByColumn(AsyncEnvironment):
    """One of several environments, as the row says. The policy is shown the tools of all."""

    def __init__(self, worlds: Mapping[str, AsyncEnvironment]) -> None:
        if not worlds:
            raise WorldError("The table of environments is empty. Name a class for each kind.")
        self.worlds = worlds
        self.concurrent = all(each.concurrent for each in worlds.values())
        self.calls = max(each.calls for each in worlds.values())
        self.guards_itself = all(each.guards_itself for each in worlds.values())
        self.chosen = next(iter(worlds.values()))
        tools = {each["function"]["name"]: each for w in worlds.values() for each in w.tools}
        self.tools = tuple(tools.values())

    async def prepare(self) -> None:
        for world in self.worlds.values():
            await world.prepare()

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        name = str(row.get(COLUMN))
        if name not in self.worlds:
            raise WorldError(
                f"The row's {COLUMN} is {name!r}, which no class stands for. "
                f"{nearest(name, self.worlds)}"
            )
        self.chosen = self.worlds[name]
        return await self.chosen.reset(row)

    async def step(self, text: str) -> Observation:
        return await self.chosen.step(text)

    async def outcome(self) -> float | None:
        return await self.chosen.outcome()

    def state(self) -> str | None:
        return self.chosen.state()

    async def close(self) -> None:
        for world in self.worlds.values():
            await world.close()


class MadeOfRow(AsyncEnvironment):
    """An environment that a function makes of the row, when an episode begins.

    Nothing is known of it before, so it has a process of its own and no tools.
    """

    def __init__(
        self, make: Callable[..., Any], wrap: Callable[[Any], AsyncEnvironment], options: Any
    ) -> None:
        self.make, self.wrap, self.options = make, wrap, options
        self.inner: AsyncEnvironment | None = None

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.inner = self.wrap(await settle(self.make(row=dict(row), **self.options)))
        if self.inner.tools:
            raise WorldError(
                "A function that makes an environment of the row made one with tools, which the "
                "policy has to be shown before there is a row. Name the class itself."
            )
        return await self.inner.reset(row)

    async def step(self, text: str) -> Observation:
        assert self.inner is not None
        return await self.inner.step(text)

    async def outcome(self) -> float | None:
        return None if self.inner is None else await self.inner.outcome()

    def state(self) -> str | None:
        return None if self.inner is None else self.inner.state()

    async def close(self) -> None:
        if self.inner is not None:
            await self.inner.close()
