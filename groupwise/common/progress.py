"""Progress for whoever waits: a phase, how far it is, and for how long.

Code that does the work names its phase and leaves counts that it has anyway. A separate thread
looks at them now and then and shows them, so the work never asks the clock, waits for a device or
writes to a terminal. Where nobody watches, phases cost nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TypeVar

Item = TypeVar("Item")

LOOK = 0.25  # seconds between two looks
LIVE_AFTER = 1.0  # seconds of silence before a line on a terminal, which is then kept up to date
FIRST_AFTER, NEXT_AFTER = 2.0, 10.0  # of silence before the first plain line, and before others
SHARE = 0.1  # of a phase that must be done before the time left is told from it
UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))  # seconds of each


class Phase:
    """Work that takes time. Called with counts as it goes on: done, and tokens so far.

    `limit`: the seconds after which it is given up, and the `setting` that says so.
    """

    def __init__(
        self,
        name: str,
        total: int = 0,
        things: str = "",
        begun: float = 0.0,
        *,
        limit: float | None = None,
        setting: str = "",
    ) -> None:
        self.name, self.total, self.things, self.begun = name, total, things, begun
        self.limit, self.setting = limit, setting
        self.done: int | None = None  # nobody has counted yet
        self.tokens = 0

    def __call__(self, done: int, tokens: int = 0) -> None:
        self.done, self.tokens = done, tokens

    def text(self, now: float) -> str:
        """Return a line such as `sampling 12 of 64 completions, 585 tokens/s, 0:14, 0:50 left`."""
        took, done = now - self.begun, self.done
        counts = [f"{number:,}" for number in (done, self.total or None) if number is not None]
        count = f"{' of '.join(counts)} {self.things}" if counts else ""
        words = [" ".join(word for word in (self.name, count) if word)]
        if self.tokens and took > 0:
            words.append(f"{self.tokens / took:,.0f} tokens/s")
        words.append(clock(took))
        if done and self.total > done >= SHARE * self.total:
            words.append(f"{clock(took / done * (self.total - done))} left")
        if self.limit is not None:
            named = f" ({self.setting} = {self.limit:g})" if self.setting else ""
            words.append(f"at most {clock(max(self.limit - took, 0.0))} more{named}")
        return ", ".join(words)


class Watcher:
    """A thread that shows what is under way: on a terminal a line that is kept up to date, else a
    line now and then. `show` gets the line, "" where there is none any more.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        *,
        live: bool,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.show, self.live, self.now = show, live, now
        self._phases: list[Phase] = []
        self._last = "getting ready"
        self._announced: list[tuple[threading.Event, Callable[[], None]]] = []
        self._lock = threading.RLock()
        self._heard = 0.0  # when something was last said
        self._shown = False  # a line that is kept up to date
        self._patience = LIVE_AFTER if live else FIRST_AFTER
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Show the phases that begin meanwhile in this thread."""
        before = _WATCHER.set(self)
        if self._thread is None:
            self.heard()
            self._thread = threading.Thread(target=self._look_on, name="progress", daemon=True)
            self._thread.start()
        try:
            yield
        finally:
            _WATCHER.reset(before)

    def doing(self) -> str:
        """Return the phases that are under way, and how far they are; or which was the last."""
        with self._lock:
            now = self.now()
            return ": ".join(phase.text(now) for phase in list(self._phases)) or self._last

    def announce(self, event: threading.Event, say: Callable[[], None]) -> None:
        """Say something once the event is set. A signal handler may set it: it must neither write
        nor wait itself.
        """
        self._announced.append((event, say))

    def heard(self) -> None:
        """Make room on the terminal for another line; the time until the next one starts anew."""
        with self._lock:
            self._heard = self.now()
            self._clear()

    def begin(self, phase: Phase) -> None:
        self._phases.append(phase)

    def end(self, phase: Phase) -> None:
        with self._lock:
            self._phases.remove(phase)
            self._last = f"going on from {phase.name}"
            if not self._phases:
                self._clear()

    def _clear(self) -> None:
        if self._shown:
            self._shown = False
            self.show("")

    def look(self) -> None:
        """Show what is under way, if it is time to."""
        for each in [each for each in self._announced if each[0].is_set()]:
            self._announced.remove(each)
            each[1]()
        with self._lock:
            now = self.now()
            if not self._phases or (not self._shown and now - self._heard < self._patience):
                return
            self.show(": ".join(phase.text(now) for phase in self._phases))
            if self.live:
                self._shown = True
            else:
                self._heard, self._patience = now, NEXT_AFTER

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None
        self._closed.clear()

    def _look_on(self) -> None:
        while not self._closed.wait(LOOK):
            self.look()

    def __enter__(self) -> Watcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextmanager
def phase(
    name: str,
    total: int = 0,
    things: str = "",
    *,
    limit: float | None = None,
    setting: str = "",
) -> Iterator[Phase]:
    """Name what is done inside the `with`; call what it yields with counts."""
    watcher = _WATCHER.get()
    if watcher is None:
        yield Phase(name)
        return
    begun = Phase(name, total, things, watcher.now(), limit=limit, setting=setting)
    watcher.begin(begun)
    try:
        yield begun
    finally:
        watcher.end(begun)


def counted(name: str, items: Sequence[Item], things: str) -> Iterator[Item]:
    """Yield the items one by one, counted, as a phase."""
    with phase(name, len(items), things) as told:
        for number, item in enumerate(items):
            told(number)
            yield item


def heard() -> None:
    """Announce that something is about to be printed, to the watcher of this thread's phases."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher.heard()


def clock(seconds: float) -> str:
    """Return seconds as 2:10, or 1:02:10."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """Return seconds in words, of two units at most: 0.4 s, 22 s, 4 min 10 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 10:
        return f"{seconds:.2g} s"
    at = next(at for at, (_, size) in enumerate(UNITS) if whole >= size)
    parts = []
    for name, size in UNITS[at : at + 2]:
        count, whole = divmod(whole, size)
        parts += [f"{count} {name}"] if count else []
    return " ".join(parts)
