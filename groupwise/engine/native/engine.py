"""The native engine: the learner's own forward pass, in captured steps on a GPU (decoder.py), else
in plain PyTorch (scheduler.py).

A call that runs out of memory starts again with fewer slots; one whose kernels fail, without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch

from groupwise import config
from groupwise.engine.backends import EngineSetup, Tell, warn
from groupwise.engine.native.copies import make_source
from groupwise.engine.native.kept import KeptPrompts
from groupwise.engine.native.scheduler import FinishedGroups, Scheduler
from groupwise.engine.protocol import (
    Capabilities,
    Engine,
    Request,
    Sampling,
    State,
    Sync,
    Ticket,
    WeightSource,
    Wrote,
)
from groupwise.errors import EngineError, in_short
from groupwise.model.config import ModelConfig
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.order import order
from groupwise.model.layers.transformer import PolicyModel
from groupwise.model.memory import is_out_of_memory
from groupwise.records import Completion

if TYPE_CHECKING:
    from groupwise.engine.native.decoder import Decoder
    from groupwise.engine.native.gpu_scheduler import GpuScheduler

CAPTURED = ("shared", "fp8")  # weights that new ones are written over
SLOTS = 64  # unless asked otherwise: more take more memory and are hardly faster on a CPU


@dataclass
class Batch:
    """Requests that were submitted together, and what is left of them."""

    sampling: Sampling
    left: dict[Ticket, Request]  # not answered yet
    written: int = 0  # completions of those that are
    tokens: int = 0  # of these completions


class NativeEngine(Engine):
    """Samples from the learner's parameters, or from a copy (see copies.py)."""

    source: WeightSource  # it can always be seen

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: Tokenizer,
        *,
        seed: int,
        slots: int,
        weights: str = "shared",
        version: int = 0,
        tell: Tell = warn,
        on_sync: Sync = "drain",
    ) -> None:
        if slots < 0:
            raise EngineError(f"engine.slots is {slots}; it must be 0 (as many as fit) or more.")
        self.capabilities = capabilities_with(weights)
        self.weights, self.seed, self.slots = weights, seed, slots
        self.tokenizer, self.tell, self.on_sync = tokenizer, tell, on_sync
        self.source = make_source(weights, model, version)
        self.decoder: Decoder | None = None  # made when it is first needed
        self.failed = False  # a kernel of the decoder
        self.told = False  # that it is not exact
        self.batches: list[Batch] = []  # the first of them in flight
        self.flight: Scheduler | GpuScheduler | None = None
        self.steps: Iterator[FinishedGroups] = iter(())  # of the flight
        self.names: list[Ticket] = []  # of the flight's requests
        self.before = (0, 0)  # completions and tokens of the batch, written by earlier tries
        self.tickets = count()
        self.kept = KeptPrompts(model.head_weight.device)

    @classmethod
    def made(cls, setup: EngineSetup) -> Engine:
        loaded, settings = setup.loaded, setup.settings
        if settings.servers:
            from groupwise.engine.native.process import ProcessEngine

            return ProcessEngine(setup)
        return cls(
            loaded.model,
            loaded.tokenizer,
            seed=setup.seed,
            slots=settings.slots,
            weights=settings.weights,
            tell=setup.tell,
            on_sync=setup.on_sync,
        )

    @classmethod
    def capabilities_for(cls, settings: config.EngineSettings) -> Capabilities:
        return capabilities_with(settings.weights, beside=settings.servers > 0)

    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        check_requests(self.source.model.config, requests, sampling)
        named = {next(self.tickets): request for request in requests}
        if not self._joined(named, sampling):
            self.batches.append(Batch(sampling, named))
        return list(named)

    def _joined(self, named: Mapping[Ticket, Request], sampling: Sampling) -> bool:
        """Let requests join those in flight, where they are sampled alike and nobody is before
        them."""
        if len(self.batches) != 1 or self.batches[0].sampling != sampling:
            return False
        if not isinstance(self.flight, Scheduler):
            return False
        self.batches[0].left |= named
        self.names += named
        self.flight.add(list(named.values()), self._places_for(self.batches[0]))
        self.places = max(self.places, self.flight.places)
        return True

    def _places_for(self, batch: Batch) -> int:
        """Return how many samples of what is left of a batch run at a time."""
        return min(self.slots or SLOTS, samples_of(list(batch.left.values())))

    def poll(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        """Sample one token more of all that are in flight."""
        return self.finished(wrote, pause=lambda: True)

    def finished(
        self, wrote: Wrote | None = None, pause: Callable[[], bool] | None = None
    ) -> list[tuple[Ticket, list[Completion]]]:
        """Sample until a group is whole; batches one after the other, in their order.

        `pause` is asked behind every step whether to come back early, perhaps with nothing.
        """
        if not self.batches:
            return []
        batch = self.batches[0]
        # Caches live as long as one try, and prompts that are kept until the next weights: a try
        # that failed leaves nothing behind.
        while True:
            captured = self._captured(batch)
            try:
                with order(fixed=False):  # nothing here depends on it, and captures go without it
                    found = self._advance(batch, captured, wrote, pause)
                break
            except Exception as error:
                self._land()
                self._recover(error, list(batch.left.values()), batch.sampling, captured)
            self._give_back()  # not before: the error holds on to all that was in memory
        if not batch.left:
            self.batches.remove(batch)
            self._land()
        return found

    def _advance(
        self,
        batch: Batch,
        captured: bool,
        wrote: Wrote | None,
        pause: Callable[[], bool] | None,
    ) -> list[tuple[Ticket, list[Completion]]]:
        """Go on with the flight, or begin it, until a group is whole or a step is done."""
        if self.flight is None:
            requests = list(batch.left.values())
            self.flight = (self._decode if captured else self._plain)(requests, batch.sampling)
            self.names = list(batch.left)
            self.before = (batch.written, batch.tokens)
            self.steps = self.flight.run()
        for whole in self.steps:
            if wrote is not None:
                written, tokens = self.before
                wrote(written + self.flight.written, tokens + self.flight.tokens)
            if whole:
                found = [(self.names[number], group) for number, group in whole]
                for ticket, group in found:
                    del batch.left[ticket]
                    batch.written += len(group)
                    batch.tokens += sum(len(each.token_ids) for each in group)
                return found
            if pause is not None and pause():
                return []
        raise AssertionError("a flight ended before its last group was whole")

    def _land(self) -> None:
        """Let go of the flight and its caches."""
        self.flight, self.steps = None, iter(())

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Start what is left of the batch in flight again; the completions will be the same."""
        for ticket in tickets:
            for batch in self.batches:
                if batch.left.pop(ticket, None) is not None and batch is self.batches[0]:
                    self._land()
        self.batches[:] = [batch for batch in self.batches if batch.left]

    def _captured(self, batch: Batch) -> bool:
        """Tell whether whole steps can run as CUDA graphs: from weights that stay where they lie,
        with kernels, drawing from the whole distribution, and with one least length for all.
        Everything else takes the plain way."""
        sampling, kernels = batch.sampling, self.source.model.ops.name
        if kernels == "plain" or self.weights not in CAPTURED or self.failed:
            return False
        if self.on_sync != "drain":
            return False  # captured steps know nothing of weights that come on the way
        whole = sampling.top_p == 1 and not sampling.top_k and not sampling.record_top_k
        if not whole and kernels == "exact" and not self.told:
            self.told = True
            self.tell(
                "engine",
                "not exact: top-p, top-k and recording the likeliest tokens take the plain "
                "sampler, whose log-probabilities differ from the learner's in their last bits.",
            )
        return whole and len({each.least(sampling) for each in batch.left.values()}) <= 1

    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> GpuScheduler:
        from groupwise.engine.native.decoder import Decoder  # needs Triton
        from groupwise.engine.native.gpu_scheduler import GpuScheduler

        model = self.source.model
        if self.decoder is None or self.decoder.model is not model:
            self.decoder = Decoder(model, self.tokenizer, seed=self.seed, slots=self.slots)
        self.places = min(self.decoder.slots, samples_of(requests))
        version = self.source.version
        flight = GpuScheduler(self.decoder, requests, sampling, version, self.weights)
        self.places = flight.slots
        return flight

    def _plain(self, requests: Sequence[Request], sampling: Sampling) -> Scheduler:
        self.places = min(self.slots or SLOTS, samples_of(requests))
        return Scheduler(self, requests, sampling, self.places)

    def _recover(
        self,
        error: Exception,
        requests: Sequence[Request],
        sampling: Sampling,
        captured: bool,
    ) -> None:
        """Fewer slots where memory ran out, the plain way where a kernel failed; else it goes on.

        What it decides is for all calls to come.
        """
        if isinstance(error, EngineError):
            raise error
        if ran_out_of_memory(error):
            if self.places == 1:
                longest = max(len(request.prompt) for request in requests)
                raise EngineError(
                    f"Out of memory with a single sequence in flight, of {longest} prompt tokens "
                    f"and up to {sampling.max_tokens} more. Lower engine.max_tokens or "
                    "data.max_prompt_tokens, free the device of other programs, or take a smaller "
                    "model."
                ) from error
            self.slots = self.places // 2
            self.tell(
                "memory",
                f"out of memory while sampling: {self.slots} in flight at a time instead of "
                f"{self.places} from here on.",
            )
        elif not captured:
            raise error
        elif self.source.model.ops.name == "exact":
            raise EngineError(
                f"A kernel of the sampler failed ({in_short(error)}), and nothing else gives the "
                "learner's bits. Set engine.exact=false."
            ) from error
        else:
            self.failed = True
            self.tell(
                "engine",
                f"a kernel of the sampler failed ({in_short(error)}). Plain PyTorch samples "
                "instead from here on, several times slower.",
            )

    def _give_back(self) -> None:
        """Free all memory that the decoder and prompts hold, captured steps included."""
        self.decoder = None
        self.kept.clear()
        if self.source.model.head_weight.is_cuda:
            torch.cuda.empty_cache()

    def sync(self, version: int) -> None:
        """Take the learner's changed weights, under this number."""
        if self.batches and self.on_sync == "drain":
            raise EngineError(
                f"{sum(len(batch.left) for batch in self.batches)} requests are under way, and new "
                "weights would change in the middle of their answers. Wait until they are "
                "finished, or cancel them."
            )
        before = self.source.version
        self.source.sync(version)
        self.kept.clear()
        if isinstance(self.flight, Scheduler) and version != before:
            self.flight.renew(keep=self.on_sync == "keep")

    def state(self) -> State:
        return self.source.state()

    def restore(self, state: State) -> None:
        self.source.restore(state)
        self.kept.clear()


def capabilities_with(weights: str, *, beside: bool = False) -> Capabilities:
    """Return what it can do with these weights: exact mode is that of the learner's own."""
    return Capabilities(
        weights=weights,
        copies=True,
        exact=weights == "shared",
        top_k_logps=True,
        routes=True,
        in_flight_updates=weights == "shared",
        beside=beside,
        own_randomness=False,
    )


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out, also where a capture broke off with its own error."""
    while error is not None:
        if is_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def samples_of(requests: Sequence[Request]) -> int:
    return sum(request.samples for request in requests)


def check_requests(config: ModelConfig, requests: Sequence[Request], sampling: Sampling) -> None:
    """Refuse what could not be served, or would be served wrongly, before anything is computed."""
    if not requests:
        raise EngineError("There are no requests. Ask for at least one completion.")
    if sampling.record_top_k > config.vocab_size:
        raise EngineError(
            f"record_top_k is {sampling.record_top_k}; the vocabulary has {config.vocab_size} "
            f"tokens. Ask for fewer."
        )
    if sampling.record_routes and config.experts is None:
        raise EngineError(
            f"Routes are asked of a model of the family {config.family}, which has no experts to "
            "route to. Leave record_routes out, or take a mixture of experts."
        )
    limit = config.context
    for request in requests:
        where = f"Prompt {request.prompt_id}"
        if request.samples < 1:
            raise EngineError(f"{where} asks for {request.samples} samples. Ask for at least one.")
        if not request.prompt:
            raise EngineError(f"{where} is empty. Give it at least one token, such as BOS.")
        if not 0 <= min(request.prompt) <= max(request.prompt) < config.vocab_size:
            raise EngineError(
                f"{where} holds token ids from {min(request.prompt)} to {max(request.prompt)}; the "
                f"model's vocabulary has {config.vocab_size}. Use the model's own tokenizer."
            )
        if not 0 <= request.begun < min(len(request.prompt), sampling.max_tokens):
            raise EngineError(
                f"{where} says that {request.begun} of its {len(request.prompt)} tokens are an "
                f"answer that has begun, of {sampling.max_tokens} tokens at the most. An answer "
                "can be gone on with that has a token left, and stands behind a prompt."
            )
        if len(request.prompt) + request.most(sampling) > limit:
            raise EngineError(
                f"{where} has {len(request.prompt)} tokens; with up to "
                f"{request.most(sampling)} more it would pass the model's limit of {limit} "
                "positions. Lower engine.max_tokens, or drop long prompts with "
                f"data.max_prompt_tokens = {max(limit - sampling.max_tokens, 0)}."
            )
    names = Counter((request.stream, request.prompt_id, request.draw) for request in requests)
    (stream, prompt_id, draw), count = names.most_common(1)[0]
    if count > 1:
        raise EngineError(
            f"{count} requests are draw {draw} of prompt {prompt_id} in stream {stream!r}: they "
            f"would get the same random numbers. Count draws up each time that a prompt comes back."
        )
