"""Monte-Carlo values within answers, and how far a critic's values are from them.

The value before token t is the mean reward of answers that go on from there: the truth, but for the
noise of a mean of few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from groupwise.engine.protocol import Engine, Sampling
from groupwise.errors import BatchError
from groupwise.graders.recorded_verdicts import Ledger
from groupwise.graders.rubric import Grader
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.branches import grade_branches, write_branches
from groupwise.records import Completion, Rollout

POSITIONS, CONTINUATIONS = 4, 16
TENTHS = 10


@dataclass(frozen=True)
class MonteCarloValue:
    """The value of one state within an answer."""

    row: int  # of the answer
    position: int  # the token that comes next: as a critic's value of that token
    tenth: int  # of the policy's own tokens, 0 to 9
    rewards: tuple[float, ...]  # of the answers that go on from there and have a grade

    @property
    def value(self) -> float:
        return sum(self.rewards) / len(self.rewards)

    @property
    def variance(self) -> float | None:
        """Return how far the value is from the truth, squared, on average; None of a single one."""
        count, mean = len(self.rewards), self.value
        if count < 2:
            return None
        return sum((x - mean) ** 2 for x in self.rewards) / (count - 1) / count


@dataclass(frozen=True)
class Agreement:
    """How far values are from Monte-Carlo values at the same places."""

    points: int
    correlation: float | None  # None where one of the two does not vary
    mean_error: float  # mean of |V − Monte Carlo|
    bias: float  # mean of V − Monte Carlo
    bias_by_tenth: tuple[float | None, ...]  # of the answer; None without a point there
    noise: float | None  # root mean square error of the Monte-Carlo values themselves

    def metrics(self, place: str) -> dict[str, float]:
        """Return the figures under names that begin with `place`."""
        found: Mapping[str, float | None] = {
            "correlation": self.correlation,
            "mean_error": self.mean_error,
            "bias": self.bias,
            "noise": self.noise,
            "points": float(self.points),
            **{f"bias/tenth_{n}": x for n, x in enumerate(self.bias_by_tenth, 1)},
        }
        return {f"{place}/{name}": x for name, x in found.items() if x is not None}


def spread_positions(completion: Completion, count: int = POSITIONS) -> list[tuple[int, int]]:
    """Return so many of the policy's tokens, evenly spread from the first on, with their tenths."""
    mask_T = completion.mask_T
    own = range(len(completion.token_ids)) if mask_T is None else mask_T.nonzero()[:, 0].tolist()
    ranks = dict.fromkeys(number * len(own) // count for number in range(count))
    return [(own[rank], TENTHS * rank // len(own)) for rank in ranks]


def monte_carlo_values(
    engine: Engine,
    grader: Grader,
    tokenizer: Tokenizer,
    answers: Sequence[Rollout],
    sampling: Sampling,
    *,
    positions: int = POSITIONS,
    continuations: int = CONTINUATIONS,
    known: Ledger | None = None,
) -> list[MonteCarloValue]:
    """Sample answers on from a few positions of each answer; what has no grade is left out."""
    places = [
        (row, position, tenth)
        for row, answer in enumerate(answers)
        for position, tenth in spread_positions(answer.completion, positions)
    ]
    points = [(answers[row], position) for row, position, _ in places]
    written = write_branches(engine, points, continuations, sampling)
    graded = grade_branches(grader, tokenizer, written, known)
    found = []
    for place, group in zip(places, graded, strict=True):
        rewards = tuple(r.grade.reward for r in group if r.grade.reward is not None)
        if rewards:
            found.append(MonteCarloValue(*place, rewards))
    return found


def values_at(found: Sequence[MonteCarloValue], value_NT: Tensor) -> list[float]:
    """Return a critic's values, of the same rows, at the places of Monte-Carlo values."""
    return [float(value_NT[each.row, each.position]) for each in found]


def agreement(found: Sequence[MonteCarloValue], values: Sequence[float]) -> Agreement:
    """Compare values with Monte-Carlo values of the same places."""
    if len(found) != len(values) or not found:
        raise BatchError(
            f"{len(values)} values can't be compared with {len(found)} Monte-Carlo values: give "
            "one for each of at least one."
        )
    truth = [each.value for each in found]
    gaps = [value - true for value, true in zip(values, truth, strict=True)]
    variances = [each.variance for each in found if each.variance is not None]
    by_tenth: list[float | None] = []
    for tenth in range(TENTHS):
        own = [gap for each, gap in zip(found, gaps, strict=True) if each.tenth == tenth]
        by_tenth.append(sum(own) / len(own) if own else None)
    return Agreement(
        points=len(found),
        correlation=correlation(values, truth),
        mean_error=sum(map(abs, gaps)) / len(gaps),
        bias=sum(gaps) / len(gaps),
        bias_by_tenth=tuple(by_tenth),
        noise=math.sqrt(sum(variances) / len(variances)) if variances else None,
    )


def correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Pearson's correlation; None where one of the two does not vary."""
    count = len(one)
    mean, mean_other = sum(one) / count, sum(other) / count
    squares = sum((x - mean) ** 2 for x in one)
    squares_other = sum((x - mean_other) ** 2 for x in other)
    if min(squares, squares_other) == 0:
        return None
    both = sum((x - mean) * (y - mean_other) for x, y in zip(one, other, strict=True))
    return both / math.sqrt(squares * squares_other)
