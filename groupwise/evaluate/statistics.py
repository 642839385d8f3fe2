"""Differences between two methods or models, with intervals that hold for a few seeds.

Values are paired: the same seed, the same task, the same random numbers on both sides. Two forms:

- one value a unit (a seed, or a task), `values[unit]`;
- one value a seed and task, `values[seed, task]`. Then both count as drawn from many: the interval
  is for other seeds and other tasks of the same kind. Seeds and tasks cross, so the variance of the
  mean is that of the seed means, and what tasks add to it (the two-way analysis of variance).

Which test: with five seeds a sign-flip permutation can't give less than p = 2/32, so no difference
would ever be seen; the percentile bootstrap stays inside the range of five values and covers 83 %
instead of 95 %. Student's t knows how little five values say of their spread. So p is Student's
for seeds, and Student's again for tasks where they count (Behrens and Fisher), and the bootstrap's
deviations are widened by the same factor: its interval has the shape of the data and the width that
so few seeds deserve. tests/evaluate/test_statistics.py simulates it: intervals over five seeds
cover 94 % to 96 % where differences are normal or heavy-tailed, 90 % where they are skewed like a
lognormal; over seeds and tasks 95 % or a little more. What happens in one run of ten (a collapse)
five seeds can't show, and no interval does.

What Student's t can't know is that runs may be of two kinds, those that took off and those that
did not: then a few seeds agree by luck, with no spread to tell. `by_luck` is the chance of that,
and no corrected p goes below it. benchmarks/false_positives.py counts how often equal arms are
told apart, by all that a comparison says together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

ALPHA, POWER = 0.05, 0.8  # a difference that is not there is seen so often, one that is, so often
DRAWS = 4_000  # of a bootstrap
CHUNK = 2**22  # numbers drawn at once
MOST_SEEDS = 100_000  # more are no advice
LEAST = 41.0  # -log of what is too rare to count in an integral
FINE = 1e-3  # between two places at which the normal tail is tabulated
ROUNDING = 1e-12  # of the largest value: what lies closer together is equal

Values = Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """The uncertainty of a mean: its variance by where it comes from.

    What seeds add is estimated from a few of them, what tasks add from as many as there are: each
    follows Student's distribution. Their sum has the tails of both: a spread that is small by the
    luck of two seeds does not make a difference certain, as a common number of degrees of freedom
    would.
    """

    units: int  # seeds, or whatever the rows are
    tasks: int  # 1 where there is one value a unit
    from_units: float  # variance of the mean
    from_tasks: float = 0.0
    from_rest: float = 0.0  # the part of from_units that more tasks would make smaller, too

    @property
    def stderr(self) -> float:
        return math.sqrt(self.from_units + self.from_tasks)

    def tail(self, size: float) -> float:
        """Return the chance of an error as large as this, in either direction."""
        if not self.from_tasks:
            by_units = math.sqrt(self.from_units)
            return two_sided(size / by_units, self.units - 1) if by_units else float(size == 0)
        units, weight_units = _student_variances(self.units - 1)
        tasks, weight_tasks = _student_variances(self.tasks - 1)
        variance = np.add.outer(self.from_units * units, self.from_tasks * tasks)
        sides = weight_units @ _outside(size / np.sqrt(variance)) @ weight_tasks
        return min(float(sides), 1.0)

    def quantile(self, share: float) -> float:
        """Return the error below which this share lies, from 0.5 on."""
        if not self.from_tasks:
            return student_quantile(share, self.units - 1) * self.stderr
        return _where(lambda size: self.tail(size) <= 2 * (1 - share), self.stderr)


@dataclass(frozen=True)
class Difference:
    """The difference of two methods, a − b: mean, 95 % interval, and its probability by chance."""

    values: npt.NDArray[np.float64]
    p: float  # two-sided; not corrected for other comparisons
    spread: Spread

    @property
    def mean(self) -> float:
        return float(self.values.mean())

    @property
    def low(self) -> float:
        return self._interval[0]

    @property
    def high(self) -> float:
        return self._interval[1]

    @cached_property
    def _interval(self) -> tuple[float, float]:
        return bootstrap_interval(self.values)


def paired_difference(a: Values, b: Values) -> Difference:
    """Compare a − b; both of the same shape, `[unit]` or `[seed, task]`."""
    first, second = np.asarray(a, float), np.asarray(b, float)
    if first.shape != second.shape:
        raise ValueError(f"Pairs must have the same shape, got {first.shape} and {second.shape}.")
    values = first - second
    return Difference(values, t_test(values), spread(values))


# --- how far a mean is known ------------------------------------------------------------------


def stderr(values: Values) -> float:
    """Return the standard error of the mean: over units, or over seeds and tasks."""
    return spread(values).stderr


def spread(values: Values) -> Spread:
    """Return the variance of the mean. Over seeds and tasks: σ²_seed/n + σ²_task/m + σ²_rest/(n·m).

    From the mean squares of the two-way analysis of variance; that of seeds holds the rest.
    """
    found = _table(values)
    units, tasks = found.shape
    count = found.size
    least = ROUNDING * float(np.abs(found).max())
    of_units = found.mean(axis=1)
    units_square = tasks * _variance(of_units, least)
    if tasks == 1:
        return Spread(units, 1, units_square / count)
    of_tasks = found.mean(axis=0)
    tasks_square = units * _variance(of_tasks, least)
    rest = found - of_units[:, None] - of_tasks[None, :] + found.mean()
    rest_square = float((rest**2).sum()) / ((units - 1) * (tasks - 1))
    by_tasks = max(tasks_square - rest_square, 0.0)
    # Seeds that agree exactly do so by chance: then the rest says how far they would not.
    by_units = units_square or rest_square
    by_rest = min(rest_square, by_units)
    return Spread(units, tasks, by_units / count, by_tasks / count, by_rest / count)


def _variance(values: npt.NDArray[np.float64], least: float) -> float:
    """Return the variance, exactly 0 where values differ by rounding only, as 0.8 − 0.7 and 0.7 −
    0.6.
    """
    return 0.0 if float(np.ptp(values)) <= least else float(values.var(ddof=1))


def t_test(values: Values) -> float:
    """Return the two-sided p of a mean of 0."""
    mean, known = float(_table(values).mean()), spread(values)
    if mean == 0.0:
        return 1.0
    if known.stderr == 0.0:  # all alike, which so few can be by chance: what their signs say
        return float(2.0 ** (1 - known.units))
    return known.tail(abs(mean))


def bootstrap_interval(
    values: Values, *, level: float = 1 - ALPHA, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """Return an interval of the mean. Seeds and tasks are drawn again, apart from each other.

    Deviations are scaled to the variance that `spread` finds, and by its quantile over the normal
    one: drawn from five values, they are too small on average, and not known to be.
    """
    found, known = _table(values), spread(values)
    mean = float(found.mean())
    drawn = np.random.default_rng(seed)
    deviations = _drawn_means(found.mean(axis=1), known.from_units, draws, drawn)
    if known.from_tasks:
        deviations += _drawn_means(found.mean(axis=0), known.from_tasks, draws, drawn)
    if known.stderr == 0.0:
        return mean, mean
    tail = (1 - level) / 2
    wider = known.quantile(1 - tail) / (known.stderr * student_quantile(1 - tail, math.inf))
    low, high = np.quantile(deviations * wider, [tail, 1 - tail])
    return mean + float(low), mean + float(high)


def _drawn_means(
    values: npt.NDArray[np.float64], variance: float, draws: int, drawn: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Return deviations of the mean of as many draws with replacement, of this variance."""
    own = values - values.mean()
    natural = float(own.var()) / len(own)
    if np.ptp(values) <= ROUNDING * np.abs(values).max():  # they have no shape to draw from
        return drawn.normal(0.0, math.sqrt(variance), draws)
    at_once = max(1, CHUNK // len(own))
    parts = [
        own[drawn.integers(len(own), size=(min(at_once, draws - first), len(own)))].mean(axis=1)
        for first in range(0, draws, at_once)
    ]
    return np.concatenate(parts) * math.sqrt(variance / natural)


def _table(values: Values) -> npt.NDArray[np.float64]:
    """Return the values as rows of units; one value a unit is one column."""
    found = np.asarray(values, float)
    found = found[:, None] if found.ndim == 1 else found
    if found.ndim != 2 or found.shape[0] < 2 or found.shape[1] < 1:
        raise ValueError(f"One value has no spread: take two or more, got {found.shape[0]}.")
    if not np.isfinite(found).all():
        raise ValueError("There are values that are not finite.")
    return found


# --- many comparisons at once -----------------------------------------------------------------


def holm(p: Sequence[float]) -> list[float]:
    """Correct p for all comparisons: below 0.05 for a true null in at most 5 % of all families."""
    corrected, worst = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        worst = max(worst, min(1.0, (len(p) - rank) * p[at]))
        corrected[at] = worst
    return corrected


def by_luck(units: int, comparisons: int = 1) -> float:
    """Return the chance that in one of so many comparisons all units agree, though no side is
    better.

    Whoever fails half of the time and succeeds otherwise has, in one unit, a chance of 1/4 to
    succeed where its equal fails. In a few units, all of them may come out so, for either side.
    """
    return float(min(1.0, comparisons * 2 * 0.25**units))


def fewest_units(comparisons: int, alpha: float = ALPHA) -> int:
    """Return the fewest units that can tell anything apart in so many comparisons."""
    units = 2
    while by_luck(units, comparisons) >= alpha:
        units += 1
    return units


def shown_p(p: float) -> str:
    """Write p with two digits, or as many as show on which side of 5 % it is: 0.0498, not 0.05."""
    if p < 1e-4:
        return f"{p:.0e}"
    digits = 2
    while p < ALPHA <= float(f"{p:.{digits}g}") or float(f"{p:.{digits}g}") < ALPHA <= p:
        digits += 1
    return f"{p:.{digits}g}"


def corrected(p: Sequence[float], units: Sequence[int], comparisons: int) -> list[float]:
    """Correct judgements that are made together: in at most 5 % of all families a true null is
    rejected.

    `units` are those of each judgement, `comparisons` the pairs that are judged. Judgements of one
    pair (accuracy, area) go wrong together where its units agree by luck, so that is counted by
    pairs; Holm's method counts judgements.
    """
    return [max(each, by_luck(own, comparisons)) for each, own in zip(holm(p), units, strict=True)]


def holm_levels(p: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Return the level that each p must stay below to count, given that the smaller ones count."""
    levels = [0.0] * len(p)
    for rank, at in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        levels[at] = alpha / (len(p) - rank)
    return levels


# --- what a design can see --------------------------------------------------------------------


def smallest_visible_effect(known: Spread, *, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return the true difference that this design would detect with this power."""
    return known.quantile(1 - alpha / 2) + known.quantile(power)


def seeds_needed(
    effect: float,
    known: Spread,
    *,
    alpha: float = ALPHA,
    power: float = POWER,
    fewest: int = 2,
) -> int | None:
    """Return the seeds in all, at this spread, that show such an effect; None if no number would
    do.

    What the choice of tasks adds stays, however many seeds there are. Fewer than `fewest` do not
    count, whatever they show.
    """
    of_one = known.from_units * known.units

    def sees(seeds: int) -> bool:
        some = Spread(seeds, known.tasks, of_one / seeds, known.from_tasks)
        return smallest_visible_effect(some, alpha=alpha, power=power) <= abs(effect)

    return _first(sees, fewest, MOST_SEEDS)


def tasks_needed(
    effect: float, known: Spread, *, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Return the held-out tasks in all, with the same seeds; None if no number of tasks would do.

    What seeds add for all tasks alike stays, however many tasks there are.
    """
    of_one, of_rest = known.from_tasks * known.tasks, known.from_rest * known.tasks

    def sees(tasks: int) -> bool:
        by_units = known.from_units - known.from_rest + of_rest / tasks
        some = Spread(known.units, tasks, by_units, of_one / tasks)
        return smallest_visible_effect(some, alpha=alpha, power=power) <= abs(effect)

    return _first(sees, 2, 10 * MOST_SEEDS)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number from which on it holds; None if it does not hold at the last."""
    if not holds(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


# --- Student's distribution -------------------------------------------------------------------


def two_sided(t: float, df: float) -> float:
    """Return the chance of a value as far from 0 as this, in either direction."""
    if math.isinf(df):
        return math.erfc(abs(t) / math.sqrt(2))
    return beta_share(df / (df + t * t), df / 2, 0.5)


@lru_cache(maxsize=4096)
def student_quantile(share: float, df: float) -> float:
    """Return the value below which this share lies."""
    if share < 0.5:
        return -student_quantile(1 - share, df)
    return _where(lambda t: two_sided(t, df) <= 2 * (1 - share), 1.0)


def _where(holds: Callable[[float], bool], scale: float) -> float:
    """Return the positive number from which on it holds."""
    low, high = 0.0, scale
    while not holds(high):
        low, high = high, 2 * high
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@lru_cache(maxsize=64)
def _student_variances(df: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Write Student's distribution as normal ones: their variances, and the weight of each.

    With V of chi-square, it is normal with a variance of df / V. So a sum with another such number
    is a mixture of normal ones, too, and smooth whichever of the two is the smaller. In
    x = log(V/df) a weight is exp(-df/2 (e^x - 1 - x)): it is below exp(-LEAST) outside of these
    ends, and so smooth that sums over steps of this size are integrals to eight digits.
    """
    ends = 2 * LEAST / df
    step = min(0.5, 0.6 * math.sqrt(2 / df))
    x = np.arange(-ends - math.sqrt(2 * ends), math.sqrt(2 * ends), step)
    weight = np.exp(-0.5 * df * (np.expm1(x) - x))
    return np.exp(-x), weight / weight.sum()


def _outside(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the chance that a normal number is as far from 0 as these, in either direction."""
    places, logs = _normal_tail()
    return np.exp(np.interp(z, places, logs, right=-math.inf))


@lru_cache(maxsize=1)
def _normal_tail() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the tail's logarithm, nearly a parabola: linear interpolation will do."""
    places = np.arange(0.0, 37.0, FINE)
    sides = np.fromiter((math.erfc(z / math.sqrt(2)) for z in places), float, len(places))
    return places, np.log(sides)


def beta_share(x: float, a: float, b: float) -> float:
    """Compute the regularised incomplete beta function, by its continued fraction (Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # there the fraction of the other side converges fast
        return 1 - beta_share(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
        + a * math.log(x) + b * math.log1p(-x)
    )  # fmt: skip
    least = 1e-300
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1), least)
    total = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        change = 1.0
        for term in (even, odd):
            d = 1 / _away(1 + term * d, least)
            c = _away(1 + term / c, least)
            total *= d * c
            change = d * c
        if abs(change - 1) < 1e-15:
            break
    return front * total / a


def _away(x: float, least: float) -> float:
    return x if abs(x) > least else least
