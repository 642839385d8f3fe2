"""Estimates for groups from counts of passes: pass@k, useful groups, with intervals.

A prompt passes with an unknown probability p; of n samples c passed. Putting c/n in the place of p
is biased: 0 of 8 would say that no group of 8 is ever of use. Where a group is no larger than n,
the share of all subsets of the samples is an estimate without bias (hypergeometric). For larger
groups the counts say nothing directly. There a model speaks, and its answers carry its name: p is
Beta distributed over prompts, averaged over all Beta distributions by how well they explain the
counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import NamedTuple

from groupwise.evaluate.statistics import beta_share

Z = 1.959964  # of a 95 % interval
SUBSETS, MODEL = "subsets of the samples", "beta-binomial model"
# Hyper-parameters of the model: the mean of p as Jeffreys' prior has it, evenly in the arc sine,
# and how alike prompts are, evenly in the logarithm.
MEANS, ALIKE = 60, 20
LEAST_ALIKE, MOST_ALIKE = 0.1, 100.0
NEGLIGIBLE = 1e-6


class PassCount(NamedTuple):
    """The graded samples of one prompt, and how many of them passed."""

    samples: int
    passed: int


@dataclass(frozen=True)
class Estimate:
    """A share of prompts or groups, its 95 % interval, and how it was found."""

    value: float
    low: float
    high: float
    how: str


# --- of one prompt ----------------------------------------------------------------------------


def all_alike(values: Sequence[Hashable], group: int) -> float:
    """Return the chance that a group drawn from these values has no two that differ.

    Without bias for any values: of passes and failures it is that of p^G + (1-p)^G.
    """
    subsets = comb(len(values), group)
    return sum(comb(number, group) for number in Counter(values).values()) / subsets


def none_pass(count: PassCount, group: int) -> float:
    """Estimate (1-p)^G without bias; the group is no larger than the samples."""
    return comb(count.samples - count.passed, group) / comb(count.samples, group)


# --- of all prompts ---------------------------------------------------------------------------


class Rates:
    """Counts of several prompts, and what follows from them."""

    def __init__(self, counts: Iterable[PassCount]) -> None:
        self.counts = [count for count in counts if count.samples]

    @property
    def passing(self) -> Estimate:
        """Return the mean of p."""
        shares = [count.passed / count.samples for count in self.counts]
        return over_prompts(shares, sum(count.samples for count in self.counts))

    def pass_at(self, k: int) -> Estimate:
        """Return the share of prompts of which one of k samples passes."""
        return self._of(
            k,
            lambda count: 1 - none_pass(count, k),
            lambda a, b: 1 - _moment(b, a, k),
        )

    def useful(self, group: int) -> Estimate:
        """Return the share of groups with passes and failures: 1 - p^G - (1-p)^G over prompts."""
        return self._of(
            group,
            lambda count: 1 - none_pass(count, group) - none_pass(_turned(count), group),
            lambda a, b: 1 - _moment(a, b, group) - _moment(b, a, group),
        )

    def below(self, count: PassCount, p: float) -> float:
        """Return how sure it is that a prompt with this count passes less often than p.

        By the model: what all prompts show says how much a few samples of one are worth.
        """
        right, wrong = count.passed, count.samples - count.passed
        return sum(
            weight * beta_share(p, a + right, b + wrong)
            for a, b, weight in self._model
            if weight > NEGLIGIBLE
        )

    def _of(
        self,
        group: int,
        direct: Callable[[PassCount], float],
        modelled: Callable[[float, float], float],
    ) -> Estimate:
        large = [count for count in self.counts if count.samples >= group]
        if 2 * len(large) > len(self.counts):  # a few that lack samples are left out
            samples = sum(count.samples for count in large) // group
            return over_prompts([direct(count) for count in large], samples)
        weighted = sorted((modelled(a, b), weight) for a, b, weight in self._model)
        value = sum(x * weight for x, weight in weighted)
        return Estimate(value, _quantile(weighted, 0.025), _quantile(weighted, 0.975), MODEL)

    @cached_property
    def _model(self) -> list[tuple[float, float, float]]:
        """Return Beta distributions of p, (a, b), and the weight of each."""
        tally = Counter(self.counts)
        grid = [
            (mean * alike, (1 - mean) * alike) for mean in _means() for alike in _concentrations()
        ]
        logs = [
            sum(times * _log_chance(a, b, *count) for count, times in tally.items())
            for a, b in grid
        ]
        best = max(logs)
        weights = [math.exp(x - best) for x in logs]
        total = sum(weights)
        return [(a, b, weight / total) for (a, b), weight in zip(grid, weights, strict=True)]


def over_prompts(values: Sequence[float], trials: float, how: str = SUBSETS) -> Estimate:
    """Return the mean of values from 0 to 1 and Wilson's interval around it.

    With as many trials as the spread between prompts says: no fewer than there are prompts, no more
    than samples. So it does not shrink to nothing where all prompts happen to agree.
    """
    number = len(values)
    mean = sum(values) / number
    spread = sum((x - mean) ** 2 for x in values) / max(number - 1, 1)
    effective = float(number)
    if spread > 0:
        effective = min(max(mean * (1 - mean) / (spread / number), number), max(trials, number))
    return Estimate(mean, *wilson(mean, effective), how)


def wilson(share: float, trials: float) -> tuple[float, float]:
    middle = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = math.sqrt(share * (1 - share) / trials + Z**2 / (4 * trials**2)) * Z
    half /= 1 + Z**2 / trials
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def _turned(count: PassCount) -> PassCount:
    return PassCount(count.samples, count.samples - count.passed)


def _means() -> list[float]:
    return [math.sin(math.pi / 2 * (i + 0.5) / MEANS) ** 2 for i in range(MEANS)]


def _concentrations() -> list[float]:
    ratio = MOST_ALIKE / LEAST_ALIKE
    return [float(LEAST_ALIKE * ratio ** (i / (ALIKE - 1))) for i in range(ALIKE)]


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_chance(a: float, b: float, samples: int, passed: int) -> float:
    """Return the log-chance of a count under a Beta distribution of p, without the number of
    orders.
    """
    return _log_beta(a + passed, b + samples - passed) - _log_beta(a, b)


def _moment(a: float, b: float, power: int) -> float:
    """Return the mean of p^power where p is Beta(a, b)."""
    return math.exp(_log_beta(a + power, b) - _log_beta(a, b))


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return a quantile of values in order with their weights."""
    reached = 0.0
    for value, weight in weighted:
        reached += weight
        if reached >= share:
            return value
    return weighted[-1][0]
