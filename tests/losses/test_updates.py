"""Several optimizer steps per batch: advantages of the whole batch, denominators of each step."""

from __future__ import annotations

import pytest
import torch
from batches import learner_outputs, leaves, random_sample

from groupwise import batch_phase, recipe, token_phase, updates


def test_token_mean_of_a_step_is_over_the_tokens_of_that_step() -> None:
    sample = random_sample(3)
    made = recipe("lite_ppo")
    done = batch_phase(made, sample.build()).batch
    parts = [torch.arange(0, 5), torch.arange(5, 12)]
    for rows, step in zip(parts, updates(made, done, parts), strict=True):
        tokens = sample.streams["mask_NT"][rows].sum()
        assert step.coefficient_NT is not None and done.advantage_NT is not None
        assert (step.coefficient_NT[step.mask_NT] == 1.0 / tokens.double()).all()
        assert torch.equal(step.advantage_NT, done.advantage_NT[rows])


def test_one_step_with_all_rows_is_the_batch_itself() -> None:
    sample = random_sample(4)
    for name in ("grpo", "dapo_group", "vapo", "prime", "lambda_grpo"):
        made, leaf = recipe(name), leaves(sample)
        learned = {"length_exponent": leaf.exponent} if name == "lambda_grpo" else {}
        done = batch_phase(made, sample.build(**learned)).batch
        (step,) = updates(made, done, [torch.arange(sample.rows)])
        outputs = learner_outputs(made, sample, leaf)
        whole, split = (token_phase(made, x, **outputs).loss for x in (done, step))
        torch.testing.assert_close(whole, split, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["reinforce", "dr_grpo", "gspo"])
def test_equal_steps_of_a_sequence_mean_add_up_to_as_many_batches(name: str) -> None:
    sample = random_sample(5)
    made = recipe(name).replace(filter=())
    done = batch_phase(made, sample.build()).batch
    parts = list(torch.arange(12).split(4))
    leaf = leaves(sample)
    total = sum(
        float(token_phase(made, step, **learner_outputs(made, sample, leaf, rows)).loss.detach())
        for rows, step in zip(parts, updates(made, done, parts), strict=True)
    )
    whole = token_phase(made, done, **learner_outputs(made, sample, leaf)).loss
    assert total == pytest.approx(3 * float(whole.detach()), abs=1e-12)


def test_positive_nll_and_value_targets_are_renormalised_per_step() -> None:
    sample = random_sample(6)
    made = recipe("vapo")
    done = batch_phase(made, sample.build()).batch
    rows = torch.arange(0, 6)
    step, _ = updates(made, done, [rows, torch.arange(6, sample.rows)])
    right = sample.streams["correct_N"][rows]
    tokens = (sample.streams["mask_NT"][rows] & right[:, None]).sum()
    weights = step.prepared["positive_nll"]["coefficient_NT"]
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights.max()) == pytest.approx(1 / float(tokens))
    before = done.prepared["value_loss"]["return_NT"][rows]
    torch.testing.assert_close(step.prepared["value_loss"]["return_NT"], before)
