"""Copies in 8-bit floats: the rounding by hand, kernels against it, products against float64."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from model_zoo import all_logits, make, sequences
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton")

from groupwise.model.kernels.fp8 import round_rows, swiglu_rounded  # noqa: E402
from groupwise.model.kernels.norm import add_norm_forward, add_norm_rounded  # noqa: E402
from groupwise.model.layers.fast import Fast  # noqa: E402
from groupwise.model.layers.fast_fp8 import FastFp8  # noqa: E402
from groupwise.model.layers.fp8 import (  # noqa: E402
    Fp8Linear,
    PlainFp8,
    Rounded,
    fp8_copy,
    round_weights,
    rounded,
    scaled_product,
)
from groupwise.model.layers.linear import Linear  # noqa: E402

HALF = torch.bfloat16 if GPU else torch.float32  # the interpreter does not round to bfloat16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def numbers(x: Rounded) -> Tensor:
    return x.bits_TD.float() * x.scale_T[:, None]


def nearest(x_TD: Tensor) -> Tensor:
    """The nearest number of e4m3 at the row's scale: 3 bits behind the first, down to 2^-9."""
    scale = x_TD.double().abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    unit = x_TD.double() / scale
    step = torch.exp2(unit.abs().clamp(min=2**-6).log2().floor() - 3)
    return (unit / step).round() * step * scale


def check_kernel(found: Rounded, wanted: Rounded) -> None:
    """The same bits; on a GPU but for quotients between two of them, whose last bit is its own."""
    torch.testing.assert_close(found.scale_T, wanted.scale_T, rtol=1e-6, atol=0)
    off = found.bits_TD.float() != wanted.bits_TD.float()
    assert float(off.float().mean()) <= (0.005 if GPU else 0)
    torch.testing.assert_close(
        found.bits_TD.float(), wanted.bits_TD.float(), rtol=0.126, atol=2**-9
    )


def test_rounding_by_hand() -> None:
    x = torch.tensor([[448.0, 1.0, 1.05, 1.07, -18.1, 0.0015], [0, 0, 0, 0, 0, 0]])
    found = rounded(x)
    assert found.bits_TD.float()[0].tolist() == [448, 1, 1, 1.125, -18, 2**-9]
    assert found.scale_T[0] == 1 and found.bits_TD.float()[1].tolist() == [0] * 6
    assert numbers(rounded(x * 1e-3))[0, 0] == pytest.approx(0.448)
    assert bool(rounded(torch.tensor([[1.0, torch.nan]])).bits_TD.float().isnan().any())


def test_rounding_is_to_the_nearest() -> None:
    x = random(20, 300).cpu() * torch.logspace(-6, 6, 20)[:, None]
    torch.testing.assert_close(numbers(rounded(x)).double(), nearest(x), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("width", [48, 600, 2048])
def test_kernels_round_as_pytorch_does(width: int, kernels: None) -> None:
    x = random(5, width, dtype=HALF) * torch.tensor([1, 100, 1e-3, 0, 5.0], device=DEVICE)[:, None]
    check_kernel(round_rows(x.to(HALF)), rounded(x.to(HALF)))
    both = random(5, 2 * width, seed=1, dtype=HALF)
    gate, up = both.split(width, dim=1)
    check_kernel(swiglu_rounded(both), rounded((F.silu(gate.float()) * up.float()).to(HALF)))
    weight = random(width, seed=2, dtype=HALF)
    for stream in (None, random(5, width, seed=3)):
        found = add_norm_rounded(stream, x.to(HALF), weight, 1e-5)
        sum_TD, normed_TD, _ = add_norm_forward(stream, x.to(HALF), weight, 1e-5)
        assert torch.equal(found[0], sum_TD)
        check_kernel(Rounded(*found[1:]), rounded(normed_TD))


@pytest.mark.parametrize("bias", [True, False])
def test_the_product_of_the_device_is_that_of_the_twin(bias: bool) -> None:
    modules = []
    for outputs, seed in ((32, 1), (16, 2)):
        layer = Linear(64, outputs, bias)
        layer.weight.data = random(outputs, 64, seed=seed, dtype=HALF)
        if layer.bias is not None:
            layer.bias.data = random(outputs, seed=seed + 5, dtype=HALF)
        modules.append(Fp8Linear(layer, *rounded(layer.weight)))
    x = random(7, 64, seed=9, dtype=HALF)
    found = scaled_product(rounded(x), modules, HALF)
    each = [PlainFp8().linear(module, x) for module in modules]
    near = {"rtol": 0.02, "atol": 0.05} if GPU else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found, torch.cat(each, dim=1), **near)
    for module, out in zip(modules, each, strict=True):
        weight = numbers(Rounded(module.bits, module.scale)).double()
        wanted = numbers(rounded(x)).double() @ weight.T
        wanted += 0 if module.bias is None else module.bias.double()
        torch.testing.assert_close(out.double(), wanted, **near)


class Rehearsed(Fast):
    """Kernels, on whatever device."""


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])  # biases; norms of heads
def test_a_copy_with_kernels_says_what_the_plain_one_says(name: str, kernels: None) -> None:
    model = make(name).to(DEVICE, HALF)
    plain = fp8_copy(model)
    round_weights(model, plain)
    assert isinstance(plain.ops, PlainFp8)
    model.ops = Rehearsed()
    fast = fp8_copy(model)
    round_weights(model, fast)
    assert isinstance(fast.ops, FastFp8)
    for (key, one), (other, two) in zip(
        plain.named_parameters(), fast.named_parameters(), strict=True
    ):
        assert key == other and one.dtype == two.dtype
        torch.testing.assert_close(one.float(), two.float(), rtol=0.126, atol=2**-9)
        two.data.copy_(one.data)  # so that only the arithmetic differs
    rows = [row.to(DEVICE) for row in sequences([9, 4])]
    with torch.no_grad():
        said, wanted, full = (all_logits(x, rows).float() for x in (fast, plain, model))
    # A last bit of the norm may take an input to the next of its few numbers.
    off = (said - wanted).abs().mean()
    assert float(off) <= (0.9 if GPU else 0.05) * float((wanted - full).abs().mean())
