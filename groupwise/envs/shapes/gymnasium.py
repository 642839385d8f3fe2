"""Environments of Gymnasium's kind: `reset(seed)`, `step(action)` -> five values (GEM too), and
TextArena's games, which are near it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import (
    AsyncEnvironment,
    class_names,
    has,
    messages_of,
    reward_of,
    seed_of,
    settle,
    waits,
)
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError


class Gymnasium(AsyncEnvironment):
    """An environment whose `step` returns observation, reward, terminated, truncated and info."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        names = ("reset", "step", "close")
        self.concurrent = waits(*(getattr(inner, name, None) for name in names))

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        found = await settle(self.inner.reset(seed=seed_of(row)))
        if not isinstance(found, tuple) or len(found) != 2:
            raise WorldError(
                f"{type(self.inner).__name__}.reset(seed) returned {str(found)[:80]!r}. With a "
                "`seed`, it is one of Gymnasium's, and returns observation and info. An "
                "environment of ours takes columns of the row instead: reset(self, **row)."
            )
        return Observation(messages_of(found[0]))

    async def step(self, text: str) -> Observation:
        action = self._action(text)
        if action is None:
            return Observation(messages_of(f"{text.strip()[:80]!r} is no action: {self._asked()}."))
        found = await settle(self.inner.step(action))
        if not isinstance(found, tuple) or len(found) != 5:
            raise WorldError(
                f"{type(self.inner).__name__}.step returned {str(found)[:80]!r}. With reset(seed) "
                "it is one of Gymnasium's, and returns observation, reward, terminated, truncated "
                "and info."
            )
        said, reward, terminated, truncated, _ = found
        done = bool(terminated) or bool(truncated)
        return Observation(messages_of(said), reward_of(reward, "step"), done)

    def _action(self, text: str) -> Any:
        """Return the text, or a number where the actions are numbered; None: it is no action."""
        space = getattr(self.inner, "action_space", None)
        if space is None or not hasattr(space, "n"):
            return text
        start = int(getattr(space, "start", 0))
        words = text.split()
        number = words[-1] if words else ""
        known = number.lstrip("-").isdecimal() and start <= int(number[:20]) < start + int(space.n)
        return int(number) if known else None

    def _asked(self) -> str:
        space = self.inner.action_space
        start = int(getattr(space, "start", 0))
        return f"end with a number from {start} to {start + int(space.n) - 1}"

    async def close(self) -> None:
        if has(self.inner, "close"):
            await settle(self.inner.close())


def is_gymnasium(thing: Any) -> bool:
    """Tell by `reset(seed=...)` without a column that it needs."""
    if not has(thing, "reset", "step"):
        return False
    parameters = inspect.signature(thing.reset).parameters
    needed = [
        key
        for key, each in parameters.items()
        if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
    ]
    return "seed" in parameters and set(needed) <= {"self", "seed"}


class TextArena(AsyncEnvironment):
    """A game of TextArena for one player: `reset(num_players, seed)`, `get_observation()`,
    `step(action)` -> done and info; rewards come with `close()`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = _told_once(inner)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.inner.reset(num_players=1, seed=seed_of(row))
        return Observation(messages_of(self._said()))

    async def step(self, text: str) -> Observation:
        done, _ = self.inner.step(action=text)
        if not done:
            return Observation(messages_of(self._said()))
        rewards = self.inner.close()
        found = rewards[0] if isinstance(rewards, tuple) else rewards
        return Observation(reward=reward_of((found or {}).get(0), "close"), done=True)

    def _said(self) -> str:
        """Return what is new to the player. Bare games give records of (who, words, kind)."""
        _, said = self.inner.get_observation()
        if isinstance(said, str):
            return said
        return "\n".join(str(words) for who, words, *_ in said if who != 0)


def _told_once(game: Any) -> Any:
    """Return a game without the wrappers that tell all of it again at each turn."""
    while any(name.endswith("ObservationWrapper") for name in class_names(game)):
        game = game.env
    if "env" in vars(game):
        game.env = _told_once(game.env)
    return game


def is_textarena(thing: Any) -> bool:
    return has(thing, "reset", "step", "get_observation", "close")
