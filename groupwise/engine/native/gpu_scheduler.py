"""The scheduler of samples on a GPU: the host's side of the decoder.

Every `CHECK_EVERY` steps the host takes out what has ended, lets waiting samples in, and goes on
with the captured step of the next smaller batch size when enough have left. While the device runs
the next steps, it hands in what it took out. Everything goes by counts, nothing by the clock. A
group's prompt is computed and stored once, apart from the completions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.native.decoder import Decoder
from groupwise.engine.native.scheduler import FinishedGroups, finished_groups
from groupwise.engine.protocol import Finish, Request, Sampling, not_finite
from groupwise.engine.randomness import key
from groupwise.engine.stopping import StopWatch, watch_of
from groupwise.errors import EngineError
from groupwise.model.config import ModelConfig
from groupwise.model.cost import activations, kept_numbers
from groupwise.model.kernels.attention import cache_layout
from groupwise.model.kernels.record import ENDED, RUNNING
from groupwise.model.layers.attention import Attend
from groupwise.model.layers.attention_rule import PLAIN, AttentionRule
from groupwise.model.layers.cache import KeyValueCache
from groupwise.model.layers.routes import RECORDED, Routes
from groupwise.records import Completion

CHECK_EVERY = 8  # steps between two looks of the host
PROMPT_TOKENS = 16_384  # of the prompts that are computed in one pass, unless one is longer
SPARE = 2**30  # bytes that stay free for what a step computes in between


@dataclass(frozen=True)
class StoredPrompts:
    """Attention within packed prompts, whose keys and values go to the cache."""

    within: Attend
    cache: KeyValueCache
    slot_T: Tensor
    position_T: Tensor

    def __call__(
        self,
        layer: int,
        query_THW: Tensor,
        key_TJW: Tensor,
        value_TJW: Tensor,
        rule: AttentionRule = PLAIN,
    ) -> Tensor:
        self.cache.key_LSJUW[layer][self.slot_T, :, self.position_T] = key_TJW
        self.cache.value_LSJUW[layer][self.slot_T, :, self.position_T] = value_TJW
        return self.within(layer, query_THW, key_TJW, value_TJW, rule)


@dataclass
class GpuSample:
    """A completion in the making, as the host sees it."""

    request: int
    number: int  # within the group
    prompt: int  # slot of the prompts' cache
    key: tuple[int, ...]
    watch: StopWatch | None


@dataclass
class EndedSamples:
    """Samples that have ended, on their way to the host."""

    samples: list[GpuSample]
    lengths: list[int]
    reasons: list[Finish]
    token_NT: Tensor
    logp_NT: Tensor
    route_NTLK: Tensor | None  # experts, where asked for
    arrived: torch.cuda.Event | None


class GpuScheduler:
    """One batch of requests: who is waiting, who runs in which slot, and the caches."""

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int,
        weights: str,
    ) -> None:
        self.decoder, self.requests, self.sampling = decoder, requests, sampling
        self.written, self.tokens = 0, 0  # completions that have ended, and tokens of all
        self.ended_tokens = 0  # of those that have ended
        self.version, self.weights = version, weights
        self.device = decoder.device
        config = decoder.model.config
        wanted = min(decoder.slots, sum(request.samples for request in requests))
        self.slots, self.cache, self.prompts = make_caches(
            config,
            wanted,
            sampling.max_tokens,
            [len(request.prompt) for request in requests],
            decoder.model.head_weight,
            route_bytes(config) if sampling.record_routes else 0,
        )
        self.state = decoder.ready(self.slots, sampling.max_tokens, sampling.record_routes)
        self.prompt_routes: dict[int, Tensor] = {}  # by request, where asked for
        self._tell_device()
        self.free = list(range(1, self.slots + 1))
        self.free_prompts = list(range(self.prompts.slots))
        self.running: dict[int, GpuSample] = {}  # by slot
        self.nearest = sampling.max_tokens  # tokens until one of them is as long as it may be
        self.waiting = deque(range(len(requests)))
        self.ready: deque[GpuSample] = deque()  # their prompts are computed
        self.last_PD = decoder.model.head_weight.new_zeros(
            self.prompts.slots, config.hidden_size
        )  # hidden states behind the prompts
        self.ended: EndedSamples | None = None
        self.left = [request.samples for request in requests]
        self.done: list[list[Completion | None]] = [[None] * r.samples for r in requests]

    @torch.no_grad()
    def run(self) -> Iterator[FinishedGroups]:
        """Sample, and yield after every few steps the groups that have become whole."""
        self._admit()
        while self.running:
            self.decoder.advance(len(self.running), self._steps(), self.sampling.temperature)
            yield self._hand_in()  # while the device is at work
            self._check_ended()
            self._admit()
        yield self._hand_in()

    def _tell_device(self) -> None:
        state, own, prompts = self.state, self.cache, self.prompts
        caches = (own.key_LSJUW, own.value_LSJUW, prompts.key_LSJUW, prompts.value_LSJUW)
        state.layout.copy_(cache_layout(*caches))
        state.limit.fill_(self.sampling.max_tokens)
        state.least.fill_(self.requests[0].least(self.sampling))  # that of all

    def _steps(self) -> int:
        """Return the steps until the next look: no more than anybody has left."""
        return min(CHECK_EVERY, self.nearest)

    def _admit(self) -> None:
        """Waiting samples into free slots; then the rows are those that run."""
        new: list[tuple[int, GpuSample]] = []
        while self.free and (self.ready or self.waiting):
            if not self.ready:
                self._compute_prompts()
            sample = self.ready.popleft()
            slot = heapq.heappop(self.free)
            self.running[slot] = sample
            new.append((slot, sample))
        if new:
            self._enter(new)
        self._set_rows()

    def _enter(self, new: Sequence[tuple[int, GpuSample]]) -> None:
        state = self.state
        words = [
            [slot, sample.prompt, len(self.requests[sample.request].prompt), *sample.key]
            for slot, sample in new
        ]
        table_NK = torch.tensor(words, device=self.device)
        slot_N, prompt_N = table_NK[:, 0], table_NK[:, 1]
        state.prompt_S[slot_N] = prompt_N.int()
        state.prompt_length_S[slot_N] = table_NK[:, 2].int()
        state.key_S4[slot_N] = table_NK[:, 3:]
        state.count_S[slot_N] = 0
        state.finish_S[slot_N] = RUNNING
        state.hidden_SD[slot_N] = self.last_PD[prompt_N]
        self.nearest = min(self.nearest, *(self._left(slot, 0) for slot, _ in new))

    def _set_rows(self) -> None:
        """Put rows of one prompt side by side, where they can read it together."""
        if not self.running:
            return
        rows = sorted(self.running, key=lambda slot: (self.running[slot].prompt, slot))
        samples = [self.running[slot] for slot in rows]
        self.decoder.set_rows(
            rows, [(s.prompt, len(self.requests[s.request].prompt)) for s in samples]
        )

    def _compute_prompts(self) -> None:
        """Compute the prompts of as many groups as the free slots can begin with."""
        room, number = PROMPT_TOKENS, 0
        indices: list[int] = []
        while self.waiting and number < len(self.free) and self.free_prompts:
            request = self.requests[self.waiting[0]]
            if indices and len(request.prompt) > room:
                break
            indices.append(self.waiting.popleft())
            room -= len(request.prompt)
            number += request.samples
        slots = [self.free_prompts.pop() for _ in indices]
        lengths = [len(self.requests[index].prompt) for index in indices]
        token_T = torch.tensor([t for index in indices for t in self.requests[index].prompt])
        position_T = torch.cat([torch.arange(n) for n in lengths])
        slot_T = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths))
        token_T, position_T, slot_T = torch.stack((token_T, position_T, slot_T)).to(self.device)
        model = self.decoder.model
        within = model.ops.attention(lengths, [[] for _ in lengths], self.device)
        attend = StoredPrompts(within, self.prompts, slot_T, position_T)
        routes = Routes() if self.sampling.record_routes else None
        hidden_TD = model(token_T, position_T, attend, routes=routes)
        if routes is not None and routes.chosen_TLK is not None:
            parts = torch.split(routes.chosen_TLK.cpu(), lengths)
            self.prompt_routes |= zip(indices, parts, strict=True)
        last_P = torch.tensor(lengths).cumsum(0) - 1
        self.last_PD[torch.tensor(slots, device=self.device)] = hidden_TD[last_P.to(self.device)]
        for index, slot in zip(indices, slots, strict=True):
            self.ready.extend(self._group(index, slot))

    def _group(self, index: int, prompt: int) -> list[GpuSample]:
        request, stop = self.requests[index], self.sampling.stop
        named = (self.decoder.seed, request.stream, request.prompt_id, request.draw)
        return [
            GpuSample(
                index,
                number,
                prompt,
                key(*named, number),
                watch_of(self.decoder.tokenizer, stop, request.begun_ids),
            )
            for number in range(request.samples)
        ]

    def _check_ended(self) -> None:
        """Take out what has ended. The only time that the host waits for the device."""
        finish, count = torch.stack((self.state.finish_S, self.state.count_S)).tolist()
        ended = {slot: count[slot] for slot in self.running if finish[slot] != RUNNING}
        reasons: dict[int, Finish] = {
            slot: "eos" if finish[slot] == ENDED else "length" for slot in ended
        }
        for slot in self.running:
            if slot not in ended and not self._left(slot, count[slot]):  # the device has one limit
                ended[slot], reasons[slot] = count[slot], "length"
        if self.sampling.stop:
            for slot, length in self._stopped(count).items():
                ended[slot], reasons[slot] = length, "stop"
        if ended:
            self._take_out(ended, reasons)
        self.written, self.ended_tokens = (
            self.written + len(ended),
            self.ended_tokens + sum(ended.values()),
        )
        self.tokens = self.ended_tokens + sum(count[slot] for slot in self.running)
        left = [self._left(slot, count[slot]) for slot in self.running]
        self.nearest = min(left, default=self.sampling.max_tokens)

    def _request(self, slot: int) -> Request:
        return self.requests[self.running[slot].request]

    def _left(self, slot: int, written: int) -> int:
        """Return how many tokens a running sample may still get."""
        return self._request(slot).most(self.sampling) - written

    def _take_out(self, ended: dict[int, int], reasons: dict[int, Finish]) -> None:
        """Free the slots and send for what they wrote; it is read by `_hand_in`."""
        index_N = torch.tensor(list(ended), device=self.device)
        width = max(ended.values())
        token_NT, logp_NT = (
            self.state.token_ST[index_N, :width],
            self.state.logp_ST[index_N, :width],
        )
        kept_STLK = self.state.route_STLK
        route_NTLK = None if kept_STLK is None else kept_STLK[index_N, : width - 1]
        arrived = None
        if self.device.type == "cuda":
            token_NT, logp_NT = _to_host(token_NT), _to_host(logp_NT)
            route_NTLK = None if route_NTLK is None else _to_host(route_NTLK)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        samples = [self.running.pop(slot) for slot in ended]
        lengths, why = list(ended.values()), [reasons[slot] for slot in ended]
        self.ended = EndedSamples(samples, lengths, why, token_NT, logp_NT, route_NTLK, arrived)
        for slot, sample in zip(ended, samples, strict=True):
            heapq.heappush(self.free, slot)
            self.left[sample.request] -= 1
            if not self.left[sample.request]:
                self.free_prompts.append(sample.prompt)

    def _hand_in(self) -> FinishedGroups:
        """Make completions of what was taken out at the last look; return groups that are whole."""
        if self.ended is None:
            return []
        ended, self.ended = self.ended, None
        if ended.arrived is not None:
            ended.arrived.synchronize()
        unwritten_NT = torch.arange(ended.token_NT.shape[1]) >= torch.tensor(ended.lengths)[:, None]
        sound_NT = ended.logp_NT.isfinite() | unwritten_NT
        if not bool(sound_NT.all()):
            row = int(sound_NT.all(1).int().argmin())
            request = self.requests[ended.samples[row].request]
            position = int(sound_NT[row].int().argmin())
            raise EngineError(not_finite(request, position, self.version))
        rows = zip(
            ended.samples,
            ended.lengths,
            ended.reasons,
            ended.token_NT.tolist(),
            ended.logp_NT,
            strict=True,
        )
        for row, (sample, length, reason, tokens, logp_T) in enumerate(rows):
            self.done[sample.request][sample.number] = Completion(
                token_ids=tuple(tokens[:length]),
                logp_T=logp_T[:length].clone(),
                finish=reason,
                version=self.version,
                weights=self.weights,
                routes_TLK=self._routes(ended, row),
            )
        return finished_groups(self.done, [sample.request for sample in ended.samples])

    def _routes(self, ended: EndedSamples, row: int) -> Tensor | None:
        """Return the experts of the tokens that were read, the prompt's first: all but the last."""
        if ended.route_NTLK is None:
            return None
        own_TLK = ended.route_NTLK[row, : ended.lengths[row] - 1]
        return torch.cat((self.prompt_routes[ended.samples[row].request], own_TLK))

    def _stopped(self, count: Sequence[int]) -> dict[int, int]:
        """Find slots whose text holds a stop string, and how many tokens they have then."""
        found: dict[int, int] = {}
        slots = list(self.running)
        token_NT = self.state.token_ST[torch.tensor(slots, device=self.device)].cpu()
        for slot, token_T in zip(slots, token_NT, strict=True):
            watch, request = self.running[slot].watch, self._request(slot)
            assert watch is not None
            for at in range(len(watch.ids) - request.begun, count[slot]):
                token = int(token_T[at])
                if token in self.decoder.tokenizer.eos_ids:
                    break
                if watch.push(token) and at + 1 >= request.least(self.sampling):
                    found[slot] = at + 1
                    break
        return found


def _to_host(x: Tensor) -> Tensor:
    """Send a tensor to the host's memory without waiting for it."""
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)


def route_bytes(config: ModelConfig) -> int:
    """Count the bytes that a token's experts are recorded in."""
    chosen = 0 if config.experts is None else config.experts.chosen
    return config.num_layers * chosen * RECORDED.itemsize


def make_caches(
    config: ModelConfig,
    slots: int,
    length: int,
    prompts: Sequence[int],
    like: Tensor,
    beside: int = 0,
) -> tuple[int, KeyValueCache, KeyValueCache]:
    """Make caches for as many slots as fit, at most those wanted, and one for rows that fill up.

    `beside` are the bytes that will be recorded of each token of a slot.
    """
    longest, width = max(prompts), like.element_size()
    per_token = kept_numbers(config) * width
    # What a pass over prompts computes: of a layer at a time, and as much again on the way to it.
    layer = activations(config, width) // (config.num_layers + 1)
    spare = SPARE + 2 * layer * min(sum(prompts), max(PROMPT_TOKENS, longest))
    while True:
        groups = min(len(prompts), slots)
        needed = per_token * ((slots + 1) * length + groups * longest)
        needed += beside * (slots + 1) * length
        if needed + spare <= free_bytes(like.device):
            try:
                own = KeyValueCache(config, slots + 1, length, like.dtype, like.device)
                shared = KeyValueCache(config, groups, longest, like.dtype, like.device)
                return slots, own, shared
            except torch.cuda.OutOfMemoryError:  # what is free may lie in pieces
                pass
        if slots == 1:
            raise EngineError(
                f"One sequence of {longest} prompt tokens and {length} more needs "
                f"{needed / 2**30:.1f} GiB of keys and values, and {spare / 2**30:.1f} GiB to "
                f"compute in; "
                f"{free_bytes(like.device) / 2**30:.1f} GiB are free on {like.device}. Lower "
                "engine.max_tokens or data.max_prompt_tokens, or take a smaller model."
            )
        slots //= 2


def free_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch could still hand out."""
    if device.type != "cuda":
        return 1 << 62
    free, whole = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * whole)
    return min(free, allowed - held) + held - torch.cuda.memory_allocated(device)
