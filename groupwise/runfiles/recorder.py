"""A recorder that writes steps while training goes on: one background thread, a bounded queue.

For each step the rollouts first, then its events and its evaluation, then its metrics line: the
line is what makes the step count.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from groupwise.errors import RunError
from groupwise.runfiles.files import to_line
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.rollouts import Row, write

Metrics = Mapping[str, float | str | None]


@dataclass(frozen=True)
class _Step:
    number: int
    rows: Sequence[Row]
    metrics: str
    events: Sequence[Event]
    evaluation: str | None


class NoRecorder:
    """The recorder of a rank that writes no files: another one writes the same."""

    def event(self, step: int, kind: str, text: str, **fields: Any) -> None:
        pass

    def step(
        self,
        step: int,
        rows: Sequence[Row],
        metrics: Metrics,
        events: Sequence[Event] = (),
        by_task: Mapping[str, Sequence[float | None]] | None = None,
    ) -> None:
        pass

    def flush(self) -> None:
        pass

    def mark(self) -> Callable[[], None]:
        return self.flush


def metrics_line(step: int, metrics: Metrics) -> str:
    """Write one line of metrics.jsonl: the step, then every name in alphabetical order."""
    for name, value in metrics.items():
        if not isinstance(value, (int, float, str, type(None))):
            raise RunError(
                f"Metric {name} of step {step} is a {type(value).__name__}; metrics.jsonl holds "
                "numbers and texts. Read it with float(...) first."
            )
    return to_line({"step": step, **{name: metrics[name] for name in sorted(metrics)}})


class Recorder:
    """A background writer: hand in steps with `step`; `flush` before a checkpoint; `close` at the
    end.

    Rows and their arrays must not change after they were handed in.
    """

    def __init__(self, folder: RunFolder, depth: int = 2) -> None:
        self._folder = folder
        self._queue: queue.Queue[_Step | Event | threading.Event | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._last = -1
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()

    def event(self, step: int, kind: str, text: str, **fields: Any) -> None:
        """Queue a message or an action, in order with the steps."""
        self._raise()
        self._queue.put(Event(step, kind, text, fields))

    def step(
        self,
        step: int,
        rows: Sequence[Row],
        metrics: Metrics,
        events: Sequence[Event] = (),
        by_task: Mapping[str, Sequence[float | None]] | None = None,
    ) -> None:
        """Queue a step; waits only when the disk is several steps behind.

        `by_task` is what its evaluation measured of each held-out task, where it had one.

        Step 0, before the first update, may have no rows and then leaves no rollout file.
        """
        self._raise()
        if self._closed or step <= self._last:
            raise RunError(
                f"Step {step} can't be recorded: "
                + ("the recorder is closed." if self._closed else f"step {self._last} was before.")
                + " Rewind the folder and make a new recorder to go back."
            )
        self._last = step
        line = metrics_line(step, {k: v for k, v in metrics.items() if k != "step"})
        evaluation = to_line({"step": step, **by_task}) if by_task else None
        self._queue.put(_Step(step, rows, line, tuple(events), evaluation))

    def flush(self) -> None:
        """Wait until all that was handed in is on the disk; raise what went wrong there."""
        self._queue.join()
        self._raise()

    def mark(self) -> Callable[[], None]:
        """Return a call that waits until all that was handed in so far is on the disk.

        It may be made by another thread, and raises what went wrong.
        """
        reached = threading.Event()
        self._queue.put(reached)

        def wait() -> None:
            reached.wait()
            self._raise()

        return wait

    def close(self) -> None:
        """Flush and end the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        self._thread.join()
        self._raise()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The error under way is the one to show; the recorder's own would hide it.
        with contextlib.suppress(RunError) if error is not None else contextlib.nullcontext():
            self.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            # After a failure nothing more is written: a later step would count, with a gap before.
            elif self._error is None:
                try:
                    self._write(item)
                except Exception as error:  # crosses the thread: raised by step, flush or close
                    self._error = error
            self._queue.task_done()
        self._queue.task_done()

    def _write(self, item: _Step | Event) -> None:
        if isinstance(item, Event):
            self._folder.add_events([item])
            return
        if item.rows or item.number > 0:
            path = self._folder.rollout(item.number)
            with self._folder.writing(f"rollouts/{path.name}"):
                path.parent.mkdir(exist_ok=True)
                write(path, item.rows, item.number)
        self._folder.add_events(item.events)
        if item.evaluation is not None:
            self._folder.add_evaluation(item.evaluation)
        self._folder.add_metrics(item.metrics)
