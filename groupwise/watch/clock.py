"""The time of a step by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by phase, since the clock was made. A phase ends when the device is done with it."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begun = now()
        try:
            yield
        finally:
            self.phases[phase] = self.phases.get(phase, 0.0) + now() - begun

    def metrics(self, tokens: int) -> dict[str, float]:
        """Return the phases, the whole, and sampled tokens per second of the rollout phase."""
        found = {f"time/{phase}": seconds for phase, seconds in self.phases.items()}
        found["time/step"] = now() - self.start
        if self.phases.get("rollout"):
            found["time/tokens_per_second"] = tokens / self.phases["rollout"]
        return found


def now() -> float:
    """Return seconds, after the work given to a GPU before is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()
