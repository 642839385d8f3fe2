"""Environments that are given the policy's text: the house's own shape, and skyrl-gym's."""

from __future__ import annotations

from collections.abc import Mapping
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
from groupwise.envs.shapes.tools import state_of
from groupwise.errors import WorldError, nearest

BOOLS = ("bool", "bool_")  # Python's and numpy's
KEYS = ("text", "messages", "reward", "done")


class House(AsyncEnvironment):
    """A class with `reset(**row)` and `step(text)`, which answers as little as it needs to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        names = ("reset", "step", "get_reward", "close")
        self.concurrent = waits(*(getattr(inner, name, None) for name in names))

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        found = await settle(self.inner.reset(**chosen(self.inner.reset, row)))
        return Observation(messages_of(found))

    async def step(self, text: str) -> Observation:
        return answer_of(await settle(self.inner.step(text)), f"{type(self.inner).__name__}.step")

    async def outcome(self) -> float | None:
        if not has(self.inner, "get_reward"):
            return None
        return reward_of(await settle(self.inner.get_reward()), "get_reward")

    def state(self) -> str | None:
        return state_of(self.inner)

    async def close(self) -> None:
        if has(self.inner, "close"):
            await settle(self.inner.close())


def answer_of(found: Any, who: str) -> Observation:
    """Read the answer to a turn: text | (text, reward, done) | dict."""
    if isinstance(found, Observation):
        return found
    if found is None or isinstance(found, str):
        return Observation(messages_of(found))
    if isinstance(found, tuple) and len(found) == 3 and type(found[2]).__name__ in BOOLS:
        text, reward, done = found
        return Observation(messages_of(text), reward_of(reward, who), bool(done))
    if isinstance(found, Mapping):
        for key in found:
            if key not in KEYS:
                raise WorldError(f"{who} returned a dict with {key!r}. {nearest(key, KEYS)}")
        said = found.get("messages", found.get("text"))
        return Observation(
            messages_of(said), reward_of(found.get("reward"), who), bool(found.get("done"))
        )
    raise WorldError(
        f"{who} returned {type(found).__name__}: {str(found)[:80]!r}. It returns a text, "
        f"(text, reward, done), or a dict of {', '.join(KEYS)}."
    )


class SkyRL(AsyncEnvironment):
    """skyrl-gym's `BaseTextEnv`: `init(prompt)`, then `step(action)` -> a dict of observations,
    reward, done and metadata.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        names = ("init", "step", "close")
        self.concurrent = waits(*(getattr(inner, name, None) for name in names))

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin with the prompt; what it puts behind that is said to the policy."""
        prompt = list(messages_of(row.get("prompt")))
        found = await settle(self.inner.init([dict(message) for message in prompt]))
        said = found[0] if isinstance(found, tuple) else found
        given = list(messages_of(said))
        if given[: len(prompt)] != prompt:
            raise WorldError(
                f"{type(self.inner).__name__}.init changes the prompt, which has been encoded "
                "already. Let it return the prompt as it is, with its own messages behind it."
            )
        return Observation(tuple(given[len(prompt) :]))

    async def step(self, text: str) -> Observation:
        found = await settle(self.inner.step(text))
        if not isinstance(found, Mapping) or not {"observations", "reward", "done"} <= set(found):
            raise WorldError(
                f"{type(self.inner).__name__}.step returned {str(found)[:80]!r}. With `init`, it "
                "is one of skyrl-gym's, and returns a dict of observations, reward and done."
            )
        return Observation(
            messages_of(found["observations"]),
            reward_of(found["reward"], "step"),
            bool(found["done"]),
        )

    async def close(self) -> None:
        if has(self.inner, "close"):
            await settle(self.inner.close())
