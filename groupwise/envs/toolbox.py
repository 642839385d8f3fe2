"""Tools that a policy may call, and the answer to a turn with calls in it.

What goes wrong with a call is said to the policy and counted: it names no tool, its arguments do
not fit, it is one too many, it raises, it takes too long.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from groupwise.common.forked import one_process
from groupwise.envs.answering import as_text, cut
from groupwise.envs.environment import Call, CallStatus, Observation
from groupwise.envs.schemas import Unfit, fitted, schema_of
from groupwise.envs.tool_calls import Asked, CallReader, Misread
from groupwise.errors import WorldError, nearest

# Characters of an answer that leave the process of a tool: floods end there. What of it the
# policy is shown is decided by who runs the episode.
MOST_CHARACTERS = 100_000
WORDS = 1_000  # characters of what an exception says

Fit = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Readers = Callable[[Sequence[Mapping[str, Any]]], CallReader]  # of calls, by the tools' schemas


@dataclass(frozen=True)
class Tool:
    """A tool under its name: what calls it, and what its arguments must be."""

    name: str
    schema: Mapping[str, Any]
    function: Callable[..., Any]
    fit: Fit = dict  # the arguments of a call, as the function takes them; raises `Unfit`
    concurrent: bool = False  # waits for nothing but the event loop
    keeps_time: bool = False  # by itself: waiting for its turn is not counted


class ToolFailed(Exception):
    """A failure that a tool reports in words of its own."""


class TooSlow(BaseException):
    """The end of a call that takes too long; no `except Exception` of the tool swallows it."""


def tool(function: Callable[..., Any], name: str = "") -> Tool:
    """Make a tool of a function with types and a docstring."""
    name = name or function.__name__
    waits = inspect.iscoroutinefunction(function)
    schema = schema_of(function, name)
    own = getattr(function, "keeps_time", False)
    return Tool(name, schema, function, lambda given: fitted(function, given, name), waits, own)


class Toolbox:
    """The tools of an environment."""

    def __init__(
        self, tools: Sequence[Tool], readers: Readers, parallel_calls: int, timeout: float
    ) -> None:
        self.by_name = {each.name: each for each in tools}
        self.readers, self.parallel_calls, self.timeout = readers, parallel_calls, timeout
        self.reader = readers(self.schemas)
        names = [each.name for each in tools]
        for name in self.by_name:
            if names.count(name) > 1:
                raise WorldError(f"Two tools are called {name!r}, and a call names one. Rename it.")

    def with_more(self, tools: Sequence[Tool]) -> Toolbox:
        both = [*self.by_name.values(), *tools]
        return Toolbox(both, self.readers, self.parallel_calls, self.timeout)

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(each.schema for each in self.by_name.values())

    @property
    def concurrent(self) -> bool:
        return all(each.concurrent for each in self.by_name.values())

    async def answer(self, text: str) -> Observation:
        """Answer a turn's calls; nothing is said to one without any: it is the answer."""
        asked = self.reader(text)
        if not asked:
            return Observation()
        ready = [
            self._answer(each) if at < self.parallel_calls else self._too_many(each)
            for at, each in enumerate(asked)
        ]
        if self.concurrent:
            answered = await asyncio.gather(*ready)
        else:
            answered = [await each for each in ready]
        messages = tuple(
            {
                "role": "tool",
                **({"name": call.name} if call.name else {}),
                "content": cut(words, MOST_CHARACTERS),
            }
            for call, words in answered
        )
        return Observation(messages, calls=tuple(call for call, _ in answered))

    async def _too_many(self, asked: Asked | Misread) -> tuple[Call, str]:
        said = f"Error: not called. A turn may have {self.parallel_calls} calls at most."
        return _refused(asked, said)

    async def _answer(self, asked: Asked | Misread) -> tuple[Call, str]:
        if isinstance(asked, Misread):
            return _refused(asked, f"Error: {asked.why}")
        found = self.by_name.get(asked.name)
        if found is None:
            told = f"Error: there is no tool {asked.name!r}. {nearest(asked.name, self.by_name)}"
            return _refused(asked, told)
        try:
            arguments = found.fit(asked.arguments)
        except Unfit as error:
            return _refused(asked, f"Error: {asked.name}: {error}")
        began = time.monotonic()
        status, words = await self._call(found, arguments)
        return Call(asked.name, asked.arguments, status, time.monotonic() - began), words

    async def _call(self, found: Tool, arguments: Mapping[str, Any]) -> tuple[CallStatus, str]:
        try:
            if inspect.iscoroutinefunction(found.function):
                limit = float("inf") if found.keeps_time else self.timeout
                value = await within(limit, self._waited(found, arguments))
            else:
                with alarm(self.timeout), one_process():
                    value = found.function(**arguments)
            return "ok", as_text(value)
        except (TooSlow, TimeoutError) as error:
            if isinstance(error, TooSlow):
                return "timeout", f"Error: {found.name} took longer than {self.timeout:g} s"
            return "failed", f"Error: {type(error).__name__}: {str(error)[:WORDS]}"
        except ToolFailed as error:
            return "failed", f"Error: {str(error)[:WORDS]}"
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            return "failed", f"Error: {type(error).__name__}: {str(error)[:WORDS]}"

    async def _waited(self, found: Tool, arguments: Mapping[str, Any]) -> Any:
        with one_process():
            return await found.function(**arguments)


def _refused(asked: Asked | Misread, words: str) -> tuple[Call, str]:
    if isinstance(asked, Misread):
        return Call("", status="refused"), words
    return Call(asked.name, asked.arguments, "refused"), words


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """Return what a coroutine returns; raise `TooSlow` behind so many seconds.

    One that will not be cancelled is left to itself: nobody waits for it.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=None if seconds == float("inf") else seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TooSlow
    return task.result()


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise `TooSlow` in what runs too long, in the main thread of a process alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
