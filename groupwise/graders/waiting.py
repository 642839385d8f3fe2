"""Messages about a wait, and how long it may still take."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]
PATIENCE = 2.0  # seconds of silence before the first word
AGAIN = 10.0  # seconds between two words


def say_nothing(text: str) -> None:
    """Ignore the message, where nobody asked to be told."""


def say_on_stderr(text: str) -> None:
    """Print to standard error, where there is no display."""
    print(f"groupwise: {text}", file=sys.stderr, flush=True)


@contextmanager
def waiting(tell: Tell, what: str, limit: float | None = None, setting: str = "") -> Iterator[None]:
    """Say now and then what is waited for; with a `limit` in seconds, how long at most."""
    if tell is say_nothing:
        yield
        return
    done, start = threading.Event(), time.monotonic()

    def speak() -> None:
        pause = PATIENCE
        while not done.wait(pause):
            spent = time.monotonic() - start
            tell(f"waiting for {what} since {spent:.0f} s{_still(spent, limit, setting)}")
            pause = AGAIN

    speaker = threading.Thread(target=speak, name="waiting", daemon=True)
    speaker.start()
    try:
        yield
    finally:
        done.set()
        speaker.join()


def _still(spent: float, limit: float | None, setting: str) -> str:
    if limit is None:
        return ""
    named = f" ({setting} = {limit:g})" if setting else ""
    return f", at most {max(limit - spent, 0.0):.0f} s more{named}"
