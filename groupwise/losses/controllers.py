"""Coefficients that change from step to step: by a target, or by the number of the step. Pure.

A controller's state is its coefficient: whoever holds it saves that one number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class EntropyTarget:
    """The weight of an entropy bonus that rises while entropy is low (2505.22312)."""

    coef: float = 0.0
    step: float = 0.005
    low: float = 0.0
    high: float = 1.0
    target: float = 0.2

    def applied(self, entropy: float) -> float:
        """Return the coefficient that counts at this entropy: none above the target."""
        return self.coef if entropy <= self.target else 0.0

    def after(self, entropy: float) -> EntropyTarget:
        """Return the controller behind a step of this entropy."""
        up = entropy <= self.target
        moved = self.coef + self.step if up else self.coef - self.step
        return replace(self, coef=min(moved, self.high) if up else max(moved, self.low))


def warmup_cosine(step: int, *, warmup: int, decay: int, peak: float, valley: float) -> float:
    """Return a weight that climbs to its peak and falls along a cosine to its valley (CHORD).

    Without decay the valley holds from the end of the warm-up on.
    """
    if step < warmup:
        return peak * step / warmup
    if step >= warmup + decay:
        return valley
    done = (step - warmup) / decay
    return valley + 0.5 * (peak - valley) * (1.0 + math.cos(math.pi * done))


STUDENT, TEACHER, DATA = 0, 1, 2  # whose answers a step learns from


def mixed_source(u: float, share: float, *, sequences: bool) -> int:
    """Return whose answers a step takes: the student's for a share of steps (GKD, 2306.13649).

    Else the teacher's where whole `sequences` are distilled, or the data's. u is in [0, 1).
    """
    if u < share:
        return STUDENT
    return TEACHER if sequences else DATA
