"""The process between a pool and its workers: it loads once, forks workers, and buries them.

It runs no work itself and has one thread, so that forking is safe and takes milliseconds. It ends,
and its workers with it, when the process that asked for it is gone.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

LOOK_EVERY = 0.5  # seconds, after which the death of the parent is noticed
FORK, KILL = b"F", b"K"
READY = "ready"


def main(control_fd: int, parent: int, target: str, memory: int) -> None:
    """Serve until the parent is gone. `target` is `module:function`, called with each item."""
    control = socket.socket(fileno=control_fd)
    problem, function = _load(target)
    workers: set[int] = set()
    try:
        while os.getppid() == parent:
            readable, _, _ = select.select([control], [], [], LOOK_EVERY)
            _bury(workers)
            if not readable:
                continue
            message, fds, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                return
            if message[:1] == KILL:
                _kill(int.from_bytes(message[1:], "big"), workers)
                control.send(KILL)
                continue
            pid = os.fork()
            if pid == 0:
                control.close()
                _work(Connection(fds[0]), function, problem, memory)
            os.close(fds[0])
            workers.add(pid)
    finally:
        for pid in tuple(workers):
            _kill(pid, workers)
        os._exit(0)


def _load(target: str) -> tuple[str, Callable[..., Any] | None]:
    module, _, name = target.partition(":")
    try:
        return "", getattr(importlib.import_module(module), name)
    except Exception as error:  # told to the pool, which raises it
        return f"{type(error).__name__}: {error}", None


def _bury(workers: set[int]) -> None:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            workers.discard(pid)


def _kill(pid: int, workers: set[int]) -> None:
    """A worker and what it has started. Only own, unburied children: no number is used again."""
    if pid not in workers:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # before it had its own group
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    workers.discard(pid)


# --- the worker's side


def _work(pool: Connection, function: Callable[..., Any] | None, problem: str, memory: int) -> None:
    """Answer (status, value) to each item, in order, until there are no more."""
    try:
        os.setpgid(0, 0)
        _die_with(os.getppid())
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pool.send((READY, os.getpid(), problem))
        while True:
            item = pool.recv()
            pool.send(_answer(function, item))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(function: Callable[..., Any] | None, item: Any) -> tuple[str, Any]:
    assert function is not None  # the pool has refused otherwise
    try:
        return "ok", function(*item)
    except MemoryError:
        return "error", "it needs more memory than it may have"
    except (Exception, SystemExit) as error:  # the boundary: said, never a 0
        return "error", f"{type(error).__name__}: {error}"


def _die_with(parent: int) -> None:
    """When the nursery dies: at once where the system offers that, else within a second."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()
