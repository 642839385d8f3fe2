"""What happened to the tokens, against the plain form; masks as numbers; what is computed once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import random_sample
from torch import Tensor

from groupwise import TokenBatch
from groupwise.groups.statistics import group_stats
from groupwise.losses.measures import merge
from groupwise.losses.measuring import OUTSIDE, RARE, measure
from groupwise.records.masks import above, as_numbers, below, equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_as_numbers(dtype: torch.dtype) -> None:
    x_NT = torch.tensor([[-1.0, 0.0, 2.0], [math.inf, -math.inf, 0.5]], dtype=dtype)
    y_NT = torch.tensor([[0.0, 0.0, 1.0]], dtype=dtype).expand(2, 3)
    for bound in (0.0, y_NT, torch.tensor(0.5, dtype=dtype)):
        for made, plain in ((above, x_NT > bound), (below, x_NT < bound), (equal, x_NT == bound)):
            found = made(x_NT, bound)
            assert found.dtype == dtype and torch.equal(found, plain.to(dtype))
            assert torch.equal(as_numbers(plain, dtype), plain.to(dtype))
    leaf = x_NT.clone().requires_grad_()
    assert not above(leaf, 0.0).requires_grad
    wide_NT = torch.tensor([[1.0], [-1.0]], dtype=dtype).expand(2, 3)  # one number, many places
    assert above(wide_NT, 0.0).tolist() == [[1.0] * 3, [0.0] * 3]


def measured(learn: str, dtype: torch.dtype) -> tuple[TokenBatch, Tensor, Tensor, Tensor]:
    """Return a batch, log-ratios that are not 0 on padding, clipped tokens and weights."""
    sample, g = random_sample(7), torch.Generator().manual_seed(7)
    batch = sample.build()
    shape = batch.mask_NT.shape

    def noise(size: float) -> Tensor:
        return size * torch.randn(shape, generator=g, dtype=torch.float64)

    learn_N = torch.full((batch.rows,), learn == "all")
    if learn == "some":
        learn_N = torch.arange(batch.rows) % 3 > 0
    old_NT = -noise(2.0).abs()
    batch = replace(batch, learn_N=learn_N, ones_NT=batch.mask_NT.to(dtype)).with_outputs(
        logp_NT=(old_NT + noise(0.3)).to(dtype), entropy_NT=noise(1.0).abs().to(dtype)
    )
    streams = {"old_logp_NT": old_NT, "ref_logp_NT": old_NT + noise(0.1)}
    streams["sampler_logp_NT"] = old_NT + noise(0.1)
    batch = batch.with_streams(**{name: x.to(dtype) for name, x in streams.items()})
    clipped_NT = (noise(1.0) > 0.5) & batch.mask_NT
    weight_NT = noise(1.0).clamp(min=0.0).to(dtype)
    return batch, noise(0.5).to(dtype), clipped_NT, weight_NT


def plainly(
    batch: TokenBatch, log_ratio_NT: Tensor, clipped_NT: Tensor, weight_NT: Tensor
) -> dict[str, float]:
    """Compute some measures from the tokens that are learned, taken out one by one."""
    taken_NT = batch.mask_NT & batch.stream("learn_N")[:, None]
    ratio_X, old_X = log_ratio_NT.exp()[taken_NT], batch.stream("old_logp_NT")[taken_NT]
    logp_X, ref_X = batch.stream("logp_NT")[taken_NT], batch.stream("ref_logp_NT")[taken_NT]
    gap_X = old_X - batch.stream("sampler_logp_NT")[taken_NT]
    high_X = clipped_NT[taken_NT] & (log_ratio_NT[taken_NT] > 0)
    low_X, rare_X = clipped_NT[taken_NT] & ~high_X, old_X.exp() < RARE
    x_X = logp_X - ref_X
    return {
        "ratio/mean": float(ratio_X.mean()),
        "ratio/max": float(ratio_X.max()),
        "ratio/off": float((ratio_X - 1).square().mean().sqrt()),
        "ratio/effective_sample_share": float(ratio_X.mean() ** 2 / ratio_X.square().mean()),
        "clip/high": float(high_X.double().mean()),
        "clip/low": float(low_X.double().mean()),
        "clip/high_probability": float(old_X.exp()[high_X].mean()),
        "clip/low_probability": float(old_X.exp()[low_X].mean()),
        "clip/low_rare_share": float(rare_X[low_X].double().mean()),
        "clip/rare": float((high_X | low_X)[rare_X].double().mean()),
        "tokens/rare_share": float(rare_X.double().mean()),
        "correction/mean": float(weight_NT[taken_NT].mean()),
        "correction/zero_share": float((weight_NT[taken_NT] == 0).double().mean()),
        "kl/ref_k1": float(x_X.mean()),
        "kl/ref": float(((-x_X).exp() + x_X - 1).mean()),
        "entropy/mean": float(batch.stream("entropy_NT")[taken_NT].mean()),
        "mismatch/abs_mean": float(gap_X.abs().mean()),
        "mismatch/abs_max": float(gap_X.abs().max()),
        "mismatch/outside_share": float(
            ((gap_X > OUTSIDE[1]) | (gap_X < OUTSIDE[0])).double().mean()
        ),
    }


@pytest.mark.parametrize("learn", ["all", "some"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_measures_are_those_of_the_learned_tokens(
    learn: str, dtype: torch.dtype, near: float
) -> None:
    given = measured(learn, dtype)
    found, wanted = measure(*given).read(), plainly(*given)
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=near, abs=near)


def test_measures_of_parts_are_those_of_the_whole() -> None:
    batch, *streams = measured("some", torch.float64)
    parts = [
        measure(batch.select(rows), *(x[rows] for x in streams))
        for rows in torch.arange(batch.rows).split(5)
    ]
    whole = measure(batch, *streams).read()
    assert merge(parts).read() == pytest.approx(whole, rel=1e-12, abs=1e-14)


def test_rows_that_are_not_learned_leave_nothing() -> None:
    found = measure(*measured("none", torch.float32)).read()
    assert set(found) == {"ratio/max", "ratio/sequence_max", "mismatch/max", "mismatch/abs_max"}
    assert not any(found.values())
    batch, *streams = measured("all", torch.float32)
    empty = measure(batch.select(slice(0, 0)), *(x[:0] for x in streams)).read()
    assert empty == found


def test_what_slots_compute_alike_is_computed_once_for_the_same_rows() -> None:
    batch, calls = random_sample(3).build(), []

    def compute() -> int:
        calls.append(1)
        return len(calls)

    assert batch.once("x", (batch.mask_NT,), compute) == 1
    assert replace(batch, reward_N=batch.task_reward_N).once("x", (batch.mask_NT,), compute) == 1
    assert batch.once("y", (batch.mask_NT,), compute) == 2
    assert batch.once("x", (batch.ones_NT,), compute) == 3
    part = batch.select(slice(0, 6))
    assert part.once("x", (batch.mask_NT,), compute) == 4  # other rows share nothing
    reward_N = batch.task_reward_N
    assert group_stats(reward_N, batch) is group_stats(reward_N, batch)
    assert len(group_stats(part.task_reward_N, part).mean_N) == 6
