"""Programs that lead their episode themselves: they ask the policy over HTTP, as any model.

What a program sends is compared with the conversation so far: all that stands behind it is said to
the policy, and its next turn is the answer. So the episode is one row as every other.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any

from groupwise.common.forked import one_process
from groupwise.envs.answering import AsyncEnvironment, chosen, reward_of
from groupwise.envs.chat_requests import (
    Branched,
    behind,
    completion_of,
    error_of,
    turn_message,
)
from groupwise.envs.endpoint import Claimable, EndpointServer, Pending, PolicyEndpoint, ProgramLine
from groupwise.envs.environment import Call, Observation
from groupwise.envs.tool_calls import Asked
from groupwise.envs.toolbox import Readers, within
from groupwise.errors import WorldError

PARAMETER = "endpoint"  # by which a function is known as a program
OVER = "the episode is over: it has reached a limit of the run"
_SERVERS: dict[int, EndpointServer] = {}  # of this process, by the port that was asked for


def is_program(found: Any) -> bool:
    """Tell whether this is a function that is told where to ask the policy."""
    return inspect.isroutine(found) and PARAMETER in inspect.signature(found).parameters


def server_at(port: int) -> EndpointServer:
    """Return this process's server; port 0 is a free one."""
    if port not in _SERVERS:
        _SERVERS[port] = EndpointServer(port)
    return _SERVERS[port]


class Led(AsyncEnvironment):
    """An episode that somebody else leads."""

    port = 0

    def __init__(self, readers: Readers) -> None:
        self.readers = readers
        self.known: list[Mapping[str, Any]] = []  # the conversation so far
        self.asked_tools: tuple[Mapping[str, Any], ...] | None = None  # once something was asked
        self.pending: Pending | None = None
        self.calls_made: tuple[Call, ...] = ()  # in the last turn
        self.turns = 0
        self.endpoint: PolicyEndpoint | None = None

    def begin(self, row: Mapping[str, Any]) -> None:
        """Open an address, and let somebody know of it."""
        self.loop = asyncio.get_running_loop()
        self.requests: asyncio.Queue[Pending] = asyncio.Queue()
        self.ending: asyncio.Future[Any] = self.loop.create_future()
        self.endpoint = server_at(self.port).open(self.line())

    def line(self) -> ProgramLine:
        return ProgramLine(self._soon(lambda pending: self.requests.put_nowait(pending)))

    def _soon(self, act: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return the same for other threads."""

        def later(value: Any) -> None:
            self.loop.call_soon_threadsafe(act, value)

        return later

    def ended(self, value: Any) -> None:
        """Take what the program has left behind: a reward, or what it raised."""
        if not self.ending.done():
            self.ending.set_result(value)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        self.begin(row)
        return await self.heard()

    async def step(self, text: str) -> Observation:
        assert self.pending is not None
        found = self.readers(self.asked_tools)(text) if self.asked_tools else []
        self.calls_made = tuple(
            Call(each.name, each.arguments) if isinstance(each, Asked) else Call("", {}, "refused")
            for each in found
        )
        message = turn_message(text, found, self.turns)
        self.known.append(message)
        self.turns += 1
        pending, self.pending = self.pending, None
        pending.send(200, completion_of(message, pending.asked.model, self.turns))
        return await self.heard()

    async def heard(self) -> Observation:
        """Return what the next request says to the policy, or that the program has ended."""
        if (pending := await self._asked()) is not None:
            return self._said(pending)
        if isinstance(self.ending.result(), BaseException):
            raise self.ending.result()
        if not self.turns:
            raise WorldError("The program ended before it had asked the policy anything.")
        return Observation(done=True, calls=self.calls_made)

    async def _asked(self) -> Pending | None:
        """Wait for the next request; None: the program has ended."""
        asking = asyncio.ensure_future(self.requests.get())
        try:
            await asyncio.wait({asking, self.ending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
        if not self.ending.done():
            return asking.result()
        if asking.done():  # somebody that the program has left behind
            asking.result().send(400, error_of(OVER))
        return None

    def _said(self, pending: Pending) -> Observation:
        asked, first = pending.asked, self.asked_tools is None
        rest = asked.messages if first else behind(self.known, asked.messages)
        if rest is None or (not first and asked.tools != self.asked_tools):
            what = "what was said so far" if rest is None else "the tools that it began with"
            pending.send(409, error_of(f"this request does not go on from {what}"))
            raise Branched(
                f"Request {self.turns + 1} of the program does not go on from {what}, and one row "
                "holds one conversation. Ask with all messages as they were sent and answered."
            )
        self.pending, self.asked_tools = pending, asked.tools
        self.known = list(asked.messages)
        return Observation(rest, calls=self.calls_made, tools=asked.tools if first else None)

    async def outcome(self) -> float | None:
        """Return the program's reward; one that a limit has cut off may end with one, too."""
        cut_off = not self.ending.done()
        while not self.ending.done():
            if self.pending is not None:
                self.pending.send(400, error_of(OVER))
            self.pending = await self._asked()
        left = self.ending.result()
        if isinstance(left, BaseException):
            if cut_off:
                return None
            raise left
        return reward_of(left, "the program")

    async def close(self) -> None:
        if self.endpoint is not None:
            server_at(self.port).shut(self.endpoint)
            waiting = [self.requests.get_nowait() for _ in range(self.requests.qsize())]
            for pending in [*waiting, *([self.pending] if self.pending else [])]:
                pending.send(400, error_of(OVER))


class ProgramWorld(Led):
    """A function that is called with the row's columns and an endpoint, and returns a reward."""

    def __init__(
        self, function: Callable[..., Any], options: Mapping[str, Any], readers: Readers
    ) -> None:
        super().__init__(readers)
        self.function, self.options = function, options
        self.concurrent = inspect.iscoroutinefunction(function)
        self.task: asyncio.Task[Any] | None = None

    def begin(self, row: Mapping[str, Any]) -> None:
        super().begin(row)
        known = {**row, **self.options, PARAMETER: self.endpoint}
        given = chosen(self.function, known)
        if self.concurrent:
            self.task = self.loop.create_task(self._awaited(given))
        else:
            threading.Thread(target=self._called, args=(given,), daemon=True).start()

    async def _awaited(self, given: Mapping[str, Any]) -> None:
        try:
            with one_process():
                self.ended(await self.function(**given))
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            self.ended(error)

    def _called(self, given: Mapping[str, Any]) -> None:
        try:
            with one_process():
                left = self.function(**given)
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            left = error
        self._soon(self.ended)(left)

    async def close(self) -> None:
        await super().close()
        if self.task is not None:
            self.task.cancel()


class Outside(Led):
    """An episode that a program outside claims, at `http://127.0.0.1:PORT/v1/episodes`."""

    concurrent, claimed = True, True

    def __init__(self, readers: Readers, patience: float, port: int = 8000) -> None:
        super().__init__(readers)
        self.port, self.patience = port, patience

    def line(self) -> ProgramLine:
        return ProgramLine(super().line().ask, self._soon(self.ended))

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        """Wait for a program, however long it takes, and then for its first request."""
        self.begin(row)
        assert self.endpoint is not None
        found = asyncio.Event()
        claimed = self._soon(lambda _: found.set())
        server_at(self.port).claims.put(Claimable(self.endpoint, row, lambda: claimed(None)))
        await found.wait()
        return await within(self.patience, self.heard())
