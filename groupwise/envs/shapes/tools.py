"""Tools and nothing else, and classes whose public methods are the tools (TRL's factories)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.envs.answering import (
    AsyncEnvironment,
    chosen,
    has,
    messages_of,
    reward_of,
    settle,
    waits,
)
from groupwise.envs.environment import Observation
from groupwise.envs.toolbox import Tool, Toolbox, tool
from groupwise.errors import WorldError

NO_TOOLS = ("reset", "get_reward", "close", "state")


class WithTools(AsyncEnvironment):
    """Functions as tools: a turn that calls none of them is the answer."""

    guards_itself = True

    def __init__(self, box: Toolbox) -> None:
        self.box, self.tools = box, box.schemas
        self.concurrent, self.calls = box.concurrent, box.parallel_calls

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return Observation()

    async def step(self, text: str) -> Observation:
        return await self.box.answer(text)


class MethodTools(WithTools):
    """A class with `reset(**row)` whose public methods are tools, with `get_reward` if it likes."""

    def __init__(self, inner: Any, box: Toolbox) -> None:
        super().__init__(box)
        self.inner = inner
        own = [getattr(inner, name, None) for name in ("reset", "get_reward", "close")]
        self.concurrent = box.concurrent and waits(*own)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        said = await settle(self.inner.reset(**chosen(self.inner.reset, row)))
        return Observation(messages_of(said))

    async def outcome(self) -> float | None:
        if not has(self.inner, "get_reward"):
            return None
        return reward_of(await settle(self.inner.get_reward()), "get_reward")

    def state(self) -> str | None:
        return state_of(self.inner)

    async def close(self) -> None:
        if has(self.inner, "close"):
            await settle(self.inner.close())


def has_method_tools(thing: Any) -> bool:
    return has(thing, "reset") and not has(thing, "step") and bool(_public(thing))


def methods_of(inner: Any) -> list[Tool]:
    """Return the public methods of an environment as tools."""
    return [tool(getattr(inner, name), name) for name in _public(inner)]


def _public(thing: Any) -> Sequence[str]:
    kind = thing if isinstance(thing, type) else type(thing)
    return [
        name
        for name, each in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NO_TOOLS
    ]


def state_of(inner: Any) -> str | None:
    """Return what an environment's `state()` names its state, if it has one that is a text."""
    found = inner.state() if has(inner, "state") else None
    if found is None or isinstance(found, str):
        return found
    if inspect.iscoroutine(found):
        found.close()
    raise WorldError(
        f"{type(inner).__name__}.state() returned {type(found).__name__}. It names the state that "
        "the episode is in: return a text, or None."
    )
