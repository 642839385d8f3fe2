"""Decoding on a GPU: a whole step is one CUDA graph, and the bookkeeping is on the device.

A step samples a token for every row from the hidden state of the one before, notes it, and runs it
through the model. Rows are few words: each names a slot, where the sequence's keys, values, tokens
and counters lie. Who is in which slot is the host's business (see inflight.py). The caches live as
long as a call and their addresses are read from the device, so that captured steps outlive them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.kernels.attention import decode_attention
from groupwise.model.kernels.head import sample
from groupwise.model.kernels.prompts import prompt_attention, prompt_tiles
from groupwise.model.kernels.record import ENDED, record
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule, check_plain
from groupwise.model.layers.routes import RECORDED, Routes
from groupwise.model.layers.transformer import PolicyModel

MOST_ROWS = 1024  # in flight at a time, unless asked otherwise
PROGRAMS = 264  # of the attention kernel, at the least: two for each multiprocessor of an H200
MOST_SPLITS = 16
FILLING = 0  # the slot of rows that only fill up a batch
FILLING_PROMPT = (0, 1)  # its slot and length
# A group's prompt is read once for all its rows where a batch has so many rows, and prompts of so
# many tokens on average. Shorter prompts stay in the L2 cache, which serves every row in the time
# that one more kernel a layer takes to start; in smaller batches splits already spread them over an
# idle GPU. Groups must be worth it, too: for `ROWS_A_TILE` rows there is room for one tile, and
# where more are needed (of a group's rows, few are left), each row reads for itself.
PROMPT_ONCE_ROWS = 128
PROMPT_ONCE_TOKENS = 512
ROWS_A_TILE = 4


def bucket(rows: int) -> int:
    """Return the batch size of the captured step that serves so many rows: at most a third more."""
    for step, up_to in ((16, 64), (32, 128), (64, 512), (128, 1024), (256, 1 << 30)):
        if rows <= up_to:
            return -(-rows // step) * step
    raise AssertionError


def most_tiles(size: int) -> int:
    """Bound the tiles of rows that share prompts, in the captured step of this batch size."""
    return size // ROWS_A_TILE


class State:
    """The device's record of each slot. Slot 0 is for rows that only fill up a batch."""

    def __init__(self, slots: int, length: int, model: PolicyModel, routed: bool) -> None:
        self.slots, self.length, self.routed = slots, length, routed
        head_VD = model.head_weight
        device = head_VD.device

        def numbers(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        every = slots + 1
        self.slot_B = numbers(bucket(slots))
        self.tile_I4 = numbers(most_tiles(bucket(slots)), 4)
        self.prompt_once = False  # whether the tiles are those of the rows
        self.hidden_SD = torch.zeros(
            every, model.config.hidden_size, dtype=head_VD.dtype, device=device
        )
        self.key_S4 = numbers(every, 4, kind=torch.int64)
        self.prompt_S, self.prompt_length_S = numbers(every), numbers(every)
        self.count_S, self.own_S, self.finish_S = numbers(every), numbers(every), numbers(every)
        self.token_ST = numbers(every, length)
        self.logp_ST = numbers(every, length, kind=torch.float32)
        # Experts of each token that was read, where they are asked for.
        experts = model.config.experts
        self.route_STLK: Tensor | None = None
        if routed and experts is not None:
            every_route = (every, length, model.config.num_layers, experts.chosen)
            self.route_STLK = numbers(*every_route, kind=RECORDED)
        self.limit, self.least = numbers(1), numbers(1)
        # Where the caches lie, see kernels/attention.py.
        self.layout = numbers(10, kind=torch.int64)
        self.prompt_S[FILLING], self.prompt_length_S[FILLING] = FILLING_PROMPT
        self.finish_S[FILLING] = ENDED


@dataclass(frozen=True)
class CachedDecode:
    """Attention of one new token a row to its prompt and to what its slot holds."""

    state: State
    slot_B: Tensor
    tile_I4: Tensor | None  # rows that read their prompt together; None: each for itself
    splits: int
    exact: bool

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        check_plain(rule)
        state, first = self.state, None
        if self.tile_I4 is not None:
            heads = key_TJW.shape[1]
            first = prompt_attention(layer, query_THW, heads, self.tile_I4, state.layout)
        return decode_attention(
            layer,
            query_THW,
            key_TJW,
            value_TJW,
            self.slot_B,
            state.own_S,
            state.prompt_S,
            state.prompt_length_S,
            state.layout,
            self.splits,
            self.exact,
            first,
        )


class Decoder:
    """Serves one model; its buffers and captured steps last as long as it does."""

    def __init__(self, model: PolicyModel, tokenizer: Tokenizer, *, seed: int, slots: int) -> None:
        self.model, self.tokenizer, self.seed = model, tokenizer, seed
        self.slots = slots or MOST_ROWS
        self.exact = model.ops.name == "exact"
        self.device = model.head_weight.device
        self.end_K = torch.tensor(tokenizer.eos_ids, dtype=torch.int64, device=self.device)
        self.state: State | None = None
        self.graphs: dict[tuple[int, float, bool], torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self.captured_at = model.placement

    def ready(self, slots: int, length: int, routed: bool = False) -> State:
        """Make buffers for so many slots of so many tokens; captured steps belong to theirs.

        With `routed` they keep each token's experts too.
        """
        state = self.state
        moved = self.captured_at != self.model.placement
        fits = state is not None and state.slots >= slots and state.length >= length
        if state is None or not fits or state.routed != routed or moved:
            if state is not None:
                slots, length = max(slots, state.slots), max(length, state.length)
            self.state, self.graphs, self.pool = None, {}, None  # freed before the new ones
            self.state = state = State(slots, length, self.model, routed)
            self.captured_at = self.model.placement
        return state

    def _state(self) -> State:
        assert self.state is not None, "ready comes first"
        return self.state

    def set_rows(self, slots: Sequence[int], prompts: Sequence[tuple[int, int]]) -> None:
        """Set who is in which row from now on: a slot each, and its prompt's slot and length.

        Rows of one prompt are neighbours: they may read it together.
        """
        state, size = self._state(), bucket(len(slots))
        filling = size - len(slots)
        _overwrite(state.slot_B[:size], [*slots, *[FILLING] * filling])
        state.prompt_once = False
        tokens = sum(length for _, length in prompts)
        if (
            not self.exact
            and size >= PROMPT_ONCE_ROWS
            and tokens >= PROMPT_ONCE_TOKENS * len(slots)
        ):
            config, most = self.model.config, most_tiles(size)
            queries = config.num_heads // config.num_kv_heads
            tiles = prompt_tiles([*prompts, *[FILLING_PROMPT] * filling], queries)
            state.prompt_once = len(tiles) <= most
            if state.prompt_once:
                _overwrite(state.tile_I4[:most], tiles + [(0, 0, 0, 0)] * (most - len(tiles)))

    def advance(self, rows: int, steps: int, temperature: float) -> None:
        """Decode so many tokens for the first rows."""
        size = bucket(rows)
        if self.device.type != "cuda":  # no graphs there: the step as it is
            for _ in range(steps):
                self._step(self._state(), size, temperature)
            return
        which = (size, temperature, self._state().prompt_once)
        graph = self.graphs.get(which) or self._capture(size, temperature)
        for _ in range(steps):
            graph.replay()

    def _capture(self, size: int, temperature: float) -> torch.cuda.CUDAGraph:
        state = self._state()
        kept = state.slot_B[:size].clone()
        state.slot_B[:size] = FILLING  # a step that touches nobody
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the first run compiles kernels and makes workspaces
            self._step(state, size, temperature)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self._step(state, size, temperature)
        self.pool = self.pool or graph.pool()
        state.slot_B[:size] = kept
        self.graphs[size, temperature, state.prompt_once] = graph
        return graph

    def _step(self, state: State, size: int, temperature: float) -> None:
        """Sample, note, run through the model. A temperature of 0 takes the likeliest."""
        slot_B = state.slot_B[:size]
        count_B = state.count_S.index_select(0, slot_B)
        token_B, logp_B = sample(
            state.hidden_SD.index_select(0, slot_B),
            self.model.head_weight,
            state.key_S4.index_select(0, slot_B),
            count_B,
            1.0 / (temperature or 1.0),
            greedy=temperature == 0,
            end_K=self.end_K,
            may_end_B=count_B >= state.least,
        )
        record(
            token_B,
            logp_B,
            slot_B,
            self.end_K,
            state.limit,
            state.count_S,
            state.own_S,
            state.finish_S,
            state.token_ST,
            state.logp_ST,
        )
        position_B = state.own_S.index_select(0, slot_B)
        position_B = position_B + state.prompt_length_S.index_select(0, slot_B)
        tile_I4 = state.tile_I4[: most_tiles(size)] if state.prompt_once else None
        attend = CachedDecode(state, slot_B, tile_I4, self._splits(size), self.exact)
        routes = None if state.route_STLK is None else Routes()
        hidden_BD = self.model(token_B, position_B, attend, routes=routes)
        state.hidden_SD.index_copy_(0, slot_B.long(), hidden_BD)
        if routes is not None and routes.chosen_TLK is not None and state.route_STLK is not None:
            at_B = state.own_S.index_select(0, slot_B).long()
            state.route_STLK[slot_B.long(), at_B] = routes.chosen_TLK

    def _splits(self, rows: int) -> int:
        """Return the programs for each row and key head: several where rows are few."""
        splits = 1
        while not self.exact and splits < MOST_SPLITS:
            if rows * self.model.config.num_kv_heads * splits >= PROGRAMS:
                break
            splits *= 2
        return splits


def _overwrite(buffer: Tensor, numbers: Sequence[Any]) -> None:
    buffer.copy_(torch.tensor(numbers, dtype=buffer.dtype, device=buffer.device))
