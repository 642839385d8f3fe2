"""The native engine: the learner's own forward pass, in captured steps on a GPU (decoder.py), else
in plain PyTorch (flight.py).

A call that runs out of memory starts again with fewer slots; one whose kernels fail, without them.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from groupwise.engine.native.copies import Source, State, make_source
from groupwise.engine.native.scheduler import Flight
from groupwise.engine.protocol import Request, Sampling
from groupwise.errors import EngineError, EngineWarning, in_short
from groupwise.model.config import ModelConfig
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.order import order
from groupwise.model.layers.transformer import PolicyModel
from groupwise.model.memory import is_out_of_memory
from groupwise.records import Completion

if TYPE_CHECKING:
    from groupwise.engine.native.decoder import Decoder

SLOTS = 64  # unless asked otherwise: more take more memory and are hardly faster on a CPU


class NativeEngine:
    """Samples from the learner's parameters, or from a copy (see copies.py)."""

    def __init__(
        self,
        model: PolicyModel,
        tokenizer: Tokenizer,
        *,
        seed: int,
        slots: int,
        weights: str = "shared",
        version: int = 0,
    ) -> None:
        if slots < 0:
            raise EngineError(f"engine.slots is {slots}; it must be 0 (as many as fit) or more.")
        self.weights, self.seed, self.slots = weights, seed, slots
        self.tokenizer = tokenizer
        self.source: Source = make_source(weights, model, version)
        self.decoder: Decoder | None = None  # made when it is first needed
        self.failed = False  # a kernel of the decoder
        self.places = 0  # slots that the last try had
        self.tell: Callable[[str, str], None] = warn  # kind and text: a run has better places
        self.told = False  # that it is not exact
        self.done: Callable[[int, list[Completion]], None] | None = None  # see Engine
        self.wrote: Callable[[int, int], None] | None = None  # see Engine

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Completions in the order of requests and samples."""
        check_requests(self.source.model.config, requests, sampling)
        # Caches live as long as one try: nothing can outlive a change of weights, and a try that
        # failed leaves nothing behind.
        while True:
            captured = self._captured(sampling)
            try:
                with order(fixed=False):  # nothing here depends on it, and captures go without it
                    if captured:
                        return self._decode(requests, sampling)
                    return self._plain(requests, sampling)
            except Exception as error:
                self._recover(error, requests, sampling, captured)
            self._give_back()  # not before: the error holds on to all that was in memory

    def _captured(self, sampling: Sampling) -> bool:
        """Whether whole steps can run as CUDA graphs: from the learner's own weights, with kernels,
        and drawing from the whole distribution. Everything else takes the plain way."""
        kernels = self.source.model.ops.name
        if kernels == "plain" or self.weights != "shared" or self.failed:
            return False
        whole = sampling.top_p == 1 and not sampling.top_k and not sampling.record_top_k
        if not whole and kernels == "exact" and not self.told:
            self.told = True
            self.tell(
                "engine",
                "not exact: top-p, top-k and recording the likeliest tokens take the plain "
                "sampler, whose log-probabilities differ from the learner's in their last bits.",
            )
        return whole

    def _decode(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        from groupwise.engine.native.decoder import Decoder  # needs Triton
        from groupwise.engine.native.gpu_scheduler import DecoderFlight

        if self.decoder is None:
            model = self.source.model
            self.decoder = Decoder(model, self.tokenizer, seed=self.seed, slots=self.slots)
        self.places = min(self.decoder.slots, samples_of(requests))
        flight = DecoderFlight(
            self.decoder,
            requests,
            sampling,
            self.source.version,
            self.weights,
            self.done,
            self.wrote,
        )
        self.places = flight.slots
        return flight.run()

    def _plain(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self.places = min(self.slots or SLOTS, samples_of(requests))
        return Flight(self, requests, sampling, self.places).run()

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
        """All memory that the decoder holds, captured steps included."""
        self.decoder = None
        if self.source.model.head_weight.is_cuda:
            torch.cuda.empty_cache()

    def sync(self, version: int) -> None:
        """The learner's weights changed: take them, under this number."""
        self.source.sync(version)

    def state(self) -> State:
        """What resuming needs beyond the learner's parameters and the version."""
        return self.source.state()

    def restore(self, state: State) -> None:
        self.source.restore(state)


def warn(kind: str, text: str) -> None:
    warnings.warn(text, EngineWarning, stacklevel=4)


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Also where another error came of it: a capture that breaks off complains by itself."""
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
        if len(request.prompt) + sampling.max_tokens > limit:
            raise EngineError(
                f"{where} has {len(request.prompt)} tokens; with up to {sampling.max_tokens} more "
                f"it would pass the model's limit of {limit} positions. Lower engine.max_tokens, "
                f"or drop long prompts with data.max_prompt_tokens = "
                f"{max(limit - sampling.max_tokens, 0)}."
            )
    names = Counter((request.stream, request.prompt_id, request.draw) for request in requests)
    (stream, prompt_id, draw), count = names.most_common(1)[0]
    if count > 1:
        raise EngineError(
            f"{count} requests are draw {draw} of prompt {prompt_id} in stream {stream!r}: they "
            f"would get the same random numbers. Count draws up each time that a prompt comes back."
        )
