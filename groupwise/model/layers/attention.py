"""Who looks at whom: attention functions for packs of sequences and of shared prompts.

Each is an `Attend`: called once a layer with the queries, keys and values of the packed tokens.
Sequences of similar length are gathered into blocks, with one call of PyTorch's fused attention
for each. Axes: `_N` row of a block, `_Q` its query, `_U` its key, else as in transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule, attention

# Rows go into one block if their sizes fall into the same class; a block is padded to its longest.
# Classes grow by a third, so at most about a quarter of a block is padding.
SMALLEST_CLASS = 16  # tokens: below this, padding costs less than another call


# What gives a token the same bits on a CPU, alone or in company: keys are counted in whole vectors,
# a key head gets its queries in fours (fewer take other roads through the kernels), and the cache
# is read in pieces, because sums over more keys are split at a place that depends on their number.
# Packs pad alike, so that in sequences of up to PIECE tokens they agree with the cache to the bit.
KEY_STEP, QUERY_STEP, PIECE = 16, 4, 128


class Attend(Protocol):
    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        """Return what each token sees, [T, H, W], for queries and keys that are rotated already."""
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
        """Return the mask where a token sees no more than so many; keys lie by position."""
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
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        if rule.window not in self.masks:
            self.masks[rule.window] = [block.within(rule.window) for block in self.blocks]
        parts = []
        for block, mask_N1QU in zip(self.blocks, self.masks[rule.window], strict=True):
            seen_NHQW = attention(
                _rows(query_THW, block.query_NQ),
                _rows(key_TJW, block.key_NU),
                _rows(value_TJW, block.key_NU),
                rule,
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
    """Return 0, 1, 2, ... within each sequence."""
    return torch.cat([torch.arange(n) for n in lengths]).to(device)


def shared_positions(
    prompts: Sequence[int],
    completions: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return `packed_positions`, each completion going on where its prompt ended."""
    parts = []
    for p, group in zip(prompts, completions, strict=True):
        parts.append(torch.arange(p))
        parts += [torch.arange(p, p + n) for n in group]
    return torch.cat(parts).to(device)


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
    """Make a block whose keys lie by position: prompt, completion, padding."""
    query_NQ, real_NQ = _indices([completion for _, completion in rows])
    (prompt_N1, before_N1), (start_N1, length_N1) = (
        torch.tensor(spans).T[:, :, None] for spans in zip(*rows, strict=True)
    )
    at_U = torch.arange(up_to(int((before_N1 + length_N1).max()), KEY_STEP))
    behind_NU = torch.minimum(at_U - before_N1, length_N1 - 1)
    key_NU = torch.where(at_U < before_N1, prompt_N1 + at_U, start_N1 + behind_NU)
    last_NQ = before_N1 + torch.arange(query_NQ.shape[1])
    mask_N1QU = (at_U <= last_NQ[:, :, None])[:, None]
    return Block(query_NQ, real_NQ, key_NU, mask_N1QU, before_N1)


def _indices(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Token numbers of the spans, padded with each span's last token, and what is no padding."""
    start_N1, length_N1 = torch.tensor(spans).T[:, :, None]
    at_Q = torch.arange(up_to(int(length_N1.max()), KEY_STEP))
    return start_N1 + torch.minimum(at_Q, length_N1 - 1), at_Q < length_N1


def _assemble(blocks: list[Block], tokens: int, device: torch.device | str) -> BlockAttention:
    index = torch.cat([block.query_NQ.flatten() for block in blocks])
    (real,) = torch.cat([block.real_NQ.flatten() for block in blocks]).nonzero(as_tuple=True)
    take_T = torch.empty(tokens, dtype=torch.long)
    take_T[index[real]] = real
    return BlockAttention([block.to(device) for block in blocks], take_T.to(device))


def up_to(number: int, step: int) -> int:
    return -(-number // step) * step
