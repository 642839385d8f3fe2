"""Several environments at once: which of them is a row's is said by its column `environment`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import AsyncEnvironment
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
