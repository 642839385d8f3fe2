"""Preference losses: numbers by hand, closed-form gradients, and any micro-batches alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from groupwise.errors import BatchError, RecipeError
from groupwise.losses.pairs import PairLoss, Pairs, logistic
from groupwise.losses.preferences import (
    cdpo,
    chosen_nll,
    chosen_nll_by_answer,
    hinge,
    ipo_sum,
    ipo_token_mean,
    odds_ratio,
    robust,
    shifted,
    simpo,
)
from groupwise.losses.unpaired import CalledAnswers, baseline_of, kto
from groupwise.methods.slots import Slot
from groupwise.recipes import recipe

# h = 0.2, 0.15 and 0.3 at β 0.1; lengths 6, 4, 10 and 5, 3, 12.
GIVEN = (
    [-12.0, -8.0, -20.0],
    [-15.0, -9.0, -18.0],
    [-11.0, -9.0, -24.0],
    [-12.0, -8.5, -19.0],
    [6.0, 4.0, 10.0],
    [5.0, 3.0, 12.0],
)


def tensor(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def pairs() -> Pairs:
    one, two, *others = (tensor(x) for x in GIVEN)
    return Pairs(one.requires_grad_(), two.requires_grad_(), *others, mean_chosen_len=20 / 3)


def slopes(loss: Slot, given: Pairs) -> tuple[PairLoss, list[float], list[float]]:
    found: PairLoss = loss(given)
    one, two = torch.autograd.grad(found.loss, [given.chosen_logp_N, given.rejected_logp_N])
    return found, one.tolist(), two.tolist()


@pytest.mark.parametrize(
    ("loss", "expected", "chosen"),
    [
        (hinge(0.1), [0.8, 0.85, 0.7], [-1 / 30] * 3),
        (ipo_sum(0.1), [9.0, 12.25, 4.0], [-2.0, -7 / 3, -4 / 3]),
        (
            ipo_token_mean(0.1),
            [20.854444444444443, 21.006944444444443, 21.933611111111112],
            [-0.5074074074074074, -0.7638888888888888, -0.31222222222222223],
        ),
        (
            cdpo(0.1, 0.1),
            [0.6181388693815918, 0.6359570477895321, 0.5843552444685272],
            [-0.01167220008958407, -0.012085671821875013, -0.010851916106278033],
        ),
        (
            robust(0.1, 0.1),
            [0.5731388693815918, 0.602207047789532, 0.5168552444685272],
            [-0.019172200089584073, -0.019585671821875015, -0.018351916106278038],
        ),
        (
            simpo(2.0, 0.5),
            [0.2014132779827524, 0.2014132779827524, 1.7014132779827524],
            [-0.020269502645150705, -0.030404253967726058, -0.054504965079576244],
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Slot) else "",
)
def test_losses_and_gradients_are_those_of_the_formulas(
    loss: Slot, expected: list[float], chosen: list[float]
) -> None:
    found, one, two = slopes(loss, pairs())
    assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-9)
    assert one == pytest.approx(chosen, rel=1e-9)
    # The rejected answer's slope is the other's, a token where means are taken.
    by_token = loss.name in ("simpo", "ipo_token_mean")
    weight = [n / m for n, m in zip(GIVEN[4], GIVEN[5], strict=True)] if by_token else [1.0] * 3
    assert two == pytest.approx([-x * w for x, w in zip(chosen, weight, strict=True)], rel=1e-9)


def test_a_shifted_pair_pushes_the_rejected_answer_by_its_share() -> None:
    """With a share of 1 it is DPO; below, the slope of the rejected answer is that share of it."""
    found, one, two = slopes(shifted(0.1, 0.6), pairs())
    margins = [0.1 * (a - c - 0.6 * (b - d)) for a, b, c, d in zip(*GIVEN[:4], strict=True)]
    assert found.loss_N.tolist() == pytest.approx([math.log1p(math.exp(-m)) for m in margins])
    wanted = [-0.1 / (1 + math.exp(m)) / 3 for m in margins]
    assert one == pytest.approx(wanted, rel=1e-9)
    assert two == pytest.approx([-0.6 * x for x in wanted], rel=1e-9)
    plain, whole = slopes(logistic(0.1), pairs()), slopes(shifted(0.1, 1.0), pairs())
    assert whole[1:] == plain[1:] and torch.equal(whole[0].loss_N, plain[0].loss_N)


def test_a_satisfied_hinge_and_a_sure_pair() -> None:
    given = Pairs(
        *(tensor(x) for x in ([-30.0, -5.0], [-22.0, -31.0], [-33.0, -4.5], [-27.5, -26.0]))
    )
    assert hinge(0.5)(given).loss_N.tolist() == [2.25, 0.0]
    assert float(robust(0.5, 0.2)(given).loss_N[1]) == pytest.approx(-0.6497934410832528)
    assert torch.equal(cdpo(0.1, 0.0)(given).loss_N, logistic(0.1)(given).loss_N)
    assert torch.allclose(robust(0.1, 0.0)(given).loss_N, logistic(0.1)(given).loss_N)


def test_robust_is_unbiased_and_cdpo_is_the_expected_loss_under_flips() -> None:
    given, noise = pairs(), 0.2
    flipped = Pairs(
        given.rejected_logp_N, given.chosen_logp_N, given.ref_rejected_logp_N,
        given.ref_chosen_logp_N,
    )  # fmt: skip

    def expected(loss: Slot) -> Tensor:
        mean_N: Tensor = (1 - noise) * loss(given).loss_N + noise * loss(flipped).loss_N
        return mean_N

    assert torch.allclose(expected(robust(0.1, noise)), logistic(0.1)(given).loss_N)
    assert torch.allclose(expected(logistic(0.1)), cdpo(0.1, noise)(given).loss_N)


def test_the_likelihood_is_a_mean_over_tokens_of_the_update() -> None:
    given = pairs()
    by_token, by_answer = chosen_nll(2.0)(given), chosen_nll_by_answer(2.0)(given)
    assert float(by_token.detach().mean()) == pytest.approx(2 * 40 / 20)
    assert float(by_answer.detach().mean()) == pytest.approx(2 * (2 + 2 + 2) / 3)
    (slope,) = torch.autograd.grad(by_token.mean(), [given.chosen_logp_N])
    assert slope.tolist() == pytest.approx([-2 / 20] * 3)


def test_orpo_is_the_published_sum() -> None:
    """Two answers of 3, 2 and 2, 4 tokens; log-probabilities −1.75, −2.5 and −2.25, −3."""
    sums = [tensor(x) for x in ([-1.75, -2.5], [-2.25, -3.0])]
    one, two = (x.requires_grad_() for x in sums)
    given = Pairs(one, two, None, None, tensor([3.0, 2.0]), tensor([2.0, 4.0]), 2.5)
    found = odds_ratio(0.1)(given)
    assert found.loss_N.tolist() == pytest.approx([0.03226126458927523, 0.11723249481288163])
    assert found.margin_N.tolist() == pytest.approx([0.9656637246161055, -0.8017738999529428])
    whole = (found.loss_N + chosen_nll(1.0)(given)).mean()
    assert float(whole.detach()) == pytest.approx(0.9247468797010784)
    slopes = torch.autograd.grad(whole, [one, two])
    assert slopes[0].tolist() == pytest.approx([-0.21039847604872725, -0.22418915377984894])
    assert slopes[1].tolist() == pytest.approx([0.01020754662369064, 0.016354957480038238])


def test_odds_stay_finite_where_an_answer_is_certain() -> None:
    one = torch.tensor([-1e-9, 0.0], requires_grad=True)
    given = Pairs(one, torch.tensor([-50.0, -1.0]), None, None, torch.ones(2), torch.ones(2), 1.0)
    loss_N = odds_ratio(0.1)(given).loss_N
    loss_N.sum().backward()
    assert loss_N.isfinite().all() and one.grad is not None and one.grad.isfinite().all()


@pytest.mark.parametrize(
    ("beta", "undesirable", "shift", "expected", "slope"),
    [
        (0.1, 1.0, [1.0, 0.5, -0.5, 1.0],
         [0.47502081252106, 0.5, 0.5374298453437496, 0.5124973964842103],
         [-0.006234401004822299, 0.00625, -0.006214975166938576, 0.006246095377027912]),
        (0.5, 1.33, [-1.0, 0.5, -0.5, -1.0],
         [0.320821300824607, 0.7476947461781116, 0.6224593312018545, 0.8278709104984665],
         [-0.027236874220226755, 0.04091979125512574, -0.02937546402519931, 0.03906936715351508]),
    ],
)  # fmt: skip
def test_kto_against_a_baseline_that_is_never_negative(
    beta: float, undesirable: float, shift: list[float], expected: list[float], slope: list[float]
) -> None:
    logp_N = tensor([-12.0, -9.0, -15.0, -7.0]).requires_grad_()
    ref_N, other_N = tensor([-13.5, -9.5, -14.0, -8.0]), tensor(shift).requires_grad_()
    baseline = baseline_of(other_N, torch.zeros(4, dtype=torch.float64))
    assert float(baseline) == max(0.0, sum(shift) / 4) and not baseline.requires_grad
    good_N = torch.tensor([True, False, True, False])
    found = kto(beta, 1.0, undesirable)(CalledAnswers(logp_N, ref_N, good_N, baseline))
    assert found.loss_N.tolist() == pytest.approx(expected, rel=1e-9)
    (found_slope,) = torch.autograd.grad(found.loss_N.mean(), [logp_N])
    assert found_slope.tolist() == pytest.approx(slope, rel=1e-9)


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(RecipeError, match="Take less than"):
        recipe("robust_dpo", {"preference.noise": 0.5})
    with pytest.raises(RecipeError, match="single answers"):
        recipe("dpo", {"preference": "kto()"})
    with pytest.raises(RecipeError, match="compares two answers"):
        recipe("kto", {"preference": "logistic()"})
    one = Pairs(torch.zeros(2), torch.zeros(2))
    with pytest.raises(BatchError, match="measures from a reference"):
        hinge()(one)
    with pytest.raises(BatchError, match="means over tokens"):
        simpo()(one)
    with pytest.raises(BatchError, match="mean_chosen_len"):
        chosen_nll()(one)
    assert recipe("simpo").roles == recipe("orpo").roles == () and recipe("simpo").fixed == {}
    assert recipe("kto").roles == recipe("rpo").roles == ("reference",)
    assert math.isclose(recipe("rpo").likelihood[0]["weight"], 1.0)
