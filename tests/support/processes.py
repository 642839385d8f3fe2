"""Processes of this machine: who lives, who came from whom, how one ended."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from groupwise.cli import main


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gone(pids: list[int], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            after = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(after[1]), []).append(int(folder.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def forked(words: Sequence[str], folder: Path) -> tuple[int, str, str]:
    """What the command line does in a process of its own, which need not import anything anew."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.chdir(folder)
                sys.stdout, sys.stderr = out, err
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                status = main(words)
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        status = exit_code(child)
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
