"""Environments in processes that can be killed, so that none of them holds up or ends a run.

An environment that may block has a process of its own, forked from one that has loaded its code:
killing it costs its own episode and no other. So many of them work at the same time as there are
workers; the others wait for their turn, and their clocks with them. Environments made of coroutines
alone share a few processes, where all of them wait at the same time. There a call that is too slow
is cancelled, and costs its own episode; one that holds up the event loop costs all episodes of its
process, and that is said to each: such a process is ended when it has not been heard of for as long
as one call may take.
"""

from __future__ import annotations

import pickle
import selectors
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from groupwise.envs.serving import Described, Reply, WorldRequest, first_limit, limit_of
from groupwise.envs.wire import Frames, Outbox
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import RewardError, WorldError
from groupwise.graders.pool import START_SECONDS, Pool, Worker

if TYPE_CHECKING:
    from groupwise.envs.opening import WorldSetup

GRACE = 1.0  # seconds beyond a limit, for a worker to say itself that it was passed
SILENCE = 5.0  # seconds at least that an event loop may stand still
CLOSING = 5.0  # seconds for an environment that nobody needs any more to give back what it holds
MOST_PROCESSES = 512  # at the same time, a few open files each; further episodes begin later
Kind = Literal["error", "timeout"]  # of a fault
TARGET = "groupwise.envs.serving:serving"


@dataclass(eq=False)
class WorkerPlace:
    """A worker process and the episodes in it."""

    worker: Worker
    outbox: Outbox
    frames: Frames
    episodes: set[int] = field(default_factory=set)
    calls: dict[int, UnderWay] = field(default_factory=dict)  # by their number
    leaves: float = float("inf")  # when it is ended, if it is told to end
    # When silence means that its event loop stands still: pushed on by every beat.
    silent: float = float("inf")

    @property
    def soonest(self) -> float:
        """Return when something of it may be late."""
        ends = [call.ends for call in self.calls.values()]
        return min([*ends, self.leaves, self.silent if ends else float("inf")])


@dataclass(frozen=True)
class UnderWay:
    """A call that was sent."""

    episode: int
    kind: str
    began: float
    ends: float  # by the clock: then its process is killed


@dataclass(frozen=True)
class WaitingCall:
    """A call that waits for its turn."""

    kind: Any
    episode: int
    payload: Any = None


class ProcessWorlds(Worlds):
    """The worlds of a setup whose files have been found."""

    def __init__(self, setup: WorldSetup) -> None:
        self.setup = setup
        given = pickle.dumps(setup).hex()
        self.pool = Pool(TARGET, workers=setup.workers, given=given)
        self.selector = selectors.DefaultSelector()
        self.places: set[WorkerPlace] = set()
        self.coming: deque[Connection] = deque()  # processes that come up while others work
        self.of: dict[int, WorkerPlace] = {}  # by episode
        self.waiting: deque[WaitingCall] = deque()
        self.lost: dict[int, str] = {}  # episodes whose process is gone, and why
        self.ready: list[tuple[int, Answered | Fault]] = []
        self.numbers = 0
        try:
            self.described = self._describe()
        except BaseException:
            self.close()
            raise
        self.tools, self.claimed = self.described.tools, self.described.claimed

    # --- the seam

    def begin(self, episode: int, row: Mapping[str, Any]) -> None:
        self.waiting.append(WaitingCall("begin", episode, dict(row)))

    def step(self, episode: int, text: str) -> None:
        self._ask(WaitingCall("step", episode, text))

    def finish(self, episode: int) -> None:
        self._ask(WaitingCall("finish", episode))

    def _ask(self, call: WaitingCall) -> None:
        if (why := self.lost.pop(call.episode, None)) is not None:
            self.ready.append((call.episode, Fault("error", why)))
        elif call.episode not in self.of:
            raise WorldError(f"Episode {call.episode} has not begun, or is over. Begin it first.")
        else:
            self.waiting.append(call)

    def drop(self, episode: int) -> None:
        self.lost.pop(episode, None)
        self.waiting = deque(each for each in self.waiting if each.episode != episode)
        self.ready = [each for each in self.ready if each[0] != episode]
        place = self.of.pop(episode, None)
        if place is None:
            return
        place.episodes.discard(episode)
        called = [number for number, call in place.calls.items() if call.episode == episode]
        if called and not self.described.concurrent:  # it hears nothing before its call is over
            self._end(place)
            return
        for number in called:
            del place.calls[number]
        self._send(place, WorldRequest(-1, "drop", episode))
        if not self.described.concurrent:
            place.leaves = time.monotonic() + CLOSING

    def answers(self, wait: float) -> list[tuple[int, Answered | Fault]]:
        deadline = time.monotonic() + wait
        while True:
            self._hand_out()
            if not self.ready:
                self._listen(deadline - time.monotonic())
            self._hand_out()  # a place may be free now
            if self.ready or time.monotonic() >= deadline or not self._expects():
                found, self.ready = self.ready, []
                return found

    def close(self) -> None:
        for pipe in (*(place.worker.pipe for place in self.places), *self.coming):
            pipe.close()
        self.coming.clear()
        self.pool.close()  # kills all of them, with what they have started
        self.selector.close()
        self.places = set()
        self.of, self.lost, self.ready = {}, {}, []
        self.waiting.clear()

    # --- starting

    def _describe(self) -> Described:
        """Load everything, and make and close one world. Raises what is wrong with it."""
        place = self._place()
        self._send(place, WorldRequest(0, "describe", -1))
        deadline = time.monotonic() + START_SECONDS
        found: list[Reply] = []
        while not found and not place.frames.ended and time.monotonic() < deadline:
            self.selector.select(deadline - time.monotonic())
            place.outbox.flush()
            found = [pickle.loads(frame) for frame in place.frames.read()]
        self._end(place)
        if not found:
            raise WorldError(
                "Making the environment once, to see what it is, ended its process or took longer "
                f"than {START_SECONDS:g} s. Make it by hand first: it must come up by itself."
            )
        if isinstance(found[0].value, Described):
            return found[0].value
        why = found[0].value.reason if isinstance(found[0].value, Fault) else str(found[0].value)
        raise WorldError(why)

    def _place(self) -> WorkerPlace:
        try:
            worker = self._worker()
        except RewardError as error:
            raise WorldError(str(error)) from None
        descriptor = worker.pipe.fileno()
        place = WorkerPlace(worker, Outbox(descriptor), Frames(descriptor))
        self.places.add(place)
        self.selector.register(descriptor, selectors.EVENT_READ, place)
        return place

    def _worker(self) -> Worker:
        """Return a process that has come up meanwhile, or else a new one."""
        while self.coming:
            with suppress(RewardError):  # one that has died before anybody was in it
                return self.pool.lease(self.coming.popleft())
        return self.pool.lease()

    def _start_ahead(self) -> None:
        """Ask for the processes of episodes that wait, as many as may work at the same time."""
        begins = sum(call.kind == "begin" for call in self.waiting)
        for _ in range(min(begins, self.pool.size) - len(self.coming)):
            self.coming.append(self.pool.ask())

    def _end(self, place: WorkerPlace) -> None:
        """Kill a process and what it has started; what its episodes are told is said before."""
        if place not in self.places:
            return
        self.places.discard(place)
        self.selector.unregister(place.worker.pipe.fileno())
        self.pool.end(place.worker)

    # --- handing out

    def _hand_out(self) -> None:
        """Send what may be sent: everything to event loops, one call to a free worker."""
        kept: deque[WaitingCall] = deque()
        if not self.described.concurrent:
            self._start_ahead()
        while self.waiting:
            call = self.waiting.popleft()
            place = self._free(call)
            if place is None:
                kept.append(call)
            else:
                self._call(place, call)
            if not self.described.concurrent and self._working() >= self.pool.size:
                break
        self.waiting.extendleft(reversed(kept))

    def _working(self) -> int:
        return sum(bool(place.calls) for place in self.places)

    def _free(self, call: WaitingCall) -> WorkerPlace | None:
        if not self.described.concurrent and self._working() >= self.pool.size:
            return None
        if call.kind != "begin":
            return self.of[call.episode]
        shared = self.described.concurrent
        if shared and len(self.places) >= (1 if self.claimed else self.pool.size):
            return min(self.places, key=lambda place: len(place.episodes))
        if not shared and len(self.places) >= MOST_PROCESSES:
            return None
        place = self._place()
        if shared:
            self._send(place, WorldRequest(-1, "beat", -1))
            place.silent = time.monotonic() + START_SECONDS
        return place

    def _call(self, place: WorkerPlace, call: WaitingCall) -> None:
        self.numbers += 1
        now = time.monotonic()
        first = call.kind == "begin"
        if first:
            place.episodes.add(call.episode)
            self.of[call.episode] = place
        timeout = self.setup.timeout
        limit = first_limit(timeout) if first else limit_of(self.described, timeout)
        ends = float("inf") if self.described.concurrent else now + limit + GRACE
        place.calls[self.numbers] = UnderWay(call.episode, call.kind, now, ends)
        self._send(place, WorldRequest(self.numbers, call.kind, call.episode, call.payload))

    def _send(self, place: WorkerPlace, request: WorldRequest) -> None:
        try:
            place.outbox.put(pickle.dumps(request))
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            call = place.calls.pop(request.number)
            said = f"the row can't be handed to another process: {error}"
            self.ready.append((call.episode, Fault("error", said)))
            return
        self._flush(place)

    def _flush(self, place: WorkerPlace) -> None:
        written = place.outbox.flush()
        events = selectors.EVENT_READ | (0 if written else selectors.EVENT_WRITE)
        with suppress(KeyError):
            self.selector.modify(place.worker.pipe.fileno(), events, place)

    # --- listening

    def _expects(self) -> bool:
        return bool(self.waiting) or any(place.calls for place in self.places)

    def _listen(self, seconds: float) -> None:
        """Take what has come, after waiting for the first of it; then see who is late."""
        soonest = min((place.soonest for place in self.places), default=float("inf"))
        wait = max(0.0, min(seconds, soonest - time.monotonic()))
        if not self._expects() and soonest == float("inf"):
            wait = 0.0
        heard = self.selector.select(wait)
        for key, events in heard:
            place: WorkerPlace = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(place)
            if events & selectors.EVENT_READ:
                self._hear(place)
        now = time.monotonic()
        spoke = {key.data for key, _ in heard}
        for place in [each for each in self.places if each.soonest <= now and each not in spoke]:
            self._late(place, now)

    def _hear(self, place: WorkerPlace) -> None:
        if self.described.concurrent:
            place.silent = time.monotonic() + max(SILENCE, self.setup.timeout)
        for frame in place.frames.read():
            try:
                reply = Reply(*pickle.loads(frame))
            except Exception:  # whatever a broken message may raise: written by no worker of ours
                place.frames.ended = True
                break
            self._take(place, reply)
        if place.frames.ended and place in self.places:
            self._gone(place, "the process of the environment ended by itself")

    def _take(self, place: WorkerPlace, reply: Reply) -> None:
        call = place.calls.pop(reply.number, None)
        if call is None or not isinstance(reply.value, (Answered, Fault)):
            return  # of an episode that was dropped
        self.ready.append((call.episode, reply.value))
        if isinstance(reply.value, Fault) or call.kind == "finish":
            self._forget(place, call.episode)

    def _forget(self, place: WorkerPlace, episode: int) -> None:
        self.of.pop(episode, None)
        place.episodes.discard(episode)
        if not self.described.concurrent:
            self._end(place)

    def _late(self, place: WorkerPlace, now: float) -> None:
        """End a process that is over a limit, and with it all that is in it."""
        limit = self.setup.timeout
        if place.leaves <= now:
            self._end(place)
            return
        if not self.described.concurrent:
            self._gone(place, f"it took longer than {limit:g} s and was stopped", "timeout")
            return
        why = (
            "the event loop that coroutines share stood still: one of them blocks (time.sleep, "
            "requests, long computations). Written without async, each has a process of its own"
        )
        self._gone(place, why, "timeout")

    def _gone(self, place: WorkerPlace, why: str, kind: Kind = "error") -> None:
        """Say to each episode of a process that it is over; to those without a call, later."""
        now = time.monotonic()
        for call in place.calls.values():
            self.ready.append((call.episode, Fault(kind, why, now - call.began)))
            place.episodes.discard(call.episode)
            self.of.pop(call.episode, None)
        for episode in place.episodes:
            self.of.pop(episode, None)
            self.lost[episode] = why
        self._end(place)
