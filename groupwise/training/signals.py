"""Requests to end the process, held back until what was learned is saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(Exception):
    """The run was asked to stop. It is saved; the same command goes on with it."""


class Signals:
    """Requests to end the process: `asked` is set, and a second one is not held back."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._previous: dict[int, Any] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold signals as long as this lasts; the outermost counts. Only the main thread can."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._previous = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
        for number in self._previous:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._previous = {}

    def _note(self, number: int, frame: object) -> None:
        self.asked.set()
        signal.signal(number, self._previous[number])
