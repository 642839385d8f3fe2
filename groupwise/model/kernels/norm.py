"""RMS norm and the residual stream in one reading: y = x / rms(x) · weight.

The mean is taken in float32, x / rms(x) is rounded to the weight's precision and then meets it. The
residual stream stays in float32: a layer adds little to it, and what rounding takes from a sum of
bfloat16 is where sampler and learner would drift apart most. A program holds whole rows, so a row's
bits depend on the width alone: not on the other rows, nor on its place among them. That is also why
the kernels are not specialised for the number of rows: one compiled kernel for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

# Programs of the backward pass: four for each of an H200's 132 processors. Each sums the weight's
# gradient over rows of its own, so no two write to one place and the sum's order is fixed.
CHUNKS = 528
TILE = 2048  # numbers that a program holds of each tensor; wider rows take more warps instead
PER_WARP = 512


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise rows, also of [T, H, W]; heads of a joined projection need not be copied first."""
    y_TD: Tensor = _Norm.apply(x_TD, weight_D, eps)
    return y_TD


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x_TD = _as_rows(x_TD)
        _, y_TD, rstd_R = _forward(x_TD, None, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, rstd_R)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, rstd_R = ctx.saved_tensors
        grad_x_TD, _, _, grad_weight_D = _backward(x_TD, weight_D, rstd_R, grad_TD, None, None)
        return grad_x_TD, grad_weight_D, None


def add_norm_forward(
    x_TD: Tensor | None, more_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + more in float32 (more alone without an x), its norm, and 1/rms of every row."""
    return _forward(x_TD, more_TD.contiguous(), weight_D, eps)


def add_norm_rounded(
    x_TD: Tensor | None, more_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + more in float32, and its norm in 8-bit floats with the scale of every row."""
    scale_R = torch.empty(len(more_TD), dtype=torch.float32, device=more_TD.device)
    sum_TD, bits_TD, _ = _forward(x_TD, more_TD.contiguous(), weight_D, eps, scale_R)
    return sum_TD, bits_TD, scale_R


def add_norm_backward(
    sum_TD: Tensor,
    weight_D: Tensor,
    rstd_R: Tensor,
    grad_TD: Tensor,
    grad_sum_TD: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of x and of what was added, the norm once more, and the weight's gradient.

    Whoever multiplied the norm need not keep it.
    """
    like = torch.empty_like(grad_TD)
    grad_x_TD, grad_more_TD, y_TD, grad_weight_D = _backward(
        sum_TD, weight_D, rstd_R, grad_TD, grad_sum_TD, like
    )
    assert grad_more_TD is not None and y_TD is not None
    return grad_x_TD, grad_more_TD, y_TD, grad_weight_D


def _as_rows(x_TD: Tensor) -> Tensor:
    """View as rows: the last axis must be contiguous; the others may have any strides."""
    return x_TD if x_TD.dim() <= 3 and x_TD.stride(-1) == 1 else x_TD.contiguous()


def _shape(x_TD: Tensor) -> dict[str, int]:
    """Describe where rows lie and how they are cut, from the width alone."""
    width = x_TD.shape[-1]
    block = triton.next_power_of_2(width)
    tile = max(block, TILE)
    return {
        "WIDTH": width,
        "BLOCK": block,
        "ROWS": tile // block,
        "HEADS": x_TD.shape[1] if x_TD.dim() == 3 else 1,
        "TOKEN_STRIDE": x_TD.stride(0),
        "HEAD_STRIDE": x_TD.stride(1) if x_TD.dim() == 3 else 0,
        "num_warps": min(tile // PER_WARP, 16),
    }


def _forward(
    x_TD: Tensor | None,
    more_TD: Tensor | None,
    weight_D: Tensor,
    eps: float,
    scale_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + more (or the one that there is), its norm, and 1/rms of every row.

    With a place for scales the norm is rounded to 8-bit floats.
    """
    given = more_TD if x_TD is None else x_TD
    assert given is not None
    shape = _shape(given)
    rows = given.numel() // shape["WIDTH"]
    kind = weight_D.dtype if scale_R is None else torch.float8_e4m3fn
    y_TD = torch.empty(given.shape, dtype=kind, device=given.device)
    rstd_R = torch.empty(rows, dtype=torch.float32, device=given.device)
    sum_TD = given if more_TD is None else torch.empty_like(given, dtype=torch.float32)
    _norm_kernel[(triton.cdiv(rows, shape["ROWS"]),)](
        x_TD, more_TD, weight_D, sum_TD, y_TD, rstd_R, scale_R, rows, eps, **shape
    )
    return sum_TD, y_TD, rstd_R


def _backward(
    x_TD: Tensor,
    weight_D: Tensor,
    rstd_R: Tensor,
    grad_TD: Tensor,
    grad_sum_TD: Tensor | None,
    grad_more_TD: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return gradients; with a place for that of what was added, the norm is made again too.

    The weight's gradient stays in float32; autograd rounds it if the parameter asks for that.
    """
    shape = _shape(x_TD)
    rows = len(rstd_R)
    chunks = min(CHUNKS, triton.cdiv(rows, shape["ROWS"]))
    grad_x_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    y_TD = None if grad_more_TD is None else torch.empty_like(grad_more_TD)
    partial_CD = torch.empty((chunks, len(weight_D)), dtype=torch.float32, device=x_TD.device)
    _norm_backward_kernel[(chunks,)](
        x_TD,
        weight_D,
        rstd_R,
        grad_TD.contiguous(),
        None if grad_sum_TD is None else grad_sum_TD.contiguous(),
        grad_x_TD,
        grad_more_TD,
        y_TD,
        partial_CD,
        rows,
        **shape,
    )
    return grad_x_TD, grad_more_TD, y_TD, partial_CD.sum(0)


@triton.jit
def round_tile(x):
    """Round rows to e4m3, each by the scale that takes its largest number to 448."""
    scale = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-30) / 448.0
    return (x / scale[:, None]).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x_ptr,
    more_ptr,
    weight_ptr,
    sum_ptr,
    y_ptr,
    rstd_ptr,
    scale_ptr,
    rows,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    if x_ptr is not None:
        start = (row // HEADS) * TOKEN_STRIDE + (row % HEADS) * HEAD_STRIDE
        x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if more_ptr is not None:
            x += tl.load(more_ptr + place, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(more_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if more_ptr is not None:
        tl.store(sum_ptr + place, x, mask=inside)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    unit = (x * rstd[:, None]).to(weight.dtype).to(tl.float32)
    y = unit * weight.to(tl.float32)[None, :]
    if scale_ptr is None:
        tl.store(y_ptr + place, y, mask=inside)
    else:
        bits, scale = round_tile(y.to(weight.dtype).to(tl.float32))
        tl.store(y_ptr + place, bits, mask=inside)
        tl.store(scale_ptr + row, scale, mask=row < rows)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    x_ptr,
    weight_ptr,
    rstd_ptr,
    grad_ptr,
    grad_sum_ptr,
    grad_x_ptr,
    grad_more_ptr,
    y_ptr,
    partial_ptr,
    rows,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
):
    # With u = x/rms and g = grad · weight:  ∂x = (g − u · mean(g · u)) / rms,  ∂weight = Σ grad · u
    chunk = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    half = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
    weight = half.to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    block = chunk
    while block * ROWS < rows:
        row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        start = (row // HEADS) * TOKEN_STRIDE + (row % HEADS) * HEAD_STRIDE
        x = tl.load(x_ptr + start[:, None] + column[None, :], mask=inside, other=0.0)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None]
        unit = x.to(tl.float32) * rstd
        total += grad * unit
        grad = grad * weight[None, :]
        along = tl.sum(grad * unit, axis=1) / WIDTH
        grad_x = (grad - unit * along[:, None]) * rstd
        if grad_sum_ptr is not None:
            grad_x += tl.load(grad_sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + place, grad_x, mask=inside)
        if y_ptr is not None:  # by the forward kernel's operations: the same bits
            tl.store(grad_more_ptr + place, grad_x, mask=inside)
            rounded = unit.to(half.dtype).to(tl.float32)
            tl.store(y_ptr + place, rounded * weight[None, :], mask=inside)
        block += tl.num_programs(0)
    tl.store(partial_ptr + chunk * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)
