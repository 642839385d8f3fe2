"""A matrix product that gives a row the same bits whatever company it has: for exact mode.

Every number of the output is summed in float32 by one program, in one accumulator, in the order of
the inner axis; nothing is split, tuned or measured. Tiles come from shapes alone. How many rows a
tile has follows the number of tokens, so that a few tokens still give all multiprocessors work:
tiles of 64 and 128 rows use the same instruction (64 rows wide), so a row's bits stay the same.

Axes besides those of CONTRIBUTING.md: `_R` row of a tile, `_B` column of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupwise.errors import ModelError

MULTIPROCESSORS = 132  # of an H200; a constant, because results must not depend on the device
GROUP = 16  # rows of tiles that are worked on together, so that both operands stay in the L2 cache


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: int
    depth: int  # numbers of the inner axis a step
    warps: int
    stages: int


# Largest first. float32 has no tensor cores that keep its precision, so its tiles are small.
HALF_TILES = (Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(64, 128, 64, 4, 3))
SINGLE_TILES = (Tile(32, 64, 16, 4, 2),)


def matmul(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias, in the inputs' precision, summed in float32."""
    check_operands(x_TD, weight_FD)
    (tokens, width), features = x_TD.shape, weight_FD.shape[0]
    y_TF = torch.empty((tokens, features), dtype=x_TD.dtype, device=x_TD.device)
    check_rows(y_TF)
    tile = choose_tile(tokens, features, x_TD.dtype)
    depth = fitting(tile.depth, width)
    grid = (triton.cdiv(tokens, tile.rows) * triton.cdiv(features, tile.columns),)
    _matmul[grid](
        TensorDescriptor.from_tensor(x_TD, [tile.rows, depth]),
        TensorDescriptor.from_tensor(weight_FD, [tile.columns, depth]),
        bias_F,
        TensorDescriptor.from_tensor(y_TF, [tile.rows, tile.columns]),
        tokens,
        F=features,
        D=width,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=depth,
        GROUP=GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y_TF


def choose_tile(tokens: int, features: int, dtype: torch.dtype) -> Tile:
    """Choose the largest tile that gives every multiprocessor one, else the smallest."""
    tiles = SINGLE_TILES if dtype == torch.float32 else HALF_TILES
    for tile in tiles:
        count = triton.cdiv(tokens, tile.rows) * triton.cdiv(features, tile.columns)
        if count >= MULTIPROCESSORS:
            return tile
    return tiles[-1]


def fitting(depth: int, width: int) -> int:
    return max(16, min(depth, triton.next_power_of_2(width)))


def check_operands(x_TD: Tensor, weight_FD: Tensor) -> None:
    if x_TD.dtype != weight_FD.dtype or x_TD.shape[-1] != weight_FD.shape[-1] or len(x_TD) == 0:
        raise ModelError(
            f"{x_TD.dtype} {tuple(x_TD.shape)} does not meet a weight of {weight_FD.dtype} "
            f"{tuple(weight_FD.shape)}: precision and last axis must be equal, and there must be "
            f"a row."
        )
    check_rows(x_TD)
    check_rows(weight_FD)


def check_rows(matrix: Tensor) -> None:
    """Check that rows are whole 16 bytes: the copy engine moves no others."""
    step = 16 // matrix.element_size()
    if matrix.stride(-1) != 1 or matrix.stride(0) % step or matrix.data_ptr() % 16:
        raise ModelError(
            f"A {matrix.dtype} matrix {tuple(matrix.shape)} with strides {matrix.stride()} can't "
            f"be copied in tiles: rows must be contiguous and start at multiples of {step} "
            f"numbers. Use widths that are multiples of {step}, or a contiguous copy."
        )


@triton.jit(do_not_specialize=["T"])
def _matmul(
    x,
    weight,
    bias,
    y,
    T,
    F: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tile, column_tile = tile_place(tl.cdiv(T, ROWS), tl.cdiv(F, COLUMNS), GROUP)
    row, column = row_tile * ROWS, column_tile * COLUMNS
    y_RB = product_tile(x, weight, row, column, D, ROWS, COLUMNS, DEPTH)
    if bias is not None:
        column_B = column + tl.arange(0, COLUMNS)
        bias_B = tl.load(bias + column_B, mask=column_B < F, other=0.0)
        y_RB += bias_B.to(tl.float32)[None, :]
    y.store([row, column], y_RB.to(y.dtype))


@triton.jit
def tile_place(row_tiles, column_tiles, GROUP: tl.constexpr):
    """Find this program's tile: rows first within a group, to share operands."""
    in_group = GROUP * column_tiles
    group, within = tl.program_id(0) // in_group, tl.program_id(0) % in_group
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    return first + within % height, within // height


@triton.jit
def product_tile(
    x,
    weight,
    row,
    column,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return [ROWS, COLUMNS] of x · weightᵀ in float32. Outside of a matrix all is 0."""
    sum_RB = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, D, DEPTH):
        x_RD = x.load([row, at])
        weight_BD = weight.load([column, at])
        sum_RB = tl.dot(x_RD, weight_BD.T, sum_RB, input_precision="ieee")
    return sum_RB
