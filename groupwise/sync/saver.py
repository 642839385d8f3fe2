"""Checkpoints written beside training: copied to the host, then written by a thread.

Whoever ends a run waits for the checkpoint that is under way. A second Ctrl-C is told what it waits
for and since when; one more leaves at once, and the half is thrown away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from torch import Tensor

from groupwise.common.sizes import size
from groupwise.model.formats.checkpoint import Part
from groupwise.parallel.world import ALONE, World
from groupwise.sync.checkpoints import Snapshot, Vanished, discard, write
from groupwise.sync.host import HostCopy, free_memory
from groupwise.sync.shards import Writers

SPARE = 2**30  # bytes of host memory that are left to others


class Saver:
    """One checkpoint at a time: the next one waits until the last one is on the disk.

    What goes wrong is raised by the next call: `check`, `save` or `close`.
    """

    def __init__(
        self,
        parent: Path,
        keep: int,
        tell: Callable[[str], None] = lambda text: None,
        world: World = ALONE,
    ) -> None:
        self.parent, self.keep, self._tell = parent, keep, tell
        self.world, self.writers = world, Writers(world)
        self.stalled = 0.0  # seconds that training waited here, since they were last asked for
        self._host = HostCopy()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._abandoned = False  # by somebody who does not want to wait for it
        self._what, self._begun, self._took = "", 0.0, 0.0  # of the work under way; of the last

    def reserve(self, made: Snapshot) -> None:
        """Make the memory for such checkpoints while something else is done."""
        tensors = made.tensors
        if any(x.is_cuda for x in tensors) and made.bytes + SPARE < free_memory():
            self._start("the host's memory for checkpoints", lambda: self._host.reserve(tensors))

    def save(
        self, made: Snapshot, before: Callable[[], None], after: Callable[[], None] = lambda: None
    ) -> None:
        """Take this very moment, and write it when `before` has returned; then call `after`.

        Where files are deleted under the writer, it is written once more, `before` called again.
        Where the host has no memory for a copy, training waits until it is written.
        """
        begun = time.perf_counter()
        self.wait()
        beside = self._host.holds(made.bytes) or made.bytes + SPARE < free_memory()
        if beside:
            made = self._copy(made)

        def work() -> None:
            self._host.ready()
            if not self.world.leads:  # whose thread says where, and when it is done
                assert made.resume is not None
                made.resume.fill(self.parent)
                return
            with self.writers.led(made.others > 0):
                before()
                try:
                    write(self.parent, made, self.keep)
                except Vanished:  # the moment is still here: what is left of the run, perhaps
                    if self._abandoned:
                        raise
                    before()
                    write(self.parent, made, self.keep)
            after()

        self._start(f"the checkpoint of step {made.step} ({size(made.bytes)})", work)
        if not beside:
            self.wait()
        self.stalled += time.perf_counter() - begun

    def hold_changes(self) -> None:
        """Call before weights or optimizer change: the copy that is under way comes first."""
        self._host.hold_changes()

    def check(self) -> None:
        """Raise what went wrong with the last checkpoint."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def take_stalled(self) -> float:
        """Return the seconds that training waited here since the last call."""
        found, self.stalled = self.stalled, 0.0
        return found

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, KeyboardInterrupt) and self._thread is not None:
                self._tell(self._waiting())
            self.wait()
        except KeyboardInterrupt:
            self._abandoned = True
            self._host.ready()
            if self.world.leads:
                discard(self.parent)
            raise
        except Exception:
            if error is None:  # the error under way is the one to show
                raise
        finally:
            self._host.release()

    def _waiting(self) -> str:
        took = f", and the last one took {self._took:.0f} s" if self._took else ""
        return (
            f"waiting for {self._what}, begun {time.perf_counter() - self._begun:.0f} s ago{took}; "
            "Ctrl-C once more leaves at once, and the run goes on from the checkpoint before"
        )

    def _start(self, what: str, work: Callable[[], None]) -> None:
        self._what, self._begun = what, time.perf_counter()
        # A daemon: a process that is ended for good leaves a hidden half, which is cleared away.
        self._thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        self._thread.start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
            self._took = time.perf_counter() - self._begun
        except Exception as error:  # crosses the thread: raised by the next call
            self._error = error

    def _copy(self, made: Snapshot) -> Snapshot:
        copies = iter(self._host.take(made.tensors))
        weights = replace(made.weights, parts=_filled(made.weights.parts, copies))
        resume = made.resume and replace(made.resume, parts=_filled(made.resume.parts, copies))
        return replace(made, weights=weights, resume=resume)


def _filled(parts: tuple[Part, ...], copies: Iterator[Tensor]) -> tuple[Part, ...]:
    return tuple(
        replace(part, tensors={name: next(copies) for name in part.tensors}) for part in parts
    )
