"""Room on the disk for a run's checkpoints: what they take, what is there, and what is said of it.

Counted before a run by `plan` and `doctor`, and by the run itself when its tensors are there.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from groupwise.common.sizes import size
from groupwise.errors import RunError


@dataclass(frozen=True)
class Space:
    """Bytes of checkpoints: one that a run goes on from, and one of weights alone."""

    whole: int
    best: int
    keep: int  # the last ones, as checkpoint.keep has it

    @property
    def most(self) -> int:
        """Return the most that a run has, while one is being written.

        Beside the last ones lie the best that the last of them knows, which may be a whole one,
        and the best since then. An old one goes when the new one is there.
        """
        return (self.keep + 2) * self.whole + self.best

    @property
    def words(self) -> str:
        return (
            f"a checkpoint takes {size(self.whole)} ({size(self.best)} of weights, the rest "
            f"optimizer), and with checkpoint.keep={self.keep}, the one that is being written and "
            f"the best a run needs {size(self.most)} at most"
        )

    def missing(self, free: int, there: int = 0) -> str | None:
        """Say where not even one fits and a best one beside it.

        `there` is what older ones take, which go in time.
        """
        if free + there >= self.whole + self.best:
            return None
        return (
            f"{size(free)} are free, and a checkpoint takes {size(self.whole)} "
            f"({size(self.best)} of weights, the rest optimizer), beside one of weights alone for "
            "the best policy. Free some space, train an adapter (adapter.rank), or choose a "
            "folder on another disk with --run."
        )

    def tight(self, free: int, there: int = 0) -> str | None:
        """Say where not all fit that a run may have, or not the next one beside those there."""
        if free >= self.whole and free + there >= self.most:
            return None
        return (
            f"{size(free)} are free: {self.words}. A full disk stops the run, and loses none of "
            "them; checkpoint.keep=1 needs less."
        )


def check_space(parent: Path, space: Space) -> str | None:
    """Refuse where the next checkpoint does not fit; return a warning where not all will."""
    files = (path for path in parent.rglob("*") if path.is_file() and not path.is_symlink())
    there, free = sum(path.stat().st_size for path in files), shutil.disk_usage(parent).free
    why = space.missing(free, there)
    if why is not None:
        raise RunError(f"In {parent} {why}")
    tight = space.tight(free, there)
    return None if tight is None else f"in {parent} {tight}"
