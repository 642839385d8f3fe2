"""Who looks at whom: attention functions for packs of sequences, shared prompts and a cache.

Each is an `Attend`: called once a layer with the queries, keys and values of the packed tokens.
The first two gather sequences of similar length into blocks and call PyTorch's fused attention on
each. Axes: `_N` row of a block, `_Q` its query, `_U` its key, `_S` slot of the cache, else as in
transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig

# Rows go into one block if their sizes fall into the same class; a block is padded to its longest.
# Classes grow by a third, so at most about a quarter of a block is padding.
SMALLEST_CLASS = 16  # tokens: below this, padding costs less than another call


# What makes a row of cached attention independent of its neighbours, to the last bit on a CPU.
KEY_STEP, QUERY_STEP = 16, 4


class Attend(Protocol):
    def __call__(self, layer: int, query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor) -> Tensor:
        """What each token sees, [T, H, W], for queries and keys that are rotated already."""
        ...


Span = tuple[int, int]  # where a sequence starts in the pack, and its length


@dataclass(frozen=True)
class Block:
    """Rows that are attended to in one call: indices into the pack."""

    query_NQ: Tensor
    real_NQ: Tensor  # False where a row is padded
    key_NU: Tensor
    mask_N1QU: Tensor | None  # None: causal, queries and keys are the same tokens

    def to(self, device: torch.device | str) -> Block:
        mask = None if self.mask_N1QU is None else self.mask_N1QU.to(device)
        query_NQ, key_NU = self.query_NQ.to(device), self.key_NU.to(device)
        return Block(query_NQ, self.real_NQ, key_NU, mask)


class BlockAttention:
    """Attention within blocks of gathered rows. Pure, so it can run again in a backward pass."""

    def __init__(self, blocks: Sequence[Block], take_T: Tensor) -> None:
        self.blocks = tuple(blocks)
        self.take_T = take_T  # where each token's result lies among the blocks' padded results

    def __call__(self, layer: int, query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor) -> Tensor:
        parts = []
        for block in self.blocks:
            seen_NHQW = F.scaled_dot_product_attention(
                _rows(query_THW, block.query_NQ),
                _rows(key_TJW, block.key_NU),
                _rows(value_TJW, block.key_NU),
                attn_mask=block.mask_N1QU,
                is_causal=block.mask_N1QU is None,
                enable_gqa=query_THW.shape[1] != key_TJW.shape[1],
            )
            parts.append(seen_NHQW.transpose(1, 2).flatten(0, 1))
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together.index_select(0, self.take_T)


def packed(lengths: Sequence[int], device: torch.device | str = "cpu") -> BlockAttention:
    """Causal attention within each of the sequences that lie one behind the other."""
    spans = list(zip(_starts(lengths), lengths, strict=True))
    return _assemble(_causal_blocks(spans), sum(lengths), device)


def shared_prompts(
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> BlockAttention:
    """Causal attention where the completions of a group see one copy of their prompt.

    The pack is: prompt of the first group, its completions, prompt of the second, and so on.
    """
    flat = [n for p, group in zip(prompts, completions, strict=True) for n in (p, *group)]
    starts = iter(_starts(flat))
    heads: list[Span] = []
    tails: list[tuple[Span, Span]] = []  # prompt, completion
    for p, group in zip(prompts, completions, strict=True):
        heads.append((next(starts), p))
        tails += [(heads[-1], (next(starts), n)) for n in group]
    blocks = _causal_blocks(heads)
    for rows in _similar([(p, n) for (_, p), (_, n) in tails]):
        blocks.append(_behind_prompts([tails[r] for r in rows]))
    return _assemble(blocks, sum(flat), device)


def packed_positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """0, 1, 2, ... within each sequence."""
    return torch.cat([torch.arange(n) for n in lengths]).to(device)


def shared_positions(
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Tensor:
    """As `packed_positions`; each completion goes on where its prompt ended."""
    parts = []
    for p, group in zip(prompts, completions, strict=True):
        parts.append(torch.arange(p))
        parts += [torch.arange(p, p + n) for n in group]
    return torch.cat(parts).to(device)


class KeyValueCache:
    """Keys and values of past tokens: a fixed number of slots, each of a fixed capacity."""

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.num_layers, slots, config.num_kv_heads, capacity, config.head_dim)
        # Zeros, not garbage: a masked key weighs nothing, but nothing times NaN is NaN.
        self.key_LSJUW = torch.zeros(shape, dtype=dtype, device=device)
        self.value_LSJUW = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        return self.key_LSJUW.shape[1]

    @property
    def capacity(self) -> int:
        return self.key_LSJUW.shape[3]

    def copy(
        self, source: int, targets: Sequence[int], length: int, origin: KeyValueCache | None = None
    ) -> None:
        """Give slots the first tokens of another slot, of this cache or of `origin`."""
        origin = origin or self
        for target in targets:
            self.key_LSJUW[:, target, :, :length] = origin.key_LSJUW[:, source, :, :length]
            self.value_LSJUW[:, target, :, :length] = origin.value_LSJUW[:, source, :, :length]


class CachedAttention:
    """New tokens of some slots look at themselves and at what their slots hold already.

    `starts` is how many tokens each slot holds, `lengths` how many come now; the pack has them in
    this order. One object serves one forward pass, in which the keys and values are written.
    """

    def __init__(
        self,
        cache: KeyValueCache,
        slots: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        _check_slots(cache, slots, starts, lengths)
        device = cache.key_LSJUW.device
        self.cache = cache
        self.runs = list(zip(slots, starts, lengths, strict=True))
        ends = [start + length for _, start, length in self.runs]
        self.position_T = torch.cat(
            [torch.arange(s, e) for s, e in zip(starts, ends, strict=True)]
        ).to(device)
        self.slot_T = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)
        self.fresh = packed(lengths, device) if not any(starts) else None

    def __call__(self, layer: int, query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.slot_T, :, self.position_T] = key_TJW
        value_SJUW[self.slot_T, :, self.position_T] = value_TJW
        if self.fresh is not None:
            return self.fresh(layer, query_THW, key_TJW, value_TJW)
        return self._several(query_THW, key_SJUW, value_SJUW)

    def _several(self, query_THW: Tensor, key_SJUW: Tensor, value_SJUW: Tensor) -> Tensor:
        parts, at = [], 0
        for slot, start, length in self.runs:
            end = start + length
            mask_QU = torch.ones(length, end, dtype=torch.bool, device=query_THW.device)
            seen_HQW = F.scaled_dot_product_attention(
                query_THW[at : at + length].transpose(0, 1)[None],
                key_SJUW[slot, :, :end][None],
                value_SJUW[slot, :, :end][None],
                attn_mask=mask_QU.tril(start),
                enable_gqa=True,
            )[0]
            parts.append(seen_HQW.transpose(0, 1))
            at += length
        return torch.cat(parts)


class DecodeAttention:
    """The next token of each of the cache's first slots looks at what its slot holds, and itself.

    `position_N` is how many tokens each slot holds; `longest` is the largest of them. One object
    serves one forward pass. A row's result is the same, to the last bit on a CPU, whatever the
    other rows hold and however many there are: keys are read up to a multiple of a vector's
    width, and a key head gets its queries in fours (fewer take other roads through the kernels).
    """

    def __init__(self, cache: KeyValueCache, position_N: Tensor, longest: int) -> None:
        if len(position_N) > cache.slots or longest >= cache.capacity:
            raise ModelError(
                f"{len(position_N)} slots of up to {longest} tokens get one more; the cache has "
                f"{cache.slots} slots of {cache.capacity} tokens. Make it larger."
            )
        self.cache = cache
        self.position_N = position_N
        self.row_N = torch.arange(len(position_N), device=position_N.device)
        self.window = min(_up_to(longest + 1, KEY_STEP), cache.capacity)
        key_U = torch.arange(self.window, device=position_N.device)
        self.mask_N11U = (key_U <= position_N[:, None])[:, None, None]

    def __call__(self, layer: int, query_THW: Tensor, key_TJW: Tensor, value_TJW: Tensor) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.row_N, :, self.position_N] = key_TJW
        value_SJUW[self.row_N, :, self.position_N] = value_TJW
        rows, heads, width = query_THW.shape
        # The heads that share a key head pose as its queries: nothing is copied for them.
        query_NJQW = query_THW.reshape(rows, key_SJUW.shape[1], -1, width)
        queries = query_NJQW.shape[2]
        if queries % QUERY_STEP:
            query_NJQW = F.pad(query_NJQW, (0, 0, 0, -queries % QUERY_STEP))
        seen_NJQW = F.scaled_dot_product_attention(
            query_NJQW,
            key_SJUW[:rows, :, : self.window],
            value_SJUW[:rows, :, : self.window],
            attn_mask=self.mask_N11U,
        )
        return seen_NJQW[:, :, :queries].reshape(rows, heads, width)


def _rows(x_THW: Tensor, index_NQ: Tensor) -> Tensor:
    rows = x_THW.index_select(0, index_NQ.flatten())
    return rows.view(*index_NQ.shape, *x_THW.shape[1:]).transpose(1, 2)


def _starts(lengths: Sequence[int]) -> list[int]:
    if not lengths or min(lengths) < 1:
        raise ModelError(
            f"Sequence lengths are {list(lengths)!r}; a pack needs at least one sequence and every "
            f"sequence at least one token. Drop the empty ones."
        )
    starts = [0]
    for n in lengths[:-1]:
        starts.append(starts[-1] + n)
    return starts


def _similar(sizes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Row numbers, grouped so that padding to the group's longest wastes little."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, size in enumerate(sizes):
        groups.setdefault(tuple(map(_size_class, size)), []).append(row)
    return list(groups.values())


def _size_class(size: int) -> int:
    number, bound = 0, SMALLEST_CLASS
    while size > bound:
        number, bound = number + 1, bound * 4 // 3
    return number


def _causal_blocks(spans: Sequence[Span]) -> list[Block]:
    blocks = []
    for rows in _similar([(n,) for _, n in spans]):
        # Padding repeats the last token. It lies to the right, where a causal query can't look.
        index_NQ, real_NQ = _indices([spans[r] for r in rows])
        blocks.append(Block(index_NQ, real_NQ, index_NQ, None))
    return blocks


def _behind_prompts(rows: Sequence[tuple[Span, Span]]) -> Block:
    prompt_NU, shown_NU = _indices([prompt for prompt, _ in rows])
    query_NQ, real_NQ = _indices([completion for _, completion in rows])
    width = query_NQ.shape[1]
    causal_QQ = torch.ones(width, width, dtype=torch.bool).tril()
    shown_NQU = shown_NU[:, None].expand(-1, width, -1)
    mask_NQU = torch.cat((shown_NQU, causal_QQ.expand(len(rows), -1, -1)), dim=2)
    return Block(query_NQ, real_NQ, torch.cat((prompt_NU, query_NQ), dim=1), mask_NQU[:, None])


def _indices(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Token numbers of the spans, padded with each span's last token, and what is no padding."""
    start_N1, length_N1 = torch.tensor(spans).T[:, :, None]
    at_Q = torch.arange(int(length_N1.max()))
    return start_N1 + torch.minimum(at_Q, length_N1 - 1), at_Q < length_N1


def _assemble(blocks: list[Block], tokens: int, device: torch.device | str) -> BlockAttention:
    index = torch.cat([block.query_NQ.flatten() for block in blocks])
    (real,) = torch.cat([block.real_NQ.flatten() for block in blocks]).nonzero(as_tuple=True)
    take_T = torch.empty(tokens, dtype=torch.long)
    take_T[index[real]] = real
    return BlockAttention([block.to(device) for block in blocks], take_T.to(device))


def _up_to(number: int, step: int) -> int:
    return -(-number // step) * step


def _check_slots(
    cache: KeyValueCache, slots: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> None:
    if (
        not slots
        or len(set(slots)) != len(slots)
        or not 0 <= min(slots) <= max(slots) < cache.slots
    ):
        raise ModelError(
            f"Slots {list(slots)!r} are not distinct slots of a cache that has {cache.slots}."
        )
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        if length < 1 or start < 0 or start + length > cache.capacity:
            raise ModelError(
                f"Slot {slot} holds {start} tokens and gets {length}; its capacity is "
                f"{cache.capacity}. Make the cache larger or the sequence shorter."
            )
