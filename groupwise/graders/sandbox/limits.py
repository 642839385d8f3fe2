"""The limits of a program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RewardError
from groupwise.graders.sandbox.inside.zygote import THREADS

MIB = 2**20
OPEN_FILES = 64
INODES = 4096


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # on the wall's clock, kept outside of the sandbox
    memory: int = 512  # MiB of address space, for each process
    processes: int = 1  # at 1 a program can't fork; it may have 16 threads in any case
    disk: int = 64  # MiB of scratch, and of any one file
    output: int = 1024  # KiB of standard output

    def __post_init__(self) -> None:
        for name, least in (
            ("seconds", 0.1),
            ("memory", 64),
            ("processes", 1),
            ("disk", 1),
            ("output", 1),
        ):
            value = getattr(self, name)
            kinds = (int, float) if name == "seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
                raise RewardError(f"code: {name} = {value!r} must be a number of at least {least}.")

    def order(self) -> dict[str, Any]:
        """Return the limits as a cell is told."""
        return {
            "processes": self.processes,
            "scratch": f"size={self.disk}m,nr_inodes={INODES}",
            "limits": {
                "memory": self.memory * MIB,
                "file_size": self.disk * MIB,
                "seconds": math.ceil(self.seconds) + 1,  # of CPU: should the outer clock fail
                "processes": self.processes + THREADS,
                "files": OPEN_FILES,
            },
        }
