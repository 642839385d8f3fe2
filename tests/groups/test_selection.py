"""Order statistics against sorting: ties, infinities, few values, samples that mislead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from batches import random_sample
from torch import Tensor

from groupwise.groups import selection
from groupwise.groups.selection import largest, learned_or, order_statistics


def values(kind: str, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(3)
    x_NT = torch.randn(97, 1031, generator=g, dtype=torch.float64)
    if kind == "ties":
        x_NT = (4 * x_NT).round()
    elif kind == "one value":
        x_NT = torch.full_like(x_NT, 0.25)
    elif kind == "padding":  # most entries are none
        x_NT = torch.where(torch.rand(x_NT.shape, generator=g) < 0.9, math.inf, x_NT)
    elif kind == "sampled alike":  # what the sample sees is unlike the rest
        x_NT.view(-1)[:: selection.STRIDE] += 100.0
    return x_NT.to(dtype)


@pytest.mark.parametrize("kind", ["random", "ties", "one value", "padding", "sampled alike"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_as_sorted(kind: str, dtype: torch.dtype) -> None:
    x_NT = values(kind, dtype)
    sorted_X = x_NT.flatten().sort().values
    size = len(sorted_X)
    for place in (1, 2, 17, size // 5, size // 2, size - 40, size):
        (found,) = order_statistics(x_NT, [place])
        assert found.dtype == dtype and torch.equal(found, sorted_X[place - 1])
    both = order_statistics(x_NT, [size // 3, size // 3 + 1])
    assert torch.equal(torch.stack(both), sorted_X[size // 3 - 1 : size // 3 + 1])
    for count in (1, 20, 1000):
        assert torch.equal(largest(x_NT, count), sorted_X[-count])


def test_one_value_and_few() -> None:
    assert order_statistics(torch.tensor([[2.0]]), [1])[0] == 2.0
    assert largest(torch.tensor([[3.0, 1.0], [2.0, 3.0]]), 2) == 3.0


def test_only_what_lies_near_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    x_NT, seen = values("random", torch.float32), []
    near = selection._near
    monkeypatch.setattr(selection, "_near", lambda *a: seen.append(near(*a)) or seen[-1])
    order_statistics(x_NT, [x_NT.numel() // 2])
    smaller, near_X = seen[0]
    assert 0 < smaller < x_NT.numel() // 2 and len(near_X) < x_NT.numel() // 4


def test_tokens_that_are_not_learned_are_none() -> None:
    batch = random_sample(3).build()
    learn_N = torch.arange(batch.rows) % 2 == 0
    found_NT = learned_or(math.inf, batch.ones_NT, replace(batch, learn_N=learn_N))
    assert torch.equal(found_NT.isfinite(), batch.mask_NT & learn_N[:, None])
