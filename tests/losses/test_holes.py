"""Tokens that the policy did not write, between its own: in the batch and in nothing else.

Every policy recipe gives the same step with holes as without them, in float64: the same rows, their
tokens moved apart, and rubbish in between.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import (
    POLICY_RECIPES,
    Sample,
    extra_streams,
    learner_outputs,
    leaves,
    random_sample,
)
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, merge, passes, recipe, token_phase

WIDER = 5  # places of others among the policy's, or behind them
every_recipe = pytest.mark.parametrize("name", POLICY_RECIPES)


def places(rows: int, width: int, seed: int = 3) -> Tensor:
    """Where each token of the rows without holes goes: another place in every row."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, width + WIDER, generator=generator).argsort(1)
    return order[:, :width].sort(1).values


def apart(x: Tensor, place_NT: Tensor, filler: Tensor) -> Tensor:
    """The values of tokens at their new places; elsewhere what `filler` has."""
    shape = (*place_NT.shape, *x.shape[2:])
    index = place_NT.reshape(*place_NT.shape, *[1] * (x.dim() - 2)).expand(shape)
    return filler.scatter(1, index, x)


def rubbish(x: Tensor, kind: float) -> Tensor:
    """A stream full of it, with room for the holes."""
    wide = torch.zeros(len(x), x.shape[1] + WIDER, *x.shape[2:], dtype=x.dtype)
    if x.is_floating_point():
        return wide + kind
    return wide if x.dtype == torch.bool else wide + 1


def with_holes(sample: Sample, place_NT: Tensor, kind: float) -> Sample:
    """The sample with its tokens moved apart; streams of the batch hold `kind` in between."""
    streams = {}
    for name, x in sample.streams.items():
        if name == "mask_NT":
            streams[name] = apart(x, place_NT, torch.zeros(len(x), x.shape[1] + WIDER).bool())
        elif name == "step_end_NT":  # a mark of a step where others write, too
            streams[name] = apart(x, place_NT, ~rubbish(x, kind))
        else:
            token = "_NT" in name
            streams[name] = apart(x, place_NT, rubbish(x, kind)) if token else x
    # What a model says of others' tokens is finite: it is only never asked.
    return replace(
        sample,
        streams=streams,
        logits_NTV=apart(sample.logits_NTV, place_NT, rubbish(sample.logits_NTV, 0.7)),
        value_NT=apart(sample.value_NT, place_NT, rubbish(sample.value_NT, -9.0)),
        prm_logp_NT=apart(sample.prm_logp_NT, place_NT, rubbish(sample.prm_logp_NT, -4.0)),
        router_NTLK=apart(sample.router_NTLK, place_NT, rubbish(sample.router_NTLK, 0.3)),
        teacher_NTV=apart(sample.teacher_NTV, place_NT, rubbish(sample.teacher_NTV, -0.2)),
    )


def step(made: Recipe, sample: Sample) -> tuple[dict[str, float], list[Tensor]]:
    """Loss, metrics and measures, and the gradients in every leaf."""
    leaf = leaves(sample)
    done = batch_phase(made, sample.build(**extra_streams(made, leaf)))
    total, tallies = torch.zeros((), dtype=torch.float64), []
    for one_pass in passes(made, done.batch):
        outputs = learner_outputs(made, sample, leaf)
        result = token_phase(made, one_pass, **outputs)
        total, tallies = total + result.loss, [*tallies, result.tally]
    found = torch.autograd.grad(total, leaf.all(), allow_unused=True)
    gradients = [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaf.all(), found, strict=True)
    ]
    told = {"loss": float(total.detach()), **done.metrics, **merge(tallies).read()}
    return told, gradients


@every_recipe
@pytest.mark.parametrize("kind", [0.0, math.nan, math.inf, -1e6, 1e30])
def test_a_step_with_holes_is_the_step_without_them(name: str, kind: float) -> None:
    """Loss, metrics and measures are equal, and no gradient whatever reaches a hole."""
    made, sample = recipe(name), random_sample(1, groups=(4, 5, 3))
    place_NT = places(sample.rows, sample.streams["mask_NT"].shape[1])
    opened = with_holes(sample, place_NT, kind)
    told, gradients = step(made, opened)
    expected, plain = step(made, sample)
    assert plain[0].abs().max() > 1e-6  # something is learned
    torch.testing.assert_close(told, expected, rtol=1e-11, atol=1e-11)
    hole_NT = ~opened.streams["mask_NT"]
    for mine, other in zip(gradients, plain, strict=True):
        if mine.dim() < 2:
            torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-11)
            continue
        assert (mine[hole_NT] == 0).all()
        moved = apart(other, place_NT, torch.zeros_like(mine))
        torch.testing.assert_close(mine, moved, rtol=1e-11, atol=1e-11)


@every_recipe
def test_what_the_policy_says_of_others_tokens_is_not_in_the_loss(name: str) -> None:
    """A pass that predicts them too gives the same bits, whatever it says there."""
    made, sample = recipe(name), random_sample(2, groups=(4, 4))
    opened = with_holes(sample, places(8, sample.streams["mask_NT"].shape[1]), 0.0)
    other = replace(
        opened,
        logits_NTV=torch.where(
            opened.streams["mask_NT"][..., None], opened.logits_NTV, 40 * opened.logits_NTV.cos()
        ),
    )
    (told, gradients), (again, repeated) = step(made, opened), step(made, other)
    assert told == again
    for mine, twin in zip(gradients, repeated, strict=True):
        assert torch.equal(mine, twin)


# A tool answers twice in the first row; in the second it has the last word.
OWN_NT = torch.tensor([[1, 0, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0]]).bool()


def two_rows(**streams: Tensor) -> TokenBatch:
    """Two answers of six tokens to one prompt, three and two of them the policy's."""
    return TokenBatch.build(mask_NT=OWN_NT, group_N=[0, 0], reward_N=[1.0, 0.0], **streams)


def test_gspo_averages_over_the_policys_tokens() -> None:
    logp_NT = torch.tensor([[-1.0, -50.0, 3.0, -2.0, 7.0, -0.5], [-1.5, -0.25, 9.0, 0, 0, 0]])
    old_NT = torch.tensor([[-1.1, -2.0, -9.0, -2.4, -1.0, -0.2], [-1.0, -0.5, -8.0, 0, 0, 0]])
    made = recipe("gspo")
    batch = two_rows(old_logp_NT=old_NT, sampler_logp_NT=old_NT, truncated_N=torch.zeros(2).bool())
    found = token_phase(made, batch_phase(made, batch).batch, logp_NT=logp_NT.requires_grad_())
    first = (0.1 + 0.4 - 0.3) / 3
    second = (-0.5 + 0.25) / 2
    ratio_NT = found.log_ratio_NT
    assert ratio_NT[0, [0, 3, 5]].tolist() == pytest.approx([first] * 3, abs=1e-6)
    assert ratio_NT[1, :2].tolist() == pytest.approx([second] * 2, abs=1e-6)
    told = found.tally.read()
    assert told["ratio/sequence_max"] == pytest.approx(math.exp(first), abs=1e-6)
    assert told["ratio/sequence_mean"] == pytest.approx(
        (math.exp(first) + math.exp(second)) / 2, abs=1e-6
    )


@pytest.mark.parametrize("name, weights", [
    ("seq_mean_token_mean", (1 / 6, 1 / 4)), ("token_mean_batch", (1 / 5, 1 / 5)),
    ("token_mean_group", (1 / 5, 1 / 5)), ("seq_mean_token_sum", (1 / 2, 1 / 2)),
    ("seq_sum_token_mean", (1 / 3, 1 / 2)), ("token_sum", (1, 1)),
])  # fmt: skip
def test_coefficients_count_the_policys_tokens(name: str, weights: tuple[float, float]) -> None:
    made = recipe("rloo").configure({"aggregation": name, "shaping": ""})
    batch = batch_phase(made, two_rows(old_logp_NT=torch.zeros(2, 6))).batch
    for row, weight in enumerate(weights):
        own_T = batch.mask_NT[row]
        assert batch.coefficient_NT[row, own_T].tolist() == pytest.approx(
            [weight] * int(own_T.sum())
        )
        assert (batch.coefficient_NT[row, ~own_T] == 0).all()


def test_a_penalty_of_length_counts_the_policys_tokens() -> None:
    """Of six tokens three are the policy's: one more than the ramp of 2 to 4 begins with."""
    made = recipe("dr_grpo").configure(
        {"aggregation.length": 4, "shaping": "soft_overlong(max_length=4, cache=2)"}
    )
    done = batch_phase(made, two_rows(old_logp_NT=torch.zeros(2, 6)))
    assert done.batch.reward_N.tolist() == pytest.approx([1.0 - 0.5, 0.0])
    assert done.metrics["tokens/count"] == 5 and done.metrics["length/mean"] == 2.5


def test_the_loss_of_rows_with_holes_by_hand() -> None:
    """GRPO without a penalty: −Σ_i 1/(2·n_i) Σ_t min(r·A, clip(r)·A) over the policy's tokens."""
    logp_NT = torch.tensor([[-1.0, -50.0, 3.0, -2.0, 7.0, -0.5], [-1.5, -0.25, 9.0, 0, 0, 0]])
    old_NT = torch.tensor([[-1.1, -2.0, -9.0, -2.4, -1.0, -0.2], [-1.0, -0.5, -8.0, 0, 0, 0]])
    made = recipe("grpo").configure({"penalty": "", "shaping": ""})
    batch = two_rows(old_logp_NT=old_NT, sampler_logp_NT=torch.where(OWN_NT, old_NT, math.nan))
    done = batch_phase(made, batch).batch
    leaf = logp_NT.double().requires_grad_()
    loss = token_phase(made, done, logp_NT=leaf).loss
    (grad,) = torch.autograd.grad(loss, leaf)
    low, high = made.gate["low"], made.gate["high"]
    expected, slope = 0.0, torch.zeros(2, 6, dtype=torch.float64)
    for row, own, advantage in ((0, (0, 3, 5), 1.0), (1, (0, 1), -1.0)):
        scale = float(done.advantage_NT[row, own[0]])
        assert math.copysign(1.0, scale) == advantage
        for t in own:
            ratio = math.exp(float(logp_NT[row, t]) - float(old_NT[row, t]))
            held = min(max(ratio, 1 - low), 1 + high)
            value = min(ratio * scale, held * scale)
            expected -= value / (2 * len(own))
            if value == ratio * scale:
                slope[row, t] = -value / (2 * len(own))
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(grad, slope, rtol=1e-5, atol=1e-6)
