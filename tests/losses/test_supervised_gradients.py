"""sft and dft on a table of three words: gradients that can be written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from groupwise import TokenBatch, batch_phase, recipe, token_phase

FIRST_V = torch.tensor([0.4, -0.3, 0.1], dtype=torch.float64)
SECOND_VV = torch.tensor([[0.2, 0.0, -0.5], [1.0, -1.0, 0.3], [0.0, 0.6, 0.2]]).double()
# Answers of the data, of two words or one; how much each counts.
ROWS, WEIGHTS = [(0,), (1, 2), (2, 0), (1, 0)], [1.0, 0.5, 2.0, 0.0]


def table(first_V: Tensor, second_VV: Tensor) -> Tensor:
    """Log-probabilities of the rows' words, [N, 2]."""
    first, second = first_V.log_softmax(-1), second_VV.log_softmax(-1)
    rows = [[first[a[0]], second[a] if len(a) > 1 else first.new_zeros(())] for a in ROWS]
    return torch.stack([torch.stack(row) for row in rows])


def slopes(name: str) -> tuple[Tensor, Tensor, Tensor]:
    live = [x.clone().requires_grad_() for x in (FIRST_V, SECOND_VV)]
    logp_NT = table(*live)
    mask_NT = torch.tensor([[True, len(a) > 1] for a in ROWS])
    method = recipe(name)
    batch = TokenBatch.build(mask_NT=mask_NT, group_N=list(range(4)), reward_N=WEIGHTS)
    found = batch_phase(method, batch).batch
    loss = token_phase(method, found, logp_NT=logp_NT).loss
    first, second = torch.autograd.grad(loss, live)
    return loss.detach(), first, second


@pytest.mark.parametrize("name", ["sft", "dft"])
def test_the_gradient_is_that_of_every_word_by_its_row(name: str) -> None:
    """∂(−log p_y)/∂z = p − 1[y], times the row's weight, over the 7 words of all rows."""
    loss, first_V, second_VV = slopes(name)
    p_V, p_VV = FIRST_V.softmax(-1), SECOND_VV.softmax(-1)
    wanted, expected_V, expected_VV = 0.0, torch.zeros(3).double(), torch.zeros(3, 3).double()
    for answer, weight in zip(ROWS, WEIGHTS, strict=True):
        for place, word in enumerate(answer):
            p = p_V if place == 0 else p_VV[answer[0]]
            counts = weight / 7 * (float(p[word]) if name == "dft" else 1.0)
            slope = counts * (p - torch.eye(3).double()[word])
            wanted -= counts * float(p[word].log())
            if place == 0:
                expected_V += slope
            else:
                expected_VV[answer[0]] += slope
    # The batch phase makes its coefficients in float32.
    assert float(loss) == pytest.approx(wanted, rel=1e-6)
    assert torch.allclose(first_V, expected_V, rtol=1e-6, atol=1e-8)
    assert torch.allclose(second_VV, expected_VV, rtol=1e-6, atol=1e-8)
    assert float(first_V.abs().max()) > 0.01


def test_dft_by_hand() -> None:
    """One token of probability 1/4: loss −¼·log ¼ = 0.3466, slope ¼ of supervised learning's."""
    logp_NT = torch.tensor([[0.25]]).log().requires_grad_()
    batch = TokenBatch.build(
        mask_NT=torch.ones(1, 1, dtype=torch.bool), group_N=[0], reward_N=[1.0]
    )
    method = recipe("dft")
    found = token_phase(method, batch_phase(method, batch).batch, logp_NT=logp_NT)
    assert float(found.loss.detach()) == pytest.approx(0.34657, abs=1e-5)
    (slope,) = torch.autograd.grad(found.loss, logp_NT)
    assert float(slope) == pytest.approx(-0.25)


@pytest.mark.parametrize("name", ["sft", "dft"])
def test_targets_outside_the_mask_change_nothing(name: str) -> None:
    """Whatever stands where nothing is learned: no loss, no gradient, no share of the tokens."""
    logits_NTV = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.manual_seed(0))
    mask_NT = torch.tensor([[True, False, True, True], [False, True, False, True]])

    def slope(target_NT: Tensor) -> tuple[Tensor, Tensor]:
        live = logits_NTV.clone().requires_grad_()
        logp_NT = live.log_softmax(-1).gather(-1, target_NT[..., None])[..., 0]
        batch = TokenBatch.build(mask_NT=mask_NT, group_N=[0, 1], reward_N=[1.0, 2.0])
        loss = token_phase(recipe(name), batch_phase(recipe(name), batch).batch, logp_NT=logp_NT)
        return loss.loss.detach(), torch.autograd.grad(loss.loss, live)[0]

    target_NT = torch.tensor([[0, 1, 2, 0], [1, 1, 0, 2]])
    loss, slope_NTV = slope(target_NT)
    for shift in (1, 2):
        other, same_NTV = slope(torch.where(mask_NT, target_NT, (target_NT + shift) % 3))
        assert torch.equal(other, loss) and torch.equal(same_NTV, slope_NTV)
        learned, changed_NTV = slope((target_NT + shift * mask_NT) % 3)
        assert not torch.equal(learned, loss) and not torch.equal(changed_NTV, slope_NTV)
    assert bool((slope_NTV[~mask_NT] == 0).all()) and bool((slope_NTV[mask_NT] != 0).any())
