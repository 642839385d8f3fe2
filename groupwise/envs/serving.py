"""The worker's side of worlds: a process with an event loop, and one episode in it or many.

It is forked from one that has loaded the user's code, so that an episode begins with the code as it
was loaded: whatever earlier ones did to it is nowhere to be seen.
"""

from __future__ import annotations

import asyncio
import gc
import pickle
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from groupwise.common.forked import one_process
from groupwise.envs.answering import AsyncEnvironment, cut, seed_of
from groupwise.envs.chat_requests import Branched
from groupwise.envs.environment import Observation
from groupwise.envs.loading import Maker, told
from groupwise.envs.toolbox import MOST_CHARACTERS, TooSlow, within
from groupwise.envs.wire import Frames, Outbox
from groupwise.envs.worlds import Answered, Fault
from groupwise.errors import WorldError
from groupwise.graders.forkserver import limit_memory
from groupwise.graders.pool import WORK_MEMORY

START_TIME = 60.0  # seconds that an episode's first call may take at least: servers come up in it
BEAT = 1.0  # seconds between two beats
SLACK = 1.0  # seconds beside a limit that tools keep themselves


@dataclass(frozen=True)
class Described:
    """A setup, once it is made: how it is called."""

    tools: tuple[Mapping[str, Any], ...]
    concurrent: bool  # many in one process, which wait at the same time
    calls: int  # in one step
    guards_itself: bool
    claimed: bool


def first_limit(timeout: float) -> float:
    """Return the seconds that an episode's first call may take."""
    return max(START_TIME, timeout)


def limit_of(world: Described | AsyncEnvironment, timeout: float) -> float:
    """Return the seconds that a call may take; tools keep the time of each themselves."""
    if not world.guards_itself:
        return timeout
    return float("inf") if world.concurrent else timeout * world.calls + SLACK


class WorldRequest(NamedTuple):
    """A call of an episode's environment; `number` comes back with its answer."""

    number: int
    kind: Literal["beat", "describe", "begin", "step", "finish", "drop"]
    episode: int
    payload: Any = None


class Reply(NamedTuple):
    """The answer to a request; a beat, which says that the event loop runs, answers none."""

    number: int
    value: Answered | Fault | Described | None


def serving(given: str) -> Serving:
    """Load what a setup names; called in the process that workers are forked from."""
    served = Serving(pickle.loads(bytes.fromhex(given)))
    gc.collect()
    gc.freeze()  # what is never looked at again stays shared with all workers
    return served


class Serving:
    """The environments of one worker process."""

    def __init__(self, setup: Any) -> None:
        self.setup = setup
        self.maker: Maker | None = None
        self.problem = ""  # with what the setup names, told to whoever asks for it
        try:
            with one_process():
                self.maker = Maker(setup)
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            self.problem = told(error)
        self.open: dict[int, AsyncEnvironment] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def __call__(self, *_: Any) -> None:
        raise WorldError("Worlds are served, not called.")

    def serve(self, pipe: Connection) -> None:
        asyncio.run(self._serve(pipe))

    async def _serve(self, pipe: Connection) -> None:
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        self.outbox = Outbox(pipe.fileno())
        frames = Frames(pipe.fileno())

        def read() -> None:
            for frame in frames.read():
                self._take(pickle.loads(frame))
            if frames.ended:
                done.set()

        def write() -> None:
            if self.outbox.flush():
                loop.remove_writer(pipe.fileno())

        self.write_later = partial(loop.add_writer, pipe.fileno(), write)
        loop.add_reader(pipe.fileno(), read)
        await done.wait()

    def _take(self, request: WorldRequest) -> None:
        if request.kind == "drop":
            self._drop(request.episode)
            return
        if request.kind == "beat":
            self.beating = asyncio.get_running_loop().create_task(self._beat())
            return
        task = asyncio.get_running_loop().create_task(self._answer(request))
        self.tasks[request.episode] = task
        task.add_done_callback(lambda _: self._done(request.episode, task))

    def _done(self, episode: int, task: asyncio.Task[None]) -> None:
        if self.tasks.get(episode) is task:
            del self.tasks[episode]

    def _drop(self, episode: int) -> None:
        task = self.tasks.pop(episode, None)
        if task is not None:
            task.cancel()
        world = self.open.pop(episode, None)
        if world is not None:
            asyncio.get_running_loop().create_task(self._closed(world))

    async def _closed(self, world: AsyncEnvironment) -> None:
        try:
            with one_process():
                await within(self.setup.timeout, world.close())
        except (Exception, SystemExit, TooSlow) as error:  # nobody waits for an answer any more
            print(f"An environment did not close: {told(error)}", file=sys.stderr)

    async def _answer(self, request: WorldRequest) -> None:
        self._send(Reply(request.number, await self._value(request)))

    async def _beat(self) -> None:
        while True:
            self._send(Reply(-1, None))
            await asyncio.sleep(BEAT)

    def _send(self, reply: Reply) -> None:
        self.outbox.put(pickle.dumps(reply))
        if not self.outbox.flush():
            self.write_later()

    async def _value(self, request: WorldRequest) -> Answered | Fault | Described:
        """Return what an environment says, or how it failed: the boundary to the user's code."""
        began = time.monotonic()
        try:
            if request.kind == "begin":
                self.open[request.episode] = self._made()
            value = await within(self._limit(request), self._called(request))
        except TooSlow:
            said = f"the environment took longer than {self.setup.timeout:g} s and was left"
            value = Fault("timeout", said)
        except Branched as error:
            value = Fault("branched", str(error))
        except (Exception, SystemExit) as error:
            value = Fault("error", told(error))
        if isinstance(value, Fault) and (world := self.open.pop(request.episode, None)):
            asyncio.get_running_loop().create_task(self._closed(world))
        seconds = time.monotonic() - began
        return value if isinstance(value, Described) else replace(value, seconds=seconds)

    def _limit(self, request: WorldRequest) -> float:
        world = self.open.get(request.episode)
        if world is None or request.kind == "begin":
            claimed = world is not None and world.claimed
            return float("inf") if claimed else first_limit(self.setup.timeout)
        return limit_of(world, self.setup.timeout)

    async def _called(self, request: WorldRequest) -> Answered | Described:
        with one_process():
            if request.kind == "describe":
                return await self._described()
            if request.kind == "begin":
                return await self._begun(request)
            world = self.open[request.episode]
            if request.kind == "step":
                said = _bounded(await world.step(request.payload))
                return Answered(said, world.state())
            outcome = await world.outcome()
            await self.open.pop(request.episode).close()
            return Answered(Observation(), outcome=outcome)

    async def _begun(self, request: WorldRequest) -> Answered:
        world = self.open[request.episode]
        if not world.concurrent:
            limit_memory(WORK_MEMORY)
        seed = seed_of(request.payload)
        random.seed(seed)
        if "numpy.random" in sys.modules:
            numbers: Any = sys.modules["numpy.random"]
            numbers.seed(seed % 2**32)
        await world.prepare()
        said = _bounded(await world.reset(request.payload))
        return Answered(said, world.state())

    def _made(self) -> AsyncEnvironment:
        if self.maker is None:
            raise WorldError(self.problem)
        return self.maker.make()

    async def _described(self) -> Described:
        world = self._made()
        try:
            await world.prepare()
            return Described(
                tuple(world.tools),
                world.concurrent,
                world.calls,
                world.guards_itself,
                world.claimed,
            )
        finally:
            await world.close()


def _bounded(said: Any) -> Observation:
    """Return an observation whose texts are no flood."""
    if not isinstance(said, Observation):
        raise WorldError(f"The environment answered with {type(said).__name__}, no Observation.")
    messages = tuple(
        {**message, "content": cut(message["content"], MOST_CHARACTERS)}
        if isinstance(message.get("content"), str)
        else message
        for message in said.messages
    )
    return replace(said, messages=messages)
