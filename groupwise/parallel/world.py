"""The ranks that share one batch: one process, ranks with rows of their own, or a team.

What looks at more than one row of a batch goes through its world, as one number per row, so that
results do not depend on how rows are spread. A learner has a world; a batch has it for its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from groupwise.errors import BatchError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)


class PassTurn(NamedTuple):
    """A pass that this rank makes, by its number among those of all ranks."""

    number: int
    counts: bool = True  # or made to keep the others company, and thrown away
    last: bool = False  # of this rank's: gradients of all passes meet behind it


class World:
    """One process: its rows are all the rows, and what it finds is what there is."""

    rank, size = 0, 1
    start = 0  # rows that the ranks before this one hold

    @property
    def leads(self) -> bool:
        """Tell whether files, graders and the screen are this rank's."""
        return self.rank == 0

    # --- rows that are spread over ranks ---

    def gather(self, x_N: Tensor) -> Tensor:
        """Return this rank's rows and everybody else's, in rank order, the same on every rank."""
        return x_N

    def own(self, x_M: Tensor) -> Tensor:
        """Return the part of a gathered tensor that belongs to this rank's rows."""
        return x_M

    def for_rows(self, rows: int) -> World:
        """Return the same ranks for a batch of which this one holds `rows`. All ranks call it."""
        return self

    # --- work that is spread over ranks ---

    def shard(self, model: M) -> M:
        """Return the model as this rank's learner holds it; the same for the same model."""
        return model

    def deal(self, costs: Sequence[int]) -> list[PassTurn]:
        """Return which of these passes are this rank's. Every rank makes equally many."""
        last = len(costs) - 1
        return [PassTurn(number, last=number == last) for number in range(len(costs))]

    def begin(self, turn: PassTurn) -> None:
        """Say whether gradients meet behind the pass that begins now."""

    def merge(self, mine: Mapping[int, T]) -> list[T]:
        """Return what all ranks found, each thing once, in the order of their numbers."""
        return [mine[number] for number in sorted(mine)]

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return x

    def close(self) -> None:
        """Give no more signs of life to others."""

    def gathering(self) -> AbstractContextManager[None]:
        """Count the seconds in which whole weights are brought together."""
        return nullcontext()

    def naming(self, doing: Callable[[], str]) -> AbstractContextManager[None]:
        """Say who is gone, and in which phase, when ranks can't go on together."""
        return nullcontext()

    def measures(self) -> dict[str, float]:
        """Return how evenly ranks worked since the last call. All ranks call it."""
        return {}

    # --- decisions ---

    def first(self, compute: Callable[[], T]) -> T:
        """Return what the first rank computes; what it raises is raised on every rank."""
        return compute()

    def together(self, compute: Callable[[], T]) -> T:
        """Return what this rank computes; what any of them raises is raised on every rank."""
        return compute()

    def any(self, flag: bool) -> bool:
        """Tell whether it is so on any rank."""
        return flag

    def led(self, lead: Callable[[Callable[[A], B]], T], work: Callable[[A], B]) -> T:
        """Return what the first rank makes by `lead`, which may have all ranks do some `work`.

        The others do that work whenever they are told to, and nothing else meanwhile.
        """
        return lead(work)

    def same(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that differ in these facts."""


ALONE = World()


class Ranks(World):
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
