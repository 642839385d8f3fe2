"""The process of the program under test. It holds no test and no expected result."""

from __future__ import annotations

import atexit
import socket
import sys
import threading
import types
from typing import Any

from groupwise.graders.sandbox.inside import wire
from groupwise.graders.sandbox.inside.peer import Peer


def as_script(code: str) -> None:
    """Run as `python program.py` would: reads standard input, writes standard output.

    It ends with its last thread, and then does what it left for the end: many programs compute
    in a thread with a large stack, or write all they have to say in one go.
    """
    module = _module("__main__")
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


def as_module(code: str, link: socket.socket) -> None:
    """Run it, then do what the process with the tests asks for: call its functions."""
    module = _module("solution")
    peer = Peer(link)
    peer.kept[0] = module  # what the examiner begins with
    try:
        exec(compile(code, "program.py", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit among them
        wire.send(link, ["failed", type(error).__name__, str(error)[:1000]])
        return
    wire.send(link, ["loaded"])
    try:
        peer.serve()
    except wire.Gone:
        return


def _module(name: str) -> Any:
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module
