"""Monte-Carlo values within answers, and what they say of a critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from steps import Start, gather, rollouts

from groupwise.errors import BatchError
from groupwise.evaluate.monte_carlo import (
    MonteCarloValue,
    agreement,
    correlation,
    monte_carlo_values,
    spread_positions,
    values_at,
)
from groupwise.prepare.setup import sampling_of
from groupwise.records import Completion, Turn


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def completion(length: int, **more) -> Completion:
    return Completion((1,) * length, torch.zeros(length), "eos", 0, **more)


def test_positions_are_spread_over_the_policys_tokens() -> None:
    assert spread_positions(completion(20)) == [(0, 0), (5, 2), (10, 5), (15, 7)]
    assert spread_positions(completion(2)) == [(0, 0), (1, 5)]
    turns = (Turn("assistant", 0, 1), Turn("tool", 1, 3), Turn("assistant", 3, 4))
    mask_T = torch.tensor([True, False, False, True])
    assert spread_positions(completion(4, mask_T=mask_T, turns=turns)) == [(0, 0), (3, 5)]


def test_statistics_by_hand() -> None:
    found = [
        MonteCarloValue(0, 0, 0, (0.0, 1.0)),
        MonteCarloValue(0, 5, 5, (1.0, 1.0)),
        MonteCarloValue(1, 0, 0, (0.0, 0.0)),
    ]
    assert [each.value for each in found] == [0.5, 1.0, 0.0]
    assert [each.variance for each in found] == [0.25, 0.0, 0.0]
    seen = agreement(found, [0.75, 0.75, 0.25])
    assert seen.mean_error == pytest.approx(0.25) and seen.bias == pytest.approx(0.25 / 3)
    assert seen.bias_by_tenth == (0.25, *[None] * 4, -0.25, *[None] * 4)
    assert seen.noise == pytest.approx((0.25 / 3) ** 0.5)
    # Deviations (1, 1, −2)/6 and (0, 1, −1)/2: covariance 1/4, variances 1/6 and 1/2.
    assert seen.correlation == pytest.approx(0.25 / (1 / 12) ** 0.5)
    assert seen.metrics("critic")["critic/bias/tenth_6"] == -0.25
    assert "critic/bias/tenth_2" not in seen.metrics("critic")


def test_what_does_not_vary_has_no_correlation() -> None:
    assert correlation([1.0, 1.0], [0.0, 1.0]) is None
    assert correlation([1.0, 2.0, 4.0], [-1.0, -2.0, -4.0]) == pytest.approx(-1.0)
    one = [MonteCarloValue(0, 0, 0, (1.0,))]
    assert agreement(one, [0.5]).noise is None and agreement(one, [0.5]).correlation is None
    with pytest.raises(BatchError, match="give one for each of at least one"):
        agreement(one, [])
    with pytest.raises(BatchError, match="give one for each"):
        agreement([], [])


def test_values_of_a_model_agree_with_more_of_them(start: Start, tmp_path: Path) -> None:
    """Sixteen answers from four positions; against 64 from the same they are noise apart."""
    with start.opened(tmp_path, recipe="rloo") as run:
        answers = rollouts(gather(run))[:6]
        parts, sampling = run.parts, sampling_of(run.config)
        given = (parts.engine, parts.grader, parts.loaded.tokenizer, answers, sampling)
        few = monte_carlo_values(*given)
        many = monte_carlo_values(*given, continuations=64)
        again = monte_carlo_values(*given[:3], answers[:2], sampling)
    assert [each for each in few if each.row < 2] == again  # nobody else's company matters
    assert {len(each.rewards) for each in few} == {16}
    assert all(each.position < len(answers[each.row].completion.token_ids) for each in few)
    value_NT = torch.zeros(6, 8)
    for each in many:
        value_NT[each.row, each.position] = each.value
    seen = agreement(few, values_at(few, value_NT))
    assert abs(seen.bias) < 3 * seen.noise / len(few) ** 0.5 + 1e-9
    assert 0 < seen.mean_error < 1.5 * seen.noise
