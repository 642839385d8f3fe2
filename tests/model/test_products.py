"""Products of float32 by oneDNN, where PyTorch's own use half of a processor's width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.model.layers import head, products

HAS = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
pytestmark = pytest.mark.skipif(not HAS, reason="this PyTorch has no oneDNN")
WIDTH, OUT = 192, 400  # more numbers than SMALL


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Act as on a processor that PyTorch's products use by half, whichever this one is."""
    monkeypatch.setattr(products, "left_unused", lambda: True)
    yield


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_float64(biased: bool) -> None:
    given = [normal(37, WIDTH), normal(OUT, WIDTH, seed=1), normal(OUT, seed=2)]
    upstream = normal(OUT, 37, seed=3).t()  # lies by columns, as a gradient may
    mine = [x.clone().requires_grad_() for x in given]
    exact = [x.double().requires_grad_() for x in given]
    assert products.is_wide(mine[1])
    made = products.linear(mine[0], mine[1], mine[2] if biased else None)
    wanted = F.linear(exact[0], exact[1], exact[2] if biased else None)
    made.backward(upstream)
    wanted.backward(upstream.double())
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-4)
    for a, b in list(zip(mine, exact, strict=True))[: 2 + biased]:
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-5, atol=1e-4)


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, weight = normal(5, WIDTH).requires_grad_(), normal(OUT, WIDTH, seed=1)
    products.linear(x, weight, None).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_a_row_has_the_same_bits_in_any_company_and_either_way_round() -> None:
    x, weight = normal(128, WIDTH), normal(OUT, WIDTH, seed=1)
    whole = products.times(x, weight)
    for rows in (2, 16, 33, 64):
        assert torch.equal(products.times(x[:rows], weight), whole[:rows])
        lying = torch.empty(OUT, rows).t()
        assert torch.equal(products.times_into(lying, x[:rows], weight), whole[:rows])


def test_small_weights_other_precisions_and_other_processors_keep_what_they_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weight = normal(OUT, WIDTH)
    assert not products.is_wide(weight[:300])
    assert not products.is_wide(weight.double()) and not products.is_wide(weight.bfloat16())
    monkeypatch.undo()
    other = tmp_path / "cpuinfo"
    other.write_text("vendor_id : GenuineIntel\n")
    assert not products.left_unused.__wrapped__(other)
    assert not products.left_unused.__wrapped__(tmp_path / "none")


def test_a_head_says_the_same_by_either_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> list[Tensor]:
        hidden, weight = normal(9, WIDTH).requires_grad_(), normal(3000, WIDTH, seed=1)
        weight = weight.mul(0.05).requires_grad_()
        found = head.log_probs(hidden, weight, torch.arange(9), entropy=True, chunk=4)
        assert found.entropy_T is not None
        (found.logp_T.sum() + found.entropy_T.sum()).backward()
        assert hidden.grad is not None and weight.grad is not None
        return [found.logp_T.detach(), hidden.grad, weight.grad]

    mine = said()
    monkeypatch.setattr(products, "left_unused", lambda: False)
    for a, b in zip(mine, said(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
