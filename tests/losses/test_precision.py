"""Every recipe stays finite far off-policy, in float32, in bfloat16, and on any shape of batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import (
    POLICY_RECIPES,
    Sample,
    learner_outputs,
    leaves,
    loss_and_gradients,
    random_sample,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe import altered, learner_logp
from torch import Tensor

from groupwise import batch_phase, passes, recipe, token_phase

every_recipe = pytest.mark.parametrize("name", POLICY_RECIPES)
both_widths = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


# --- far off-policy ------------------------------------------------------------------------------


OLD_AND_SAMPLER = ("old_logp_NT", "sampler_logp_NT", "sampler_topk_logp_NTK")


def _unlikely_to(*names: str) -> Callable[[Sample], None]:
    """These log-probabilities of the sampled tokens, 100 lower; `learner` means the logits."""

    def change(sample: Sample) -> None:
        for name in names:
            if name == "learner":
                token_NT1 = sample.streams["token_NT"][..., None]
                low = torch.full(token_NT1.shape, -100.0, dtype=sample.logits_NTV.dtype)
                sample.logits_NTV.scatter_add_(-1, token_NT1, low)
            else:
                sample.streams[name] = sample.streams[name] - 100.0

    return change


EXTREMES: dict[str, Callable[[Sample], None]] = {
    "log-ratio +100": _unlikely_to(*OLD_AND_SAMPLER),
    "log-ratio -100": _unlikely_to("learner"),
    "sampler mismatch +100": _unlikely_to(*OLD_AND_SAMPLER[1:]),
    "sampler mismatch -100": _unlikely_to("old_logp_NT"),
    "reference +100": _unlikely_to("ref_logp_NT"),
    "reference -100": _unlikely_to("learner", *OLD_AND_SAMPLER),
}


def test_the_extremes_are_what_their_names_say() -> None:
    for extreme, change in EXTREMES.items():
        sample = random_sample(3)
        change(sample)
        old_NT, sampler_NT = sample.streams["old_logp_NT"], sample.streams["sampler_logp_NT"]
        what, size = extreme.rsplit(" ", 1)
        gap_NT = {
            "log-ratio": learner_logp(sample) - old_NT,
            "sampler mismatch": old_NT - sampler_NT,
            "reference": learner_logp(sample) - sample.streams["ref_logp_NT"],
        }[what]
        assert (gap_NT - float(size)).abs().max() < 10


@every_recipe
@both_widths
@pytest.mark.parametrize("extreme", EXTREMES)
def test_finite_at_a_difference_of_100(name: str, dtype: torch.dtype, extreme: str) -> None:
    sample = random_sample(3, groups=(4, 4), width=4, dtype=dtype)
    EXTREMES[extreme](sample)
    loss, gradients = loss_and_gradients(recipe(name), sample)
    assert abs(loss) < float("inf")
    for gradient in gradients:
        assert gradient.isfinite().all()


@pytest.mark.parametrize("penalty", ["k1", "k2", "k3", "k3+", "importance", "drift"])
@pytest.mark.parametrize("extreme", EXTREMES)
def test_penalties_are_finite_at_a_difference_of_100(penalty: str, extreme: str) -> None:
    text = {"importance": "kl_importance()", "drift": "drift()"}.get(penalty)
    sample = random_sample(4, groups=(4, 4), width=4, dtype=torch.float32)
    EXTREMES[extreme](sample)
    made = altered("dr_grpo", penalty=text or f"kl(0.1, {penalty!r})")
    loss, gradients = loss_and_gradients(made, sample)
    assert abs(loss) < float("inf") and all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize(("old", "floor"), [(0.3, 0.0), (0.0, 0.8)])
def test_an_expert_that_nobody_chooses_any_more_is_finite(old: float, floor: float) -> None:
    sample = random_sample(1)
    sample.streams["old_router_NTLK"][0, 0, 0, 0] = old
    sample.router_NTLK[0, 0, 0, 0] = 0.0
    made = altered("rspo", ratio=f"router_shift(floor={floor})")
    loss, gradients = loss_and_gradients(made, sample)
    assert abs(loss) < float("inf") and gradients[0].isfinite().all()


def test_an_expert_that_lost_all_its_weight_meets_the_floor() -> None:
    sample = random_sample(1)
    sample.router_NTLK[0, 0, 0, 0] = 0.0
    loss, gradients = loss_and_gradients(recipe("rspo"), sample)
    assert abs(loss) < float("inf") and gradients[0].isfinite().all()


# --- float32 and bfloat16 ------------------------------------------------------------------------


def cast(sample: Sample, dtype: torch.dtype) -> Sample:
    """The same numbers in another type; widening is exact."""

    def to(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    streams = {name: to(x) for name, x in sample.streams.items()}
    rest = (
        sample.logits_NTV,
        sample.value_NT,
        sample.prm_logp_NT,
        sample.router_NTLK,
        sample.teacher_NTV,
    )
    return Sample(streams, *map(to, rest))


def outcome(name: str, sample: Sample) -> tuple[Tensor, float, list[Tensor]]:
    """Loss, the size of what it sums (it may cancel to almost nothing), gradients."""
    made, leaf = recipe(name), leaves(sample)
    extra = {"length_exponent": leaf.exponent} if "lambda" in name else {}
    done = batch_phase(made, sample.build(**extra)).batch
    losses, size = [], 0.0
    for part in passes(made, done):
        result = token_phase(made, part, **learner_outputs(made, sample, leaf))
        losses.append(result.loss)
        size += float((part.coefficient_NT * result.objective_NT).abs().sum())
        size += sum(abs(float(x)) for term, x in result.terms.items() if term != "policy")
    total = torch.stack(losses).sum()
    gradients = torch.autograd.grad(total, leaf.all(), allow_unused=True)
    return total.detach(), size, [g for g in gradients if g is not None]


def assert_within(
    got: tuple[Tensor, float, list[Tensor]],
    want: tuple[Tensor, float, list[Tensor]],
    loss: float,
    gradient: float,
) -> None:
    """Relative to the size of the terms, and to each leaf's largest gradient."""
    assert abs(float(got[0]) - float(want[0])) <= loss * want[1]
    assert len(got[2]) == len(want[2]) > 0
    for g, w in zip(got[2], want[2], strict=True):
        assert (g.double() - w.double()).abs().max() <= gradient * w.double().abs().max()


@every_recipe
@pytest.mark.parametrize("seed", [0, 1])
def test_float32_is_within_1e_5_of_float64(name: str, seed: int) -> None:
    narrow = random_sample(seed, dtype=torch.float32)
    narrow.streams["reward_N"][2] = 1.25  # better than all others of its group
    got, want = outcome(name, narrow), outcome(name, cast(narrow, torch.float64))
    assert want[1] > 1e-4 and want[0].dtype == torch.float64
    assert got[0].dtype == torch.float32
    assert_within(got, want, loss=1e-5, gradient=1e-5)


@every_recipe
@pytest.mark.parametrize("seed", [0, 1])
def test_bfloat16_is_computed_in_float32(name: str, seed: int) -> None:
    narrow = cast(random_sample(seed), torch.bfloat16)
    got, want = outcome(name, narrow), outcome(name, cast(narrow, torch.float64))
    assert got[0].dtype == torch.float32
    assert all(g.dtype in (torch.bfloat16, torch.float64) for g in got[2])  # λ is float64
    # Computed in float32, the loss is far better than bfloat16's 4e-3; gradients are rounded to it.
    assert_within(got, want, loss=1e-4, gradient=2e-2)


def test_a_float32_batch_and_float64_outputs_give_a_float64_loss() -> None:
    narrow = random_sample(0, dtype=torch.float32)
    wide = cast(narrow, torch.float64)
    mixed = Sample(
        narrow.streams,
        wide.logits_NTV,
        wide.value_NT,
        wide.prm_logp_NT,
        wide.router_NTLK,
        wide.teacher_NTV,
    )
    got, want = outcome("grpo", mixed), outcome("grpo", wide)
    assert got[0].dtype == torch.float64
    assert_within(got, want, loss=1e-6, gradient=1e-6)


def test_equal_rewards_cancel_exactly_in_every_type() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        sample = cast(random_sample(0), dtype)
        sample.streams["reward_N"] = torch.full_like(sample.streams["reward_N"], 0.1)
        for name in ("grpo", "dr_grpo", "lite_ppo", "maxrl", "dcpo", "gpg"):
            done = batch_phase(recipe(name), sample.build()).batch
            assert not done.stream("advantage_NT").any(), (name, dtype)


# --- any shape -----------------------------------------------------------------------------------


def fill_padding(sample: Sample, junk: float) -> None:
    """Junk in the padding of all streams and of the learner's outputs other than the logits."""
    mask_NT = sample.streams["mask_NT"]
    outputs = (sample.value_NT, sample.prm_logp_NT, sample.router_NTLK)
    streams = [x for name, x in sample.streams.items() if "_NT" in name]
    for x in (*streams, *outputs):
        if x.is_floating_point() and x.shape[:2] == mask_NT.shape:
            x[~mask_NT] = junk


@st.composite
def samples(draw: Any) -> tuple[Sample, torch.Tensor]:
    """Any groups, any mask (holes and empty rows too), NaN in every padded position."""
    groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    width = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    sample = random_sample(draw(st.integers(0, 999)), groups, width, dtype, spread=1.0)
    bits = draw(st.lists(st.booleans(), min_size=sum(groups) * width, max_size=sum(groups) * width))
    mask_NT = torch.tensor(bits).reshape(sum(groups), width)
    sample.streams["mask_NT"] = mask_NT
    fill_padding(sample, float("nan"))
    return sample, mask_NT


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=samples(), name=st.sampled_from(POLICY_RECIPES))
def test_any_batch_gives_finite_gradients_and_none_on_padding(
    drawn: tuple[Sample, Tensor], name: str
) -> None:
    sample, mask_NT = drawn
    loss, gradients = loss_and_gradients(recipe(name), sample)
    assert abs(loss) < float("inf")
    for gradient in gradients:
        assert gradient.isfinite().all()
    for gradient in gradients[:3]:  # logits, values, the reward model's log-probabilities
        assert (gradient[~mask_NT] == 0).all()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn=samples(), name=st.sampled_from(POLICY_RECIPES), data=st.data())
def test_junk_in_padding_is_never_seen(
    drawn: tuple[Sample, Tensor], name: str, data: st.DataObject
) -> None:
    sample, _ = drawn
    before = loss_and_gradients(recipe(name), sample)
    junk = data.draw(st.sampled_from([0.0, -1e4, 1e30, float("inf")]))
    fill_padding(sample, junk)
    after = loss_and_gradients(recipe(name), sample)
    assert after[0] == before[0]
    for one, other in zip(before[1], after[1], strict=True):
        assert torch.equal(one, other)


@every_recipe
def test_a_batch_without_any_token_gives_0(name: str) -> None:
    sample = random_sample(0, groups=(2, 2), width=2)
    sample.streams["mask_NT"] = torch.zeros_like(sample.streams["mask_NT"])
    loss, gradients = loss_and_gradients(recipe(name), sample)
    assert loss == 0.0 and not any(g.any() for g in gradients)


# CHORD learns from an expert's answers, which have no grade.
@pytest.mark.parametrize("name", [n for n in POLICY_RECIPES if n != "chord"])
def test_a_batch_without_any_grade_gives_0(name: str) -> None:
    sample = random_sample(0, groups=(2, 2), width=2)
    sample.streams["reward_N"] = torch.full((4,), float("nan"), dtype=torch.float64)
    loss, gradients = loss_and_gradients(recipe(name), sample)
    assert loss == 0.0 and not any(g.any() for g in gradients)
