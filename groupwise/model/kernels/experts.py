"""Kernels around the products of experts: who goes where, and what comes back.

Visits of tokens lie in the order of their experts (`_S`), see layers/experts.py. Axes besides those
of CONTRIBUTING.md: `_E` expert, `_K` experts of a token, `_S` visit, `_I` tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupwise.model.kernels.matmul import check_operands, fitting, product_tile

BLOCK = 1024  # columns of a program, at most
ROWS, COLUMNS, DEPTH = 64, 128, 64  # of an exact product's tile: one size, one instruction
ROWS_SINGLE, COLUMNS_SINGLE, DEPTH_SINGLE = 32, 64, 16  # in float32
FAR = 1 << 30  # a tile's first row where there is no tile


def combine(made_SD: Tensor, back_TK: Tensor, gate_TK: Tensor | None) -> Tensor:
    """Return Σ_k gate · made of each token, summed in float32 one after the other; no gate is 1."""
    (tokens, chosen), width = back_TK.shape, made_SD.shape[1]
    total_TD = made_SD.new_empty(tokens, width)
    block = min(BLOCK, triton.next_power_of_2(width))
    blocks = triton.cdiv(width, block)
    _combine_kernel[(tokens * blocks,)](
        made_SD, back_TK, gate_TK, total_TD,
        WIDTH=width, COLUMNS=block, BLOCKS=blocks, CHOSEN=chosen, num_warps=4,
    )  # fmt: skip
    return total_TD


@triton.jit
def _combine_kernel(
    made_ptr, back_ptr, gate_ptr, total_ptr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    token, column = program // BLOCKS, (program % BLOCKS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(CHOSEN):
        row = tl.load(back_ptr + token * CHOSEN + k).to(tl.int64)
        made = tl.load(made_ptr + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            total = tl.fma(made, tl.load(gate_ptr + token * CHOSEN + k), total)
        else:
            total += made
    tl.store(total_ptr + token * WIDTH + column, total, mask=inside)


def gated_backward(
    gate_up_SF2: Tensor, grad_SF: Tensor, gate_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of gates and ups, weighted activations, and gradients of the weights.

    `grad_SF` is that of the activations, without the visit's weight in it.
    """
    grad_gate_up_SF2, act_SF = torch.empty_like(gate_up_SF2), torch.empty_like(grad_SF)
    grad_gate_S = torch.empty_like(gate_S)
    visits, width = grad_SF.shape
    _gated_backward_kernel[(visits,)](
        gate_up_SF2, grad_SF, gate_S, grad_gate_up_SF2, act_SF, grad_gate_S,
        WIDTH=width, COLUMNS=min(BLOCK, triton.next_power_of_2(width)), num_warps=4,
    )  # fmt: skip
    return grad_gate_up_SF2, act_SF, grad_gate_S


@triton.jit
def _gated_backward_kernel(
    gate_up_ptr, grad_ptr, weight_ptr, grad_gate_up_ptr, act_ptr, grad_weight_ptr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # As in swiglu.py, with w the visit's weight:  ∂act = w · grad,  ∂w = Σ grad · act
    visit = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + visit)
    along = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, WIDTH, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        place = visit * (2 * WIDTH) + column
        gate = tl.load(gate_up_ptr + place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + place + WIDTH, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + visit * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        open_ = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * open_ * up
        along += grad * act
        grad = grad * weight
        grad_gate = grad * up * open_ * (1.0 + gate * (1.0 - open_))
        tl.store(grad_gate_up_ptr + place, grad_gate, mask=inside)
        tl.store(grad_gate_up_ptr + place + WIDTH, grad * gate * open_, mask=inside)
        tl.store(act_ptr + visit * WIDTH + column, act * weight, mask=inside)
    tl.store(grad_weight_ptr + visit, tl.sum(along, axis=0))


# --- exact mode -------------------------------------------------------------------------------


def exact_products(x_SD: Tensor, weight_EFD: Tensor, end_E: Tensor) -> Tensor:
    """Return x · weightᵀ of each visit's expert, a row to the same bits in any batch.

    A tile has rows of one expert. Which tile is whose is found on the device: there are as many
    programs as there could be tiles.
    """
    experts, features, width = weight_EFD.shape
    weight_ED = weight_EFD.view(experts * features, width)
    check_operands(x_SD, weight_ED)
    single = x_SD.dtype == torch.float32
    rows, columns = (ROWS_SINGLE, COLUMNS_SINGLE) if single else (ROWS, COLUMNS)
    depth = fitting(DEPTH_SINGLE if single else DEPTH, width)
    y_SF = torch.empty((len(x_SD), features), dtype=x_SD.dtype, device=x_SD.device)
    tile_I3 = tiles_of_experts(end_E, len(x_SD), rows)
    column_tiles = triton.cdiv(features, columns)
    _experts_matmul[(len(tile_I3) * column_tiles,)](
        TensorDescriptor.from_tensor(x_SD, [rows, depth]),
        TensorDescriptor.from_tensor(weight_ED, [columns, depth]),
        y_SF, tile_I3,
        F=features, D=width, ROWS=rows, COLUMNS=columns, DEPTH=depth, COLUMN_TILES=column_tiles,
        num_warps=4, num_stages=2 if single else 3,
    )  # fmt: skip
    return y_SF


def tiles_of_experts(end_E: Tensor, visits: int, rows: int) -> Tensor:
    """Return expert, first row and end of its rows for each tile, none of which the host reads."""
    experts = len(end_E)
    start_E = torch.cat([end_E.new_zeros(1), end_E[:-1]])
    count_E = (end_E - start_E + rows - 1) // rows
    last_E = count_E.cumsum(0)
    most = min(visits, triton.cdiv(visits, rows) + experts)
    at_I = torch.arange(most, device=end_E.device)
    expert_I = torch.searchsorted(last_E, at_I, right=True)
    there_I = expert_I < experts
    expert_I = expert_I.clamp(max=experts - 1)
    within_I = at_I - (last_E - count_E)[expert_I]
    row_I = torch.where(there_I, start_E[expert_I] + within_I * rows, FAR)
    return torch.stack((expert_I, row_I, end_E[expert_I]), 1).int()


@triton.jit
def _experts_matmul(
    x, weight, y, tile_I3,
    F: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, COLUMN_TILES: tl.constexpr,
):  # fmt: skip
    tile, column = tl.program_id(0) // COLUMN_TILES, tl.program_id(0) % COLUMN_TILES * COLUMNS
    expert = tl.load(tile_I3 + tile * 3)
    row, end = tl.load(tile_I3 + tile * 3 + 1), tl.load(tile_I3 + tile * 3 + 2)
    if row < end:
        y_RB = product_tile(x, weight, row, expert * F + column, D, ROWS, COLUMNS, DEPTH)
        row_R, column_B = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        # What a tile reads behind its expert's rows and columns is others': it is not written.
        inside = (row_R < end)[:, None] & (column_B < F)[None, :]
        place = row_R.to(tl.int64)[:, None] * F + column_B[None, :]
        tl.store(y + place, y_RB.to(y.dtype.element_ty), mask=inside)
