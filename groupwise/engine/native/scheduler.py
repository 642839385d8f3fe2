"""The scheduler of samples in plain PyTorch: who runs, and what one step of all computes.

Samples in flight fill the first slots of one cache. At each step all of them get a token, those
that end leave, the last ones move into the gaps, and waiting samples take the free slots at once.
A prompt is computed once for its whole group and copied into the slots.

On a CPU in float32 a completion is the same, to the last bit, whatever else is in flight: every
pass has a multiple of `ROW_STEP` rows, since matrix products and sums take other roads for a few
or for the last rows, and attention keeps sequences apart (see model/layers/cache.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from groupwise.engine.native.sampling import DrawnTokens, choose, padded_width
from groupwise.engine.protocol import Finish, Request, Sampling, not_finite
from groupwise.engine.randomness import key, normals, uniforms
from groupwise.engine.stopping import StopWatch, watch_of
from groupwise.errors import EngineError
from groupwise.model.layers.attention import KEY_STEP
from groupwise.model.layers.cache import CachedAttention, DecodeAttention, KeyValueCache
from groupwise.model.layers.head import logits, widened
from groupwise.model.layers.routes import Routes
from groupwise.model.layers.transformer import PolicyModel
from groupwise.records import Completion, VersionRun

if TYPE_CHECKING:
    from groupwise.engine.native.engine import NativeEngine

ROW_STEP = 16
FinishedGroups = list[tuple[int, list[Completion]]]  # numbers of requests, and their completions
PROMPT_TOKENS = 2048  # of the prompts that are computed in one pass, unless one is longer


@dataclass
class RunningSample:
    """A completion in the making."""

    request: int
    number: int  # within the group
    prompt: int  # the slot of the prompts' cache that its own is in
    uniform_T: list[float]
    noise_key: tuple[int, ...]
    held: int  # tokens of it in the cache: the prompt, later the completion but its last token
    watch: StopWatch | None
    # From which of its tokens on which weights write, and whether all that they read is theirs.
    marks: list[tuple[int, int, bool]]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    topk: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)  # experts of the tokens that were read


class Scheduler:
    """One batch of requests: the samples in flight, their cache, and who is waiting."""

    def __init__(
        self,
        engine: NativeEngine,
        requests: Sequence[Request],
        sampling: Sampling,
        places: int,  # slots, at most as many as there are samples
    ) -> None:
        self.engine, self.requests, self.sampling = engine, list(requests), sampling
        self.source = engine.source
        self.model: PolicyModel = engine.source.model
        config, head_VD = self.model.config, self.model.head_weight
        self.device = head_VD.device
        self.head_VD = widened(head_VD)  # weights do not change during the call
        self.temperature = sampling.temperature or 1.0
        self.places = places
        longest = max(len(request.prompt) for request in requests)
        self.together = max(1, min(self.places, len(requests), PROMPT_TOKENS // longest))
        self.cache = self._cache(round_up(places, ROW_STEP), self._most(requests))
        # One slot more, for the ballast that makes the rows of a pass whole steps.
        self.prompts = self._cache(self.together + 1, max(longest, ROW_STEP))
        self.prompt_routes: list[Tensor] = []  # of the prompts in that cache, where asked for
        self.last_PD = head_VD.new_zeros(0)  # hidden states behind the prompts in that cache
        self.begun: list[int] = []  # the requests whose prompts are in that cache
        self.hidden_SD = head_VD.new_zeros(self.cache.slots, config.hidden_size)
        self.scratch = self._scratch()
        self.running: list[RunningSample] = []
        self.ready: deque[RunningSample] = deque()  # their prompts are computed
        self.waiting = deque(range(len(requests)))
        self.done: list[list[Completion | None]] = [[None] * r.samples for r in requests]
        self.written, self.tokens = 0, 0  # completions, and tokens of all

    def _cache(self, slots: int, tokens: int) -> KeyValueCache:
        capacity = round_up(tokens, KEY_STEP)
        config, dtype = self.model.config, self.model.head_weight.dtype
        return KeyValueCache(config, slots, capacity, dtype, self.device)

    def _most(self, requests: Sequence[Request]) -> int:
        """Return the tokens that the longest sample of some requests may come to."""
        return max(len(request.prompt) + request.most(self.sampling) for request in requests)

    def _scratch(self) -> list[Tensor]:
        """Return room for the logits of all slots, twice."""
        wide = torch.float64 if self.head_VD.dtype == torch.float64 else torch.float32
        width = padded_width(self.model.config.vocab_size)
        numbers = self.cache.slots * width
        return [torch.empty(numbers, dtype=wide, device=self.device) for _ in range(2)]

    def add(self, requests: Sequence[Request], places: int) -> None:
        """Take further requests while others run, with so many slots for all, or as many as now.

        Caches grow where they must. No bit of a sample depends on their size.
        """
        self.waiting.extend(range(len(self.requests), len(self.requests) + len(requests)))
        self.requests += requests
        self.done += [[None] * request.samples for request in requests]
        self.places = max(self.places, places)
        rows = max(round_up(self.places, ROW_STEP), self.cache.slots)
        most = self._most(requests)
        if rows > self.cache.slots or most > self.cache.capacity:
            # With room for the next ones: whoever talks in turns comes back a little longer.
            self._grow(rows, max(most + most // 4, self.cache.capacity))
        longest = max(len(request.prompt) for request in requests)
        together = max(self.together, min(self.places, PROMPT_TOKENS // longest))
        if longest > self.prompts.capacity or together > self.together:
            self.together = together
            prompts = self._cache(together + 1, max(longest, self.prompts.capacity))
            for slot in range(len(self.last_PD)):  # those that wait in `ready` begin with them
                prompts.copy(slot, [slot], self.prompts.capacity, self.prompts)
            self.prompts = prompts

    def _grow(self, rows: int, tokens: int) -> None:
        """Move the samples in flight to larger caches."""
        cache = self._cache(rows, tokens)
        for slot, sample in enumerate(self.running):
            cache.copy(slot, [slot], sample.held, self.cache)
        hidden_SD = self.hidden_SD.new_zeros(rows, self.hidden_SD.shape[1])
        hidden_SD[: len(self.hidden_SD)] = self.hidden_SD
        self.cache, self.hidden_SD = cache, hidden_SD
        self.scratch = self._scratch()

    @torch.no_grad()
    def run(self) -> Iterator[FinishedGroups]:
        """Sample, and yield after every step the groups whose last completion it wrote."""
        self._admit()
        while self.running:
            yield finished_groups(self.done, self._retire(self._write(self._choose())))
            self._forward()
            self._admit()

    def _admit(self) -> None:
        """Waiting samples into the slots behind the running ones."""
        while len(self.running) < self.places and (self.ready or self.waiting):
            if not self.ready:
                self._compute_prompts()
            sample = self.ready.popleft()
            slot = len(self.running)
            self.cache.copy(sample.prompt, [slot], sample.held, self.prompts)
            self.hidden_SD[slot] = self.last_PD[sample.prompt]
            if self.prompt_routes:
                sample.routes.append(self.prompt_routes[sample.prompt])
            self.running.append(sample)

    def _compute_prompts(self) -> None:
        """Compute the prompts of as many groups as the free slots can begin with."""
        free, number = self.places - len(self.running), 0
        self.begun = []
        while self.waiting and number < free and len(self.begun) < self.together:
            index = self.waiting.popleft()
            self.ready.extend(self._group(index, len(self.begun)))
            self.begun.append(index)
            number += self.requests[index].samples
        self._read_prompts()

    def _read_prompts(self) -> None:
        """Compute the prompts of the groups that begin.

        That of a later turn is computed in the parts that it has grown by, but what is kept.
        """
        begun, kept = [self.requests[index] for index in self.begun], self.engine.kept
        held = [kept.give(request, self.prompts, slot) for slot, request in enumerate(begun)]
        ends = [
            [*(length for length in request.grown if length > there), len(request.prompt)]
            for request, there in zip(begun, held, strict=True)
        ]
        self.last_PD = self.hidden_SD.new_zeros(len(begun), self.hidden_SD.shape[1])
        while slots := [slot for slot, left in enumerate(ends) if left]:
            parts = [begun[slot].prompt[held[slot] : ends[slot][0]] for slot in slots]
            self.last_PD[slots] = self._read_parts(parts, slots, [held[slot] for slot in slots])
            for slot in slots:
                held[slot] = ends[slot].pop(0)
        for slot, request in enumerate(begun):
            kept.take(request, self.prompts, slot)

    def _read_parts(
        self, parts: Sequence[tuple[int, ...]], slots: Sequence[int], starts: Sequence[int]
    ) -> Tensor:
        """Compute parts of prompts behind what their slots hold; return their last states."""
        lengths = [len(part) for part in parts]
        self.engine.kept.read += sum(lengths)
        last_P = torch.tensor(lengths, device=self.device).cumsum(0) - 1
        routes = Routes() if self.sampling.record_routes else None
        last_PD = self._read(self.prompts, parts, routes, slots, starts)[last_P]
        if routes is not None and routes.chosen_TLK is not None:  # conversations record none
            read = routes.chosen_TLK[: sum(lengths)].cpu()
            self.prompt_routes = list(torch.split(read, lengths))
        return last_PD

    def _read(
        self,
        cache: KeyValueCache,
        texts: Sequence[tuple[int, ...]],
        routes: Routes | None = None,
        slots: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> Tensor:
        """Put texts through the model, into slots of a cache (the first ones, which hold nothing,
        unless others are named); the last slot is for ballast.
        """
        packed, lengths = list(texts), [len(text) for text in texts]
        slots = list(range(len(packed)) if slots is None else slots)
        starts = [0] * len(slots) if starts is None else list(starts)
        ballast = -sum(lengths) % ROW_STEP
        if ballast:
            packed.append((0,) * ballast)
            lengths.append(ballast)
            slots.append(cache.slots - 1)
            starts.append(0)
        attend = CachedAttention(cache, slots, starts, lengths)
        token_T = torch.tensor([token for text in packed for token in text]).to(self.device)
        return self.model(token_T, attend.position_T, attend, routes=routes)

    @torch.no_grad()
    def renew(self, *, keep: bool) -> None:
        """Go on with other weights, between two steps: they read anew what is written so far.

        With `keep` the caches stay, and what running samples write from here on is of no single
        policy. Samples that have not begun are the new weights' alone either way.
        """
        self.model, version = self.source.model, self.source.version
        self.head_VD = widened(self.model.head_weight)
        for sample in self.running:
            sample.marks.append((len(sample.tokens), version, not keep))
        for sample in self.ready:
            sample.marks = [(0, version, True)]
        if self.ready:
            self._read_prompts()
        if not keep:
            self._read_again()

    def _read_again(self) -> None:
        """Compute the caches of running samples anew: all that they hold but their last token."""
        head_VD, first = self.model.head_weight, 0
        while first < len(self.running):
            texts: list[tuple[int, ...]] = []
            for sample in self.running[first:]:
                text = (*self.requests[sample.request].prompt, *sample.tokens[:-1])
                if texts and sum(map(len, texts)) + len(text) > PROMPT_TOKENS:
                    break
                texts.append(text)
            room = round_up(max(ROW_STEP, *map(len, texts)), KEY_STEP)
            fresh = KeyValueCache(
                self.model.config, len(texts) + 1, room, head_VD.dtype, self.device
            )
            self._read(fresh, texts)
            for number, text in enumerate(texts):
                self.cache.copy(number, [first + number], len(text), fresh)
            first += len(texts)

    def _group(self, index: int, prompt: int) -> list[RunningSample]:
        request, stop = self.requests[index], self.sampling.stop
        named = (self.engine.seed, request.stream, request.prompt_id, request.draw)
        keys = [key(*named, number) for number in range(request.samples)]
        uniform_NT = uniforms(torch.tensor(keys), request.most(self.sampling)).tolist()
        return [
            RunningSample(
                request=index,
                number=number,
                prompt=prompt,
                uniform_T=uniform_T,
                noise_key=key(*named, number, purpose="noise"),
                held=len(request.prompt),
                watch=watch_of(self.engine.tokenizer, stop, request.begun_ids),
                marks=[(0, self.source.version, True)],
            )
            for number, uniform_T in enumerate(uniform_NT)
        ]

    def _forward(self) -> None:
        """Put every running sample's last token through the model. Rows behind only fill up."""
        if not self.running:
            return
        rows = round_up(len(self.running), ROW_STEP)
        ballast = [0] * (rows - len(self.running))
        tokens = [sample.tokens[-1] for sample in self.running] + ballast
        held = [sample.held for sample in self.running] + ballast
        token_N, position_N = torch.tensor([tokens, held], device=self.device)
        attend = DecodeAttention(self.cache, position_N, max(held))
        routes = Routes() if self.sampling.record_routes else None
        self.hidden_SD[:rows] = self.model(token_N, position_N, attend, routes=routes)
        for sample in self.running:
            sample.held += 1
        if routes is not None and routes.chosen_TLK is not None:
            chosen_TLK = routes.chosen_TLK.cpu()
            for row, sample in enumerate(self.running):
                sample.routes.append(chosen_TLK[row : row + 1])

    def _choose(self) -> DrawnTokens:
        rows = round_up(len(self.running), ROW_STEP)
        vocabulary = self.model.config.vocab_size
        logits_NV, work_NV = (self._buffer(numbers, rows) for numbers in self.scratch)
        real_NV = logits_NV[:, :vocabulary]
        logits_NV[:, vocabulary:] = -torch.inf
        logits(self.hidden_SD[:rows], self.head_VD, out=real_NV, rule=self.model.head_rule)
        if self.source.noise:
            real_NV[: len(self.running)] += self.source.noise * self._noise(vocabulary)
        if self.temperature != 1.0:
            real_NV.div_(self.temperature)
        uniform = [sample.uniform_T[len(sample.tokens)] for sample in self.running]
        uniform += [0.0] * (rows - len(self.running))
        uniform_N = torch.tensor(uniform, dtype=torch.float64, device=self.device)
        return choose(logits_NV, work_NV, uniform_N, self.sampling, self._banned())

    def _buffer(self, numbers: Tensor, rows: int) -> Tensor:
        """Return [N, V] in whole blocks. A CPU makes logits of few rows faster lying as [V, N]."""
        width = padded_width(self.model.config.vocab_size)
        flat = numbers[: rows * width]
        return flat.view(rows, width) if flat.is_cuda else flat.view(width, rows).t()

    def _noise(self, vocabulary: int) -> Tensor:
        keys = torch.tensor([sample.noise_key for sample in self.running], device=self.device)
        at = torch.tensor([len(sample.tokens) for sample in self.running], device=self.device)
        return normals(keys, at, vocabulary)

    def _banned(self) -> tuple[Tensor, Tensor] | None:
        """Find the rows that may not end yet, and the tokens that would end them."""
        if not self.sampling.min_tokens:
            return None
        rows = [
            row
            for row, sample in enumerate(self.running)
            if len(sample.tokens) < self.requests[sample.request].least(self.sampling)
        ]
        ends = torch.tensor(self.engine.tokenizer.eos_ids, dtype=torch.long, device=self.device)
        return torch.tensor(rows, dtype=torch.long, device=self.device), ends

    def _write(self, choice: DrawnTokens) -> list[tuple[int, Finish]]:
        """Append what was chosen; which slots have ended, and why."""
        ended: list[tuple[int, Finish]] = []
        self.tokens += len(self.running)
        tokens, logps = choice.token_N.tolist(), choice.logp_N.tolist()
        topk_id_NK, topk_logp_NK = choice.topk_id_NK, choice.topk_logp_NK
        for slot, sample in enumerate(self.running):
            if not math.isfinite(logps[slot]):
                request = self.requests[sample.request]
                raise EngineError(not_finite(request, len(sample.tokens), self.source.version))
            sample.tokens.append(tokens[slot])
            sample.logps.append(logps[slot])
            if topk_id_NK is not None and topk_logp_NK is not None:
                sample.topk.append((topk_id_NK[slot], topk_logp_NK[slot]))
            finish = self._finish(sample)
            if finish is not None:
                ended.append((slot, finish))
        return ended

    def _finish(self, sample: RunningSample) -> Finish | None:
        written, token = len(sample.tokens), sample.tokens[-1]
        request = self.requests[sample.request]
        if token in self.engine.tokenizer.eos_ids:
            return "eos"
        stopped = sample.watch is not None and sample.watch.push(token)
        if stopped and written >= request.least(self.sampling):
            return "stop"
        return "length" if written == request.most(self.sampling) else None

    def _retire(self, ended: Sequence[tuple[int, Finish]]) -> list[int]:
        """Hand in what has ended, last slot first, and close each gap with the last sample.

        Returns the requests that it belongs to.
        """
        requests = []
        for slot, finish in reversed(ended):
            sample, last = self.running[slot], self.running.pop()
            self.written += 1
            self.done[sample.request][sample.number] = self._completion(sample, finish)
            requests.append(sample.request)
            if last is not sample:
                self.cache.copy(len(self.running), [slot], last.held)
                self.running[slot] = last
        return requests

    def _completion(self, sample: RunningSample, finish: Finish) -> Completion:
        ids, logps = zip(*sample.topk, strict=True) if sample.topk else (None, None)
        runs = runs_of(sample.marks, len(sample.tokens))
        return Completion(
            token_ids=tuple(sample.tokens),
            logp_T=torch.tensor(sample.logps, dtype=torch.float32),
            finish=finish,
            version=runs[0].version,
            weights=self.engine.weights,
            runs=runs if len(runs) > 1 else (),
            topk_id_TK=None if ids is None else torch.stack(ids).cpu(),
            topk_logp_TK=None if logps is None else torch.stack(logps).cpu(),
            routes_TLK=torch.cat(sample.routes) if sample.routes else None,
        )


def runs_of(marks: Sequence[tuple[int, int, bool]], length: int) -> tuple[VersionRun, ...]:
    """Return which weights wrote which of so many tokens; some wrote none."""
    ends = [*(at for at, _, _ in marks[1:]), length]
    runs = [
        VersionRun(version, end - at, pure)
        for (at, version, pure), end in zip(marks, ends, strict=True)
    ]
    return tuple(run for run in runs if run.tokens)


def finished_groups(
    done: Sequence[Sequence[Completion | None]], written: Sequence[int]
) -> FinishedGroups:
    """Return those of some requests that lack no completion any more, in the order of the first."""
    found: FinishedGroups = []
    for request in dict.fromkeys(written):
        group = [completion for completion in done[request] if completion is not None]
        if len(group) == len(done[request]):
            found.append((request, group))
    return found


def round_up(number: int, step: int) -> int:
    """Round up to the next multiple."""
    return -(-number // step) * step
