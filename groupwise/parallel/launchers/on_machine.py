"""All ranks on this machine: torchrun, in this process's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from groupwise.parallel.launchers.job import RankJob, shell, threads


def command(job: RankJob) -> list[str]:
    """Return what starts it. One rank alone needs no torchrun."""
    if job.size == 1:
        return [job.python, *job.words]
    return job.torchrun("--standalone")


def text(job: RankJob) -> str:
    """Return the same as a line of a shell."""
    return " ".join([*_set(threads(job) if job.size > 1 else {}), shell(command(job))])


def start(job: RankJob) -> None:
    """Become torchrun: its exit status, signals and output are then this process's. No return."""
    words = command(job)
    os.chdir(job.folder)
    sys.stdout.flush()
    sys.stderr.flush()
    more = threads(job) if job.size > 1 else {}
    os.execvpe(words[0], words, {**os.environ, **more})


def _set(variables: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in variables.items()]
