"""What the workers of test_graders_pool.py do."""

from __future__ import annotations

import os
import signal
import stat
import struct
import subprocess
import time
from contextlib import suppress
from typing import Any


def work(kind: str, argument: Any = None) -> Any:
    if kind == "echo":
        return argument
    if kind == "pid":
        return os.getpid()
    if kind == "sleep":
        time.sleep(argument)
        return argument
    if kind == "raise":
        raise ValueError(argument)
    if kind == "exit":
        os._exit(argument)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "power":
        return 7 ** (7**argument)  # one operation in C, deaf to signals until it is done
    if kind == "memory":
        return len(bytearray(argument))
    if kind == "child":  # a child that outlives its parent if it is not killed with it
        child = subprocess.Popen(["sleep", "600"])
        with open(argument, "w") as file:
            file.write(str(child.pid))
        time.sleep(600)
    if kind == "large":
        return "x" * argument
    if kind == "half":  # dies, or hangs, with a part of its answer written
        _write(struct.pack("!i", 1000) + b"abc")
        time.sleep(argument)
        os._exit(0)
    if kind == "answer_twice":
        _write(argument)  # and then the one that is due
        return None
    if kind == "close":
        os.closerange(3, 256)
        return None
    if kind == "burn":
        end = time.process_time() + argument
        while time.process_time() < end:
            pass
        return argument
    if kind == "daemon":
        note, how = argument
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(note, "w") as file:
            file.write(str(child.pid))
        if how == "hangs":
            time.sleep(600)
        if how == "dies":
            os._exit(1)
        return None
    if kind == "junk":
        _write(argument)
        time.sleep(600)
    raise AssertionError(kind)


def _write(message: bytes) -> None:
    """To the pool, which is the only socket that a worker has."""
    for number in range(3, 64):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, message)


def scorer(name: str, options: Any, answer: str, entry: Any) -> tuple[float | None, str, str]:
    """A scorer of a task that takes for ever over some answers, and dies over one."""
    if answer in ("burn", "sleep", "exit"):
        work(answer, 600)
    return float(answer == entry["answer"]), "ok", ""


def stand_in(gold: str, answer: str, rounding: Any) -> Any:
    """An engine that dies or hangs."""
    return work("kill" if "11" in answer else "sleep", 600)
