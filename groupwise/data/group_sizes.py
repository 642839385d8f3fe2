"""Sizes of groups by the pass rates of their prompts: the same number of answers, spent better.

Knapsack RL (2509.25849): n answers to a prompt with pass rate p are worth
(1 − pⁿ − (1 − p)ⁿ)·p(1 − p)², the chance that they are not all alike, times roughly what an update
then gains. Every further answer is worth less than the one before, so giving each to the prompt
where it is worth most finds the best of all ways to spend them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def group_sizes(
    rates: Sequence[float | None], size: int, *, least: int = 2, most: int = 128
) -> list[int]:
    """Return the answers to each prompt: `size` for one that is not known, as many on average.

    Where another answer is worth nothing at all, as all known prompts were always passed or never,
    the rest goes to those that were never passed, and then to the others, in turn.
    """
    sizes = [size if rate is None else least for rate in rates]
    left = size * len(rates) - sum(sizes)
    best = [(-_gain(least, p), at) for at, p in enumerate(rates) if p is not None]
    best = [each for each in best if each[0] < 0 and least < most]
    heapq.heapify(best)
    while left and best:
        _, at = heapq.heappop(best)
        sizes[at], left = sizes[at] + 1, left - 1
        if sizes[at] < most:
            heapq.heappush(best, (-_gain(sizes[at], rates[at] or 0.0), at))
    for worthless in (0.0, 1.0):
        open_ones = [at for at, rate in enumerate(rates) if rate == worthless]
        while left and (open_ones := [at for at in open_ones if sizes[at] < most]):
            for at in open_ones[:left]:
                sizes[at], left = sizes[at] + 1, left - 1
    return sizes


def _gain(n: int, p: float) -> float:
    """Return what the answer behind n others is worth."""
    return (p**n * (1 - p) + (1 - p) ** n * p) * p * (1 - p) ** 2
