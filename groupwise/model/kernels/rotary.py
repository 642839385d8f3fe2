"""Rotary embeddings on the joined projection of queries, keys and values.

Forward, one reading turns [T, (H + 2J)·W] into rotated queries and keys and plain values, each on
its own; backward, one reading puts their gradients together again, rotated the other way. The
arithmetic is in float32 with one rounding at the end. A program takes some heads of one token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2048  # numbers that a program holds: its heads times their width
PER_WARP = 1024


def split_rotate(
    qkv_TF: Tensor, cos_TK: Tensor, sin_TK: Tensor, heads: int, kv_heads: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Turn queries [T, H, W] and keys [T, J, W] by their angles; split off values [T, J, W].

    cos and sin are float32, one number for each pair (i, i + W/2) of a head.
    """
    query_THW, key_TJW, value_TJW = _SplitRotate.apply(
        qkv_TF, cos_TK, sin_TK, heads, kv_heads, width
    )
    return query_THW, key_TJW, value_TJW


def rotate(x_THW: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turn heads that are split already, because they were normalised first."""
    _, heads, width = x_THW.shape
    return split_rotate(x_THW.flatten(1), cos_TK, sin_TK, heads, 0, width)[0]


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_TF: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        heads: int,
        kv_heads: int,
        width: int,
    ) -> tuple[Tensor, ...]:
        counts = (heads, kv_heads, kv_heads)
        out = tuple(qkv_TF.new_empty(len(qkv_TF), count, width) for count in counts)
        _launch(qkv_TF.contiguous(), out, cos_TK, sin_TK, backward=False)
        ctx.save_for_backward(cos_TK, sin_TK)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        parts = tuple(grad.contiguous() for grad in grads)
        width = sum(part.shape[1] * part.shape[2] for part in parts)
        grad_TF = parts[0].new_empty(len(parts[0]), width)
        _launch(grad_TF, parts, *ctx.saved_tensors, backward=True)
        return grad_TF, None, None, None, None, None


def _launch(
    joined_TF: Tensor,
    parts: tuple[Tensor, ...],
    cos_TK: Tensor,
    sin_TK: Tensor,
    *,
    backward: bool,
) -> None:
    """Launch blocks of heads that follow from their number and width: the same for any tokens."""
    tokens, heads, width = parts[0].shape
    kv_heads = parts[1].shape[1]
    total = heads + 2 * kv_heads
    half = triton.next_power_of_2(width // 2)
    block = min(triton.next_power_of_2(total), max(1, TILE // (2 * half)))
    blocks = triton.cdiv(total, block)
    _rotary_kernel[(tokens * blocks,)](
        joined_TF,
        *parts,
        cos_TK.contiguous(),
        sin_TK.contiguous(),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=width // 2,
        BLOCK=block,
        BLOCKS=blocks,
        HALF_BLOCK=half,
        BACKWARD=backward,
        num_warps=max(1, block * 2 * half // PER_WARP),
    )


@triton.jit
def _rotary_kernel(
    joined_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    token, head = program // BLOCKS, (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    key, value = head - HEADS, head - HEADS - KV_HEADS
    joined = joined_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    query = query_ptr + (token * HEADS + head) * (2 * HALF)
    split = tl.where(value < 0, key_ptr, value_ptr) + (
        token * KV_HEADS + tl.where(value < 0, key, value)
    ) * (2 * HALF)
    split = tl.where(key < 0, query, split)

    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0)[None, :]
    if BACKWARD:
        source, target, sin = split, joined, -sin
    else:
        source, target = joined, split
    source, target = source[:, None] + pair[None, :], target[:, None] + pair[None, :]
    inside = (value < KV_HEADS)[:, None] & (pair < HALF)[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    turns = (value < 0)[:, None]
    tl.store(target, tl.where(turns, first * cos - second * sin, first), mask=inside)
    tl.store(target + HALF, tl.where(turns, second * cos + first * sin, second), mask=inside)
