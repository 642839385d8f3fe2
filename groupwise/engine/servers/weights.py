"""The seam of the policy for engines in other processes: tensors, folders, the probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

Ids = tuple[int, ...]


class PolicyWeights(Protocol):
    """The policy as it is now; sync/publish.py has it."""

    @property
    def rank(self) -> int:
        """Return the rank of an adapter that is all that learns, beside a plain base; else 0."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds, an adapter folded in; a tied head comes, too."""
        ...

    def folder(self, place: Path, *, fold: bool = True) -> None:
        """Write a whole model; without `fold` the base that an adapter sits on."""
        ...

    def adapter(self, place: Path) -> None:
        """Write the adapter alone, as PEFT does."""
        ...

    def probe(self) -> tuple[Ids, ...]:
        """Return the sequences that engine and learner score after every sync."""
        ...

    def scored(self, sequences: Sequence[Ids], temperature: float = 1.0) -> list[Tensor]:
        """Return the learner's log-probability of every token but each sequence's first."""
        ...
