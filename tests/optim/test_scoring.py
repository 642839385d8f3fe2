"""Learning to score: where numbers are read, micro-batches, and gradients in closed form."""

from __future__ import annotations

import copy

import pytest
import torch
from scorers import language_model, scores

from groupwise.config import Optim
from groupwise.losses.scores import bradley_terry, soft_labels
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.scalar_head import ScalarHead
from groupwise.optim.scoring import PairComparisons, RowsAsked, ScoreLearner, StepLabels

PROMPTS = [(3, 4, 5), (3, 4, 5), (6, 7), (6, 7), (6, 7)]
ANSWERS = [(8, 9, 0), (10, 0), (11, 12, 13, 0), (14, 0), (15, 16, 0)]
UNITS = [[0, 1], [2, 3, 4]]


def head(seed=1):
    made = ScalarHead(language_model(seed=seed).model)
    torch.nn.init.normal_(made.score.weight, std=0.3, generator=torch.Generator().manual_seed(seed))
    return made


def ends():
    return RowsAsked.of(PROMPTS, ANSWERS, [(len(ids) - 1,) for ids in ANSWERS], UNITS)


def comparisons():
    better, worse = [0, 2, 2, 3], [1, 3, 4, 4]
    return PairComparisons(
        bradley_terry(centre=0.05), better, worse, [0.0, 0.5, 0.5, 0.5], [1 / 2] + [1 / 6] * 3
    )


def learner(made, budget):
    return ScoreLearner(made, Optim(learning_rate=1e-2, micro_tokens=budget, clip_norm=0.0))


def gradients(made, asked, loss, budget):
    seen = {}
    with torch.no_grad():
        made.zero_grad()
    teacher = learner(made, budget)
    teacher._clear()
    found, shares = {}, []
    teacher._accumulate(asked, loss, found, shares)
    for name, parameter in made.learning_parameters():
        seen[name] = parameter.grad.clone()
    return seen, float(torch.stack(shares).sum()), len(shares)


def test_numbers_are_read_at_the_end_token():
    made = head()
    found = learner(made, 64).ask(ends()).tolist()
    alone = [scores(made, [*p, *a])[-1] for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert found == pytest.approx(alone, abs=1e-6)


def test_numbers_are_read_at_the_ends_of_steps():
    made, places = head(), [(1, 2), (0,)]
    asked = RowsAsked.of(PROMPTS[:2], ANSWERS[:2], places, [[0], [1]])
    found = learner(made, 64).ask(asked).tolist()
    first, second = (scores(made, [*p, *a]) for p, a in zip(PROMPTS[:2], ANSWERS[:2], strict=True))
    assert found == pytest.approx([first[4], first[5], second[3]], abs=1e-6)


@pytest.mark.parametrize("kind", ["pairs", "steps"])
def test_any_cut_into_micro_batches_gives_the_same_gradient(kind):
    if kind == "pairs":
        asked, loss = ends(), comparisons()
    else:
        places = [(0, 2), (1,), (1, 3), (0, 1), (2,)]
        asked = RowsAsked.of(PROMPTS, ANSWERS, places, [[row] for row in range(5)])
        loss = StepLabels(soft_labels(), [(1.0, 0.5), (None,), (0.0, 1.0), (None, 0.25), (1.0,)])
        assert loss.count == 6
    whole, total, passes = gradients(head(), asked, loss, 1000)
    parts, again, more = gradients(head(), asked, loss, 1)
    assert passes == 1 and more == len(asked.units)
    assert again == pytest.approx(total, abs=1e-6)
    for name, expected in whole.items():
        torch.testing.assert_close(parts[name], expected, atol=2e-6, rtol=1e-4)


def test_units_are_never_cut():
    assert ends().cut(1) == UNITS
    assert ends().cut(8) == UNITS  # three prompt tokens and five of the answers fill it
    assert ends().cut(100) == [[0, 1, 2, 3, 4]]


def test_the_first_gradient_is_that_of_the_difference_of_hidden_states():
    made = ScalarHead(language_model().model)  # its score is 0
    asked = RowsAsked.of(PROMPTS[:2], ANSWERS[:2], [(2,), (1,)], [[0, 1]])
    loss = PairComparisons(bradley_terry(centre=0.01), [0], [1], [0.0], [1.0])
    seen, total, _ = gradients(made, asked, loss, 100)
    assert total == pytest.approx(0.6931472, abs=1e-6)

    def last(ids):
        out = made.trunk(torch.tensor(ids), packed_positions([len(ids)]), packed([len(ids)]))
        return out[-1].detach()

    chosen, rejected = (last([*p, *a]) for p, a in zip(PROMPTS[:2], ANSWERS[:2], strict=True))
    torch.testing.assert_close(seen["score.weight"][0], -(chosen - rejected) / 2)
    assert all(not x.any() for name, x in seen.items() if name != "score.weight")


def test_an_update_changes_the_order_and_bad_numbers_skip_it():
    made = head()
    before = copy.deepcopy(made.state_dict())
    teacher = learner(made, 100)
    outcome, found, total = teacher.learn(ends(), comparisons(), 1e-2)
    assert not outcome.skipped and len(found) == 5 and total > 0
    after = gradients(made, ends(), comparisons(), 100)[1]
    assert after < total
    with torch.no_grad():
        made.score.weight[0, 0] = float("nan")
    kept = copy.deepcopy(made.trunk.state_dict())
    outcome, *_ = teacher.learn(ends(), comparisons(), 1e-2)
    assert outcome.skipped and "score_A" in str(outcome.bad)
    assert all(torch.equal(x, kept[name]) for name, x in made.trunk.state_dict().items())
    assert before.keys() == made.state_dict().keys()
