"""silu(gate) · up on the joined projection of both, in float32 with one rounding at the end."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 1024  # columns of a program, at most
WARPS = 4


def swiglu(gate_up_TF2: Tensor) -> Tensor:
    """Turn [T, 2F], gates first, into [T, F]. Only the input is kept for the backward pass."""
    act_TF: Tensor = _SwiGLU.apply(gate_up_TF2)
    return act_TF


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_TF2: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TF2)
        return swiglu_forward(gate_up_TF2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_TF2,) = ctx.saved_tensors
        return swiglu_backward(gate_up_TF2, grad_TF)[0]


def swiglu_forward(gate_up_TF2: Tensor) -> Tensor:
    gate_up_TF2 = gate_up_TF2.contiguous()
    act_TF = gate_up_TF2.new_empty(len(gate_up_TF2), gate_up_TF2.shape[1] // 2)
    grid, shape = _shape(act_TF)
    _swiglu_kernel[grid](gate_up_TF2, act_TF, **shape)
    return act_TF


def swiglu_backward(gate_up_TF2: Tensor, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input's gradient, and the output again: its users need not keep it."""
    gate_up_TF2, grad_TF = gate_up_TF2.contiguous(), grad_TF.contiguous()
    grad_gate_up_TF2, act_TF = torch.empty_like(gate_up_TF2), torch.empty_like(grad_TF)
    grid, shape = _shape(grad_TF)
    _swiglu_backward_kernel[grid](gate_up_TF2, grad_TF, grad_gate_up_TF2, act_TF, **shape)
    return grad_gate_up_TF2, act_TF


def _shape(act_TF: Tensor) -> tuple[tuple[int], dict[str, int]]:
    tokens, width = act_TF.shape
    block = min(BLOCK, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block)
    return (tokens * blocks,), {
        "WIDTH": width,
        "COLUMNS": block,
        "BLOCKS": blocks,
        "num_warps": WARPS,
    }


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, act_ptr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr
):
    program = tl.program_id(0).to(tl.int64)
    token, column = program // BLOCKS, (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    joined = gate_up_ptr + token * (2 * WIDTH) + column
    gate = tl.load(joined, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joined + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(act_ptr + token * WIDTH + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    gate_up_ptr,
    grad_ptr,
    grad_gate_up_ptr,
    act_ptr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    # With σ = sigmoid(gate):  ∂gate = grad · up · σ · (1 + gate · (1 − σ)),  ∂up = grad · gate · σ
    program = tl.program_id(0).to(tl.int64)
    token, column = program // BLOCKS, (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    place = token * (2 * WIDTH) + column
    gate = tl.load(gate_up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + token * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    open_ = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(grad_gate_up_ptr + place, grad_gate, mask=inside)
    tl.store(grad_gate_up_ptr + place + WIDTH, grad * gate * open_, mask=inside)
    act = gate / (1.0 + tl.exp(-gate)) * up  # by the forward kernel's operations: the same bits
    tl.store(act_ptr + token * WIDTH + column, act, mask=inside)
