"""The protocol of all engines: requests in, completions with probabilities out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor

from groupwise.engine.answers import check_answer, check_tickets, cut
from groupwise.errors import EngineError
from groupwise.records import Completion

if TYPE_CHECKING:
    from groupwise import config
    from groupwise.engine.backends import EngineSetup
    from groupwise.model.layers.transformer import PolicyModel

Stream = (
    # what samples are for: "train", "eval", "probe", or of `branch_stream`, `judge_stream`,
    # `turn_stream`
    str
)
Finish = Literal["eos", "stop", "length"]
# What new weights do to answers under way: those are waited for; they go on, caches computed anew;
# they go on with the caches that there are.
Sync = Literal["drain", "recompute", "keep"]
State = dict[str, Tensor]
Ticket = int  # names a request from its submission to its answer
Done = Callable[[int, list[Completion]], None]  # the number of a request, its completions
Wrote = Callable[[int, int], None]  # completions written so far, and tokens of all


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
    record_routes: bool = False  # record which experts each token visits, of a mixture

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

    A prompt may end in the beginning of an answer, to be gone on with (`begun`): the completions
    are what follows, and have the tokens that are left. An engine that does not look at it writes
    too much now and then, and is cut.
    """

    prompt: tuple[int, ...]
    samples: int
    prompt_id: int
    draw: int
    stream: Stream = "train"
    begun: int = 0  # tokens of the answer that the policy has written: the prompt ends in them
    # the most tokens of a completion, where that is fewer than `Sampling.max_tokens`; 0: those. As
    # with `begun`, an engine that does not look at it is cut
    limit: int = 0
    # Of a conversation: the lengths of the prompts before, all of which this one begins with; and
    # whether a later one will begin with this. Engines may keep what they have computed of them.
    grown: tuple[int, ...] = ()
    goes_on: bool = False

    @property
    def begun_ids(self) -> tuple[int, ...]:
        """Return the last tokens of the prompt, as many as the policy has written."""
        return self.prompt[len(self.prompt) - self.begun :]

    def most(self, sampling: Sampling) -> int:
        """Return how many tokens a completion of it may have."""
        left = sampling.max_tokens - self.begun
        return min(self.limit, left) if self.limit else left

    def least(self, sampling: Sampling) -> int:
        """Return how many tokens come before an end."""
        return max(sampling.min_tokens - self.begun, 0)


def branch_stream(sample: int, position: int) -> Stream:
    """Return the stream of answers that go on from a position of a group's sample.

    With the seed, the prompt's id and its draw it names the randomness of each of them: it depends
    on nothing else that is sampled.
    """
    return f"branch {sample} {position}"


def judge_stream(of: Stream, sample: int) -> Stream:
    """Return the stream of the policy's judgements of a sample of that stream."""
    return f"judge {of} {sample}"


def turn_stream(of: Stream, sample: int, turn: int) -> Stream:
    """Return the stream of a later turn of a sample's episode; the first turn is of `of` itself.

    So a sample's turn has numbers of its own, whenever what it answers came.
    """
    return f"turn {of} {sample} {turn}"


@dataclass(frozen=True)
class Capabilities:
    """Abilities of an engine, and where its samples come from: all that is asked about its kind."""

    # "shared": the learner's own parameters. Else the name of a copy, which goes with every sample:
    # then log-probabilities that differ from the learner's are measured instead of refused
    weights: str = "shared"
    copies: bool = False  # knows the copies of engine.weights: fp8, int8, stale:K, noise:S
    exact: bool = False  # can give the learner's log-probabilities to the last bit (engine.exact)
    top_k_logps: bool = False  # records the likeliest tokens too (Sampling.record_top_k)
    routes: bool = False  # records the experts of a mixture too (Sampling.record_routes)
    in_flight_updates: bool = False  # takes new weights while requests are under way
    # Samples while the learner learns, in a process of its own: `finished` may be called by another
    # thread than everything else
    beside: bool = False
    own_randomness: bool = True  # draws by numbers of its own: asked again, it answers otherwise

    @property
    def shares_weights(self) -> bool:
        """Tell whether it samples from the learner's own parameters, as they are."""
        return self.weights == "shared"


class WeightSource(Protocol):
    """Where an engine's weights come from, for a look at what arrived."""

    model: PolicyModel
    version: int  # of the weights that `model` holds
    noise: float  # standard deviation on the logits

    def sync(self, version: int) -> None: ...

    def state(self) -> State:
        """Return what can't be made again from the learner's parameters."""
        ...

    def restore(self, state: State) -> None: ...


class Engine(ABC):
    """Who samples. One that answers whole batches is written in fewer lines as a `BatchEngine`.

    Requests are submitted and come back, group by group, when they are finished; `generate` does
    both. Every completion says which version of the weights it is of.
    """

    capabilities: Capabilities = Capabilities()
    places: int = 0  # sequences in flight at a time, of late; 0: it keeps that to itself
    idle_seconds: float = 0.0  # so far, of one that samples beside the learner and counts them
    source: WeightSource | None = None  # its weights; None where they can't be seen

    def __init_subclass__(cls, **rest: Any) -> None:
        """Let engines of users go on that write `generate`, as all did before there were tickets.

        Such a class is a `BatchEngine` whose `answer` is called `generate`; it is made from the
        model and its tokenizer, and `weights` names a copy.
        """
        super().__init_subclass__(**rest)
        if "generate" not in vars(cls) or not _older(cls.generate):
            return
        from groupwise.engine.batch import BatchEngine

        older: Any = cls
        older.__bases__ = tuple(BatchEngine if x is Engine else x for x in cls.__bases__)
        older.answer = cls.generate
        older.made = classmethod(lambda own, setup: own(setup.loaded))
        older.capabilities = Capabilities(weights=vars(cls).get("weights", "shared"))
        del older.generate

    @classmethod
    def made(cls, setup: EngineSetup) -> Engine:
        """Return an engine for a policy."""
        make: Any = cls
        return make(setup)

    @classmethod
    def capabilities_for(cls, settings: config.EngineSettings) -> Capabilities:
        """Return what one made with these settings can do."""
        return cls.capabilities

    @classmethod
    def problems(cls, settings: config.EngineSettings) -> Iterator[str]:
        """Say what speaks against such settings, before anything is loaded."""
        for name in ("urls", "quantization"):
            if getattr(settings, name):
                yield (
                    f"engine.{name} would be ignored: engine.backend={settings.backend} samples "
                    "by no servers that have addresses. Leave it out, or set engine.backend=vllm."
                )

    def measures(self) -> dict[str, float]:
        """Return what happened since the last call that the metrics of a step should tell."""
        return {}

    @abstractmethod
    def submit(self, requests: Sequence[Request], sampling: Sampling) -> list[Ticket]:
        """Take requests; each gets a ticket that no other request of this engine has had."""

    @abstractmethod
    def finished(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        """Return requests whose completions are all written, each once, in any order.

        Waits until there is one; nothing is returned only where nothing is under way. `wrote` may
        be told, from time to time, how far the batch is, for whoever waits.
        """

    def poll(self, wrote: Wrote | None = None) -> list[tuple[Ticket, list[Completion]]]:
        """Go on for a moment, and return what is finished by then, perhaps nothing.

        For a caller that has others to look after, such as environments that answer meanwhile.
        Here it waits as `finished` does: right, and as slow as what is under way is long.
        """
        return self.finished(wrote)

    @abstractmethod
    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Forget requests: they are finished never."""

    @abstractmethod
    def sync(self, version: int) -> None:
        """Take the learner's changed weights, under this number, and forget every cache."""

    def state(self) -> State:
        """Return what resuming needs beyond the learner's parameters and the version."""
        return {}

    def restore(self, state: State) -> None:
        """Take back what `state()` returned."""
        if state:
            raise EngineError(
                f"The checkpoint holds a state of the engine ({len(state)} tensors), and the "
                f"engine {type(self).__name__} has none to restore. Resume with the engine that "
                "the run began with, or write its `restore`."
            )

    def close(self) -> None:
        """Let go of what it holds, such as processes: it is asked nothing any more."""
        return None

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        done: Done | None = None,
        wrote: Wrote | None = None,
    ) -> list[list[Completion]]:
        """Return completions in the order of requests and samples.

        `done` is told of every request as soon as its last completion is written, so that they can
        be graded while others are sampled. For a caller that has nothing else under way.
        """
        tickets = self.submit(requests, sampling)
        left = {ticket: number for number, ticket in enumerate(tickets)}
        answers: list[list[Completion]] = [[] for _ in requests]
        try:
            while left:
                found = self.finished(wrote)
                check_tickets(self, left, [ticket for ticket, _ in found])
                for ticket, group in found:
                    number = left[ticket]
                    request = requests[number]
                    if request.begun or request.limit:
                        group = [cut(each, request.most(sampling)) for each in group]
                    check_answer(self, request, sampling, group)
                    del left[ticket]
                    answers[number] = list(group)
                    if done is not None:
                        done(number, answers[number])
        except BaseException:
            self.cancel(list(left))
            raise
        return answers


def _older(generate: Callable[..., Any]) -> bool:
    """Tell whether it can't be told who waits for its answers."""
    taken = signature(generate).parameters.values()
    return not any(x.name == "done" or x.kind is x.VAR_KEYWORD for x in taken)


def _check(good: bool, name: str, value: object, wanted: str) -> None:
    if not good:
        raise EngineError(f"{name} is {value!r}; it must be {wanted}. Change engine.{name}.")


def not_finite(request: Request, position: int, version: int) -> str:
    """Say that a model's numbers have left the range of its precision."""
    return (
        f"The model gives no finite probabilities for token {position} behind prompt "
        f"{request.prompt_id} (weights of version {version}): its weights hold NaN or infinity, or "
        f"its activations overflow. Go back to an earlier checkpoint with a smaller learning rate, "
        f"or use model.dtype = 'float32'."
    )
