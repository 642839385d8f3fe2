"""Row-wise kernels against textbook formulas in float64: norm, rotary, SwiGLU and their gradients.

Without a GPU they run in Triton's interpreter, which does not round to bfloat16 as a GPU does: half
precision is float16 there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton")

from groupwise.model.kernels import norm  # noqa: E402
from groupwise.model.kernels.norm import rms_norm  # noqa: E402
from groupwise.model.kernels.rotary import rotate, split_rotate  # noqa: E402
from groupwise.model.kernels.swiglu import swiglu  # noqa: E402
from groupwise.model.layers.fast import _NormLinear  # noqa: E402

HALVES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def mixed_loss(*outputs: Tensor) -> Tensor:
    """Every number of every output with a weight of its own, so that no gradient can hide."""
    total = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for scale, x in enumerate(outputs, 1):
        wave = torch.arange(x.numel(), dtype=torch.float64, device=DEVICE).add(scale).sin()
        total = total + (wave.view(x.shape) * x.double()).sum()
    return total


def compare(
    kernel: Callable[..., Any],
    formula: Callable[..., Any],
    inputs: list[Tensor],
    rtol: float = 2e-6,
) -> None:
    """Values and gradients of a float32 kernel against the formula in float64."""
    found_in = [x.detach().clone().requires_grad_() for x in inputs]
    exact_in = [x.detach().double().requires_grad_() for x in inputs]
    found, exact = kernel(*found_in), formula(*exact_in)
    if isinstance(found, Tensor):
        found, exact = (found,), (exact,)
    found_grads = torch.autograd.grad(mixed_loss(*found), found_in)
    exact_grads = torch.autograd.grad(mixed_loss(*exact), exact_in)
    for one, other in zip((*found, *found_grads), (*exact, *exact_grads), strict=True):
        assert one.shape == other.shape and one.dtype == torch.float32 and one.is_contiguous()
        scale = other.abs().max().clamp_min(1e-30)
        assert ((one.double() - other).abs().max() / scale) < rtol


def assert_rounded(found: Tensor, wanted: Tensor) -> None:
    """The same roundings. A GPU's float32 differs in last bits, which tips a few of them over."""
    assert found.dtype == wanted.dtype
    if GPU:
        assert (found == wanted).double().mean() > 0.99
        step = torch.finfo(wanted.dtype).eps
        torch.testing.assert_close(found, wanted, rtol=2 * step, atol=1e-6)
    else:
        assert torch.equal(found, wanted)


def norm_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def add_rms_norm(x: Tensor | None, delta: Tensor, weight: Tensor, eps: float):
    """The residual stream and its norm, as a layer without a product behind it."""
    return _NormLinear.apply(x, delta, weight, eps, None, 0)


def add_norm_formula(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x + delta, norm_formula(x + delta, weight)


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (67, 48), (5, 576), (3, 1536), (2, 4608)])
def test_norm_and_its_gradients(rows: int, width: int) -> None:
    x, weight = random(rows, width), random(width, seed=1)
    compare(lambda x, w: rms_norm(x, w, EPS), norm_formula, [x, weight])


@pytest.mark.parametrize(("rows", "width"), [(1, 16), (67, 48), (5, 576), (3, 1536)])
def test_added_norm_and_its_gradients(rows: int, width: int) -> None:
    x, delta, weight = (random(*s, seed=i) for i, s in enumerate([(rows, width)] * 2 + [(width,)]))
    compare(lambda x, d, w: add_rms_norm(x, d, w, EPS), add_norm_formula, [x, delta, weight])


@pytest.mark.parametrize("used", [0, 1])
def test_added_norm_where_one_output_is_not_used(used: int) -> None:
    x, delta, weight = random(7, 48), random(7, 48, seed=1), random(48, seed=2)
    inputs = [x, delta, weight][: 2 + used]  # the sum alone does not reach the weight

    def kernel(x: Tensor, d: Tensor, w: Tensor = weight) -> Tensor:
        return add_rms_norm(x, d, w, EPS)[used]

    def formula(x: Tensor, d: Tensor, w: Tensor = weight) -> Tensor:
        return add_norm_formula(x, d, w.double())[used]

    compare(kernel, formula, inputs)


def test_norm_of_heads_that_lie_in_a_joined_projection() -> None:
    joined, weight = random(6, 9 * 16), random(16, seed=1)

    def keys(joined: Tensor) -> Tensor:
        return joined[:, 4 * 16 : 7 * 16].unflatten(1, (3, 16))

    compare(
        lambda j, w: rms_norm(keys(j), w, EPS),
        lambda j, w: norm_formula(keys(j), w),
        [joined, weight],
    )
    assert keys(joined).data_ptr() == norm._as_rows(keys(joined)).data_ptr()  # no copy
    across = random(16, 9).t()  # columns that are not neighbours need one
    compare(lambda x, w: rms_norm(x, w, EPS), norm_formula, [across, weight])


def test_weight_gradient_over_more_rows_than_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "CHUNKS", 3)
    x, weight = random(517, 48), random(48, seed=1)  # 32 rows a tile: 17 tiles, the last cut short
    compare(lambda x, w: rms_norm(x, w, EPS), norm_formula, [x, weight])


@pytest.mark.parametrize("dtype", HALVES)
def test_norm_rounds_before_the_weight_and_after_it(dtype: torch.dtype) -> None:
    # Whole numbers and a width of 2ⁿ: the mean of squares is exact in any order of summation.
    x = (random(33, 64) * 8).round().to(dtype)
    delta, weight = (random(33, 64, seed=1) * 8).round().to(dtype), random(64, seed=2, dtype=dtype)
    total = x + delta
    rstd = (1 / (total.double().square().mean(-1, keepdim=True) + EPS).sqrt()).float()
    wanted = weight * (total.float() * rstd).to(dtype)
    once = (weight.float() * (total.float() * rstd)).to(dtype)
    assert (wanted != once).any()  # or this test would not see the difference
    summed, y = add_rms_norm(x.float(), delta, weight, EPS)
    assert torch.equal(summed, total.float())
    assert_rounded(y, wanted)
    alone, y = add_rms_norm(None, total, weight, EPS)
    assert torch.equal(alone, total.float())
    assert_rounded(y, wanted)
    assert_rounded(rms_norm(total, weight, EPS), wanted)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_residual_stream_is_not_rounded(dtype: torch.dtype) -> None:
    stream, weight = torch.full((3, 16), 1000.0, device=DEVICE), random(16, dtype=dtype)
    little = torch.full((3, 16), 2.0**-8, dtype=dtype, device=DEVICE)
    summed, y = add_rms_norm(stream, little, weight, EPS)
    assert summed.dtype == torch.float32 and y.dtype == dtype
    assert summed.eq(1000 + 2.0**-8).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_gradient_of_a_half_precision_weight_is_a_float32_sum(dtype: torch.dtype) -> None:
    x, weight = random(400, 16, dtype=dtype), random(16, seed=1, dtype=dtype)
    weight.requires_grad_().grad_dtype = torch.float32
    grad = random(400, 16, seed=2, dtype=dtype)
    rms_norm(x, weight, EPS).backward(grad)
    exact = (grad.double() * norm_formula(x.double(), torch.ones_like(weight).double())).sum(0)
    torch.testing.assert_close(weight.grad, exact.float(), rtol=2e-6, atol=2e-5)


def angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor, Tensor]:
    angle_TK = random(tokens, pairs, seed=9) * 3
    return angle_TK, angle_TK.cos(), angle_TK.sin()


def turned(x_THW: Tensor, angle_TK: Tensor) -> Tensor:
    """Each pair as a complex number, times exp(i · angle)."""
    first, second = x_THW.double().chunk(2, dim=-1)
    unit = torch.polar(torch.ones_like(angle_TK).double(), angle_TK.double())[:, None]
    z = torch.complex(first, second) * unit
    return torch.cat((z.real, z.imag), dim=-1)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "width"),
    [(1, 9, 3, 64), (5, 6, 2, 8), (3, 5, 1, 80), (2, 28, 4, 128), (2, 4, 4, 256), (2, 300, 1, 16)],
)
def test_split_and_rotate(tokens: int, heads: int, kv_heads: int, width: int) -> None:
    angle, cos, sin = angles(tokens, width // 2)
    qkv = random(tokens, (heads + 2 * kv_heads) * width)

    def formula(qkv: Tensor) -> tuple[Tensor, ...]:
        query, key, value = qkv.view(tokens, -1, width).split((heads, kv_heads, kv_heads), dim=1)
        return turned(query, angle), turned(key, angle), value

    compare(lambda x: split_rotate(x, cos, sin, heads, kv_heads, width), formula, [qkv])


def test_rotate_alone() -> None:
    angle, cos, sin = angles(5, 8)
    compare(lambda x: rotate(x, cos, sin), lambda x: turned(x, angle), [random(5, 3, 16)])


@pytest.mark.parametrize("dtype", HALVES)
def test_rotation_rounds_once_and_leaves_values_alone(dtype: torch.dtype) -> None:
    _, cos, sin = angles(7, 32)
    qkv = random(7, 15 * 64, dtype=dtype)
    qkv[3, -64] = float("inf")  # a value's first number must not spoil its partner
    query, key, value = split_rotate(qkv, cos, sin, 9, 3, 64)
    first, second = qkv.view(7, 15, 64)[:, :12].float().chunk(2, dim=-1)
    c, s = cos[:, None], sin[:, None]
    wanted = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(dtype)
    assert_rounded(query, wanted[:, :9])
    assert_rounded(key, wanted[:, 9:])
    assert torch.equal(value, qkv.view(7, 15, 64)[:, 12:])


def swiglu_formula(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * gate.sigmoid() * up


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (5, 80), (3, 1536), (2, 2050)])
def test_swiglu(tokens: int, width: int) -> None:
    compare(swiglu, swiglu_formula, [random(tokens, 2 * width) * 3])


def test_swiglu_of_extreme_gates() -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 88.0, 100.0, 1e4]], device=DEVICE)
    compare(swiglu, swiglu_formula, [torch.cat((gate, torch.ones_like(gate)), dim=1)])


@pytest.mark.parametrize("dtype", HALVES)
def test_swiglu_rounds_once(dtype: torch.dtype) -> None:
    gate_up = (random(9, 160) * 3).to(dtype)
    wanted = swiglu_formula(gate_up.double()).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    assert (torch.nn.functional.silu(gate) * up != wanted).any()
    assert_rounded(swiglu(gate_up), wanted)


def rowwise(name: str, joined: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> list[Tensor]:
    """Outputs and the input's gradient of each kernel, for rows of 15 · 16 numbers."""
    x = joined.detach().requires_grad_()
    outputs: dict[str, Callable[[], Any]] = {
        "norm": lambda: [rms_norm(x, weight, EPS)],
        "heads": lambda: [rms_norm(x.view(-1, 15, 16), weight[:16], EPS)],
        "add_norm": lambda: add_rms_norm(x.float(), x * 0.5, weight, EPS),
        "rotary": lambda: split_rotate(x, cos, sin, 9, 3, 16),
        "swiglu": lambda: [swiglu(x)],
    }
    found = outputs[name]()
    total = sum((out * out.detach().cos()).sum() for out in found)
    return [*found, *torch.autograd.grad(total, x)]


@pytest.mark.parametrize("name", ["norm", "heads", "add_norm", "rotary", "swiglu"])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_a_row_has_the_same_bits_alone_and_in_company(name: str, dtype: torch.dtype) -> None:
    joined, weight = random(70, 240, dtype=dtype), random(240, seed=1, dtype=dtype)
    _, cos, sin = angles(70, 8)
    together = rowwise(name, joined, cos, sin, weight)
    for part in (slice(0, 1), slice(37, 38), slice(33, 69)):
        apart = rowwise(name, joined[part], cos[part], sin[part], weight)
        for one, other in zip(apart, together, strict=True):
            assert torch.equal(one, other[part])


def test_no_rows_at_all() -> None:
    weight, nothing = random(240).requires_grad_(), random(0, 240).requires_grad_()
    _, cos, sin = angles(0, 8)
    outputs = [
        rms_norm(nothing, weight, EPS),
        *add_rms_norm(nothing, nothing, weight, EPS),
        *split_rotate(nothing, cos, sin, 9, 3, 16),
        swiglu(nothing),
    ]
    mixed_loss(*outputs).backward()
    assert [len(out) for out in outputs] == [0] * 7
    assert nothing.grad is not None and weight.grad is not None and weight.grad.eq(0).all()
