"""A group's prompt, read once for all its rows: the first half of decode attention in fast mode.

The rows of a group ask about the same keys, so their queries fill one tile; what they saw is left
in float32 for `decode_attention` to go on from. Without this, every row reads the prompt for
itself, with most of its tile empty. Axes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.kernels.attention import (
    Parts,
    Shape,
    _address,
    _alignment,
    _attend_block,
    _block_width,
    _place,
    _row_strides,
    _scale,
)
from groupwise.model.layers.prefix import TILE


def prompt_shape(width: int, dtype: torch.dtype) -> Shape:
    """Choose 64 rows and 4 warps for `wgmma`; as many blocks under way as a short prompt has."""
    if dtype.itemsize > 2:  # no tensor cores: more warps, lest the registers run out
        return Shape(TILE, keys=32, warps=8, stages=2)
    if width > 128:
        return Shape(TILE, keys=32, warps=4, stages=2)
    return Shape(TILE, keys=64, warps=4, stages=3)


def prompt_tiles(
    prompts: Sequence[tuple[int, int]], queries: int
) -> list[tuple[int, int, int, int]]:
    """Neighbouring rows with one prompt, as many at a time as a tile takes; on the host.

    Of each row: its prompt's slot and length. Of each tile: the first row, how many, slot, length.
    """
    most = max(1, TILE // queries)
    tiles: list[tuple[int, int, int, int]] = []
    start = 0
    for (slot, length), run in groupby(prompts):
        end = start + len(list(run))
        tiles += [(at, min(most, end - at), slot, length) for at in range(start, end, most)]
        start = end
    return tiles


@triton.jit(do_not_specialize=["layer"])
def _prompt_kernel(
    query_BHW, tile_I4, layout_G, seen_BHW, top_BH, total_BH, layer, scale, query_stride,
    H: tl.constexpr, QUERIES: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Do one tile of rows, one key head. Tiles nobody uses stand last in the grid and return."""
    head, tile = tl.program_id(0), tl.program_id(1)
    first = tl.load(tile_I4 + tile * 4).to(tl.int64)
    rows = tl.load(tile_I4 + tile * 4 + 1)
    prompt = tl.load(tile_I4 + tile * 4 + 2).to(tl.int64)
    length = tl.load(tile_I4 + tile * 4 + 3)
    if rows == 0:
        return
    element: tl.constexpr = query_BHW.dtype.element_ty
    place = _place(layout_G, 7, layer, prompt, head, ALIGN)
    key = _address(layout_G, 5, element) + place
    value = _address(layout_G, 6, element) + place

    at_W = tl.arange(0, BLOCK_W)
    real_W = at_W < W
    at_Q = tl.arange(0, BLOCK_Q)
    real_Q = at_Q < rows * QUERIES
    real_QW = real_Q[:, None] & real_W[None, :]
    row_Q = first + at_Q // QUERIES
    head_Q = head * QUERIES + at_Q % QUERIES
    query_QW = tl.load(
        query_BHW + (row_Q * query_stride + head_Q * W)[:, None] + at_W[None, :],
        mask=real_QW,
        other=0.0,
    )
    seen_QW = tl.zeros([BLOCK_Q, BLOCK_W], tl.float32)
    top_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)
    last_Q = tl.full([BLOCK_Q], 0, tl.int32) + length - 1
    for block in range(0, tl.cdiv(length, BLOCK_U)):
        index_U = block * BLOCK_U + tl.arange(0, BLOCK_U)
        at_UW = index_U[:, None] * W + at_W[None, :]
        real_UW = (index_U < length)[:, None] & real_W[None, :]
        key_UW = tl.load(key + at_UW, mask=real_UW, other=0.0)
        value_UW = tl.load(value + at_UW, mask=real_UW, other=0.0)
        seen_QW, top_Q, total_Q = _attend_block(
            query_QW, key_UW, value_UW, index_U, last_Q, seen_QW, top_Q, total_Q, scale
        )

    out_Q = row_Q * H + head_Q
    tl.store(top_BH + out_Q, top_Q, mask=real_Q)
    tl.store(total_BH + out_Q, total_Q, mask=real_Q)
    tl.store(seen_BHW + out_Q[:, None] * W + at_W[None, :], seen_QW, mask=real_QW)


def prompt_attention(
    layer: int, query_BHW: Tensor, key_heads: int, tile_I4: Tensor, layout_G: Tensor
) -> Parts:
    """Compute what each row sees of its prompt, for `decode_attention`.

    `tile_I4` is what `prompt_tiles` makes; a tile of 0 rows is nobody's, and a row without a tile
    gets nothing: what it finds is not initialised.
    """
    rows, heads, width = query_BHW.shape
    queries = heads // key_heads
    if queries > TILE:
        raise ModelError(
            f"{queries} query heads share a key head; the kernel takes up to {TILE}. Let each row "
            f"read its prompt."
        )
    shape = prompt_shape(width, query_BHW.dtype)
    parts = (
        query_BHW.new_empty((rows, heads, width), dtype=torch.float32),
        query_BHW.new_empty((rows, heads), dtype=torch.float32),
        query_BHW.new_empty((rows, heads), dtype=torch.float32),
    )
    _prompt_kernel[key_heads, len(tile_I4)](
        query_BHW, tile_I4, layout_G, *parts, layer, _scale(width), *_row_strides(query_BHW),
        H=heads, QUERIES=queries, W=width, ALIGN=_alignment(width),
        BLOCK_Q=shape.rows, BLOCK_U=shape.keys, BLOCK_W=_block_width(width),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return parts
