"""A record of what a step sampled, kept on the device: the next step needs no host for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

RUNNING, ENDED, FULL = 0, 1, 2  # by an end token; by the limit of tokens


def record(
    token_B: Tensor,
    logp_B: Tensor,
    slot_B: Tensor,
    end_K: Tensor,
    limit: Tensor,
    count_S: Tensor,
    own_S: Tensor,
    finish_S: Tensor,
    token_ST: Tensor,
    logp_ST: Tensor,
) -> None:
    """Append tokens to the slots that are still running, and note which of them have ended.

    `count_S` is how many tokens a slot has, `own_S` the place of its last one; `limit` holds the
    most that a slot may have. Slots that ended before stay as they are.
    """
    _record[(len(token_B),)](
        token_B,
        logp_B,
        slot_B,
        end_K,
        limit,
        count_S,
        own_S,
        finish_S,
        token_ST,
        logp_ST,
        token_ST.shape[1],
        ENDS=len(end_K),
        num_warps=1,
    )


@triton.jit
def _record(
    token_B, logp_B, slot_B, end_K, limit, count_S, own_S, finish_S, token_ST, logp_ST, width,
    ENDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slot_B + row).to(tl.int64)
    if tl.load(finish_S + slot) == 0:
        token, count = tl.load(token_B + row), tl.load(count_S + slot)
        tl.store(token_ST + slot * width + count, token.to(tl.int32))
        tl.store(logp_ST + slot * width + count, tl.load(logp_B + row))
        tl.store(own_S + slot, count)
        tl.store(count_S + slot, count + 1)
        finish = tl.where(count + 1 >= tl.load(limit), 2, 0)
        for k in tl.static_range(ENDS):
            finish = tl.where(token == tl.load(end_K + k), 1, finish)
        tl.store(finish_S + slot, finish)


def record_plain(
    token_B: Tensor,
    logp_B: Tensor,
    slot_B: Tensor,
    end_K: Tensor,
    limit: Tensor,
    count_S: Tensor,
    own_S: Tensor,
    finish_S: Tensor,
    token_ST: Tensor,
    logp_ST: Tensor,
) -> None:
    """Do the same in PyTorch. Slots that several rows name must have ended already."""
    going = finish_S[slot_B] == RUNNING
    slot, token = slot_B[going].long(), token_B[going]
    count = count_S[slot]
    token_ST[slot, count.long()] = token.to(token_ST.dtype)
    logp_ST[slot, count.long()] = logp_B[going]
    own_S[slot] = count
    count_S[slot] = count + 1
    full = torch.where(count + 1 >= limit, FULL, RUNNING)
    ended = torch.isin(token, end_K)
    finish_S[slot] = torch.where(ended, ENDED, full).to(finish_S.dtype)
