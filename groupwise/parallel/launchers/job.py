"""A run that is to be started: how many ranks where, and the words that start one of them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

# Stand in a rank's words for the addresses of servers that a launcher has started beside it.
ADDRESS, ADDRESSES = "{url}", "{urls}"


@dataclass(frozen=True)
class Servers:
    """Servers beside the ranks, such as engines or judges: as many as asked, by one command."""

    count: int
    words: tuple[str, ...]  # with {port} in them
    gpus: int = 0  # of each


@dataclass(frozen=True)
class RankJob:
    """A run of several ranks."""

    name: str
    words: tuple[str, ...]  # behind the interpreter: -m groupwise train ...
    ranks: int  # on each node, one a GPU
    nodes: int = 1
    gpus: bool = True  # whether ranks have GPUs; else cores
    folder: Path = Path()  # where it is started: names of files in the words are as seen from there
    restarts: int = 0  # how often torchrun starts all ranks again by itself
    servers: Servers | None = None
    python: str = sys.executable

    @property
    def size(self) -> int:
        """Return how many ranks there are in all."""
        return self.ranks * self.nodes

    def torchrun(self, *meeting: str) -> list[str]:
        """Return the command that starts the ranks of one node, which meet as `meeting` says."""
        restarts = ["--max-restarts", str(self.restarts)] if self.restarts else []
        start = [self.python, "-m", "torch.distributed.run", *meeting, *restarts]
        return [*start, "--nproc-per-node", str(self.ranks), *self.words]

    def with_addresses(self, urls: Sequence[str]) -> RankJob:
        """Return the job whose words name the servers."""
        listed = "[" + ", ".join(f'"{url}"' for url in urls) + "]"
        words = (word.replace(ADDRESSES, listed) for word in self.words)
        return replace(
            self, words=tuple(word.replace(ADDRESS, next(iter(urls), "")) for word in words)
        )


def threads(job: RankJob) -> dict[str, str]:
    """Return the variables that give each rank its share of the cores, where nobody has set them.

    torchrun gives each rank one thread, and says so in a warning, unless this is set.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // job.ranks))}


def shell(words: Sequence[str]) -> str:
    """Return a command as a shell reads it."""
    return shlex.join(words)
