"""Attacks that a way of isolation must withstand, on this machine, just now, to be used."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from groupwise.graders.sandbox.inside.zygote import SCRATCH
from groupwise.graders.sandbox.isolation import SandboxError
from groupwise.graders.sandbox.limits import Limits
from groupwise.graders.sandbox.worker import Sandbox

LIMITS = Limits(seconds=20, memory=256, disk=8)
PROGRAM = r"""
import ctypes, json, os, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
TARGET = json.loads(input())
tried = []
through = []

def attempt(name, function):
    tried.append(name)
    try:
        if function() is not False:
            through.append(name)
    except (OSError, MemoryError, ValueError):
        pass

def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as client:
        client.settimeout(2)
        client.connect(address)

def send_to(address):
    left, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.sendto(b"x", address)

def write_to(folder):
    open(os.path.join(folder, TARGET["name"]), "w").close()

def fork():
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)

def fill_scratch():
    written = 0
    for number in range(4):
        with open(f"fill{number}", "wb") as file:
            for _ in range(TARGET["disk"]):
                written += file.write(b"x" * 2**20)
    return written > TARGET["disk"] * 2**20

def in_memory():
    return len(bytearray(TARGET["memory"] * 2**20 * 2)) > 0

def raise_limit():
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

pid = TARGET["pid"]
others = [p for p in (pid, os.getppid()) if p not in (0, os.getpid())]
attempt("read a file", lambda: open(TARGET["secret"]).read())
attempt("read a file of the system", lambda: open("/etc/passwd").read())
for folder in TARGET["folders"]:
    attempt(f"write to {folder}", lambda: write_to(folder))
attempt("connect over TCP", lambda: connect(socket.AF_INET, ("127.0.0.1", TARGET["port"])))
attempt("connect to a socket", lambda: connect(socket.AF_UNIX, TARGET["socket"]))
attempt("connect to an abstract socket", lambda: connect(socket.AF_UNIX, "\0" + TARGET["name"]))
attempt("send to a socket", lambda: send_to(TARGET["mailbox"]))
for other in others:
    attempt("signal a process", lambda: os.kill(other, 0))
    attempt("read a process", lambda: open(f"/proc/{other}/environ").read())
    attempt("trace a process", lambda: libc.ptrace(16, other, 0, 0) == 0)
    attempt("change a process", lambda: resource.prlimit(other, resource.RLIMIT_CORE))
attempt("fork", fork)
attempt("take memory", in_memory)
attempt("fill the disk", fill_scratch)
attempt("raise a limit", raise_limit)
attempt("become root", lambda: os.setuid(0))
attempt("make namespaces", lambda: libc.unshare(0x10000000) == 0)
attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0)
attempt("share memory", lambda: libc.shmget(0, 4096, 0o1600) != -1)
print(json.dumps([tried, through]))
"""


def withstood(worker: Sandbox) -> None:
    """Raise a SandboxError that names what got through, if anything did."""
    _, through = attempted(worker)
    if through:
        raise SandboxError(f"{worker.wall} is not tight here: a program could {through[0]}")


def attempted(worker: Sandbox) -> tuple[list[str], list[str]]:
    """Return what a program in there tried, and what of it got through."""
    with _targets() as (given, evidence):
        ran = worker.script(PROGRAM, json.dumps(given), LIMITS)
        try:
            tried, through = json.loads(ran.output)
        except ValueError:
            raise SandboxError(
                f"{worker.wall}: a harmless program does not run: {ran.why or ran.output!r}"
            ) from None
        return tried, [*through, *evidence()]


@contextlib.contextmanager
def _targets() -> Iterator[tuple[dict[str, Any], Any]]:
    """Make things to reach for that anyone on this machine can reach, and read what was done to
    them.
    """
    with contextlib.ExitStack() as stack:
        # The address of a socket has 107 bytes at most, and a long TMPDIR is no hole.
        short = None if len(tempfile.gettempdir()) < 60 else "/tmp"
        place = stack.enter_context(tempfile.TemporaryDirectory(dir=short))
        os.chmod(place, 0o777)
        secret = Path(place, "secret")
        secret.write_text("secret")
        secret.chmod(0o644)
        name = f"groupwise-{os.getpid()}-{Path(place).name}"
        listeners = [
            stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            for family in (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX)
        ]
        addresses: list[Any] = [("127.0.0.1", 0), f"{place}/socket", f"\0{name}"]
        for listener, address in zip(listeners, addresses, strict=True):
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
        mailbox = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        mailbox.bind(f"{place}/mailbox")
        for path in (f"{place}/socket", f"{place}/mailbox"):
            os.chmod(path, 0o777)
        folders = [place, "/", "/usr", "/var/tmp", "/dev/shm", os.path.expanduser("~")]
        written = [Path(folder, name) for folder in folders]
        stack.callback(_remove, written)
        given = {
            "secret": str(secret),
            "name": name,
            "folders": [folder for folder in folders if folder != SCRATCH],  # its own is called so
            "port": listeners[0].getsockname()[1],
            "socket": f"{place}/socket",
            "mailbox": f"{place}/mailbox",
            "pid": os.getpid(),
            "memory": LIMITS.memory,
            "disk": LIMITS.disk,
        }

        def evidence() -> list[str]:
            found = []
            for listener in listeners:
                with contextlib.suppress(BlockingIOError):
                    listener.accept()[0].close()
                    found.append("reach a listener")
            return found + [f"write {file}" for file in written if file.exists()]

        yield given, evidence


def _remove(files: list[Path]) -> None:
    """Remove what got through, after it was reported."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
