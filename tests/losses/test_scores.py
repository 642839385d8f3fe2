"""Losses of models that score, against numbers worked out by hand and closed-form gradients."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.errors import RecipeError
from groupwise.losses.scores import (
    LabelledSteps,
    ScoredPairs,
    bradley_terry,
    every_pair,
    hard_labels,
    neighbours,
    soft_labels,
)
from groupwise.recipes import recipe


def pairs(chosen, rejected, margin):
    made = [torch.tensor(x, dtype=torch.float64) for x in (chosen, rejected, margin)]
    return ScoredPairs(*(x.requires_grad_() for x in made[:2]), made[2])


def test_bradley_terry_by_hand():
    found = bradley_terry(centre=0.01)(pairs([2.0, 0.0, 1.0], [1.0, 0.0, -1.0], [0.0, 0.0, 0.5]))
    expected = [
        math.log(1 + math.exp(-1.0)) + 0.01 * 9,  # 0.313262 + 0.09
        math.log(2),
        math.log(1 + math.exp(-1.5)),  # r_w − r_l − m = 1.5, and the sum is 0
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert found[0].item() == pytest.approx(0.4032617, abs=1e-6)


def test_bradley_terry_gradient_in_closed_form():
    given = pairs([2.0, -0.5], [1.0, 0.75], [0.25, 0.0])
    bradley_terry(centre=0.03)(given).sum().backward()
    for n, (w, lost, m) in enumerate([(2.0, 1.0, 0.25), (-0.5, 0.75, 0.0)]):
        wrong = 1 / (1 + math.exp(w - lost - m))  # σ(−(r_w − r_l − m))
        centring = 2 * 0.03 * (w + lost)
        assert given.chosen_N.grad[n].item() == pytest.approx(-wrong + centring, abs=1e-12)
        assert given.rejected_N.grad[n].item() == pytest.approx(wrong + centring, abs=1e-12)


def test_centring_alone_tells_shifted_scores_apart():
    for centre, same in ((0.0, True), (0.01, False)):
        low, high = (
            bradley_terry(centre=centre)(pairs([1.0 + by], [0.5 + by], [0.0])) for by in (0.0, 3.0)
        )
        assert torch.allclose(low, high) == same


def test_labels_of_steps_by_hand():
    steps = LabelledSteps(torch.tensor([0.0, 2.0, -1.0]), torch.tensor([1.0, 0.25, 0.0]))
    two = 0.25 * math.log(1 + math.exp(-2)) + 0.75 * math.log(1 + math.exp(2))
    assert soft_labels()(steps).tolist() == pytest.approx(
        [math.log(2), two, math.log(1 + math.exp(-1))], abs=1e-6
    )
    hard = hard_labels(above=0.0)(steps)
    assert hard[1].item() == pytest.approx(math.log(1 + math.exp(-2)), abs=1e-6)
    strict = hard_labels(above=0.5)(steps)
    assert strict[1].item() == pytest.approx(math.log(1 + math.exp(2)), abs=1e-6)


def test_which_answers_are_compared():
    good = torch.tensor([-2.0, -1.0, -3.0, -2.0])  # ranks 2, 1, 3, 2
    found = {(choice.chosen, choice.rejected) for choice in every_pair()(good)}
    assert found == {(1, 0), (1, 3), (1, 2), (0, 2), (3, 2)}
    near = {(choice.chosen, choice.rejected) for choice in neighbours()(good)}
    assert near == {(1, 0), (1, 3), (0, 2), (3, 2)}
    pair = torch.tensor([1.0, 0.0])
    for slot in (every_pair(), neighbours()):
        assert [(c.chosen, c.rejected) for c in slot(pair)] == [(0, 1)]


def test_scores_and_log_probabilities_are_not_mixed_up():
    with pytest.raises(RecipeError, match="is for scores of a reward model"):
        recipe("dpo", {"preference": "bradley_terry()"})
    with pytest.raises(RecipeError, match="is for scores of a reward model"):
        recipe("dpo", {"pairing": "every_pair()"})
    with pytest.raises(RecipeError, match="log-probabilities of a policy"):
        recipe("reward_model", {"preference": "logistic()"})
    with pytest.raises(RecipeError, match="log-probabilities of a policy"):
        recipe("reward_model", {"pairing": "best_and_worst()"})
    with pytest.raises(RecipeError, match="text that stands between two steps"):
        recipe("process_reward_model", {"separator": ""})
