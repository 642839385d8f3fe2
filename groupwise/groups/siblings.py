"""Answers of a group that another answer's teacher may look at (SDPO, 2601.20802)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def demonstrations(
    rewards: Sequence[float], groups: Sequence[int], *, threshold: float, own: bool
) -> list[int]:
    """Return for each row the first successful row of its group; −1 for none.

    A row is its own demonstration only where `own` says so.
    """
    found = []
    for row, group in enumerate(groups):
        good = (
            other
            for other, reward in enumerate(rewards)
            if groups[other] == group
            and (own or other != row)
            and not math.isnan(reward)
            and reward >= threshold
        )
        found.append(next(good, -1))
    return found
