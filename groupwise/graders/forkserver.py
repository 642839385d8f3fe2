"""The process between a pool and its workers: it loads once and forks the workers.

It runs no work itself and has one thread, so that forking is safe and takes milliseconds. It ends,
and its workers with it, when the process that asked for it is gone. Processes that a worker has
started, in whatever session, become its own when the worker ends, and are killed.

A target that has `serve` is given the pipe instead of items, and answers by itself.

A worker's answer carries the number of the request. The pipe is the worker's alone: a process that
work has forked loses it, so that it can't read another's item or answer for another.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from groupwise.common.forked import flush, one_process

LOOK_EVERY = 0.5  # seconds, after which the death of the parent is noticed
FORK, KILL = b"F", b"K"
READY = "ready"
NUMBER = struct.Struct("!Q")  # of a request, before it and before its answer
MAX_ANSWER = 2**28  # bytes
MAX_WORDS = 2_000  # characters of an error
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(control_fd: int, parent: int, target: str, memory: int, given: str = "") -> None:
    """Serve until the parent is gone. `target` is `module:function`, called with each item; with
    something `given`, the function is called with that once and makes what is called with items.
    """
    control = socket.socket(fileno=control_fd)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    problem, function = _load(target, given)
    workers: set[int] = set()
    try:
        while os.getppid() == parent:
            readable, _, _ = select.select([control], [], [], LOOK_EVERY)
            _reap(workers)
            if not readable:
                continue
            message, fds, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                return
            if message[:1] == KILL:
                _kill(int.from_bytes(message[1:], "big"), workers)
                control.send(KILL)
                continue
            pid = _fork(parent)
            if pid == 0:
                control.close()
                _work(Connection(fds[0]), function, problem, memory)
            os.close(fds[0])
            workers.add(pid)
    finally:
        for pid in tuple(workers):
            _kill(pid, workers)
        os._exit(0)


def _fork(parent: int) -> int:
    """Fork; wait where the system has no process to give just now, which the pool reports."""
    while True:
        try:
            return os.fork()
        except OSError:
            if os.getppid() != parent:
                raise
            time.sleep(LOOK_EVERY)


def _load(target: str, given: str) -> tuple[str, Callable[..., Any] | None]:
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
        return "", found(given) if given else found
    except Exception as error:  # told to the pool, which raises it
        return f"{type(error).__name__}: {error}", None


def _reap(workers: set[int]) -> None:
    """Forget the workers that have ended, and end what they left behind."""
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            workers.discard(pid)
    _kill_orphans(workers)


def _kill_orphans(workers: set[int]) -> None:
    """Kill what dead workers left: it is ours now. Each that dies leaves its own to us."""
    while strangers := _children() - workers:
        for pid in strangers:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in strangers:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> set[int]:
    """Return the processes whose parent is this one; none where the system does not tell."""
    try:
        return set(map(int, Path("/proc/thread-self/children").read_text().split()))
    except OSError:
        return set()


def _kill(pid: int, workers: set[int]) -> None:
    """Kill a worker and what it has started: only children not yet waited for, whose number is
    theirs.
    """
    if pid not in workers:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # before it had its own group
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
    workers.discard(pid)
    _kill_orphans(workers)


# --- the worker's side


def _work(pool: Connection, function: Callable[..., Any] | None, problem: str, memory: int) -> None:
    """Answer (status, value, processor seconds so far) to each item, in order, until the last."""
    try:
        os.setpgid(0, 0)
        _die_with(os.getppid())
        _prctl(PR_SET_CHILD_SUBREAPER, 1)  # what leaves its parent behind stays below its worker
        if memory:
            limit_memory(memory)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.register_at_fork(after_in_child=pool.close)
        pool.send((READY, os.getpid(), problem))
        serve = getattr(function, "serve", None)
        if serve is not None:
            serve(pool)
            return
        while True:
            request = memoryview(pool.recv_bytes())
            number, item = request[: NUMBER.size], request[NUMBER.size :]
            pool.send_bytes(bytes(number) + _answer(function, item))
    except (EOFError, OSError, KeyboardInterrupt):
        pass
    finally:
        try:
            flush()
        finally:
            os._exit(0)  # whatever happened: behind this stands the forkserver's own code


def limit_memory(memory: int) -> None:
    """Limit memory to so many bytes beside what the process has loaded."""
    try:
        loaded = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        loaded = 0
    resource.setrlimit(resource.RLIMIT_AS, (loaded + memory, loaded + memory))


def _answer(function: Callable[..., Any] | None, item: memoryview) -> bytes:
    """Return the function's answer, ready to be sent. What can't be sent is an error, too."""
    assert function is not None  # the pool has refused otherwise
    try:
        with one_process():
            value = function(*pickle.loads(item))
        return _packed("ok", value)
    except MemoryError:
        return _packed("costly", "it needs more memory than it may have")
    except (Exception, SystemExit) as error:  # the boundary: said, never a 0
        return _packed("error", f"{type(error).__name__}: {error}"[:MAX_WORDS])


def _packed(status: str, value: Any) -> bytes:
    packed = pickle.dumps((status, value, time.process_time()))
    if len(packed) > MAX_ANSWER:
        raise ValueError(f"its result has {len(packed)} bytes, more than {MAX_ANSWER}")
    return packed


def _die_with(parent: int) -> None:
    """End this process with its parent: at once where the system can, else within a second."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def _prctl(option: int, value: int) -> None:
    """Call prctl where the system has it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)
