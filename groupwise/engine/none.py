"""No engine: what stands in its place where a run's model scores answers and writes none."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.engine.protocol import Capabilities, Engine, Request, Sampling, Ticket, Wrote
from groupwise.errors import EngineError
from groupwise.records import Completion


class NoEngine(Engine):
    """Samples nothing, holds nothing, and says so when it is asked."""

    capabilities = Capabilities(own_randomness=False)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        raise EngineError(
            "This run's model scores answers and writes none, so there is nothing to sample from. "
            "Use it in the reward of another run: rm(path=...) or prm(path=...)."
        )

    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        return []

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        pass

    def sync(self, version: int) -> None:
        pass
