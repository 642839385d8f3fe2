"""Statistics of comparisons: closed forms, printed tables, simulations of what is promised."""

from __future__ import annotations

import math
from itertools import product

import mpmath
import numpy as np
import pytest

from groupwise.evaluate.statistics import (
    Spread,
    bootstrap_interval,
    by_luck,
    corrected,
    fewest_units,
    holm,
    holm_levels,
    paired_difference,
    seeds_needed,
    shown_p,
    smallest_visible_effect,
    spread,
    stderr,
    student_quantile,
    t_test,
    tasks_needed,
    two_sided,
)


@pytest.mark.parametrize("df", [1, 2, 2.5, 4, 9, 30, 1000])
@pytest.mark.parametrize("t", [0.0, 0.1, 1.0, 2.776, 8.0, 60.0])
def test_student_against_mpmath(t: float, df: float) -> None:
    exact = mpmath.betainc(df / 2, 0.5, 0, mpmath.mpf(df) / (df + t * t), regularized=True)
    assert two_sided(t, df) == pytest.approx(float(exact), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(
    ("share", "df", "printed"),
    [
        (0.975, 1, 12.706),
        (0.975, 4, 2.776),
        (0.995, 4, 4.604),
        (0.8, 4, 0.941),
        (0.975, 1e9, 1.960),
    ],
)
def test_quantiles_of_the_printed_tables(share: float, df: float, printed: float) -> None:
    assert student_quantile(share, df) == pytest.approx(printed, abs=6e-4)
    assert student_quantile(1 - share, df) == -student_quantile(share, df)


def test_p_is_shown_on_its_side_of_five_percent() -> None:
    """'p = 0.05' beside 'separable with p < 0.05' would contradict itself."""
    shown = {0.0498: "0.0498", 0.04983: "0.0498", 0.05: "0.05", 0.0502: "0.05", 0.0004: "0.0004"}
    assert {p: shown_p(p) for p in shown} == shown
    assert [shown_p(p) for p in (1.0, 0.12, 0.028, 3e-7)] == ["1", "0.12", "0.028", "3e-07"]


def test_a_paired_test_by_hand() -> None:
    # Differences 1, 2, 3, 4, 5: mean 3, sd √2.5, t = 3/√0.5 = 4.2426 on 4 degrees: p = 0.013236.
    found = paired_difference([2, 4, 6, 8, 10], [1, 2, 3, 4, 5])
    assert found.mean == 3.0
    assert found.spread.stderr == pytest.approx(math.sqrt(0.5))
    assert found.p == pytest.approx(0.0132356, abs=1e-6)
    half = 2.7764451 * math.sqrt(0.5)
    assert found.low == pytest.approx(3 - half, abs=0.05 * half)
    assert found.high == pytest.approx(3 + half, abs=0.05 * half)


def test_no_difference_is_exactly_none() -> None:
    values = np.random.default_rng(0).random((5, 40))
    found = paired_difference(values, values)
    assert (found.mean, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_seeds_that_all_agree_are_only_as_good_as_their_signs() -> None:
    assert t_test([0.125] * 5) == 2 / 32
    assert t_test([0.125] * 2) == 0.5


def test_rounding_is_no_spread() -> None:
    """Three seeds that agree: the last bits of their differences say nothing."""
    for values in ([0.1] * 3, [0.6 - 0.5, 0.7 - 0.6, 0.8 - 0.7]):
        assert t_test(values) == 2 / 8
        assert stderr(values) == 0.0
        low, high = bootstrap_interval(values)
        assert low == high == pytest.approx(0.1)
    seeds = np.array([[0.1, 0.2, 0.3, 0.7], [0.7, 0.3, 0.2, 0.1]]) - 1 / 3
    assert np.ptp(seeds.mean(axis=1)) > 0  # in the last bit
    assert spread(seeds).from_units > 0.001


def test_the_variance_of_a_crossed_design_by_hand() -> None:
    # Two seeds x two tasks. Means of seeds 1, 4; of tasks 2, 3; rest ±0.5.
    known = spread([[1.0, 1.0], [3.0, 5.0]])
    seeds, tasks, rest = 2 * 4.5, 2 * 0.5, 4 * 0.25
    assert known.from_units == pytest.approx(seeds / 4)
    assert known.from_tasks == pytest.approx((tasks - rest) / 4)  # none beyond chance
    assert known.tail(math.sqrt(seeds / 4)) == pytest.approx(0.5)  # of Student's t with 1 degree
    assert stderr([[1.0, 1.0], [3.0, 5.0]]) == pytest.approx(math.sqrt(seeds / 4))


def test_tasks_that_differ_count_beside_seeds() -> None:
    """Every seed says the same of every task: the spread is that between tasks alone."""
    tasks = np.array([0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    known = spread(np.tile(tasks, (5, 1)))
    assert known.from_units == 0.0
    assert known.from_tasks == pytest.approx(tasks.var(ddof=1) / len(tasks))
    assert known.tail(known.stderr) == pytest.approx(two_sided(1.0, df=7))  # of eight tasks


def test_seeds_that_agree_by_chance_are_not_taken_for_certain() -> None:
    """Both seeds have the same mean, and differ in every task."""
    known = spread([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]])
    assert known.from_units == pytest.approx((8 * 0.25 / 3) / 8)
    found = paired_difference([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]], np.zeros((2, 4)))
    half = known.quantile(0.975)  # nothing but its width is known
    assert found.low == pytest.approx(0.5 - half, rel=0.1)
    assert found.high == pytest.approx(0.5 + half, rel=0.1)


@pytest.mark.parametrize(("units", "tasks"), [(2, 4), (2, 100), (5, 8), (20, 100), (5, 10**9)])
@pytest.mark.parametrize("share", [1e-18, 1e-4, 0.01, 0.5, 2.0])
def test_the_sum_of_two_student_errors(units: int, tasks: int, share: float) -> None:
    """Against mpmath's integral over the tasks' part."""
    known = Spread(units, tasks, from_units=1.0, from_tasks=share)
    df = tasks - 1
    scale = mpmath.gamma(mpmath.mpf(df + 1) / 2) / mpmath.gamma(mpmath.mpf(df) / 2)
    scale /= mpmath.sqrt(df * mpmath.pi)
    ends = [0, 2, 4, 9] if df > 1000 else [0, 2, 4, 9, 40, 400, mpmath.inf]
    for size in (0.5, 3.0, 12.0):

        def upper(x: mpmath.mpf) -> mpmath.mpf:
            inner = mpmath.betainc((units - 1) / 2, 0.5, 0, (units - 1) / (units - 1 + x * x),
                                   regularized=True) / 2  # fmt: skip
            return inner if x > 0 else 1 - inner

        def weighed(z: mpmath.mpf) -> mpmath.mpf:
            density = scale * (1 + z * z / df) ** (-mpmath.mpf(df + 1) / 2)
            move = mpmath.sqrt(share) * z
            return density * (upper(size - move) + upper(size + move))  # noqa: B023

        with mpmath.workdps(12):
            exact = 2 * mpmath.quad(weighed, ends)
        assert known.tail(size) == pytest.approx(float(exact), rel=1e-6)
    assert known.tail(known.quantile(0.975)) == pytest.approx(0.05)


def test_a_small_spread_by_the_luck_of_two_seeds_makes_nothing_certain() -> None:
    """18 points, 0.34 of them by seeds and 1 by tasks: one degree of freedom can't give 1e-20."""
    known = Spread(2, 256, 0.0034**2, 0.0106**2)
    assert 0.005 < known.tail(0.18) < 0.03


def _covers(make, true: float, repeats: int, draws: int = 500) -> tuple[float, float]:
    """How often the interval holds the truth, and how often p < 0.05 (rejects the truth)."""
    inside = rejected = 0
    for _ in range(repeats):
        values = make()
        low, high = bootstrap_interval(values, draws=draws)
        inside += low <= true <= high
        rejected += t_test(values - true) < 0.05
    return inside / repeats, rejected / repeats


# Of 1,500 repeats the share has a standard error of 0.6 points: limits are three of them away.
@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_intervals_over_seeds_cover(seeds: int) -> None:
    draw = np.random.default_rng(seeds)
    inside, rejected = _covers(lambda: draw.normal(0.3, 1.0, seeds), 0.3, 1500)
    assert 0.93 <= inside <= 0.97
    assert 0.03 <= rejected <= 0.07


def test_heavy_tails_do_not_fool_it_and_skew_does_a_little() -> None:
    draw = np.random.default_rng(1)
    inside, rejected = _covers(lambda: draw.standard_t(3, 5), 0.0, 1500)
    assert inside >= 0.93 and rejected <= 0.06
    inside, _ = _covers(lambda: draw.lognormal(0.0, 0.6, 5), math.exp(0.18), 1500)
    assert 0.87 <= inside <= 0.94  # what the module says: about 90 %


def test_the_percentile_bootstrap_would_not_cover() -> None:
    """Why deviations are widened: without it, 83 % at five seeds."""
    draw = np.random.default_rng(2)
    inside = 0
    for _ in range(1500):
        values = draw.normal(0.0, 1.0, 5)
        means = draw.choice(values, (500, 5)).mean(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        inside += low <= 0 <= high
    assert inside / 1500 < 0.87


def _levels(make, repeats: int) -> list[float]:
    """How often p is below 0.05, 0.01 and 0.003 where there is no difference."""
    found = np.array([t_test(make()) for _ in range(repeats)])
    return [float((found < level).mean()) for level in (0.05, 0.01, 0.003)]


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_small_p_values_are_as_rare_as_they_say(seeds: int) -> None:
    """Corrected comparisons ask for small ones: the far tail must hold too, for two seeds even."""
    draw = np.random.default_rng(8)

    def make() -> np.ndarray:
        own = draw.normal(0, 0.03, (seeds, 1)) + draw.normal(0, 0.2, (1, 60))
        return own + draw.normal(0, 0.4, (seeds, 60))

    common, rare, rarest = _levels(make, 1500)
    assert common <= 0.065 and rare <= 0.018 and rarest <= 0.008


@pytest.mark.parametrize(
    ("of_seeds", "of_tasks", "rest"),
    [(0.02, 0.2, 0.5), (0.05, 0.0, 0.5), (0.0, 0.3, 0.5), (0.0, 0.0, 0.5)],
)
def test_intervals_over_seeds_and_tasks_cover(
    of_seeds: float, of_tasks: float, rest: float
) -> None:
    """New seeds and new tasks every time: five seeds, 100 tasks."""
    draw = np.random.default_rng(3)

    def make() -> np.ndarray:
        seeds, tasks = draw.normal(0.1, of_seeds, (5, 1)), draw.normal(0, of_tasks, (1, 100))
        return seeds + tasks + draw.normal(0, rest, (5, 100))

    inside, rejected = _covers(make, 0.1, 500, draws=300)
    assert 0.92 <= inside <= 0.985
    assert rejected <= 0.08


def test_verdicts_of_tasks_cover() -> None:
    """Right or wrong, correlated by task and by seed, as accuracies are."""
    draw = np.random.default_rng(4)

    def make() -> np.ndarray:
        hard = draw.normal(0, 1.2, (1, 120))
        better = draw.normal(0.0, 0.5, (1, 120))
        sides = [
            (draw.random((5, 120)) < 1 / (1 + np.exp(-(hard + move + draw.normal(0, 0.2, (5, 1))))))
            for move in (better, -better)
        ]
        return sides[0].astype(float) - sides[1]

    inside, rejected = _covers(make, 0.0, 500, draws=300)
    assert 0.92 <= inside <= 0.985
    assert rejected <= 0.08


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]
    assert holm([]) == []
    assert holm_levels([0.01, 0.04, 0.03]) == pytest.approx([0.05 / 3, 0.05, 0.05 / 2])


def test_how_few_agree_by_luck() -> None:
    """Each of two equal arms fails in half of its runs: exact, by counting all outcomes."""
    for units in (2, 3):
        runs = list(product(product((0, 1), repeat=units), repeat=2))
        apart = [all(x - y == a[0] - b[0] != 0 for x, y in zip(a, b, strict=True)) for a, b in runs]
        assert sum(apart) / len(runs) == by_luck(units)
    assert by_luck(3, comparisons=3) == 3 * by_luck(3)
    assert [fewest_units(pairs) for pairs in (0, 1, 3, 6, 10, 15, 28)] == [2, 3, 4, 4, 5, 5, 6]


def test_no_p_goes_below_the_luck_of_few() -> None:
    assert corrected([1e-9, 0.2], [2, 2], comparisons=1) == [0.125, 0.2]
    assert corrected([1e-9, 0.03], [8, 8], comparisons=1) == pytest.approx([by_luck(8), 0.03])
    assert corrected([], [], comparisons=0) == []


def test_few_tasks_do_not_make_their_own_spread_certain() -> None:
    """Many seeds that agree, four tasks that differ: p is Student's of three degrees of freedom."""
    draw = np.random.default_rng(9)

    def make() -> np.ndarray:
        return draw.normal(0, 1, (1, 4)) + draw.normal(0, 0.01, (8, 4))

    common, rare, _ = _levels(make, 1500)
    assert common <= 0.065 and rare <= 0.018  # as normal: 0.14 and 0.08


def test_holm_holds_the_family() -> None:
    """Ten true nulls, one correlated family a time: any p below 0.05 in at most 5 %."""
    draw = np.random.default_rng(5)
    wrong = 0
    for _ in range(1000):
        values = draw.normal(0, 1, (5, 5))  # arms x seeds; all ten pairs
        pairs = [(i, j) for i, j in product(range(5), range(5)) if i < j]
        wrong += min(holm([t_test(values[i] - values[j]) for i, j in pairs])) < 0.05
    assert wrong / 1000 <= 0.05 + 3 * 0.007


@pytest.mark.parametrize("effect", [0.5, 1.0, 2.0])
def test_as_many_seeds_as_are_said_to_be_needed_see_it(effect: float) -> None:
    known = Spread(units=5, tasks=1, from_units=1 / 5)
    seeds = seeds_needed(effect, known)
    assert seeds is not None
    draw = np.random.default_rng(6)

    def power(number: int) -> float:
        return float(np.mean([t_test(draw.normal(effect, 1, number)) < 0.05 for _ in range(1200)]))

    assert 0.76 <= power(seeds) <= 0.92  # whole numbers overshoot where there are few
    assert power(seeds - 1) < 0.84


def test_the_smallest_visible_effect_is_seen_so_often() -> None:
    draw = np.random.default_rng(7)
    known = Spread(units=5, tasks=1, from_units=1 / 5)
    effect = smallest_visible_effect(known)
    assert effect == pytest.approx((2.7764 + 0.9410) / math.sqrt(5), abs=1e-3)
    seen = np.mean([t_test(draw.normal(effect, 1, 5)) < 0.05 for _ in range(2000)])
    assert 0.77 <= seen <= 0.83


def test_no_number_of_seeds_makes_up_for_few_tasks() -> None:
    known = Spread(units=5, tasks=50, from_units=0.01**2, from_tasks=0.02**2)
    assert seeds_needed(0.03, known) is None
    tasks = tasks_needed(0.04, known)
    assert tasks is not None and tasks > 50
    assert seeds_needed(0.0, known) is None and tasks_needed(0.0, known) is None


def test_more_tasks_also_thin_out_what_seeds_and_tasks_share() -> None:
    """Seeds have no effect of their own: four times the tasks show an effect half as large."""
    draw = np.random.default_rng(5)
    table = draw.normal(size=50) + draw.normal(size=(6, 50))
    table -= table.mean(axis=1, keepdims=True)  # seeds that agree: all they add is the rest
    known = spread(table)
    assert known.from_rest == known.from_units > 0
    half = tasks_needed(smallest_visible_effect(known) / 2, known)
    assert 190 <= half <= 4 * 50  # a little fewer, as the spread of more tasks is better known
    apart = spread(table + np.arange(6.0)[:, None])  # now seeds differ for all tasks alike
    assert apart.from_rest == pytest.approx(known.from_rest)
    assert tasks_needed(smallest_visible_effect(apart) / 2, apart) is None


@pytest.mark.parametrize("values", [[0.1], [], [[0.1, 0.2]], [0.1, math.nan]])
def test_what_has_no_spread_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError):
        spread(values)


def test_pairs_must_be_pairs() -> None:
    with pytest.raises(ValueError, match="same shape"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])
