"""Environments as coroutines, which all shapes are wrapped into, and what they answer with."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from groupwise.envs.environment import Environment, Observation
from groupwise.errors import WorldError

if TYPE_CHECKING:
    from groupwise.records import Message


class AsyncEnvironment(ABC):
    """The world of one episode, as `Environment`, with coroutines in the place of functions.

    One that never waits for anything but the event loop may be `concurrent`: many of them live in
    one process then, and wait at the same time.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    concurrent = False
    calls = 1  # in one step, each with the time of one
    guards_itself = False  # keeps the time of its calls, and answers one that is too slow
    claimed = False  # begins when somebody outside claims it, all in one process

    async def prepare(self) -> None:
        """Find out what only asking tells, such as the tools of a server; called before `reset`."""
        return None

    @abstractmethod
    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin an episode with a row of the data."""

    @abstractmethod
    async def step(self, text: str) -> Observation:
        """Answer a turn of the policy."""

    async def outcome(self) -> float | None:
        """Return a reward of the whole episode; None: there is none."""
        return None

    def state(self) -> str | None:
        """Return a name of the present state; None: no name."""
        return None

    async def close(self) -> None:
        """Give back what the episode holds."""
        return None


class Alone(Environment):
    """An environment of coroutines, called plainly: it has an event loop of its own."""

    def __init__(self, inner: AsyncEnvironment) -> None:
        self.inner, self.tools = inner, inner.tools
        self.loop = asyncio.new_event_loop()

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.loop.run_until_complete(self.inner.prepare())
        self.tools = self.inner.tools
        return self.loop.run_until_complete(self.inner.reset(row))

    def step(self, text: str) -> Observation:
        return self.loop.run_until_complete(self.inner.step(text))

    def outcome(self) -> float | None:
        return self.loop.run_until_complete(self.inner.outcome())

    def state(self) -> str | None:
        return self.inner.state()

    def close(self) -> None:
        self.loop.run_until_complete(self.inner.close())
        self.loop.close()


class PlainWorld(AsyncEnvironment):
    """An `Environment` as one of coroutines."""

    def __init__(self, inner: Environment) -> None:
        self.inner, self.tools = inner, tuple(inner.tools)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return self.inner.reset(row)

    async def step(self, text: str) -> Observation:
        return self.inner.step(text)

    async def outcome(self) -> float | None:
        return self.inner.outcome()

    def state(self) -> str | None:
        return self.inner.state()

    async def close(self) -> None:
        self.inner.close()


async def settle(value: Any) -> Any:
    """Return a value, or what a coroutine returns."""
    return await value if inspect.isawaitable(value) else value


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the seed of an episode: the row's own, else a number made of the row.

    So all samples of a row begin alike, in every run.
    """
    own = row.get("seed")
    if isinstance(own, int) and not isinstance(own, bool):
        return own % 2**32
    return zlib.crc32(json.dumps(row, sort_keys=True, default=repr).encode())


def chosen(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a function has parameters for, or all if it takes the rest."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(known)
    for key, each in parameters.items():
        named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if named and each.default is each.empty and key not in known:
            raise WorldError(
                f"{getattr(function, '__qualname__', function)} asks for {key!r}, which is no "
                f"column of the data. The row has: {', '.join(map(str, known)) or 'none'}."
            )
    return {key: known[key] for key in parameters if key in known}


def messages_of(said: Any, role: str = "user") -> tuple[Message, ...]:
    """Return what an environment said as messages: a text, a message, a list of them, or None."""
    if said is None or (isinstance(said, (str, list, tuple)) and not len(said)):
        return ()
    if isinstance(said, str):
        return ({"role": role, "content": said},)
    if isinstance(said, Mapping) and "role" in said:
        return (plain_message(said),)
    if isinstance(said, (list, tuple)) and all(isinstance(each, Mapping) for each in said):
        return tuple(plain_message(each) for each in said)
    return ({"role": role, "content": as_text(said)},)


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with texts and plain values alone, so that it can go to another process."""
    found: dict[str, Any] = json.loads(json.dumps(dict(message), default=repr))
    if "role" not in found or "content" not in found:
        raise WorldError(
            f"An environment's message is {str(found)[:120]}, without role or content. Write "
            '{"role": "user", "content": ...}.'
        )
    return found


def as_text(value: Any) -> str:
    """Return a value as a text: one as it stands, others as JSON."""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump"):  # of pydantic
        value = value.model_dump()
    if hasattr(value, "tolist") and hasattr(value, "shape"):  # of an array library
        value = value.tolist()
    return json.dumps(value, ensure_ascii=False, default=repr)


def reward_of(value: Any, who: str) -> float | None:
    """Return a reward as a finite float, None as it is. Raises for what is none."""
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
        raise WorldError(f"{who} gave {str(value)[:80]!r} as a reward, which is no finite number.")
    return float(value)


def class_names(thing: Any) -> set[str]:
    """Return the names of a class, or of an object's, and of those that it is made from."""
    kind = thing if isinstance(thing, type) else type(thing)
    return {each.__name__ for each in kind.__mro__}


def has(thing: Any, *names: str) -> bool:
    """Return whether a class or an object has all these methods."""
    return all(callable(getattr(thing, name, None)) for name in names)


def waits(*functions: Any) -> bool:
    """Return whether all of these functions that are there are coroutine functions."""
    there = [each for each in functions if each is not None]
    return bool(there) and all(map(inspect.iscoroutinefunction, there))


def cut(text: str, most: int) -> str:
    """Return a text with at most so many characters of its beginning and end, the cut said."""
    if len(text) <= most:
        return text
    left = text[: most // 2] + f"\n[{len(text) - most} characters left out]\n"
    return left + text[len(text) - (most - most // 2) :]
