"""The learning rate as a function of the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from groupwise.errors import ConfigError, nearest

# What is left of the rate when a share of the steps after the warm-up is done.
DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


class LearningRates(NamedTuple):
    """The learning rates of one step, and the numbers of the recipe that it changes."""

    policy: float | None  # None: it waits, while what stands beside it learns
    roles: Mapping[str, float] = {}
    coefs: Mapping[str, float] = {}  # by their places in the recipe


def learning_rate(
    step: int,
    *,
    base: float,
    schedule: str,
    warmup_steps: int,
    total_steps: int,
    min_share: float = 0.0,
) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    The warm-up climbs in equal stairs: base/warmup_steps for the first step (a rate of 0 would
    waste a batch), base for its last. The decays start from base and reach `min_share` of it at
    `total_steps`, the first step that is not taken.
    """
    if schedule not in DECAYS:
        raise ConfigError(f"There is no schedule {schedule!r}. {nearest(schedule, DECAYS)}")
    if step < warmup_steps:
        return base * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return base * (min_share + (1.0 - min_share) * DECAYS[schedule](min(done, 1.0)))
