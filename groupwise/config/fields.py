"""Every setting with its type, range, default and purpose: the one place that defines them.

The comment beside a field is also what `text` writes beside it in a resolved configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from groupwise.methods.composition import PairRecipe, Recipe
from groupwise.methods.slots import Count, Fraction, NonNegative, Positive, Range


@dataclass(frozen=True)
class Forms:
    """A text that is one of some words, or a word and a number: `int8`, `stale:2`."""

    words: tuple[str, ...]
    numbered: tuple[tuple[str, type[int] | type[float], Range], ...]
    meant: tuple[tuple[str, str], ...] = ()  # what else people write for a word

    def admits(self, text: str) -> bool:
        if text in self.words:
            return True
        word, _, digits = text.partition(":")
        for known, kind, bounds in self.numbered:
            if word == known:
                try:
                    number = kind(digits)
                except ValueError:
                    return False
                return math.isfinite(number) and bounds.admits(number)
        return False

    def nearest(self, text: str) -> str | None:
        """Return what was probably meant by a text that is not admitted."""
        word, colon, digits = text.strip().lower().partition(":")
        word = dict(self.meant).get(word, word)
        return next((x for x in (f"{word}{colon}{digits}", word) if self.admits(x)), None)

    def __str__(self) -> str:
        listed = [repr(word) for word in self.words]
        for word, kind, bounds in self.numbered:
            listed.append(f"'{word}:{'K' if kind is int else 'X'}' with a number {bounds}")
        return ", ".join(listed)


Whole = Annotated[int, Range(0)]
PositiveFraction = Annotated[float, Range(0.0, 1.0, above=True)]
_ONE, _ABOVE_ZERO, _DECAY = Range(1), Range(0.0, above=True), Range(0.0, 0.999999, above=True)
SamplingWeights = Annotated[
    str, Forms(("shared", "int8"), (("stale", int, _ONE), ("noise", float, _ABOVE_ZERO)))
]
AUTO: Final = "auto"
Precision = Literal["auto", "float32", "bfloat16"]
Device = Annotated[
    str,
    Forms(
        (AUTO, "cpu", "cuda"),
        (("cuda", int, Range(0)),),
        (("gpu", "cuda"), ("nvidia", "cuda"), ("rocm", "cuda"), ("hip", "cuda")),
    ),
]
Mirror = Literal["tensorboard", "wandb", "trackio", "mlflow"]
ReferenceUpdate = Annotated[str, Forms(("frozen",), (("ema", float, _DECAY), ("reset", int, _ONE)))]


@dataclass(frozen=True)
class Model:
    """The policy."""

    # a Hugging Face folder, a .gguf file, an id on a hub ("org/name", "org/name@revision"), or
    # "tiny": made on the spot
    path: str = "tiny"
    # "auto": bfloat16 on a GPU that computes in it, else float32; masters are float32 anyway
    dtype: Precision = AUTO
    # "cpu", "cuda", "cuda:1"; "auto": a GPU if PyTorch can use one, the CPU for the embedded model.
    # A run keeps what it was started with
    device: Device = AUTO
    adapters: tuple[str, ...] = ()  # of PEFT's, folded into it: part of the starting policy
    quantize: Literal["none", "int8", "nf4"] = "none"  # the frozen weights beside an adapter
    threads: Whole = 0  # of the CPU; 0: as PyTorch has it. Other numbers give other last bits


@dataclass(frozen=True)
class Adapter:
    """LoRA: an adapter that is trained instead of the weights, which stay as they are."""

    rank: Whole = 0  # 0: none, all weights are trained; 8 to 64 are usual
    alpha: NonNegative = 0.0  # its output is scaled by alpha / rank; 0: 32
    # "all" linear layers, names or their ends ["q_proj", "mlp.up_proj"], or a regular expression
    targets: str | tuple[str, ...] = "all"
    dropout: Annotated[float, Range(0.0, 0.9)] = 0.0  # in updates alone: never when sampling
    rslora: bool = False  # scaled by alpha / √rank
    path: str = ""  # an adapter of PEFT's to train further, with its rank, alpha and targets

    @property
    def used(self) -> bool:
        return bool(self.rank or self.path)


@dataclass(frozen=True)
class Tiny:
    """The embedded model: a small transformer over characters with a supervised cold start."""

    width: Count = 128  # of the hidden states
    layers: Count = 4  # of attention and feed-forward
    heads: Count = 4  # of attention
    cold_start_accuracy: Fraction = 0.3  # supervised learning on the task's solutions up to here
    cold_start_steps: Whole = 3000  # of it at most
    cold_start_batch: Count = 64  # solutions a step
    cold_start_rate: Positive = 3e-3  # its learning rate


GENERATORS = ("arithmetic", "countdown")
GYM = "reasoning_gym"  # its tasks are generators, too: reasoning_gym:chain_sum
FILES = re.compile(r"hub:|.*[./*]")  # and no name of a task


def is_generator(name: str) -> bool:
    """Return whether a name is a generator's; countdown:FILE and reasoning_gym:FILE are sets."""
    task = name.removeprefix(f"{GYM}:")
    if task != name:
        return not FILES.match(task)
    return name in GENERATORS or name.startswith("arithmetic:")


@dataclass(frozen=True)
class Source:
    """An entry of a table in data.train or data.eval."""

    weight: Positive = 1.0  # against the other sources
    grader: str = ""  # of its rows, for the part `row` of the reward; "": the set's own, or number
    size: Whole = 0  # tasks that a generator makes; 0: data.size
    options: dict[str, Any] = field(default_factory=dict)  # of a generator; data.options else


@dataclass(frozen=True)
class Data:
    """The prompts."""

    # a file, a pattern ("data/*.parquet"), a named set ("gsm8k:FILE") or a generator (arithmetic,
    # countdown, reasoning_gym:TASK); a list of them, or a table: { "gsm8k:FILE" = 0.7, "FILE" =
    # { weight = 0.3, grader = "number" } } (also size and options, of a generator; arithmetic:NAME
    # is one). FILE may be on a hub: hub:org/name, hub:org/name@revision/train*.parquet
    train: str | tuple[str, ...] | dict[str, Positive | Source] = "arithmetic"
    # the same without weights; "" holds tasks out of a generator, and none of a file
    eval: str | tuple[str, ...] | dict[str, Source] = ""
    # of the prompts of data.train, held out for evaluation, chosen by their text; not with eval
    holdout_share: Fraction = 0.0
    duplicates: Literal["keep", "drop"] = "keep"  # drop also leaves prompts of data.eval out
    prompt_key: str = ""  # a column, or a path such as extra_info.question; "": recognised
    answer_key: str = ""  # the same: reward_model.ground_truth
    grader_key: str = ""  # a column with the row's own grader, for the part `row` of the reward
    # leave malformed rows out, counted and told, instead of refusing their file
    drop_bad: bool = False
    # tasks in a temporary file and not in memory: auto (those that are large), always, never
    streaming: Literal["auto", "always", "never"] = "auto"
    # auto (chat for messages, else plain), chat, plain, r1_zero, qwen_math, a file with {prompt}
    template: str = "auto"
    system: str = ""  # a system message in front of chat prompts
    instruction: str = "{prompt}"  # what a string prompt becomes
    max_prompt_tokens: Whole = 0  # longer ones are dropped, and reported; 0: what the model holds
    size: Count = 10_000  # tasks that a generator makes; fewer where it has no more different ones
    options: dict[str, Any] = field(default_factory=dict)  # of a generator, such as digits = 2
    shuffle: bool = True  # each pass in an order of its own; else as the rows stand

    @property
    def sources(self) -> tuple[str, ...]:
        return _names(self.train)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        return _names(self.eval)

    @property
    def details(self) -> dict[str, Source]:
        """Return all settings of each source of training, by its name."""
        return _details(self.train)

    @property
    def eval_details(self) -> dict[str, Source]:
        return _details(self.eval)

    @property
    def weights(self) -> dict[str, float]:
        """Return the weights of a mixture; none where all tasks are drawn alike."""
        mixed = self.details if isinstance(self.train, dict) else {}
        return {name: source.weight for name, source in mixed.items()}

    @property
    def graders(self) -> tuple[str, ...]:
        """Return the graders that the configuration names for sources."""
        entries = [*self.details.values(), *self.eval_details.values()]
        return tuple(dict.fromkeys(entry.grader for entry in entries if entry.grader))

    @property
    def holds_out(self) -> bool:
        """Return whether a number of tasks is held out of the generator that is trained on."""
        alone = len(self.sources) == 1 and is_generator(self.sources[0])
        return alone and not self.holdout_share and self.eval_sources in ((), self.sources)

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_sources or self.holdout_share or self.holds_out)


_Named = str | tuple[str, ...] | Mapping[str, float | Source]


def _names(source: _Named) -> tuple[str, ...]:
    if isinstance(source, str):
        return (source,) if source else ()
    return tuple(source)


def _details(source: _Named) -> dict[str, Source]:
    if not isinstance(source, Mapping):
        return {name: Source() for name in _names(source)}
    return {
        name: entry if isinstance(entry, Source) else Source(weight=entry)
        for name, entry in source.items()
    }


@dataclass(frozen=True)
class Reward:
    """The reward of an answer: a weighted sum of parts."""

    # name -> weight: "math", "number", "choice", "format(pattern=...)", "code", ...,
    # "judge(url=..., model=...)", "rm(path=...)", "file.py:function";
    # "row": what the row, its source or its set names (data.grader_key, data.train), else number
    parts: dict[str, float] = field(default_factory=lambda: {"row": 1.0})
    max_failed_share: Fraction = 0.05  # of a step's rewards that may fail before the run stops
    timeout: Positive = 60.0  # seconds that a call of a function in a file may take


@dataclass(frozen=True)
class Engine:
    """The sampler."""

    max_tokens: Count = 64  # of an answer
    # before an answer may end; above 0, only with a recipe that corrects for it, such as tis
    min_tokens: Whole = 0
    temperature: NonNegative = 1.0  # of sampling, and of the learner that scores the samples
    top_p: PositiveFraction = 1.0  # below 1, only with such a recipe
    top_k: Whole = 0  # 0: all tokens; above 0, only with such a recipe
    stop: tuple[str, ...] = ()  # texts that end an answer
    slots: Whole = 0  # sequences in flight; 0: 64 on a CPU, up to 1,024 on a GPU as memory allows
    exact: bool = False  # sampler and learner equal to the last bit on a GPU, at a price in speed
    # "shared": the learner's own. To study a mismatch, a copy: "int8", "stale:K" updates, "noise:S"
    weights: SamplingWeights = "shared"


@dataclass(frozen=True)
class Optim:
    """The update."""

    learning_rate: NonNegative = 1e-6  # with an adapter 1e-5, unless you set it
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # the last two: down to 0
    warmup_steps: Whole = 0  # in which the rate rises to its full height
    weight_decay: NonNegative = 0.0  # not of norms and biases
    beta1: Fraction = 0.9  # of AdamW
    beta2: Fraction = 0.999  # of AdamW
    eps: Positive = 1e-8  # of AdamW
    clip_norm: NonNegative = 1.0  # of the gradient; 0: no clipping
    # in one forward and backward pass; 0: 1,024 on a CPU, as memory allows on a GPU. It changes
    # memory and speed, not the update
    micro_tokens: Whole = 0
    recompute: bool = False  # activations in the backward pass: less memory, a third more time
    exponent_rate: NonNegative = 1e-2  # of the length exponent, where the recipe learns one


@dataclass(frozen=True)
class Reference:
    """The policy that KL terms compare with, for recipes that have them."""

    # "frozen": the starting policy; "ema:0.99": a moving average; "reset:100": every 100 steps
    update: ReferenceUpdate = "frozen"


@dataclass(frozen=True)
class Eval:
    """The evaluation on held-out tasks."""

    every: Whole = 10  # steps; also before the first and after the last. 0: only those two
    points: Whole = 0  # in place of it: so many, evenly over steps or budget. 0: as every has it
    tasks: Whole = 128  # 0: no evaluation
    samples: Count = 1  # of each task
    temperature: NonNegative = 0.0  # 0: greedy


@dataclass(frozen=True)
class Budget:
    """Limits that end a run before its last step, after the step that reaches one."""

    tokens: Whole = 0  # sampled in training, those of dropped groups too; 0: no limit
    seconds: NonNegative = 0.0  # of steps, evaluation left out; 0: no limit


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, from which a stopped run continues."""

    every_steps: Whole = 50  # 0: not by steps
    every_seconds: NonNegative = 600.0  # 0: not by time
    keep: Count = 2  # how many of the latest stay; the best is kept beside them, as weights alone


@dataclass(frozen=True)
class Guard:
    """Limits at which a run stops because something is wrong."""

    # mean |sampler − learner| log-probability that the first step may have; 50 times it in bfloat16
    mismatch: NonNegative = 1e-3
    max_skipped: Whole = 3  # updates in a row that may be skipped because they are not finite


@dataclass(frozen=True)
class Watch:
    """Health rules, the cost of the run, and trackers."""

    stop: tuple[str, ...] = ()  # rules that stop the run when they fire, by name (docs/health.md)
    snapshot: bool = False  # keep the last checkpoint before a rule fires, in snapshots/
    price: NonNegative = 0.0  # of an hour of the device, in any currency: costs are in it
    # trackers that are told, too: tensorboard, wandb, trackio, mlflow (docs/mirrors.md)
    mirrors: tuple[Mirror, ...] = ()


@dataclass(frozen=True)
class Config:
    """All settings of a run. Two numbers set the batch: prompts_per_step and group_size."""

    recipe: Recipe | PairRecipe
    prompts_per_step: Count = 16  # each answered group_size times: the batch of a step
    group_size: Count = 8  # completions of each prompt
    steps: Count = 100  # batches to sample and learn from
    seed: Whole = 0  # of the data's order and of every sample
    # answers that hit the limit: as the recipe has it, left out, masked in the loss, or penalised
    overlong: Literal["recipe", "drop", "mask", "penalise"] = "recipe"
    # rounds of dynamic sampling before a smaller batch is taken, or "until full"
    refills: Whole | Literal["until full"] = 3
    # sampled in refills, the most in a step; 0: no such limit, with "until full" ten times what the
    # step's first draw sampled
    refill_tokens: Whole = 0
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    tiny: Tiny = field(default_factory=Tiny)
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    engine: Engine = field(default_factory=Engine)
    optim: Optim = field(default_factory=Optim)
    reference: Reference = field(default_factory=Reference)
    eval: Eval = field(default_factory=Eval)
    budget: Budget = field(default_factory=Budget)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
    watch: Watch = field(default_factory=Watch)
