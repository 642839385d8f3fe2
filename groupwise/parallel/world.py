"""The ranks that share one batch: one process, or those of a process group.

What looks at more than one row of a batch goes through its world, as one number per row, so that
results do not depend on how rows are spread. A learner has a world; a batch has it for its rows.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from groupwise.errors import BatchError


class World(Protocol):
    """The ranks that share one batch. Rows of all ranks are gathered in rank order."""

    @property
    def start(self) -> int:
        """Count the rows that the ranks before this one hold."""
        ...

    def gather(self, x_N: Tensor) -> Tensor:
        """Return this rank's rows and everybody else's, the same on every rank."""
        ...

    def own(self, x_M: Tensor) -> Tensor:
        """Return the part of a gathered tensor that belongs to this rank's rows."""
        ...

    def for_rows(self, rows: int) -> World:
        """Return the same ranks for a batch of which this one holds `rows`. All ranks call it."""
        ...


class OneProcess:
    """The world of a single process: its rows are all the rows."""

    start = 0

    def gather(self, x_N: Tensor) -> Tensor:
        return x_N

    def own(self, x_M: Tensor) -> Tensor:
        return x_M

    def for_rows(self, rows: int) -> OneProcess:
        return self


ALONE = OneProcess()


class Ranks:
    """The world of a `torch.distributed` process group; ranks may hold different row counts.

    Without `rows` it is the ranks alone, as a learner has them: its batches ask it `for_rows`.
    """

    def __init__(self, rows: int = 0, process_group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, process_group
        sizes: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(sizes, rows, group=process_group)
        self._sizes: list[int] = sizes
        rank = dist.get_rank(process_group)
        self.start, self._rows = sum(self._sizes[:rank]), rows

    def gather(self, x_N: Tensor) -> Tensor:
        if len(x_N) != self._rows:
            raise BatchError(
                f"This world was made for {self._rows} rows on this rank, the batch has "
                f"{len(x_N)}. Drop rows with batch.keep(rows), or build the batch anew with "
                "world=Ranks(rows)."
            )
        longest = max(self._sizes)
        padded = x_N.new_zeros((longest, *x_N.shape[1:]))
        padded[: len(x_N)] = x_N
        parts = [torch.empty_like(padded) for _ in self._sizes]
        self._dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=True)])

    def own(self, x_M: Tensor) -> Tensor:
        return x_M[self.start : self.start + self._rows]

    def for_rows(self, rows: int) -> Ranks:
        return Ranks(rows, self._group)
