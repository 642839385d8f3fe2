"""Worker processes for work that may hang, die or take all memory. The clock is the parent's.

No signal is used, so a pool works from any thread and in any process, forked or spawned. A worker
that is too slow is killed with all that it started, and another takes its place within
milliseconds. Results come in the order of the items, whatever the timing.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pickle import PicklingError
from typing import Any, Literal, NamedTuple

from groupwise.errors import RewardError
from groupwise.graders.nursery import FORK, KILL, READY

START_SECONDS = 120.0  # for a process to load what it needs, on a busy machine


class Outcome(NamedTuple):
    """What became of one item. `value` is None unless the status is ok."""

    value: Any
    status: Literal["ok", "error", "timeout"] = "ok"
    reason: str = ""
    seconds: float = 0.0


@dataclass(eq=False)
class Worker:
    pipe: Connection
    pid: int


class Pool:
    """Workers that call `target`, a `module:function`, with the parts of an item."""

    def __init__(self, target: str, *, workers: int = 0, memory: int = 0) -> None:
        """`workers`: 0 is one per core. `memory`: bytes that a worker may address, 0 for all."""
        self.target, self.memory = target, memory
        self.size = workers or _cores()
        self._forget()

    def _forget(self) -> None:
        self.owner = os.getpid()
        self.changed = threading.Condition()
        self.idle: list[Worker] = []
        self.started = 0
        self.nursery: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    # --- calling

    def run(
        self,
        items: Sequence[tuple[Any, ...]],
        timeout: float,
        done: Callable[[int, Outcome], None] | None = None,
    ) -> list[Outcome]:
        """An outcome for each item, in order. `timeout` in seconds holds for each on its own.

        `done` is told of each as it comes, in whatever order.
        """
        if os.getpid() != self.owner:  # forked: the workers are another process's
            self._forget()
        found: dict[int, Outcome] = {}
        busy: dict[Worker, tuple[int, float]] = {}
        waiting = list(range(len(items)))[::-1]
        try:
            while waiting or busy:
                while waiting and (worker := self._lease(wanted=not busy)):
                    try:
                        if self._send(worker, items[waiting[-1]]):
                            busy[worker] = (waiting.pop(), time.monotonic())
                    except (TypeError, AttributeError, ValueError, PicklingError) as error:
                        self._give_back(worker)
                        said = f"it can't be handed to another process: {error}"
                        found[waiting.pop()] = Outcome(None, "error", said)
                if not busy:
                    continue
                for number, outcome in self._collect(busy, timeout):
                    found[number] = outcome
                    if done is not None:
                        done(number, outcome)
        finally:
            for worker in busy:  # something was raised here: their answers are nobody's
                self._end(worker)
        return [found[number] for number in range(len(items))]

    def _send(self, worker: Worker, item: tuple[Any, ...]) -> bool:
        try:
            worker.pipe.send(item)
        except OSError:  # it died while it was idle
            self._end(worker)
            return False
        return True

    def _collect(
        self, busy: dict[Worker, tuple[int, float]], timeout: float
    ) -> list[tuple[int, Outcome]]:
        """What is there, or late, after waiting for the first of either."""
        first = min(start for _, start in busy.values()) + timeout
        pipes = {worker.pipe: worker for worker in busy}
        ready = wait(list(pipes), max(0.0, first - time.monotonic()))
        now, found = time.monotonic(), []
        for pipe in ready:
            worker = pipes[pipe]  # type: ignore[index]
            number, start = busy.pop(worker)
            try:
                status, value = worker.pipe.recv()
            except (EOFError, OSError):
                self._end(worker)
                said = "the process that graded it died"
                found.append((number, Outcome(None, "error", said, now - start)))
                continue
            self._give_back(worker)
            good = status == "ok"
            found.append(
                (
                    number,
                    Outcome(
                        value if good else None, status, "" if good else str(value), now - start
                    ),
                )
            )
        for worker, (number, start) in list(busy.items()):
            if now - start >= timeout:
                del busy[worker]
                self._end(worker)
                said = f"it took longer than {timeout:g} s and was stopped"
                found.append((number, Outcome(None, "timeout", said, time.monotonic() - start)))
        return found

    # --- workers

    def _lease(self, wanted: bool) -> Worker | None:
        """A worker of one's own. None if there is none free and `wanted` does not insist."""
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
        """Kill it. It is dead on return."""
        worker.pipe.close()
        with self.changed:
            if self.control is not None:
                with suppress(OSError):
                    self.control.send(KILL + worker.pid.to_bytes(8, "big"))
                    self.control.recv(1)
        self._one_less()

    def _start(self) -> Worker:
        mine, theirs = socket.socketpair()
        with self.changed, theirs:
            try:
                socket.send_fds(self._control(), [FORK], [theirs.fileno()])
            except OSError:  # the nursery has just died
                self.nursery = None
                socket.send_fds(self._control(), [FORK], [theirs.fileno()])
        pipe = Connection(mine.detach())
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
        """The line to the nursery, which is started where there is none (any more)."""
        if self.nursery is not None and self.nursery.poll() is None and self.control is not None:
            return self.control
        mine, theirs = socket.socketpair()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from groupwise.graders.nursery import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {self.target!r}, {self.memory})"
        )
        self.nursery = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what is graded may print; standard output is ours
            start_new_session=True,  # a Ctrl-C is for the parent
        )
        theirs.close()
        self.control = mine
        weakref.finalize(self, _stop, self.nursery, mine, self.owner)
        return mine

    def close(self) -> None:
        """End all workers. The pool can be used again, and starts others."""
        if self.nursery is not None and self.control is not None:
            _stop(self.nursery, self.control, self.owner)
        self._forget()


def _cores() -> int:
    able = getattr(os, "sched_getaffinity", None)  # what this process may use, where that is told
    return len(able(0)) if able else os.cpu_count() or 1


def _stop(nursery: subprocess.Popen[bytes], control: socket.socket, owner: int) -> None:
    control.close()
    if os.getpid() != owner:
        return
    try:
        nursery.wait(5.0)
    except subprocess.TimeoutExpired:
        nursery.kill()
        nursery.wait()
