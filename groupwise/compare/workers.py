"""Runs on all cores or GPUs: a process for each, which does one run after the other.

Starting a process costs seconds, so it is kept; if it dies, its run has failed and the next one
gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.common.progress import phase
from groupwise.compare.plan import ComparisonFolder, ComparisonPlan, Job

LOG = "workers.log"  # what processes say beside their answers: prints of rewards, last words


@dataclass
class JobProgress:
    """The work that this call has done so far."""

    jobs: Sequence[Job]
    shares: dict[Job, float] = field(default_factory=dict)  # of those under way
    seconds: dict[Job, float] = field(default_factory=dict)  # of those done
    failed: dict[Job, str] = field(default_factory=dict)

    @property
    def share(self) -> float:
        done = len(self.seconds) + len(self.failed) + sum(self.shares.values())
        return done / len(self.jobs)

    @property
    def words(self) -> str:
        done = len(self.seconds) + len(self.failed)
        return f"{done} of {len(self.jobs)} runs, {100 * self.share:.0f} %"


def run_jobs(
    plan: ComparisonPlan,
    folder: ComparisonFolder,
    jobs: Sequence[Job],
    places: Sequence[Mapping[str, str]],
    lock: int,
    show: Callable[[JobProgress], None],
) -> JobProgress:
    """Do all jobs, one process for each place; a place is the environment of its process.

    Asked to stop (KeyboardInterrupt), it has the runs under way saved, and raises it again. Asked
    twice, it ends them where they are: they go on from their last checkpoints.
    """
    waiting: queue.Queue[Job] = queue.Queue()
    for job in jobs:
        waiting.put(job)
    heard: queue.Queue[tuple[Job, dict[str, Any]] | None] = queue.Queue()
    progress = JobProgress(jobs)
    workers = [_Worker(folder, place, lock, waiting, heard) for place in places[: len(jobs)]]
    for worker in workers:
        worker.start()
    try:
        left = len(workers)
        while left:
            with phase(f"running, {progress.words}"):
                said = heard.get()
            left -= said is None
            if said is not None:
                _note(progress, *said)
                show(progress)
    except BaseException:
        for worker in workers:
            worker.stop(signal.SIGTERM)
        raise
    finally:
        try:
            for worker in workers:
                worker.join()
        except KeyboardInterrupt:
            for worker in workers:
                worker.stop(signal.SIGKILL)
            raise
    return progress


def _note(progress: JobProgress, job: Job, said: dict[str, Any]) -> None:
    if "share" in said:
        progress.shares[job] = said["share"]
        return
    progress.shares.pop(job, None)
    if "done" in said:
        progress.seconds[job] = said["done"]
    elif "failed" in said:
        progress.failed[job] = said["failed"]


class _Worker(threading.Thread):
    """A place that takes jobs as long as there are any, and passes on what its process reports."""

    def __init__(
        self,
        folder: ComparisonFolder,
        place: Mapping[str, str],
        lock: int,
        waiting: queue.Queue[Job],
        heard: queue.Queue[tuple[Job, dict[str, Any]] | None],
    ) -> None:
        super().__init__(daemon=True)
        self._folder, self._place, self._lock = folder, place, lock
        self._waiting, self._heard = waiting, heard
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False
        self._starting = threading.Lock()  # a process is not started after the request to stop

    def stop(self, how: signal.Signals) -> None:
        with self._starting:
            self._stopping = True
        if self._process is not None:
            self._process.send_signal(how)

    def run(self) -> None:
        try:
            while not self._stopping:
                try:
                    job = self._waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    self._do(job)
                except OSError as error:
                    why = f"its process could not be started: {error}"
                    self._heard.put((job, {"failed": why}))
        finally:
            self._end()
            self._heard.put(None)

    def _do(self, job: Job) -> None:
        process = self._ready()
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"arm": job.arm, "seed": job.seed}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                said = json.loads(line)
                self._heard.put((job, said))
                if "share" not in said:
                    return
        except BrokenPipeError:  # it died before it was asked
            pass
        status = process.wait()
        if not self._stopping:
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            why = " (out of memory?)" if status == -signal.SIGKILL else ""
            self._heard.put((job, {"failed": f"its process ended {how}{why}; see {LOG}"}))

    def _ready(self) -> subprocess.Popen[str] | None:
        """Return the process, a new one if there is none; None if it is time to stop."""
        with self._starting:
            if self._stopping:
                return None
            if self._process is None or self._process.poll() is not None:
                with (self._folder.path / LOG).open("a") as log:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "groupwise.compare.worker", str(self._folder.path)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=os.environ | self._place,
                        pass_fds=(self._lock,),
                        start_new_session=True,  # Ctrl-C is for us: we ask, and wait for the rest
                    )
            return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
