"""A warm interpreter inside the wall. It forks a cell for every program and never sees one.

    the grader's process
      └ zygote        behind the wall: own files, own processes, no network; reads no job
          └ keeper    one per cell: its clock's hand; ends with the cell, or when told to
              └ cell  process 1 of its own process namespace, own scratch; reads the job, runs it

A cell is a fresh fork of the same clean zygote, so no program finds anything of another. Whatever
a program started ends with process 1. Jobs come over a connection of the cell's own: what the
zygote had read would be in the memory of every later cell.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any

from groupwise.graders.sandbox.inside import examiner, kernel, program, wire

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
THREADS = 16  # of a cell, over and above its processes
WARM = (
    "array bisect cmath collections copy dataclasses datetime decimal enum fractions functools "
    "hashlib heapq itertools math operator queue random re statistics string textwrap typing"
)
SCRATCH = "/tmp"
CONFINED = "confined"  # what a cell says before it reads its job
ALL_OUTSIDE = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
ALL_OUTSIDE |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP


def main(control: socket.socket, settings: dict[str, Any]) -> None:
    """Build the wall, or find it built; give up root; then fork cells until the grader leaves."""
    for name in WARM.split():
        __import__(name)
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setsid()
    try:
        if settings["wall"] == "namespaces":
            _build_wall(settings)
        if settings["uid"] is not None:
            kernel.become(settings["uid"])
        kernel.no_new_privileges()
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need no burial
    control.send(json.dumps({"failed": ""}).encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 8)
        if not message:
            return
        if os.fork() == 0:
            _keep(control, settings, json.loads(message), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _build_wall(settings: dict[str, Any]) -> None:
    """Build the wall as bubblewrap would. The process goes on as its own child, inside it."""
    uid, gid = os.getuid(), os.getgid()
    root = settings["uid"] is not None
    kernel.unshare(ALL_OUTSIDE | (0 if root else kernel.CLONE_NEWUSER))
    if not root:
        kernel.map_own_id(uid, gid)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    kernel.build_root(settings["folders"], settings["files"], DEVICES)


def _keep(
    control: socket.socket, settings: dict[str, Any], order: dict[str, Any], descriptors: list[int]
) -> None:
    """Start a cell, say how it ended, end it when the grader hangs up. Does not return."""
    control.close()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # and the cell with it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    leash = socket.socket(fileno=descriptors[0])
    try:
        uid, gid = os.getuid(), os.getgid()
        if settings["nested"]:
            kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
            kernel.map_own_id(uid, gid)
        told, tells = os.pipe()
        cell = os.fork()
        if cell == 0:
            leash.close()
            os.close(told)
            _cell(settings, order, descriptors[1:], tells)
        os.close(tells)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        _watch(leash, cell, told)
    except (OSError, wire.Gone) as error:
        leash.send(json.dumps({"failed": str(error)}).encode())
    os._exit(0)


def _watch(leash: socket.socket, cell: int, told: int) -> None:
    ended = os.pidfd_open(cell)
    waiting = {told, ended, leash.fileno()}
    while True:
        ready, _, _ = select.select(waiting, [], [])
        if told in ready:  # confined, or why not
            said = os.read(told, 4096).decode()
            leash.send(json.dumps({"ready": said == CONFINED, "why": said}).encode())
            waiting.discard(told)
        if leash.fileno() in ready:
            os.kill(cell, signal.SIGKILL)
        if ended in ready or leash.fileno() in ready:
            _, status, used = os.wait4(cell, 0)
            code = os.waitstatus_to_exitcode(status)
            found = {"exit": code, "cpu": used.ru_utime + used.ru_stime, "memory": used.ru_maxrss}
            leash.send(json.dumps(found).encode())
            return


def _cell(
    settings: dict[str, Any], order: dict[str, Any], descriptors: list[int], tells: int
) -> None:
    """Confine this process for good, then run what comes over its connection. Does not return."""
    code = 1
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        channel = _take_descriptors(order["fds"], descriptors, tells)
        tells = 3
        _confine(settings, order)
        os.write(tells, CONFINED.encode())
    except BaseException as error:
        os.write(tells, (str(error) or type(error).__name__).encode()[:4096])
        os._exit(1)
    os.close(tells)
    try:
        job = wire.receive(channel)
        link = socket.socket(fileno=5) if "link" in order["fds"] else channel
        for own in (channel, link):  # what a program forks must not answer for it
            os.register_at_fork(after_in_child=own.close)
        if order["kind"] == "script":
            channel.close()
            program.as_script(job["code"])
        elif order["kind"] == "module":
            channel.close()
            program.as_module(job["code"], link)
        else:
            wire.send(channel, examiner.examine(job, link))
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc(limit=-10)  # a recursion has millions
    try:
        sys.stdout.flush()
    finally:
        os._exit(code & 255)


def _take_descriptors(names: list[str], descriptors: list[int], tells: int) -> socket.socket:
    """Place descriptors: standard input and output first, `tells` as 3, connection 4, link 5."""
    given = dict(zip(names, descriptors, strict=True))
    nothing = os.open("/dev/null", os.O_RDWR)
    wanted = [given.get(name, nothing) for name in ("stdin", "stdout", "stderr")]
    wanted += [tells, given["channel"], given.get("link", nothing)]
    high = [_above(descriptor) for descriptor in wanted]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number, inheritable=number < 3)
    os.closerange(len(wanted), 4096)
    return socket.socket(fileno=4)


def _above(descriptor: int) -> int:
    """Copy a descriptor out of the way of the low numbers."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 16)


def _confine(settings: dict[str, Any], order: dict[str, Any]) -> None:
    """Give the cell its scratch and limits, take rights and calls away; failure ends the cell."""
    limits = order["limits"]
    if not settings["nested"] and settings["uid"] is None:
        limits["processes"] = None  # it would count all that this user runs
    if settings["wall"] == "none":
        kernel.set_limits(**limits)
        return
    nested, writable = settings["nested"], []
    may_fork = order["processes"] > 1
    if nested:
        flags = kernel.MS_NOSUID | kernel.MS_NODEV
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", SCRATCH, "tmpfs", flags, f"{order['scratch']},mode=0700")
        kernel.mount("tmpfs", "/proc", "tmpfs", flags | kernel.MS_RDONLY, "size=4k")
        writable = [SCRATCH]
    elif may_fork:
        raise OSError("forking can't be allowed without a process namespace")
    os.chdir(SCRATCH if nested else "/")
    kernel.no_new_privileges()
    if kernel.landlock_version():
        kernel.landlock([*settings["folders"], *settings["files"]], DEVICES, writable)
    elif not nested:
        raise OSError("this kernel has no Landlock")
    kernel.set_limits(**limits)
    if nested:
        kernel.drop_capabilities()
    kernel.refuse_calls(may_fork, sees_others=not nested)
