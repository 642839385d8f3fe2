"""Measures of scores: how often the better answer or the right verdict wins, and what else shows.

A tie counts half: a model that says the same of everything is right half the time.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

Labels = Sequence[float | None]


def win(margin: float) -> float:
    """Return 1 where the better one is ahead, a half for a tie."""
    return 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0


def correlation(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Return Pearson's; None where one of them does not vary."""
    means = [math.fsum(x) / len(x) for x in (one, two)]
    both = math.fsum((a - means[0]) * (b - means[1]) for a, b in zip(one, two, strict=True))
    spreads = [
        math.fsum((a - mean) ** 2 for a in x) for x, mean in zip((one, two), means, strict=True)
    ]
    return both / math.sqrt(spreads[0] * spreads[1]) if all(spreads) else None


def verdict(score: float, label: float) -> float:
    """Return whether the sign of a step's score is right about its label, good from a half on."""
    return win(score if label >= 0.5 else -score)


def area(scores: Sequence[float], labels: Sequence[float]) -> float | None:
    """Return how often a good step's score is above a bad one's; None without both kinds."""
    good = [s for s, y in zip(scores, labels, strict=True) if y >= 0.5]
    bad = sorted(s for s, y in zip(scores, labels, strict=True) if y < 0.5)
    if not good or not bad:
        return None
    wins = 0.0
    for score in good:
        wins += _below(bad, score, ties=0.5)
    return wins / (len(good) * len(bad))


def _below(ordered: Sequence[float], value: float, ties: float) -> float:
    low, high = bisect_left(ordered, value), bisect_right(ordered, value)
    return low + ties * (high - low)


def finds_first_error(scores: Sequence[float], labels: Labels) -> float | None:
    """Return whether the first step that is scored as bad is the first bad one; None unlabelled."""
    known = [(s, y) for s, y in zip(scores, labels, strict=True) if y is not None]
    if not known:
        return None
    said = next((at for at, (score, _) in enumerate(known) if score < 0), len(known))
    true = next((at for at, (_, label) in enumerate(known) if label < 0.5), len(known))
    return float(said == true)


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of those that are known."""
    known = [x for x in values if x is not None]
    return math.fsum(known) / len(known) if known else None
