"""Attention kernels: decode over shared prompts, exact attention of packs, merging of two parts.

Decode and packs share `_attend_block`, the walk through one block of keys. In exact mode they also
share the block's size, where blocks start (at the prompt's first token, and again at the
completion's) and the tile's rows and warps, so that a token gets the same bits from either: a block
that a row may not see is multiplied by exactly 1 and adds exactly 0. Products that feed a sum are
written as `fma`, because the compiler would else choose for each kernel anew whether to round in
between.

Axes: `_B` row of a decode batch, `_Q` row of a tile, `_U` key of a block, `_I` tile, `_X` share of
the keys, `_G` entry of a layout, else as in CONTRIBUTING.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log, log2, sqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.layers.prefix import TILE

LN_2 = tl.constexpr(log(2))

# What was seen so far, [B, H, W], relative to the top score, [B, H], and the weights' sum, [B, H].
Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    """How a kernel is cut: from widths alone, never from the batch."""

    rows: int  # queries of a tile
    keys: int  # keys of a block
    warps: int
    stages: int


def decode_shape(queries: int, width: int) -> Shape:
    """Fast decode: little work a key, so one warp, and small blocks that leave room for many."""
    rows = max(16, triton.next_power_of_2(queries))
    if width > 128:
        return Shape(rows, keys=16, warps=2, stages=2)
    return Shape(rows, keys=32, warps=1, stages=3 if width <= 64 else 2)


def exact_shape(width: int, dtype: torch.dtype) -> Shape:
    """Decode and packs in exact mode: 64 rows and 4 warps are the least that `wgmma` takes."""
    return Shape(TILE, keys=64 if width * dtype.itemsize <= 256 else 32, warps=4, stages=2)


@triton.jit
def _attend_block(query_QW, key_UW, value_UW, index_U, last_Q, seen_QW, top_Q, total_Q, scale):
    """Add one block of keys, visible up to `last_Q`: softmax sums so far, relative to `top_Q`."""
    score_QU = tl.dot(query_QW, tl.trans(key_UW), input_precision="ieee")
    score_QU = tl.where(index_U[None, :] <= last_Q[:, None], score_QU, float("-inf"))
    higher_Q = tl.maximum(top_Q, tl.max(score_QU, 1))
    weight_QU = tl.exp2(tl.fma(score_QU, scale, -(higher_Q * scale)[:, None]))
    fade_Q = tl.exp2((top_Q - higher_Q) * scale)
    total_Q = tl.fma(total_Q, fade_Q, tl.sum(weight_QU, 1))
    seen_QW = tl.dot(
        weight_QU.to(value_UW.dtype),
        value_UW,
        seen_QW * fade_Q[:, None],
        input_precision="ieee",
    )
    return seen_QW, higher_Q, total_Q


@triton.jit
def _address(layout_G, entry: tl.constexpr, element: tl.constexpr):
    """Return a cache's first element. Allocations start at whole vectors of 16 bytes."""
    pointer = tl.load(layout_G + entry).to(tl.pointer_type(element))
    return tl.multiple_of(pointer, 16)


@triton.jit
def _place(layout_G, entry: tl.constexpr, layer, slot, head, ALIGN: tl.constexpr):
    """Find where a slot's head starts in its cache: strides of layer, slot, head from `entry`."""
    layer_stride = tl.load(layout_G + entry)
    slot_stride = tl.load(layout_G + entry + 1)
    head_stride = tl.load(layout_G + entry + 2)
    place = layer * layer_stride + slot * slot_stride + head * head_stride
    return tl.multiple_of(place, ALIGN)


@triton.jit(do_not_specialize=["layer"])
def _decode_kernel(
    query_BHW, key_BJW, value_BJW, slot_B, own_S, prompt_S, prompt_length_S, layout_G,
    seen_BHW, part_BHXW, top_BHX, total_BHX, first_BHW, first_top_BH, first_total_BH,
    layer, scale, query_stride, key_stride, value_stride,
    J: tl.constexpr, QUERIES: tl.constexpr, W: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_W: tl.constexpr, WHOLE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Do one row, one key head, one share of its keys. Rows of a prompt are neighbours in the grid.

    With FIRST, the prompt was seen before: the first share goes on from there.
    """
    row, head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    shares = tl.num_programs(2)
    element: tl.constexpr = query_BHW.dtype.element_ty
    slot = tl.load(slot_B + row).to(tl.int64)
    own = tl.load(own_S + slot).to(tl.int32)
    prompt = tl.load(prompt_S + slot).to(tl.int64)
    before = tl.load(prompt_length_S + slot).to(tl.int32)
    own_place = _place(layout_G, 2, layer, slot, head, ALIGN)
    prompt_place = _place(layout_G, 7, layer, prompt, head, ALIGN)
    own_key = _address(layout_G, 0, element) + own_place
    own_value = _address(layout_G, 1, element) + own_place
    prompt_key = _address(layout_G, 5, element) + prompt_place
    prompt_value = _address(layout_G, 6, element) + prompt_place

    at_W = tl.arange(0, BLOCK_W)
    real_W = at_W < W
    new_key = key_BJW + row.to(tl.int64) * key_stride + head * W
    new_value = value_BJW + row.to(tl.int64) * value_stride + head * W
    if share == 0:  # for the steps to come: in this one, nobody reads it there
        tl.store(own_key + own * W + at_W, tl.load(new_key + at_W, mask=real_W), mask=real_W)
        tl.store(own_value + own * W + at_W, tl.load(new_value + at_W, mask=real_W), mask=real_W)

    at_Q = tl.arange(0, BLOCK_Q)
    real_QW = (at_Q < QUERIES)[:, None] & real_W[None, :]
    heads_QW = (head * QUERIES + at_Q)[:, None] * W + at_W[None, :]
    query_QW = tl.load(
        query_BHW + row.to(tl.int64) * query_stride + heads_QW, mask=real_QW, other=0.0
    )
    seen_QW = tl.zeros([BLOCK_Q, BLOCK_W], tl.float32)
    top_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)
    if FIRST:
        first_Q = (row.to(tl.int64) * J + head) * QUERIES + at_Q
        mine_Q = (at_Q < QUERIES) & (share == 0)
        first_QW = first_BHW + first_Q[:, None] * W + at_W[None, :]
        seen_QW = tl.load(first_QW, mask=mine_Q[:, None] & real_W[None, :], other=0.0)
        top_Q = tl.load(first_top_BH + first_Q, mask=mine_Q, other=float("-inf"))
        total_Q = tl.load(first_total_BH + first_Q, mask=mine_Q, other=0.0)

    prompt_blocks = 0 if FIRST else tl.cdiv(before, BLOCK_U)
    blocks = prompt_blocks + own // BLOCK_U + 1
    part = tl.cdiv(blocks, shares)
    for block in range(share * part, tl.minimum((share + 1) * part, blocks)):
        shared = False if FIRST else block < prompt_blocks
        index_U = (block - tl.where(shared, 0, prompt_blocks)) * BLOCK_U + tl.arange(0, BLOCK_U)
        last = tl.where(shared, before - 1, own)
        # The new token's key and value come from where they were made, not from the cache.
        new_U = (index_U == own) & (block >= prompt_blocks)
        key_U = tl.where(new_U, new_key, tl.where(shared, prompt_key, own_key) + index_U * W)
        value_U = tl.where(
            new_U, new_value, tl.where(shared, prompt_value, own_value) + index_U * W
        )
        real_UW = (index_U <= last)[:, None] & real_W[None, :]
        key_UW = tl.load(key_U[:, None] + at_W[None, :], mask=real_UW, other=0.0)
        value_UW = tl.load(value_U[:, None] + at_W[None, :], mask=real_UW, other=0.0)
        last_Q = tl.full([BLOCK_Q], 0, tl.int32) + last
        seen_QW, top_Q, total_Q = _attend_block(
            query_QW, key_UW, value_UW, index_U, last_Q, seen_QW, top_Q, total_Q, scale
        )

    out_row = row.to(tl.int64) * J * QUERIES
    if WHOLE:
        seen_QW = seen_QW / total_Q[:, None]
        tl.store(seen_BHW + out_row * W + heads_QW, seen_QW.to(element), mask=real_QW)
    else:
        part_Q = (out_row + head * QUERIES + at_Q) * shares + share
        tl.store(top_BHX + part_Q, top_Q, mask=at_Q < QUERIES)
        tl.store(total_BHX + part_Q, total_Q, mask=at_Q < QUERIES)
        tl.store(part_BHXW + part_Q[:, None] * W + at_W[None, :], seen_QW, mask=real_QW)


@triton.jit
def _combine_kernel(
    part_BHXW, top_BHX, total_BHX, seen_BHW, scale, shares,
    W: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Join the shares of one row and query head. A share without keys has top −inf: it weighs 0."""
    row = tl.program_id(0).to(tl.int64)
    at_X, at_W = tl.arange(0, BLOCK_X), tl.arange(0, BLOCK_W)
    real_X, real_W = at_X < shares, at_W < W
    top_X = tl.load(top_BHX + row * shares + at_X, mask=real_X, other=float("-inf"))
    total_X = tl.load(total_BHX + row * shares + at_X, mask=real_X, other=0.0)
    part_XW = tl.load(
        part_BHXW + (row * shares + at_X)[:, None] * W + at_W[None, :],
        mask=real_X[:, None] & real_W[None, :],
        other=0.0,
    )
    weight_X = tl.exp2((top_X - tl.max(top_X, 0)) * scale)
    seen_W = tl.sum(part_XW * weight_X[:, None], 0) / tl.sum(total_X * weight_X, 0)
    tl.store(seen_BHW + row * W + at_W, seen_W.to(seen_BHW.dtype.element_ty), mask=real_W)


@triton.jit(do_not_specialize=["tokens"])
def _pack_kernel(
    query_THW, key_TJW, value_TJW, tile_I5, seen_THW, lse_HT,
    scale, tokens, query_stride, key_stride, value_stride,
    H: tl.constexpr, QUERIES: tl.constexpr, W: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_U: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Do one tile of a segment's tokens, one query head."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(tile_I5 + tile * 5)  # where things lie in the pack
    start = tl.load(tile_I5 + tile * 5 + 1)
    length = tl.load(tile_I5 + tile * 5 + 2)
    prompt = tl.load(tile_I5 + tile * 5 + 3)
    before = tl.load(tile_I5 + tile * 5 + 4)
    at_W = tl.arange(0, BLOCK_W)
    real_W = at_W < W
    at_Q = tl.arange(0, BLOCK_Q)
    position_Q = first - start + at_Q
    real_QW = (position_Q < length)[:, None] & real_W[None, :]
    query_QW = tl.load(
        query_THW
        + first.to(tl.int64) * query_stride
        + head * W
        + at_Q[:, None] * query_stride
        + at_W[None, :],
        mask=real_QW,
        other=0.0,
    )
    seen_QW = tl.zeros([BLOCK_Q, BLOCK_W], tl.float32)
    top_Q = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total_Q = tl.zeros([BLOCK_Q], tl.float32)

    key_head = key_TJW + (head // QUERIES) * W
    value_head = value_TJW + (head // QUERIES) * W
    prompt_blocks = tl.cdiv(before, BLOCK_U)
    seen_by_last = tl.minimum(first - start + BLOCK_Q, length)
    for block in range(0, prompt_blocks + tl.cdiv(seen_by_last, BLOCK_U)):
        shared = block < prompt_blocks
        index_U = (block - tl.where(shared, 0, prompt_blocks)) * BLOCK_U + tl.arange(0, BLOCK_U)
        origin = tl.where(shared, prompt, start).to(tl.int64)
        last_Q = tl.where(shared, before - 1, position_Q)
        real_UW = (index_U < tl.where(shared, before, length))[:, None] & real_W[None, :]
        key_UW = tl.load(
            key_head + origin * key_stride + index_U[:, None] * key_stride + at_W[None, :],
            mask=real_UW,
            other=0.0,
        )
        value_UW = tl.load(
            value_head + origin * value_stride + index_U[:, None] * value_stride + at_W[None, :],
            mask=real_UW,
            other=0.0,
        )
        seen_QW, top_Q, total_Q = _attend_block(
            query_QW, key_UW, value_UW, index_U, last_Q, seen_QW, top_Q, total_Q, scale
        )

    seen_QW = seen_QW / total_Q[:, None]
    seen_tile = seen_THW + first.to(tl.int64) * H * W + head * W
    tl.store(
        seen_tile + at_Q[:, None] * (H * W) + at_W[None, :],
        seen_QW.to(seen_THW.dtype.element_ty),
        mask=real_QW,
    )
    lse_Q = (top_Q * scale + tl.log2(total_Q)) * LN_2
    tl.store(lse_HT + head.to(tl.int64) * tokens + first + at_Q, lse_Q, mask=position_Q < length)


@triton.jit(do_not_specialize=["rows", "tokens"])
def _merge_kernel(
    seen_THW, lse_HT, other_THW, other_HT, behind_T, merged_THW, merged_HT, rows, tokens,
    H: tl.constexpr, W: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Merge some rows, each a token and query head; `_R`."""
    at_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    real_R = at_R < rows
    token_R = at_R // H
    place_R = (at_R % H).to(tl.int64) * tokens + token_R
    behind_R = tl.load(behind_T + token_R, mask=real_R, other=0) != 0
    lse_R = tl.load(lse_HT + place_R, mask=real_R, other=0.0)
    other_R = tl.load(other_HT + place_R, mask=real_R & behind_R, other=float("-inf"))
    high_R = tl.maximum(lse_R, other_R)
    weight_R, other_weight_R = tl.exp(lse_R - high_R), tl.exp(other_R - high_R)
    total_R = weight_R + other_weight_R
    at_W = tl.arange(0, BLOCK_W)
    at_RW = at_R.to(tl.int64)[:, None] * W + at_W[None, :]
    real_RW = real_R[:, None] & (at_W < W)[None, :]
    seen_RW = tl.load(seen_THW + at_RW, mask=real_RW, other=0.0).to(tl.float32)
    other_RW = tl.load(other_THW + at_RW, mask=real_RW & behind_R[:, None], other=0.0)
    merged_RW = seen_RW * (weight_R / total_R)[:, None]
    merged_RW += other_RW.to(tl.float32) * (other_weight_R / total_R)[:, None]
    tl.store(merged_THW + at_RW, merged_RW.to(merged_THW.dtype.element_ty), mask=real_RW)
    tl.store(merged_HT + place_R, high_R + tl.log(total_R), mask=real_R)


def cache_layout(
    own_key_LSJUW: Tensor, own_value_LSJUW: Tensor, prompt_key_LPJUW: Tensor, prompt_value: Tensor
) -> Tensor:
    """Describe where the caches lie, for `decode_attention`: addresses, and strides in elements.

    Kernels in a captured graph read it from the device, so the caches may move between replays.
    """
    numbers: list[int] = []
    for key, value in ((own_key_LSJUW, own_value_LSJUW), (prompt_key_LPJUW, prompt_value)):
        if key.stride() != value.stride() or key.stride()[3:] != (key.shape[4], 1):
            raise ModelError(
                f"Key and value cache have strides {key.stride()} and {value.stride()}; they must "
                f"be equal, with the tokens of a head one behind the other. Make them contiguous."
            )
        numbers += [key.data_ptr(), value.data_ptr(), *key.stride()[:3]]
    return torch.tensor(numbers, dtype=torch.int64).to(own_key_LSJUW.device)


def decode_attention(
    layer: int,
    query_BHW: Tensor,
    key_BJW: Tensor,
    value_BJW: Tensor,
    slot_B: Tensor,
    own_S: Tensor,
    prompt_S: Tensor,
    prompt_length_S: Tensor,
    layout_G: Tensor,
    splits: int,
    exact: bool,
    first: Parts | None = None,
) -> Tensor:
    """Attend with one new token a row: to its prompt, its slot's own tokens, itself. [B, H, W].

    Row b works on slot `slot_B[b]`, which holds `own_S` tokens behind prompt `prompt_S` of
    `prompt_length_S` tokens; the new key and value are written behind them. `splits` programs
    share a row's keys: more than 1 for small batches, chosen from the batch's size alone. With
    `exact` and one split, the bits are those of `pack_attention`. With `first`, what the rows saw
    of their prompts (see prompts.py), nobody looks at them again.
    """
    (rows, heads, width), groups = query_BHW.shape, key_BJW.shape[1]
    queries = heads // groups
    shape = exact_shape(width, query_BHW.dtype) if exact else decode_shape(queries, width)
    if queries > shape.rows:
        raise ModelError(
            f"{queries} query heads share a key head; the exact kernel takes up to {shape.rows}. "
            f"Turn exact mode off for this model."
        )
    strides = _row_strides(query_BHW, key_BJW, value_BJW)
    seen_BHW = query_BHW.new_empty((rows, heads, width))
    whole = splits == 1
    parts: tuple[Tensor, ...] = (seen_BHW,) * 3  # nothing is written there
    if not whole:
        sizes = ((rows, heads, splits, width), (rows, heads, splits), (rows, heads, splits))
        parts = tuple(query_BHW.new_empty(size, dtype=torch.float32) for size in sizes)
    scale, block = _scale(width), _block_width(width)
    _decode_kernel[rows, groups, splits](
        query_BHW, key_BJW, value_BJW, slot_B, own_S, prompt_S, prompt_length_S, layout_G,
        seen_BHW, *parts, *(first or parts), layer, scale, *strides,
        J=groups, QUERIES=queries, W=width, ALIGN=_alignment(width),
        BLOCK_Q=shape.rows, BLOCK_U=shape.keys, BLOCK_W=block, WHOLE=whole,
        FIRST=first is not None,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if not whole:
        _combine_kernel[(rows * heads,)](
            *parts, seen_BHW, scale, splits,
            W=width, BLOCK_X=triton.next_power_of_2(splits), BLOCK_W=block, num_warps=1,
        )  # fmt: skip
    return seen_BHW


def pack_attention(
    query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor, tile_I5: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each token of a pack sees, [T, H, W], and its log-sum-exp, [H, T] in float32.

    `tile_I5` says of up to TILE tokens in a row: the first, where their segment starts and how
    long it is, and the same of the prompt before it (`prefix.tiles` makes it). A token gets the
    same bits in any pack, and those of `decode_attention` in exact mode.
    """
    (tokens, heads, width), groups = query_THW.shape, key_TJW.shape[1]
    shape = exact_shape(width, query_THW.dtype)
    strides = _row_strides(query_THW, key_TJW, value_TJW)
    seen_THW = query_THW.new_empty((tokens, heads, width))
    lse_HT = torch.empty((heads, tokens), dtype=torch.float32, device=query_THW.device)
    _pack_kernel[len(tile_I5), heads](
        query_THW, key_TJW, value_TJW, tile_I5, seen_THW, lse_HT, _scale(width), tokens, *strides,
        H=heads, QUERIES=heads // groups, W=width,
        BLOCK_Q=shape.rows, BLOCK_U=shape.keys, BLOCK_W=_block_width(width),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return seen_THW, lse_HT


def merge(
    seen_THW: Tensor, lse_HT: Tensor, other_THW: Tensor, other_HT: Tensor, behind_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attentions over two sets of keys into one; the second counts where `behind_T`."""
    tokens, heads, width = seen_THW.shape
    merged_THW, merged_HT = torch.empty_like(seen_THW), torch.empty_like(lse_HT)
    block = triton.next_power_of_2(width)
    size = max(1, 4096 // block)
    _merge_kernel[(triton.cdiv(tokens * heads, size),)](
        seen_THW, lse_HT, other_THW, other_HT, behind_T, merged_THW, merged_HT,
        tokens * heads, tokens, H=heads, W=width, BLOCK_R=size, BLOCK_W=block, num_warps=4,
    )  # fmt: skip
    return merged_THW, merged_HT


def _scale(width: int) -> float:
    """Return the scale of scores whose exponentials are powers of 2."""
    return log2(e) / sqrt(width)


def _block_width(width: int) -> int:
    return max(16, triton.next_power_of_2(width))  # 16: the least that a dot product takes


def _alignment(width: int) -> int:
    """Return the largest power of 2 that divides the width, and so every stride of a cache."""
    return width & -width


def _row_strides(*tensors: Tensor) -> list[int]:
    for x in tensors:
        if x.stride()[1:] != (x.shape[2], 1):
            raise ModelError(
                f"Heads of {x.shape[2]} numbers have strides {x.stride()[1:]}; they must lie one "
                f"behind the other. Make queries, keys and values contiguous within a token."
            )
    return [x.stride(0) for x in tensors]
