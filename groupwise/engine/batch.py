"""The base of an engine that answers whole batches: one method to write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from groupwise.engine.protocol import Engine, Request, Sampling, Ticket, Wrote
from groupwise.errors import EngineError
from groupwise.records import Completion


@dataclass
class Submitted:
    """Requests that were submitted together, by ticket."""

    requests: dict[Ticket, Request]
    sampling: Sampling


class BatchEngine(Engine):
    """Answers what was submitted together in one call. A subclass writes `answer`; one that keeps
    weights or caches writes `sync`, too, and calls this one's for the version."""

    version: int = 0  # of the weights: for `Completion.version`

    @abstractmethod
    def answer(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return completions in the order of requests and samples."""

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        tickets = [next(self._tickets) for _ in requests]
        self._queue.append(Submitted(dict(zip(tickets, requests, strict=True)), sampling))
        return tickets

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        """Return the oldest batch, whole."""
        if not self._queue:
            return []
        batch = self._queue[0]
        groups = self.answer(list(batch.requests.values()), batch.sampling)
        if len(groups) != len(batch.requests):
            raise EngineError(
                f"The engine {type(self).__name__} answered {len(groups)} requests of "
                f"{len(batch.requests)}. Its `answer` must return a list of completions for every "
                "request, in order."
            )
        self._queue.remove(batch)
        return list(zip(batch.requests, groups, strict=True))

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        for batch in self._queue:
            for ticket in tickets:
                batch.requests.pop(ticket, None)
        self._queue[:] = [batch for batch in self._queue if batch.requests]

    def sync(self, version: int) -> None:
        self.version = version

    # Made when they are first needed: a subclass need not call an __init__ of this class.

    @cached_property
    def _queue(self) -> list[Submitted]:
        return []

    @cached_property
    def _tickets(self) -> count[int]:
        return count()
