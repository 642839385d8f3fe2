"""Worker processes for work that may hang, die or take all memory. The clock is the parent's.

No signal is used, so a pool works from any thread and in any process, forked or spawned. A worker
that is too slow is killed with all that it started, and another takes its place within
milliseconds. Results come in the order of the items, whatever the timing.

Two limits hold for an item: seconds by the clock, for what hangs, and seconds of the processor, for
what is costly. The second does not depend on what else the machine does.
"""

from __future__ import annotations

import math
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple

from groupwise.errors import RewardError
from groupwise.graders.forkserver import FORK, KILL, MAX_ANSWER, NUMBER, READY

PIECE = 2**20  # bytes that are read at once
LONG = struct.pack("!i", -1)  # how multiprocessing announces more than 2 GiB
START_SECONDS = 120.0  # for a process to load what it needs, on a busy machine
# Bytes of items that wait in a worker's pipe. Well below what a pipe takes: a worker that hangs
# reads nothing, and who writes to it must not hang as well.
AHEAD_BYTES = 65_536
MESSAGE_BYTES = 1_024  # that a pipe needs for an item beside its own: many small ones fill it, too
WORK_MEMORY = 3 * 2**30  # bytes that an answer may take to be worked out
# What hangs is stopped by the clock after so many times its processor seconds, or so many seconds
# more, where that is less: no machine in use is as busy as that.
HANGS, HANGS_MORE = 30, 240.0
LOOK_AGAIN = 0.02  # seconds, at least, between two looks at what a worker has used


class Outcome(NamedTuple):
    """The outcome of one item. `value` is None unless the status is ok.

    costly: it took more of the processor, or of memory, than it may; timeout: too long by the
    clock, which is the machine's doing, or that of something that hangs.
    """

    value: Any
    status: Literal["ok", "error", "timeout", "costly"] = "ok"
    reason: str = ""
    seconds: float = 0.0


class WorkerAnswer(NamedTuple):
    """The answer of a worker to one item."""

    status: Literal["ok", "error", "costly"]
    value: Any
    used: float  # seconds of the processor since the worker began


@dataclass(eq=False)
class Worker:
    pipe: Connection
    pid: int
    # (number, bytes in the pipe) of the items that it has, the first in work, which began `since`,
    # when the worker had `used` so many seconds of the processor.
    line: deque[tuple[int, int]] = field(default_factory=deque)
    since: float = 0.0
    used: float = 0.0
    asked: int = 0  # requests sent, each numbered
    answered: int = 0
    heard: bytearray = field(default_factory=bytearray)  # of answers that are not all there yet

    def ask(self, item: bytes) -> None:
        self.pipe.send_bytes(NUMBER.pack(self.asked) + item)
        self.asked += 1

    def cost(self) -> float:
        """Return the processor seconds that the item in work has taken; 0 where none can tell."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2) - self.used  # its CLOCK_PROCESS_CPUTIME
        except (OSError, AttributeError):
            return 0.0

    def has_room(self, size: int) -> bool:
        """Return whether an item that takes so many bytes of the pipe may wait in it."""
        return sum(held for _, held in self.line) + size <= AHEAD_BYTES

    def answers(self) -> tuple[list[WorkerAnswer], str]:
        """Return the answers that are complete, and what is wrong with the worker, if anything.

        Nothing waits here for the rest of an answer: that is for the clock.
        """
        found: list[WorkerAnswer] = []
        try:
            piece = os.read(self.pipe.fileno(), PIECE)
            self.heard += piece
            while (answer := self._answer()) is not None:
                found.append(answer)
        except ValueError as error:
            return found, f"the process that graded it is broken: {error}"
        except OSError:
            piece = b""
        return found, "" if piece else "the process that graded it died"

    def _answer(self) -> WorkerAnswer | None:
        """Return the next answer that is complete. Raises ValueError for what is none."""
        long = self.heard[:4] == LONG
        start = 12 if long else 4
        if len(self.heard) < start:
            return None
        (size,) = struct.unpack("!Q" if long else "!i", self.heard[4 if long else 0 : start])
        if not NUMBER.size <= size <= MAX_ANSWER + NUMBER.size:
            raise ValueError(f"its answer has no length that one has: {size}")
        if len(self.heard) < start + size:
            return None
        whole = bytes(self.heard[start : start + size])
        del self.heard[: start + size]
        if NUMBER.unpack_from(whole) != (self.answered,) or self.answered == self.asked:
            raise ValueError("it answers what it was not asked")
        self.answered += 1
        try:
            return WorkerAnswer(*pickle.loads(whole[NUMBER.size :]))
        except Exception as error:  # whatever a broken message may raise
            raise ValueError(f"its answer can't be read: {error}") from error


Take = Callable[[int, Outcome], None]  # what is done with an outcome


class ItemLimits(NamedTuple):
    """The limits of one item, in seconds: by the clock, and of the processor."""

    timeout: float
    cost: float

    def left(self, worker: Worker) -> float:
        """Return how long nothing can be late: nobody uses more processor time than passes."""
        by_clock = worker.since + self.timeout - time.monotonic()
        if self.cost == math.inf:
            return max(0.0, by_clock)
        return max(0.0, min(by_clock, max(self.cost - worker.cost(), LOOK_AGAIN)))

    def passed(self, worker: Worker) -> Outcome | None:
        """Return the outcome of the item that a worker has in work, if it is over a limit."""
        seconds = time.monotonic() - worker.since
        if self.cost != math.inf and worker.cost() >= self.cost:
            said = f"it took more than {self.cost:g} s of the processor and was stopped"
            return Outcome(None, "costly", said, seconds)
        if seconds >= self.timeout:
            said = f"it took longer than {self.timeout:g} s and was stopped"
            return Outcome(None, "timeout", said, seconds)
        return None


class Pool:
    """Workers that call `target`, a `module:function`, with the parts of an item."""

    def __init__(self, target: str, *, workers: int = 0, memory: int = 0, given: str = "") -> None:
        """Set up the pool. `workers`: 0 is one per core. `memory`: bytes a worker may address, 0
        for all. `given`: a text that `target` is called with, once, to make what does the work.
        """
        self.target, self.memory, self.given = target, memory, given
        self.size = workers or _cores()
        self._forget()

    def _forget(self) -> None:
        self.owner = os.getpid()
        self.changed = threading.Condition()
        self.idle: list[Worker] = []
        self.started = 0
        self.forkserver: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    # --- calling

    def run(
        self,
        items: Sequence[tuple[Any, ...]],
        timeout: float,
        done: Take | None = None,
        *,
        cost: float = math.inf,
    ) -> list[Outcome]:
        """Return an outcome for each item, in order. `timeout` in seconds by the clock, and `cost`
        in seconds of the processor, hold for each on its own.

        `done` is told of each as it comes, in whatever order.
        """
        if os.getpid() != self.owner:  # forked: the workers are another process's
            self._forget()
        found: dict[int, Outcome] = {}
        busy: list[Worker] = []
        waiting = deque(range(len(items)))

        def take(number: int, outcome: Outcome) -> None:
            found[number] = outcome
            if done is not None:
                done(number, outcome)

        try:
            while waiting or busy:
                self._hand_out(items, waiting, busy, take)
                if busy:
                    self._collect(busy, waiting, ItemLimits(timeout, cost), take)
        finally:
            for worker in busy:  # something was raised here: their answers are nobody's
                self._end(worker)
        return [found[number] for number in range(len(items))]

    def work_out(self, items: Sequence[tuple[Any, ...]], seconds: float) -> list[Outcome]:
        """Return an outcome for each item, which may take so many seconds of the processor."""
        return self.run(items, min(HANGS * seconds, seconds + HANGS_MORE), cost=seconds)

    def _hand_out(
        self, items: Sequence[tuple[Any, ...]], waiting: deque[int], busy: list[Worker], take: Take
    ) -> None:
        while waiting:
            try:
                item = pickle.dumps(items[waiting[0]])
            except (TypeError, AttributeError, ValueError, pickle.PicklingError) as error:
                said = f"it can't be handed to another process: {error}"
                take(waiting.popleft(), Outcome(None, "error", said))
                continue
            size = len(item) + MESSAGE_BYTES
            worker = self._free(busy, size)
            if worker is None:
                return
            try:
                worker.ask(item)
            except OSError:  # it has died
                if worker.line:  # over one of these: that is found out where answers are read
                    return
                self._end(worker)
                continue
            if not worker.line:
                worker.since = time.monotonic()
                busy.append(worker)
            worker.line.append((waiting.popleft(), size))

    def _free(self, busy: Sequence[Worker], size: int) -> Worker | None:
        """Return a worker for an item that takes so many bytes of its pipe, if there is one.

        The only worker of a pool has items ahead, so that it never waits for the next one. Of
        several, each has one: behind a slow item others would wait.
        """
        if self.size == 1 and busy:
            return busy[0] if busy[0].has_room(size) else None
        return self._lease(wanted=not busy)

    def _collect(
        self, busy: list[Worker], waiting: deque[int], limits: ItemLimits, take: Take
    ) -> None:
        """Collect what is there, or late, after waiting for the first of either."""
        soonest = min(limits.left(worker) for worker in busy)
        ready = wait([worker.pipe for worker in busy], soonest)
        for worker in list(busy):
            dead = worker.pipe in ready and not self._receive(worker, take)
            late = limits.passed(worker) if worker.line and not dead else None
            if late is not None:
                number, _ = worker.line.popleft()
                take(number, late)
            if dead or late is not None:
                self._end(worker)
                waiting.extendleft(number for number, _ in reversed(worker.line))
            elif not worker.line:
                self._give_back(worker)
            else:
                continue
            busy.remove(worker)

    def _receive(self, worker: Worker, take: Take) -> bool:
        """Take all answers that are there. Return False if the worker died over its first item, or
        sent what is no answer.
        """
        answers, broken = worker.answers()
        for status, value, used in answers:
            now, good = time.monotonic(), status == "ok"
            reason = "" if good else str(value)
            number, _ = worker.line.popleft()
            take(number, Outcome(value if good else None, status, reason, now - worker.since))
            worker.since, worker.used = now, used
        if broken and worker.line:
            number, _ = worker.line.popleft()
            take(number, Outcome(None, "error", broken, time.monotonic() - worker.since))
        return not (broken or (worker.heard and not worker.line))

    # --- workers

    def lease(self, coming: Connection | None = None) -> Worker:
        """Start a worker for whoever talks to it by himself, until `end`; or take one that was
        asked for.
        """
        worker = self._there(coming or self.ask())
        with self.changed:
            self.started += 1
        return worker

    def ask(self) -> Connection:
        """Ask for a worker to lease, and do not wait for it: several come up at the same time."""
        if os.getpid() != self.owner:
            self._forget()
        return self._asked()

    def end(self, worker: Worker) -> None:
        """Kill a leased worker and what it has started."""
        self._end(worker)

    def _lease(self, wanted: bool) -> Worker | None:
        """Reserve a worker. None if there is none free and `wanted` does not insist."""
        with self.changed:
            while not self.idle and self.started >= self.size:
                if not wanted:
                    return None
                self.changed.wait()
            if self.idle:
                return self.idle.pop()
            self.started += 1
        try:
            return self._start()
        except BaseException:
            self._one_less()
            raise

    def _give_back(self, worker: Worker) -> None:
        with self.changed:
            self.idle.append(worker)
            self.changed.notify()

    def _one_less(self) -> None:
        with self.changed:
            self.started -= 1
            self.changed.notify()

    def _end(self, worker: Worker) -> None:
        """Kill a worker. It is dead on return."""
        worker.pipe.close()
        with self.changed:
            if self.control is not None:
                with suppress(OSError):
                    self.control.send(KILL + worker.pid.to_bytes(8, "big"))
                    self.control.recv(1)
        self._one_less()

    def _start(self) -> Worker:
        return self._there(self._asked())

    def _asked(self) -> Connection:
        mine, theirs = socket.socketpair()
        with self.changed, theirs:
            try:
                socket.send_fds(self._control(), [FORK], [theirs.fileno()])
            except OSError:  # the forkserver has just died
                self.forkserver = None
                socket.send_fds(self._control(), [FORK], [theirs.fileno()])
        return Connection(mine.detach())

    def _there(self, pipe: Connection) -> Worker:
        """Wait until a worker says that it is there."""
        if not pipe.poll(START_SECONDS):
            raise RewardError(
                f"No worker for {self.target} in {START_SECONDS:g} s: the machine is overloaded."
            )
        try:
            ready, pid, problem = pipe.recv()
        except (EOFError, OSError):
            ready, pid, problem = READY, 0, "its process ended at once"
        assert ready == READY
        if problem:
            pipe.close()
            raise RewardError(f"Can't start a worker for {self.target}: {problem}.")
        return Worker(pipe, pid)

    def _control(self) -> socket.socket:
        """Return the connection to the forking process, which is started if it does not run."""
        if (
            self.forkserver is not None
            and self.forkserver.poll() is None
            and self.control is not None
        ):
            return self.control
        mine, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from groupwise.graders.forkserver import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {self.target!r}, {self.memory}, "
            f"{self.given!r})"
        )
        self.forkserver = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what is graded may print; standard output is ours
            start_new_session=True,  # a Ctrl-C is for the parent
        )
        theirs.close()
        self.control = mine
        weakref.finalize(self, _stop, self.forkserver, mine, self.owner)
        return mine

    def close(self) -> None:
        """End all workers. The pool can be used again, and starts others."""
        if self.forkserver is not None and self.control is not None:
            _stop(self.forkserver, self.control, self.owner)
        self._forget()


def _cores() -> int:
    able = getattr(os, "sched_getaffinity", None)  # what this process may use, where that is told
    return len(able(0)) if able else os.cpu_count() or 1


def _stop(forkserver: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        return
    try:
        forkserver.wait(5.0)
    except subprocess.TimeoutExpired:
        forkserver.kill()
        forkserver.wait()
