"""Protection from forks in users' code: a forked child must not go on as a second groupwise."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def one_process() -> Iterator[None]:
    """Let only the process that came in go on: a child that was forked within ends here.

    It ends as a program of its own would: with the status that it leaves with (`sys.exit`), 1 for
    an exception, which is shown, else 0.
    """
    own = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != own:
            _leave(error)
        raise
    if os.getpid() != own:
        _leave(None)


def _leave(error: BaseException | None) -> None:
    status = 0
    if isinstance(error, SystemExit):
        code = error.code
        status = code if isinstance(code, int) else int(code is not None)
    elif error is not None:
        with suppress(Exception):
            traceback.print_exception(error)
        status = 1
    try:
        flush()
    finally:
        os._exit(status & 255)


def flush() -> None:
    """Write what was printed and is still buffered, even if its target is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
