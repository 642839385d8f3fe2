"""Sandboxes kept warm, and the way of isolation that this machine gets."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from groupwise.graders.sandbox.attacks import withstood
from groupwise.graders.sandbox.isolation import TRUST, WALLS, SandboxError, Wall
from groupwise.graders.sandbox.worker import Sandbox

Job = TypeVar("Job")
Verdict = TypeVar("Verdict")

HELP = (
    "Programs of a model are not run without isolation. What would help: apt-get install "
    "bubblewrap; a kernel that allows user namespaces (sysctl user.max_user_namespaces, and on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0), or one with Landlock. In a container: "
    "docker run --security-opt seccomp=unconfined. Or say in so many words that you need none: "
    f"code(isolation='{TRUST}')."
)


@functools.cache
def problem(wall: Wall, python: str = "") -> str:
    """Return why this way of isolation can't be used here; '' if it withstood every attack."""
    try:
        with contextlib.closing(Sandbox(wall, python=python)) as worker:
            withstood(worker)
    except (SandboxError, OSError) as error:
        return str(error)
    return ""


def report() -> dict[Wall, str]:
    """Return every way of isolation and why it can't be used here; '' where it can."""
    return {wall: problem(wall) for wall in WALLS}


def choose(isolation: str = "", python: str = "") -> Wall:
    """Choose the first way that holds here, or the named one if it does. Refuses otherwise."""
    if isolation == TRUST:
        return "none"
    if isolation and isolation not in WALLS:
        raise SandboxError(
            f"There is no isolation {isolation!r}. Known: {', '.join(WALLS)}; without any: "
            f"{TRUST!r}."
        )
    asked = [wall for wall in WALLS if isolation in ("", wall)]
    for wall in asked:
        if not problem(wall, python):
            return wall
    whys = "; ".join(problem(wall, python) for wall in asked)
    raise SandboxError(f"No isolation for programs holds on this machine ({whys}). {HELP}")


class SandboxPool:
    """A number of sandboxes side by side, started when needed and used again and again."""

    def __init__(self, isolation: str = "", python: str = "", size: int | None = None) -> None:
        self.wall, self.python = choose(isolation, python), python
        self.size = size or len(os.sched_getaffinity(0))
        self.slots: queue.Queue[tuple[int, Sandbox | None]] = queue.Queue()
        for slot in range(self.size):
            self.slots.put((slot, None))

    def map(
        self,
        work: Callable[[Sandbox, Job], Verdict],
        jobs: Sequence[Job],
        failed: Callable[[SandboxError], Verdict],
    ) -> list[Verdict]:
        """Do `work` on every job, in order of the jobs; `failed` where no sandbox could do it."""

        def one(job: Job) -> Verdict:
            try:
                return self.run(work, job)
            except SandboxError as error:
                return failed(error)

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(one, jobs))

    def run(self, work: Callable[[Sandbox, Job], Verdict], job: Job) -> Verdict:
        """Run a job, once more in a new sandbox if one fails: that is not the program's fault."""
        with contextlib.suppress(SandboxError), self._worker() as worker:
            return work(worker, job)
        with self._worker() as worker:
            return work(worker, job)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[Sandbox]:
        slot, worker = self.slots.get()
        try:
            worker = worker or Sandbox(self.wall, slot, self.python)
            yield worker
        except BaseException:
            if worker is not None:
                worker.close()
            worker = None
            raise
        finally:
            self.slots.put((slot, worker))

    def close(self) -> None:
        for _ in range(self.size):
            slot, worker = self.slots.get()
            if worker is not None:
                worker.close()
            self.slots.put((slot, None))
