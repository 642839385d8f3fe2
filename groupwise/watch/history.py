"""The metrics of a run so far, and robust statements about a stretch of them.

Medians and median deviations, never means: one odd step must not raise an alarm, nor hide one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from groupwise.watch.chart import Point

SIGMA = 1.4826  # median absolute deviation -> standard deviation, of a normal distribution


class History:
    """Every number of every step, by name, in order of steps."""

    def __init__(self) -> None:
        self.step = 0
        self._series: dict[str, list[Point]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.step = step
        for name, value in metrics.items():
            if isinstance(value, int | float) and math.isfinite(value) and name != "step":
                self._series.setdefault(name, []).append(Point(step, float(value)))

    def all(self, *names: str) -> Sequence[Point]:
        """Return the values of the first of these names that the run has: later ones stand in for
        it.
        """
        return next((self._series[name] for name in names if name in self._series), ())

    @property
    def supervised(self) -> bool:
        """Tell whether rows of the data are learned as they stand: their reward is no news, and
        that the policy becomes sure of them is what is wanted.
        """
        return "supervised/nll" in self._series

    @property
    def waited(self) -> int:
        """Return the last step in which the policy waited for a critic; 0 where there is none."""
        return max((p.step for p in self.all("updates/count") if p.value == 0), default=0)

    def learning(self, *names: str) -> Sequence[Point]:
        """Return the values of the steps since the policy learns."""
        waited = self.waited
        return [point for point in self.all(*names) if point.step > waited]

    def first(self, count: int, *names: str) -> Sequence[Point]:
        """Return the first values; none while there are fewer."""
        points = self.all(*names)
        return points[:count] if len(points) >= count else ()

    def last(self, count: int, *names: str) -> Sequence[Point]:
        """Return the last values up to now; none while there are fewer, or if the last step has
        none.
        """
        points = self.all(*names)
        if len(points) < count or points[-1].step != self.step:
            return ()
        return points[-count:]


@dataclass(frozen=True)
class Evidence:
    """The evidence of a rule: the number, its limit, and since when."""

    metric: str
    value: float
    limit: float
    first: int  # the first bad step
    text: str


Test = Callable[[History], Evidence | None]


def middle(points: Sequence[Point]) -> float:
    return median(point.value for point in points)


def noise(points: Sequence[Point]) -> float:
    """Return the standard deviation from step to step without a trend: of differences, over √2."""
    steps = [b.value - a.value for a, b in pairwise(points)]
    centre = median(steps)
    return SIGMA * median(abs(x - centre) for x in steps) / math.sqrt(2)


def first_known(history: History, *names: str) -> str:
    """Return the first of the names that the run has."""
    return next((name for name in names if history.all(name)), names[0])


# --- what most rules ask ----------------------------------------------------------------------


def above(*names: str, limit: float, steps: int) -> Test:
    """Test whether the median of the last so many steps is above a limit."""

    def test(history: History) -> Evidence | None:
        points = history.last(steps, *names)
        if not points or middle(points) <= limit:
            return None
        bad = next(point.step for point in points if point.value > limit)
        return _seen(first_known(history, *names), middle(points), limit, bad, steps, "above")

    return test


def below(*names: str, limit: float, steps: int) -> Test:
    """Test whether the median of the last so many steps is below a limit."""

    def test(history: History) -> Evidence | None:
        points = history.last(steps, *names)
        if not points or middle(points) >= limit:
            return None
        bad = next(point.step for point in points if point.value < limit)
        return _seen(first_known(history, *names), middle(points), limit, bad, steps, "below")

    return test


def grows(*names: str, times: float, least: float, steps: int = 5) -> Test:
    """Test whether the median of the last steps is so many times the first's, and at least so
    large.
    """

    def test(history: History) -> Evidence | None:
        start = history.first(steps, *names)
        if not start:
            return None
        limit = max(times * middle(start), least)
        found = above(*names, limit=limit, steps=steps)(history)
        return found and _against_start(found, middle(start), steps)

    return test


def any_of(*tests: Test) -> Test:
    return lambda history: next((seen for test in tests if (seen := test(history))), None)


def all_of(first: Test, *others: Test) -> Test:
    """Return the evidence of the first, where all the others see something as well."""

    def test(history: History) -> Evidence | None:
        return first(history) if all(other(history) for other in others) else None

    return test


def _seen(metric: str, value: float, limit: float, bad: int, steps: int, side: str) -> Evidence:
    stretch = f"median of {steps} steps" if steps > 1 else "this step"
    return Evidence(
        metric, value, limit, bad, f"{metric} {value:.3g} ({stretch}), {side} {limit:.3g}"
    )


def _against_start(seen: Evidence, start: float, steps: int) -> Evidence:
    text = f"{seen.metric} {seen.value:.3g}, {start:.3g} in the first {steps} steps"
    return Evidence(seen.metric, seen.value, seen.limit, seen.first, text)
