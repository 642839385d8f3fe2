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
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig
from groupwise.model.look import PLAIN, Look, attention

# Rows go into one block if their sizes fall into the same class; a block is padded to its longest.
# Classes grow by a third, so at most about a quarter of a block is padding.
SMALLEST_CLASS = 16  # tokens: below this, padding costs less than another call


# What gives a token the same bits on a CPU, alone or in company: keys are counted in whole vectors,
# a key head gets its queries in fours (fewer take other roads through the kernels), and the cache
# is read in pieces, because sums over more keys are split at a place that depends on their number.
# Packs pad alike, so that in sequences of up to PIECE tokens they agree with the cache to the bit.
KEY_STEP, QUERY_STEP, PIECE = 16, 4, 128
NOTHING = -1e30  # below every log-sum-exp; unlike −inf, twice nothing makes no NaN


class Attend(Protocol):
    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        look: Look = PLAIN,
    ) -> Tensor:
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
    before_N1: Tensor | None = None  # keys before the first query; None: 0

    def to(self, device: torch.device | str) -> Block:
        mask = None if self.mask_N1QU is None else self.mask_N1QU.to(device)
        before_N1 = None if self.before_N1 is None else self.before_N1.to(device)
        query_NQ, key_NU = self.query_NQ.to(device), self.key_NU.to(device)
        return Block(query_NQ, self.real_NQ, key_NU, mask, before_N1)

    def within(self, window: int | None) -> Tensor | None:
        """The mask where a token sees no more than so many; keys lie by position."""
        keys = self.key_NU.shape[1]
        if window is None or window >= keys:
            return self.mask_N1QU
        at_U = torch.arange(keys, device=self.key_NU.device)
        last_NQ = at_U[None, : self.query_NQ.shape[1]]
        if self.before_N1 is not None:  # padding must see something, too: nothing at all is NaN
            last_NQ = (self.before_N1 + last_NQ).clamp(max=keys - 1)
        behind_NQU = last_NQ[:, :, None] - at_U
        return ((behind_NQU >= 0) & (behind_NQU < window))[:, None]


class BlockAttention:
    """Attention within blocks of gathered rows. Pure, so it can run again in a backward pass."""

    def __init__(self, blocks: Sequence[Block], take_T: Tensor) -> None:
        self.blocks = tuple(blocks)
        self.take_T = take_T  # where each token's result lies among the blocks' padded results
        self.masks: dict[int | None, list[Tensor | None]] = {}  # of the blocks, by window

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        look: Look = PLAIN,
    ) -> Tensor:
        if look.window not in self.masks:
            self.masks[look.window] = [block.within(look.window) for block in self.blocks]
        parts = []
        for block, mask_N1QU in zip(self.blocks, self.masks[look.window], strict=True):
            seen_NHQW = attention(
                _rows(query_THW, block.query_NQ),
                _rows(key_TJW, block.key_NU),
                _rows(value_TJW, block.key_NU),
                look,
                mask=mask_N1QU,
                causal=mask_N1QU is None,
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
        shape = (config.num_layers, slots, config.num_kv_heads, capacity)
        # Zeros, not garbage: a masked key weighs nothing, but nothing times NaN is NaN.
        self.key_LSJUW = torch.zeros((*shape, config.head_dim), dtype=dtype, device=device)
        value_dim = config.value_dim or config.head_dim
        self.value_LSJUW = torch.zeros((*shape, value_dim), dtype=dtype, device=device)

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
    this order. One object serves one forward pass, in which the keys and values are written. Each
    slot is attended to by itself, so that its neighbours change no bit.
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
        spans = [torch.arange(start, start + length) for _, start, length in self.runs]
        self.position_T = torch.cat(spans).to(device)
        self.slot_T = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        look: Look = PLAIN,
    ) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.slot_T, :, self.position_T] = key_TJW
        value_SJUW[self.slot_T, :, self.position_T] = value_TJW
        parts, at = [], 0
        for slot, start, length in self.runs:
            end = min(_up_to(start + length, KEY_STEP), self.cache.capacity)
            query_QHW = query_THW.new_zeros((end - start, *query_THW.shape[1:]))
            query_QHW[:length] = query_THW[at : at + length]
            mask_QU, window = None, end if look.window is None else look.window
            if start or window < end:
                mask_QU = torch.ones(end - start, end, dtype=torch.bool, device=query_THW.device)
                mask_QU = mask_QU.tril(start).triu(start - window + 1)
            seen_HQW = attention(
                query_QHW.transpose(0, 1)[None],
                key_SJUW[slot, :, :end][None],
                value_SJUW[slot, :, :end][None],
                look,
                mask=mask_QU,
                causal=mask_QU is None,
            )[0]
            parts.append(seen_HQW.transpose(0, 1)[:length])
            at += length
        return torch.cat(parts)


class DecodeAttention:
    """The next token of each of the cache's first slots looks at what its slot holds, and itself.

    `position_N` is how many tokens each slot holds; `longest` is the largest of them. One object
    serves one forward pass. On a CPU a row's result has the same bits whatever the other rows hold
    and however many (at least 16) there are.
    """

    def __init__(self, cache: KeyValueCache, position_N: Tensor, longest: int) -> None:
        if len(position_N) > cache.slots or longest >= cache.capacity:
            raise ModelError(
                f"{len(position_N)} slots of up to {longest} tokens get one more; the cache has "
                f"{cache.slots} slots of {cache.capacity} tokens. Make it larger."
            )
        device = position_N.device
        self.cache = cache
        self.position_N = position_N
        self.row_N = torch.arange(len(position_N), device=device)
        window = min(_up_to(longest + 1, KEY_STEP), cache.capacity)
        size = PIECE if device.type == "cpu" else window
        self.pieces = [slice(at, min(at + size, window)) for at in range(0, window, size)]
        unseen_NU = torch.arange(window, device=device) > position_N[:, None]
        mask_NU = torch.zeros(unseen_NU.shape, dtype=cache.key_LSJUW.dtype, device=device)
        self.mask_N11U = mask_NU.masked_fill_(unseen_NU, -torch.inf)[:, None, None]
        self.masks: dict[int, Tensor] = {}  # the same, by window
        self.query_NJQW: Tensor | None = None  # made once, for all layers

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        look: Look = PLAIN,
    ) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.row_N, :, self.position_N] = key_TJW
        value_SJUW[self.row_N, :, self.position_N] = value_TJW
        rows, heads, width = query_THW.shape
        groups = key_TJW.shape[1]
        queries = heads // groups
        if self.query_NJQW is None:
            shape = (rows, groups, _up_to(queries, QUERY_STEP), width)
            self.query_NJQW = query_THW.new_zeros(shape)
        # The heads that share a key head pose as its queries: nothing is copied for them.
        self.query_NJQW[:, :, :queries] = query_THW.view(rows, groups, queries, width)
        key_NJUW, value_NJUW = key_SJUW[:rows], value_SJUW[:rows]
        if not look.fused:
            return self._one_by_one(query_THW, key_NJUW, value_NJUW, look)
        if len(self.pieces) == 1 or key_NJUW.shape[-1] != value_NJUW.shape[-1]:
            seen_NJQW = self._whole(self.query_NJQW, key_NJUW, value_NJUW, look)
        else:
            seen_NJQW = self._in_pieces(self.query_NJQW, key_NJUW, value_NJUW, look)
        return seen_NJQW[:, :, :queries].reshape(rows, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """0 where a key is seen, else −inf."""
        end = self.pieces[-1].stop
        if window is None or window >= end:
            return self.mask_N11U
        if window not in self.masks:
            past_NU = torch.arange(end, device=self.position_N.device) <= (
                self.position_N[:, None] - window
            )
            self.masks[window] = self.mask_N11U.masked_fill(past_NU[:, None, None], -torch.inf)
        return self.masks[window]

    def _whole(self, query_NJQW: Tensor, key: Tensor, value: Tensor, look: Look) -> Tensor:
        end = self.pieces[-1].stop
        mask_N11U = self._mask(look.window)
        return attention(query_NJQW, key[:, :, :end], value[:, :, :end], look, mask=mask_N11U)

    def _one_by_one(self, query_THW: Tensor, key: Tensor, value: Tensor, look: Look) -> Tensor:
        """Every head by itself: a sink is a head's own."""
        end = self.pieces[-1].stop
        query_NH1W, mask_N11U = query_THW[:, :, None], self._mask(look.window)
        seen_NH1W = attention(query_NH1W, key[:, :, :end], value[:, :, :end], look, mask=mask_N11U)
        return seen_NH1W[:, :, 0]

    def _in_pieces(
        self, query_NJQW: Tensor, key_NJUW: Tensor, value_NJUW: Tensor, look: Look
    ) -> Tensor:
        """Σ w·seen / Σ w over pieces, w = exp(log-sum-exp of the piece's scores). Only on a CPU.

        Where a row has no key in a piece, w is exactly 0: longer neighbours change nothing.
        """
        given = (query_NJQW, key_NJUW, value_NJUW, look)
        total_NJQW, level_NJQ = self._piece(*given, self.pieces[0])
        for piece in self.pieces[1:]:
            seen_NJQW, score_NJQ = self._piece(*given, piece)
            higher_NJQ = torch.logaddexp(level_NJQ, score_NJQ)
            old_NJQ, new_NJQ = (level_NJQ - higher_NJQ).exp(), (score_NJQ - higher_NJQ).exp()
            total_NJQW = total_NJQW * old_NJQ[..., None] + seen_NJQW * new_NJQ[..., None]
            level_NJQ = higher_NJQ
        return total_NJQW.to(query_NJQW.dtype)

    def _piece(
        self, query_NJQW: Tensor, key_NJUW: Tensor, value_NJUW: Tensor, look: Look, piece: slice
    ) -> tuple[Tensor, Tensor]:
        """What is seen within a piece, and the log-sum-exp of its scores: NOTHING if nothing is."""
        none_N = self.position_N < piece.start
        if look.window is not None:
            none_N = none_N | (self.position_N - look.window >= piece.stop - 1)
        mask_N11U = self._mask(look.window)[..., piece]
        mask_N11U = mask_N11U.masked_fill(none_N[:, None, None, None], 0)
        # The kernel behind scaled_dot_product_attention, which does not hand out the second.
        seen_NJQW, score_NJQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_NJQW,
            key_NJUW[:, :, piece],
            value_NJUW[:, :, piece],
            attn_mask=mask_N11U,
            scale=look.scale,
        )
        return seen_NJQW, score_NJQ.masked_fill(none_N[:, None, None], NOTHING)


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
    """Keys lie by position: the prompt's, then at once the completion's, then padding."""
    query_NQ, real_NQ = _indices([completion for _, completion in rows])
    (prompt_N1, before_N1), (start_N1, length_N1) = (
        torch.tensor(spans).T[:, :, None] for spans in zip(*rows, strict=True)
    )
    at_U = torch.arange(_up_to(int((before_N1 + length_N1).max()), KEY_STEP))
    behind_NU = torch.minimum(at_U - before_N1, length_N1 - 1)
    key_NU = torch.where(at_U < before_N1, prompt_N1 + at_U, start_N1 + behind_NU)
    last_NQ = before_N1 + torch.arange(query_NQ.shape[1])
    mask_N1QU = (at_U <= last_NQ[:, :, None])[:, None]
    return Block(query_NQ, real_NQ, key_NU, mask_N1QU, before_N1)


def _indices(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Token numbers of the spans, padded with each span's last token, and what is no padding."""
    start_N1, length_N1 = torch.tensor(spans).T[:, :, None]
    at_Q = torch.arange(_up_to(int(length_N1.max()), KEY_STEP))
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
