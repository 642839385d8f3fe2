"""What the loop asks of a sampler, whichever it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from groupwise.engine.native.copies import Source, State
from groupwise.errors import EngineError
from groupwise.records import Completion

Stream = Literal["train", "eval", "probe"]
Finish = Literal["eos", "stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a completion ends.

    Log-probabilities are those of the distribution that a token was drawn from: at this
    temperature, renormalised over what top-k, top-p and min_tokens leave. A learner that scores
    the whole vocabulary can match the temperature, but none of the other three; whether a run may
    use them is the trainer's decision.
    """

    max_tokens: int
    min_tokens: int = 0  # before, end tokens can't be drawn and stop strings do not end anything
    temperature: float = 1.0  # 0: the likeliest token, recorded with its log-probability at 1
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()
    record_top_k: int = 0  # likeliest tokens to record, of the whole distribution

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        _check(
            0 <= self.min_tokens <= self.max_tokens,
            "min_tokens",
            self.min_tokens,
            f"0 to max_tokens, {self.max_tokens}",
        )
        _check(
            0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more"
        )
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1 (all tokens)")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (all tokens) or more")
        _check(self.record_top_k >= 0, "record_top_k", self.record_top_k, "0 or more")
        texts = not isinstance(self.stop, str) and all(
            isinstance(text, str) and text for text in self.stop
        )
        _check(texts, "stop", self.stop, 'a list of texts that are not empty, such as ("\\n\\n",)')


@dataclass(frozen=True)
class Request:
    """A prompt and how many completions it gets.

    Stream, prompt id and draw name the randomness: a prompt that comes back needs another draw.
    """

    prompt: tuple[int, ...]
    samples: int
    prompt_id: int
    draw: int
    stream: Stream = "train"


class Engine(Protocol):
    """What an engine of your own has to have: a subclass writes `generate`, and `sync` if it keeps
    weights or caches. The rest is as it should be for the learner's own parameters."""

    weights: str = "shared"  # what it samples from: "shared", or the name of a copy
    # If set: told the number of a request and its completions as soon as the last one is written,
    # so that they can be graded while others are sampled. An engine may leave that out.
    done: Callable[[int, list[Completion]], None] | None = None
    # If set: told how many completions of a call are written, and how many tokens of all, from time
    # to time, for whoever waits. An engine may leave that out.
    wrote: Callable[[int, int], None] | None = None

    @property
    def source(self) -> Source | None:
        """The weights themselves, for a look at what arrived; None where they can't be seen."""
        return None

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Completions in the order of requests and samples."""
        ...

    def sync(self, version: int) -> None:
        """The learner's weights changed: take them, under this number, and forget every cache."""

    def state(self) -> State:
        """What resuming needs beyond the learner's parameters and the version."""
        return {}

    def restore(self, state: State) -> None:
        """From `state()`."""


def _check(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise EngineError(f"{name} is {value!r}; it must be {wanted}. Change engine.{name}.")


def not_finite(request: Request, position: int, version: int) -> str:
    """What to say of a model whose numbers have left the range of its precision."""
    return (
        f"The model gives no finite probabilities for token {position} behind prompt "
        f"{request.prompt_id} (weights of version {version}): its weights hold NaN or infinity, or "
        f"its activations overflow. Go back to an earlier checkpoint with a smaller learning rate, "
        f"or use model.dtype = 'float32'."
    )
