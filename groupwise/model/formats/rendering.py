"""Chat templates, rendered by a process of their own: see renderer.py, which is its program."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from groupwise.errors import ModelError
from groupwise.model.formats.renderer import HEAD, SECONDS

PROGRAM = Path(__file__).with_name("renderer.py")

# By process: a fork must neither use nor end its parent's.
_renderers: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


def render(template: str, variables: dict[str, Any]) -> tuple[bool, str]:
    """Return the text and true, or what went wrong and false; in bounded time and memory."""
    with _lock:
        process = _renderers.get(os.getpid()) or _start()
        try:
            assert process.stdin is not None and process.stdout is not None
            pickle.dump((template, variables), process.stdin)
            process.stdin.flush()
            head = process.stdout.read(HEAD.size)
            if len(head) == HEAD.size:
                done, length = HEAD.unpack(head)
                return done, process.stdout.read(length).decode("utf-8", "surrogatepass")
        except BrokenPipeError:
            pass  # it ended before it had read all, as below
        except BaseException:  # whoever interrupts leaves a reply behind that nobody asked for
            _end()
            raise
        _end()
    return False, f"it does not end within {SECONDS} s of the processor, or ended its process"


def _start() -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, sys.path))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the run: this one ends when nobody asks any more
        )
    except OSError as error:
        raise ModelError(
            f"Chat templates are rendered by a process of their own, which can't be started: "
            f"{error}. Allow this process more, or give prompts as strings."
        ) from error
    _renderers[os.getpid()] = process
    return process


def _end() -> None:
    process = _renderers.pop(os.getpid(), None)
    if process is not None:
        process.kill()
        process.communicate()


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()


atexit.register(_end)
os.register_at_fork(after_in_child=_unlock)
