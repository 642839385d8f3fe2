"""One warm sandbox, seen from outside: starts cells, keeps their clocks, trusts nobody inside."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from groupwise.graders.sandbox import isolation
from groupwise.graders.sandbox.inside import wire
from groupwise.graders.sandbox.isolation import SandboxError, Wall
from groupwise.graders.sandbox.limits import Limits

START = 20.0  # seconds for a sandbox or a cell to come up, on a busy machine
ERRORS_SHOWN = 2000  # bytes of standard error
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL

_open_workers: weakref.WeakSet[Sandbox] = weakref.WeakSet()


class Overtime(Exception):
    """A program did not end in time."""


@dataclass(frozen=True)
class Ran:
    """The end of a script. `why` is empty if it ended by itself with status 0."""

    output: str = ""
    errors: str = ""
    why: str = ""
    timed_out: bool = False


@dataclass(frozen=True)
class Examined:
    passed: int
    total: int
    why: str = ""
    timed_out: bool = False


class Sandbox:
    """A zygote behind its wall. One job at a time; `slot` numbers those that run side by side."""

    def __init__(self, wall: Wall, slot: int = 0, python: str = "") -> None:
        told = isolation.settings(wall, _uid(slot), python)
        self.wall = wall
        self.control, near = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Not 0, 1 or 2, which a daemon may have closed: those are the zygote's own.
        with near, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD_CLOEXEC, 3)) as inner:
            self.process = subprocess.Popen(
                isolation.command(told, python, inner.fileno()),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[inner.fileno()],
                env=isolation.ENVIRONMENT,
                cwd="/",
            )
        _open_workers.add(self)
        try:
            self._greet(isolation.boot_data(told, python))
        except BaseException:
            self.close()
            raise

    def _greet(self, boot: bytes) -> None:
        assert self.process.stdin is not None and self.process.stderr is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as door:
            door.write(boot)
        said = _message(self.control, time.monotonic() + START)
        if said is None or said["failed"]:
            said = said or {"failed": self.process.stderr.read(ERRORS_SHOWN).decode().strip()}
            raise SandboxError(f"{self.wall}: {said['failed'] or 'the sandbox did not start'}")

    def close(self) -> None:
        """Close the connection: the zygote leaves with it, and all cells."""
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        _open_workers.discard(self)

    def script(self, code: str, stdin: str, limits: Limits) -> Ran:
        """Run a program that reads standard input and writes standard output."""
        with contextlib.ExitStack() as stack:
            out, errors = stack.enter_context(_Pipe()), stack.enter_context(_Pipe())
            given = stack.enter_context(_sealed(stdin.encode("utf-8", "surrogatepass")))
            ends = {"stdin": given, "stdout": out.inner, "stderr": errors.inner}
            cell = stack.enter_context(self.cell("script", limits, ends))
            out.close_inner()
            errors.close_inner()
            cell.wait_until_confined()
            cell.hand({"code": code})
            deadline = time.monotonic() + limits.seconds
            try:
                ended = _drain(cell, out, errors, limits, deadline)
            except Overtime:
                return Ran(out.text, errors.text, _overtime(limits), timed_out=True)
            return Ran(out.text, errors.text, ended)

    def examine(self, code: str, job: Mapping[str, Any], limits: Limits) -> Examined:
        """Run a program and, in a cell of their own, the tests that call its functions."""
        left, right = socket.socketpair()
        total = len(job["tests"])
        with left, right, contextlib.ExitStack() as stack:
            tests = stack.enter_context(self.cell("tests", limits, {"link": left.fileno()}))
            program = stack.enter_context(self.cell("module", limits, {"link": right.fileno()}))
            left.close()
            right.close()
            program.wait_until_confined()  # both come up at the same time
            tests.wait_until_confined()
            program.hand({"code": code})
            tests.hand(job)
            deadline = time.monotonic() + limits.seconds
            try:
                found = tests.report(deadline)
            except Overtime:
                return Examined(0, total, _overtime(limits), timed_out=True)
            if found is None:
                tests.ended(time.monotonic() + 1)
                tests.check()
                return Examined(0, total, "the tests ended without a verdict")
            if "ended" in found.why and (ended := program.ended(time.monotonic() + 0.1)):
                return replace(found, why=f"{found.why} ({ended})")
            return found

    @contextlib.contextmanager
    def cell(self, kind: str, limits: Limits, ends: Mapping[str, int]) -> Iterator[Cell]:
        leash, inner_leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel, inner_channel = socket.socketpair()
        with leash, channel:
            with inner_leash, inner_channel:
                order = {"kind": kind, "fds": ["channel", *ends], **limits.order()}
                handed = [inner_leash.fileno(), inner_channel.fileno(), *ends.values()]
                try:
                    socket.send_fds(self.control, [json.dumps(order).encode()], handed)
                except OSError as error:
                    raise SandboxError(f"{self.wall}: the sandbox has ended") from error
            cell = Cell(leash, channel)
            try:
                yield cell
            finally:
                cell.end()


class Cell:
    """One process for one program. When its connection is closed, it is ended."""

    def __init__(self, leash: socket.socket, channel: socket.socket) -> None:
        self.leash, self.channel = leash, channel
        self.status: dict[str, Any] | None = None

    def wait_until_confined(self) -> None:
        said = _message(self.leash, time.monotonic() + START)
        if said is None or not said.get("ready"):
            self.status = said or {}
            why = (said or {}).get("why") or (said or {}).get("failed") or "no cell came up"
            raise SandboxError(f"A program can't be confined: {why}")

    def hand(self, job: Mapping[str, Any]) -> None:
        try:
            wire.send(self.channel, job)
        except wire.Gone:  # it may end before it has read all
            pass
        except ValueError as error:
            raise SandboxError(f"The tests are too large to be run: {error}") from error

    def report(self, deadline: float) -> Examined | None:
        """Return the report of the tests, bounded and checked; None if they ended without."""
        data = b""
        while True:
            _wait([self.channel], deadline)
            try:
                part = self.channel.recv(65536)
            except OSError:
                return None
            data += part
            if not part or len(data) > 2**20:
                break
        try:
            found = json.loads(data[4:])
            return Examined(int(found["passed"]), int(found["total"]), str(found["why"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def ended(self, deadline: float) -> str:
        """Return how the process ended, as its keeper says; '' if with status 0, or not yet."""
        if self.status is None:
            self.status = _message(self.leash, deadline)
        code = (self.status or {}).get("exit", 0)
        return "" if code == 0 else f"signal {-code}" if code < 0 else f"exit status {code}"

    def check(self) -> None:
        """Raise if nobody says how it ended: the keeper is gone, which is no program's doing."""
        if self.status is None:
            raise SandboxError("A sandbox was ended from outside")

    def end(self) -> None:
        """Let go: the keeper kills what is left. Returns when it has."""
        with contextlib.suppress(OSError):
            self.leash.shutdown(socket.SHUT_WR)
        if self.status is None:
            self.status = _message(self.leash, time.monotonic() + START)


class _Pipe:
    """The output of a script, up to a number of bytes."""

    def __init__(self) -> None:
        self.outer, self.inner = os.pipe()
        os.set_blocking(self.outer, False)
        self.data = bytearray()
        self.open = True

    def __enter__(self) -> _Pipe:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_inner()
        os.close(self.outer)

    def fileno(self) -> int:
        return self.outer

    def close_inner(self) -> None:
        if self.inner >= 0:
            os.close(self.inner)
        self.inner = -1

    def read(self) -> None:
        try:
            part = os.read(self.outer, 65536)
        except BlockingIOError:
            return
        self.data += part
        self.open = bool(part)

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


def _drain(cell: Cell, out: _Pipe, errors: _Pipe, limits: Limits, deadline: float) -> str:
    """Read until both are closed; return why the program is at fault, '' if it is not."""
    while out.open or errors.open:
        ready = _wait([pipe for pipe in (out, errors) if pipe.open], deadline)
        for pipe in ready:
            pipe.read()
        del errors.data[:-ERRORS_SHOWN]
        if len(out.data) > limits.output * 1024:
            return f"more than {limits.output} KiB of output"
    ended = cell.ended(deadline)
    if time.monotonic() >= deadline:
        raise Overtime
    cell.check()
    last = errors.text.strip().splitlines()[-1:]
    return ": ".join([ended, *last]) if ended else ""


@contextlib.contextmanager
def _sealed(data: bytes) -> Iterator[int]:
    """Provide standard input that nobody can change or lengthen, without a file."""
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait(sources: Sequence[Any], deadline: float) -> list[Any]:
    """Return those that can be read; `poll` has no upper bound of descriptors, unlike `select`."""
    poll = select.poll()
    by_number = {source.fileno(): source for source in sources}
    for number in by_number:
        poll.register(number, select.POLLIN)
    left = deadline - time.monotonic()
    found = poll.poll(max(left, 0) * 1000) if left > 0 else []
    if not found:
        raise Overtime
    return [by_number[number] for number, _ in found]


def _message(connection: socket.socket, deadline: float) -> dict[str, Any] | None:
    """Return the next message; None if the other side left or was too slow."""
    try:
        _wait([connection], deadline)
        data = connection.recv(65536)
        return json.loads(data) if data else None
    except (OSError, Overtime, ValueError):
        return None


def _overtime(limits: Limits) -> str:
    return f"did not end within {limits.seconds:g} s"


def _uid(slot: int) -> int | None:
    """Return a user of its own for every sandbox on the machine, out of those that this root has.

    None for who is not root, or root of a namespace that knows nobody else.
    """
    if os.getuid() != 0:
        return None
    with open("/proc/self/uid_map") as file:
        known = [tuple(map(int, line.split())) for line in file]
    first, count = max(((inner, size) for inner, _, size in known), key=lambda found: found[1])
    usable = min(first + count, 2**31 - 1) - 1
    if usable < 2:
        return None
    least = min(1_000_000_000, usable // 2)
    return least + (os.getpid() * 64 + slot) % (usable - least)


def _forget_workers() -> None:
    """Forget the parent's sandboxes in a forked child: they must not outlive it here."""
    for worker in list(_open_workers):
        worker.control.close()
    _open_workers.clear()


def _close_workers() -> None:
    for worker in list(_open_workers):
        worker.close()


atexit.register(_close_workers)
os.register_at_fork(after_in_child=_forget_workers)
