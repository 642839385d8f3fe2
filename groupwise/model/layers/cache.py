"""Keys and values of past tokens, and attention functions that read them.

Each function is an `Attend` (attention.py). Axes: `_S` slot of the cache, `_N` row, `_Q` its query,
`_U` its key, else as in transformer.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import ModelConfig
from groupwise.model.layers.attention import KEY_STEP, PIECE, QUERY_STEP, up_to
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule, attention

NOTHING = -1e30  # below every log-sum-exp; unlike −inf, twice nothing makes no NaN


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
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.slot_T, :, self.position_T] = key_TJW
        value_SJUW[self.slot_T, :, self.position_T] = value_TJW
        parts, at = [], 0
        for slot, start, length in self.runs:
            end = min(up_to(start + length, KEY_STEP), self.cache.capacity)
            query_QHW = query_THW.new_zeros((end - start, *query_THW.shape[1:]))
            query_QHW[:length] = query_THW[at : at + length]
            mask_QU, window = None, end if rule.window is None else rule.window
            if start or window < end:
                mask_QU = torch.ones(end - start, end, dtype=torch.bool, device=query_THW.device)
                mask_QU = mask_QU.tril(start).triu(start - window + 1)
            seen_HQW = attention(
                query_QHW.transpose(0, 1)[None],
                key_SJUW[slot, :, :end][None],
                value_SJUW[slot, :, :end][None],
                rule,
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
        window = min(up_to(longest + 1, KEY_STEP), cache.capacity)
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
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        key_SJUW, value_SJUW = self.cache.key_LSJUW[layer], self.cache.value_LSJUW[layer]
        key_SJUW[self.row_N, :, self.position_N] = key_TJW
        value_SJUW[self.row_N, :, self.position_N] = value_TJW
        rows, heads, width = query_THW.shape
        groups = key_TJW.shape[1]
        queries = heads // groups
        if self.query_NJQW is None:
            shape = (rows, groups, up_to(queries, QUERY_STEP), width)
            self.query_NJQW = query_THW.new_zeros(shape)
        # The heads that share a key head pose as its queries: nothing is copied for them.
        self.query_NJQW[:, :, :queries] = query_THW.view(rows, groups, queries, width)
        key_NJUW, value_NJUW = key_SJUW[:rows], value_SJUW[:rows]
        if not rule.fused:
            return self._one_by_one(query_THW, key_NJUW, value_NJUW, rule)
        if len(self.pieces) == 1 or key_NJUW.shape[-1] != value_NJUW.shape[-1]:
            seen_NJQW = self._whole(self.query_NJQW, key_NJUW, value_NJUW, rule)
        else:
            seen_NJQW = self._in_pieces(self.query_NJQW, key_NJUW, value_NJUW, rule)
        return seen_NJQW[:, :, :queries].reshape(rows, heads, -1)

    def _mask(self, window: int | None) -> Tensor:
        """Return 0 where a key is seen, else −inf."""
        end = self.pieces[-1].stop
        if window is None or window >= end:
            return self.mask_N11U
        if window not in self.masks:
            past_NU = torch.arange(end, device=self.position_N.device) <= (
                self.position_N[:, None] - window
            )
            self.masks[window] = self.mask_N11U.masked_fill(past_NU[:, None, None], -torch.inf)
        return self.masks[window]

    def _whole(self, query_NJQW: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        end = self.pieces[-1].stop
        mask_N11U = self._mask(rule.window)
        return attention(query_NJQW, key[:, :, :end], value[:, :, :end], rule, mask=mask_N11U)

    def _one_by_one(
        self, query_THW: Tensor, key: Tensor, value: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Attend with every head by itself: a sink is a head's own."""
        end = self.pieces[-1].stop
        query_NH1W, mask_N11U = query_THW[:, :, None], self._mask(rule.window)
        seen_NH1W = attention(query_NH1W, key[:, :, :end], value[:, :, :end], rule, mask=mask_N11U)
        return seen_NH1W[:, :, 0]

    def _in_pieces(
        self, query_NJQW: Tensor, key_NJUW: Tensor, value_NJUW: Tensor, rule: AttentionRule
    ) -> Tensor:
        """Return Σ w·seen / Σ w over pieces, w = exp(log-sum-exp of their scores). Only on a CPU.

        Where a row has no key in a piece, w is exactly 0: longer neighbours change nothing.
        """
        given = (query_NJQW, key_NJUW, value_NJUW, rule)
        total_NJQW, level_NJQ = self._piece(*given, self.pieces[0])
        for piece in self.pieces[1:]:
            seen_NJQW, score_NJQ = self._piece(*given, piece)
            higher_NJQ = torch.logaddexp(level_NJQ, score_NJQ)
            old_NJQ, new_NJQ = (level_NJQ - higher_NJQ).exp(), (score_NJQ - higher_NJQ).exp()
            total_NJQW = total_NJQW * old_NJQ[..., None] + seen_NJQW * new_NJQ[..., None]
            level_NJQ = higher_NJQ
        return total_NJQW.to(query_NJQW.dtype)

    def _piece(
        self,
        query_NJQW: Tensor,
        key_NJUW: Tensor,
        value_NJUW: Tensor,
        rule: AttentionRule,
        piece: slice,
    ) -> tuple[Tensor, Tensor]:
        """Return what is seen within a piece, and the log-sum-exp of its scores, or NOTHING."""
        none_N = self.position_N < piece.start
        if rule.window is not None:
            none_N = none_N | (self.position_N - rule.window >= piece.stop - 1)
        mask_N11U = self._mask(rule.window)[..., piece]
        mask_N11U = mask_N11U.masked_fill(none_N[:, None, None, None], 0)
        # The kernel behind scaled_dot_product_attention, which does not hand out the second.
        seen_NJQW, score_NJQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_NJQW,
            key_NJUW[:, :, piece],
            value_NJUW[:, :, piece],
            attn_mask=mask_N11U,
            scale=rule.scale,
        )
        return seen_NJQW, score_NJQ.masked_fill(none_N[:, None, None], NOTHING)


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
