"""Signs of life: every rank writes down, twice a second, that it lives and what it is at.

When ranks can't go on together, the others read which of them fell silent, and in which phase.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

EVERY = 0.5  # seconds between two signs
SILENT = 3.0  # seconds without a sign, after which a rank is gone


class Beats:
    """The signs of life of all ranks, in the store that they met in."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self.doing: Callable[[], str] = lambda: "starting"
        self._ended = threading.Event()
        self._count = 0
        self._give()
        threading.Thread(target=self._go_on, name="signs of life", daemon=True).start()

    @property
    def going(self) -> bool:
        """Tell whether signs are still given."""
        return not self._ended.is_set()

    def end(self) -> None:
        """Give no more signs."""
        self._ended.set()

    def silent(self) -> dict[int, str]:
        """Return the ranks that have fallen silent, with what they were last at; waits for it."""
        before = self._read()
        time.sleep(SILENT)
        after = self._read()
        return {
            rank: said.partition(" ")[2]
            for rank, said in after.items()
            if rank != self._rank and before.get(rank) == said
        }

    def places(self) -> dict[int, str]:
        """Return what every rank was last at."""
        return {rank: said.partition(" ")[2] for rank, said in self._read().items()}

    def leave_word(self, text: str) -> None:
        """Leave to the others why this rank ends."""
        self._store.set(f"word/{self._rank}", text)

    def words(self) -> dict[int, str]:
        """Return why ranks ended, of those that could say so."""
        names = {rank: f"word/{rank}" for rank in range(self._size)}
        return {
            rank: self._store.get(name).decode()
            for rank, name in names.items()
            if self._store.check([name])
        }

    def _read(self) -> dict[int, str]:
        names = {rank: f"beat/{rank}" for rank in range(self._size)}
        return {rank: self._store.get(name).decode() for rank, name in names.items()}

    def _give(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self._rank}", f"{self._count} {self.doing()}")

    def _go_on(self) -> None:
        while not self._ended.wait(EVERY):
            try:
                self._give()
            except Exception:  # the store is gone, and with it those who could read this
                return
