"""Rows rounded to 8-bit floats where they are made: a scale for each, s = max|row| / 448.

A program holds whole rows, as in norm.py. The plain twin is `rounded` in layers/fp8.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.model.kernels.norm import PER_WARP, round_tile
from groupwise.model.layers.fp8 import KIND, Rounded

MOST_WARPS = 16


def round_rows(x_TD: Tensor) -> Rounded:
    """Round the rows of a matrix: an input's tokens, or a weight's outputs."""
    x_TD = x_TD.contiguous()
    found, shape = _places(len(x_TD), x_TD.shape[1], x_TD.device)
    _round_kernel[(len(x_TD),)](x_TD, *found, **shape)
    return found


def swiglu_rounded(gate_up_TF2: Tensor) -> Rounded:
    """Turn [T, 2F], gates first, into silu(gate) · up, rounded to the input's precision first."""
    gate_up_TF2 = gate_up_TF2.contiguous()
    found, shape = _places(len(gate_up_TF2), gate_up_TF2.shape[1] // 2, gate_up_TF2.device)
    _swiglu_round_kernel[(len(gate_up_TF2),)](gate_up_TF2, *found, **shape)
    return found


def _places(rows: int, width: int, device: torch.device) -> tuple[Rounded, dict[str, int]]:
    bits_TD = torch.empty((rows, width), dtype=KIND, device=device)
    scale_T = torch.empty(rows, dtype=torch.float32, device=device)
    block = triton.next_power_of_2(width)
    warps = max(1, min(block // PER_WARP, MOST_WARPS))
    return Rounded(bits_TD, scale_T), {"WIDTH": width, "BLOCK": block, "num_warps": warps}


@triton.jit
def _round_kernel(x_ptr, bits_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(x_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    bits, scale = round_tile(x[None, :])
    tl.store(bits_ptr + row * WIDTH + column[None, :], bits, mask=inside[None, :])
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _swiglu_round_kernel(
    gate_up_ptr, bits_ptr, scale_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    joined = gate_up_ptr + row * (2 * WIDTH) + column
    gate = tl.load(joined, mask=inside, other=0.0)
    up = tl.load(joined + WIDTH, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    act = (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype).to(tl.float32)
    bits, scale = round_tile(act[None, :])
    tl.store(bits_ptr + row * WIDTH + column[None, :], bits, mask=inside[None, :])
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
