"""Every setting with its type, range, default and purpose: the one place that defines them.

The comment beside a field is also what `text` writes beside it in a resolved configuration.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from groupwise.methods.method import Method
from groupwise.methods.slots import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    Range,
)

Number = tuple[type[int] | type[float], Range]


@dataclass(frozen=True)
class Forms:
    """A text that is one of some words, or a word with numbers: `int8`, `stale:2`, `mix:0.6:8`."""

    words: tuple[str, ...]
    numbered: tuple[tuple[str, Number] | tuple[str, Number, Number], ...]
    meant: tuple[tuple[str, str], ...] = ()  # what else people write for a word

    def admits(self, text: str) -> bool:
        if text in self.words:
            return True
        word, *digits = text.split(":")
        return any(word == known and _fit(digits, wanted) for known, *wanted in self.numbered)

    def nearest(self, text: str) -> str | None:
        """Return what was probably meant by a text that is not admitted."""
        word, colon, digits = text.strip().lower().partition(":")
        word = dict(self.meant).get(word, word)
        return next((x for x in (f"{word}{colon}{digits}", word) if self.admits(x)), None)

    def __str__(self) -> str:
        listed = [repr(word) for word in self.words]
        for pattern, (_, *numbers) in zip(self.patterns, self.numbered, strict=True):
            bounds = " and one ".join(str(bounds) for _, bounds in numbers)
            listed.append(f"'{pattern}' with a number {bounds}")
        return ", ".join(listed)

    @property
    def patterns(self) -> list[str]:
        """Return the forms with numbers, K for a whole one: `stale:K`, `mix:X:K`."""
        return [
            ":".join([word, *("K" if kind is int else "X" for kind, _ in numbers)])
            for word, *numbers in self.numbered
        ]


def _fit(digits: list[str], wanted: list[Number]) -> bool:
    """Tell whether texts are as many numbers as are wanted, each in its range."""
    if len(digits) != len(wanted):
        return False
    try:
        numbers = [kind(text) for text, (kind, _) in zip(digits, wanted, strict=True)]
    except ValueError:
        return False
    pairs = zip(numbers, wanted, strict=True)
    return all(math.isfinite(number) and bounds.admits(number) for number, (_, bounds) in pairs)


Whole = Annotated[int, Range(0)]
_ONE, _ABOVE_ZERO, _DECAY = Range(1), Range(0.0, above=True), Range(0.0, 0.999999, above=True)
SamplingWeights = Annotated[
    str,
    Forms(("shared", "fp8", "int8"), (("stale", (int, _ONE)), ("noise", (float, _ABOVE_ZERO)))),
]
AUTO: Final = "auto"
Precision = Literal["auto", "float32", "bfloat16"]
Device = Annotated[
    str,
    Forms(
        (AUTO, "cpu", "cuda"),
        (("cuda", (int, Range(0))),),
        (("gpu", "cuda"), ("nvidia", "cuda"), ("rocm", "cuda"), ("hip", "cuda")),
    ),
]
Mirror = Literal["tensorboard", "wandb", "trackio", "mlflow"]
_FOLLOWING: Final = (
    ("ema", (float, _DECAY)),
    ("reset", (int, _ONE)),
    ("mix", (float, _DECAY), (int, _ONE)),
)
TeacherUpdate = Annotated[str, Forms(("frozen", "policy"), _FOLLOWING)]
ReferenceUpdate = Annotated[str, Forms(("frozen",), _FOLLOWING)]


@dataclass(frozen=True)
class Model:
    """The policy."""

    # the model to train: a Hugging Face folder, a .gguf file, an id on a hub ("org/name",
    # "org/name@revision"), or "tiny", the embedded model, which is made on the spot
    path: str = "tiny"
    # precision of the forward and backward pass; "auto": bfloat16 on a GPU that computes in it,
    # else float32. The optimizer's copy of the weights is float32 in any case
    dtype: Precision = AUTO
    # where the model runs: "cpu", "cuda", "cuda:1"; "auto": a GPU if PyTorch can use one, the CPU
    # for the embedded model. A resumed run keeps its device
    device: Device = AUTO
    adapters: tuple[str, ...] = ()  # PEFT adapters, merged into the model before training starts
    # storage of the frozen weights when an adapter is trained; int8 and nf4 take less memory
    quantize: Literal["none", "int8", "nf4"] = "none"
    # of a mixture of experts: the routers stay as they are, all other weights learn
    freeze_router: bool = False
    # CPU threads; 0: PyTorch's default. Another number changes the last bits of results
    threads: Whole = 0


@dataclass(frozen=True)
class Adapter:
    """LoRA: an adapter that is trained instead of the weights, which stay as they are."""

    rank: Whole = 0  # rank of the LoRA adapter; 8 to 64 are usual. 0: no adapter, all weights learn
    alpha: NonNegative = 0.0  # the adapter's output is scaled by alpha / rank; 0: alpha is 32
    # layers that get an adapter: "all" linear ones, a list of names or their ends ["q_proj",
    # "mlp.up_proj"], or a regular expression
    targets: str | tuple[str, ...] = "all"
    # dropout of the adapter's input during updates; never when sampling
    dropout: Annotated[float, Range(0.0, 0.9)] = 0.0
    rslora: bool = False  # scale the adapter's output by alpha / √rank instead of alpha / rank
    path: str = ""  # a PEFT adapter to train further, with its own rank, alpha and targets

    @property
    def used(self) -> bool:
        return bool(self.rank or self.path)


@dataclass(frozen=True)
class Tiny:
    """The embedded model: a small transformer over characters with a supervised cold start."""

    width: Count = 128  # width of the embedded model's hidden states
    layers: Count = 4  # layers of the embedded model
    heads: Count = 4  # attention heads of the embedded model
    experts: Whole = 0  # experts of each of its layers, as a mixture; 0: it is none
    chosen: Count = 2  # experts that a token visits, where there are any
    # before training, the embedded model learns solutions, supervised, up to this accuracy
    cold_start_accuracy: Fraction = 0.3
    cold_start_steps: Whole = 3000  # the most steps of that supervised cold start
    cold_start_batch: Count = 64  # solutions in each step of the cold start
    cold_start_rate: Positive = 3e-3  # learning rate of the cold start


GENERATORS = ("arithmetic", "arithmetic_pairs", "chain", "countdown", "guess", "tictactoe",
              "wordle")  # fmt: skip
GYM = "reasoning_gym"  # its tasks are generators, too: reasoning_gym:chain_sum
FILES = re.compile(r"hub:|.*[./*]")  # and no name of a task


def is_generator(name: str) -> bool:
    """Return whether a name is a generator's; countdown:FILE and reasoning_gym:FILE are sets."""
    task = name.removeprefix(f"{GYM}:")
    if task != name:
        return not FILES.match(task)
    return name in GENERATORS or name.startswith(("arithmetic:", "chain:"))


@dataclass(frozen=True)
class SourceSettings:
    """An entry of a table in data.train or data.eval."""

    weight: Positive = 1.0  # how often its tasks are drawn, relative to the other sources
    # grader of its rows, for the part `row` of the reward; "": the set's own, or number
    grader: str = ""
    size: Whole = 0  # tasks that a generator makes; 0: data.size
    # options of a generator; {}: data.options
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """The prompts."""

    # tasks to train on: a file, a pattern ("data/*.parquet"), a named set ("gsm8k:FILE") or a
    # generator (arithmetic, chain, countdown, reasoning_gym:TASK); a list of them, or a table:
    # { "gsm8k:FILE" = 0.7, "FILE" = { weight = 0.3, grader = "number" } } (also size and options,
    # of a generator; arithmetic:NAME and chain:NAME are some). FILE may be on a hub: hub:org/name,
    # hub:org/name@revision/train*.parquet
    train: str | tuple[str, ...] | dict[str, Positive | SourceSettings] = "arithmetic"
    # held-out tasks, written like data.train but without weights; "": some tasks of a generator are
    # held out, none of a file
    eval: str | tuple[str, ...] | dict[str, SourceSettings] = ""
    # share of the prompts of data.train that is held out for evaluation, chosen by their text; not
    # together with data.eval
    holdout_share: Fraction = 0.0
    # what happens to prompts that repeat; drop also removes training prompts that data.eval has
    duplicates: Literal["keep", "drop"] = "keep"
    # column of the prompt, or a path such as extra_info.question; "": recognised
    prompt_key: str = ""
    # column of the answer, or a path such as reward_model.ground_truth; "": recognised
    answer_key: str = ""
    grader_key: str = ""  # column that names a row's own grader, for the part `row` of the reward
    # leave out malformed rows and report their number, instead of refusing the file
    drop_bad: bool = False
    # keep tasks in a temporary file instead of memory: auto (where they are large), always, never
    streaming: Literal["auto", "always", "never"] = "auto"
    # template of prompts: auto (chat for messages, else plain), chat, plain, r1_zero, qwen_math, or
    # a file with {prompt} in it
    template: str = "auto"
    system: str = ""  # a system message in front of chat prompts; "": none
    instruction: str = "{prompt}"  # text around a prompt that is a string, with {prompt} in it
    # longer prompts are dropped, and reported; 0: the limit is what the model holds
    max_prompt_tokens: Whole = 0
    # longer rows of recipes that learn rows as they stand (prompt and answer) are dropped, and
    # reported; 0: the limit is what the model holds
    max_row_tokens: Whole = 0
    # what is learned of a row, with columns in braces: "{solution}</think>{answer}"; empty: its
    # column `completion`, `messages`, `solution` or `text`
    completion: str = ""
    # the assistant's turns of a conversation that are learned: "all", or the "last" one
    turns: Literal["all", "last"] = "all"
    size: Count = 10_000  # tasks that a generator makes; fewer where it has no more different ones
    options: dict[str, Any] = field(default_factory=dict)  # options of a generator, as digits = 2
    # every pass over the tasks in a new order; false: in the order of the rows
    shuffle: bool = True
    # folders of earlier runs, or of `groupwise collect`, whose answers recipe.source = "run" learns
    # from: ["runs/earlier"]. Which of them: keep. Held out is data.eval, else what the first held
    # out
    runs: tuple[str, ...] = ()
    # rows to learn from with data.runs: { reasoning = 600, other = 200 } are 600 answers that were
    # kept and 200 rows of data.train with answers of their own; all kept ones and no others where
    # it says nothing
    mix: dict[str, Whole] = field(default_factory=dict)

    @property
    def sources(self) -> tuple[str, ...]:
        return _names(self.train)

    @property
    def eval_sources(self) -> tuple[str, ...]:
        return _names(self.eval)

    @property
    def details(self) -> dict[str, SourceSettings]:
        """Return all settings of each source of training, by its name."""
        return _details(self.train)

    @property
    def eval_details(self) -> dict[str, SourceSettings]:
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
        alone = len(self.sources) == 1 and is_generator(self.sources[0]) and not self.runs
        return alone and not self.holdout_share and self.eval_sources in ((), self.sources)

    @property
    def evaluates(self) -> bool:
        return bool(self.eval_sources or self.holdout_share or self.holds_out or self.runs)


@dataclass(frozen=True)
class CurriculumSettings:
    """How often prompts are drawn and answered, by the running share of answers that pass."""

    # how often prompts that are too easy are drawn, relative to others: 0.25 is at one of four
    # passes over the data; 1: as often
    easy: Annotated[float, Range(0.01, 1.0)] = 1.0
    # how often prompts that are too hard are drawn, relative to others; 1: as often
    hard: Annotated[float, Range(0.01, 1.0)] = 1.0
    above: Fraction = 0.9  # prompts whose running pass rate is at least this are too easy
    below: Fraction = 0.1  # prompts whose running pass rate is at most this are too hard
    # how much the newest group counts in its prompt's running pass rate, the older ones the rest;
    # 1: it alone
    newest: PositiveFraction = 0.5
    # answers to each prompt: "equal", group_size to all; "knapsack", as many on average, more to
    # prompts whose pass rate says that another one may teach something
    group_sizes: Literal["equal", "knapsack"] = "equal"
    least: Count = 2  # the fewest answers to a prompt, where group sizes differ
    most: Count = 128  # the most answers to a prompt, where group sizes differ

    @property
    def thins(self) -> bool:
        """Return whether some prompts are drawn less often than others."""
        return min(self.easy, self.hard) < 1

    @property
    def used(self) -> bool:
        """Return whether anything goes by pass rates."""
        return self.thins or self.group_sizes != "equal"


@dataclass(frozen=True)
class Keep:
    """The answers of earlier runs (data.runs) that are learned from: rejection sampling."""

    correct: bool = True  # learn only from earlier answers that are correct; false: from wrong, too
    # learn only from earlier answers that ended with an end token; false: also from those that were
    # cut off or ended by a stop string
    ended: bool = True
    # verdicts on earlier answers: "stored", those of the run that sampled them; "anew", those of
    # this run's reward
    grade: Literal["stored", "anew"] = "stored"
    # least share of the words of an earlier answer that must be in one language, whichever; 0: any
    language: Fraction = 0.95
    # most characters between two line breaks of an earlier answer; 0: any number
    paragraph: Whole = 2_000
    # learn also from earlier answers with a code fence (```) to tasks that ask for no program
    fences: bool = False
    per_prompt: Whole = 4  # most different earlier answers to a prompt that are learned; 0: all
    # which earlier answers to a prompt go first: random ones, by the seed; the shortest; or those
    # with the highest reward
    order: Literal["random", "shortest", "reward"] = "random"
    # share of the prompts whose every earlier answer is correct that stay, chosen by the seed
    solved: Fraction = 1.0


_Named = str | tuple[str, ...] | Mapping[str, float | SourceSettings]


def _names(source: _Named) -> tuple[str, ...]:
    if isinstance(source, str):
        return (source,) if source else ()
    return tuple(source)


def _details(source: _Named) -> dict[str, SourceSettings]:
    if not isinstance(source, Mapping):
        return {name: SourceSettings() for name in _names(source)}
    return {
        name: entry if isinstance(entry, SourceSettings) else SourceSettings(weight=entry)
        for name, entry in source.items()
    }


@dataclass(frozen=True)
class Reward:
    """The reward of an answer: a weighted sum of parts."""

    # parts of the reward, name -> weight: "math", "number", "choice", "format(pattern=...)",
    # "code", ..., "judge(url=..., model=...)", "rm(path=...)", "file.py:function"; "row": what the
    # row, its source or its set names (data.grader_key, data.train), else number
    parts: dict[str, float] = field(default_factory=lambda: {"row": 1.0})
    max_failed_share: Fraction = 0.05  # share of a step's rewards above which failures stop the run
    timeout: Positive = 60.0  # seconds that a call of a reward function in a file may take
    # a file with what the policy gives its own answers points for, where it judges them
    # (self_rewarding); "": five points, one on top of the other
    rubric: str = ""


@dataclass(frozen=True)
class EngineSettings:
    """The sampler."""

    # who samples: "native"; "vllm" or "sglang", servers that are asked over HTTP; or
    # "file.py:Class" for an engine of one's own (docs/engines.md)
    backend: str = "native"
    urls: tuple[str, ...] = ()  # addresses of running servers: ["http://127.0.0.1:8000"]
    # processes that sample, which the run starts and ends: servers of vLLM or SGLang; or one of the
    # native engine, with a copy of the weights, which samples while the learner learns (train.lag).
    # 0: none
    servers: Whole = 0
    # words that start such a server, before groupwise's own; unless you set it, those of this
    # Python: ["/its/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    command: tuple[str, ...] = ()
    # how weights reach servers: "folder", which they read; "ipc", on one GPU; "nccl", between GPUs
    carrier: Literal["folder", "ipc", "nccl"] = "folder"
    # folder for such weights, which servers on other machines must see, too; unless you set it, a
    # temporary one of this machine
    folder: str = ""
    # precision that servers round weights to as they arrive, by its name there: "fp8_per_tensor";
    # only with a recipe that corrects for it, such as tis
    quantization: str = ""
    # seconds that a server may take for an answer or for weights, and that all of them may be away
    timeout: Positive = 600.0
    max_tokens: Count = 64  # the most tokens of an answer
    # the fewest tokens of an answer; above 0 only with a recipe that corrects for it, such as tis
    min_tokens: Whole = 0
    # temperature of sampling, and of the learner that scores the samples
    temperature: NonNegative = 1.0
    # sample from the most probable tokens with this total probability; below 1 only with a recipe
    # that corrects for it, such as tis
    top_p: PositiveFraction = 1.0
    # sample from so many of the most probable tokens, 0: from all; above 0 only with a recipe that
    # corrects for it, such as tis
    top_k: Whole = 0
    stop: tuple[str, ...] = ()  # texts that end an answer
    # sequences sampled at the same time; 0: 64 on a CPU, up to 1,024 on a GPU as memory allows
    slots: Whole = 0
    exact: bool = False  # sampler and learner agree to the last bit on a GPU, which is slower
    # record which experts of a mixture each sampled token visits; recipes that replay them do so
    # anyway
    record_routes: bool = False
    # weights that sample: "shared", the learner's own; "fp8", a copy in 8-bit floats, which large
    # models sample faster from on GPUs that multiply these, only with a recipe that corrects for
    # it, such as tis; or, to study a mismatch, a copy: "int8", "stale:K" updates old, with
    # "noise:S" added
    weights: SamplingWeights = "shared"


@dataclass(frozen=True)
class Train:
    """The steps of a run: how far sampling runs ahead, and coefficients that change."""

    # steps that the weights which write an answer may be older than those that learn from it:
    # prompts are admitted so far ahead, and sampled and graded beside the update. 0: sampling and
    # learning take turns. Above 0 only with recipes that go by the sampler's probabilities, such as
    # tis (docs/lag.md)
    lag: Whole = 0
    # what new weights do to answers under way: "drain", they are waited for; "recompute", they go
    # on under the new weights, which read anew what is written; "keep", they go on with the
    # caches of older weights
    sync: Literal["drain", "recompute", "keep"] = "drain"
    # numbers of the recipe that change from step to step, by their places in it:
    # {"penalty.coef" = "kl_target(target=6.0)"}; kl_target, entropy_target, warmup_cosine or
    # rest_of_warmup_cosine
    coefs: dict[str, str] = field(default_factory=dict)


# Ways in which an episode ends.
EpisodeEnd = Literal["answered", "done", "max_turns", "max_calls", "own_tokens", "context",
                     "timeout", "error", "branched"]  # fmt: skip


@dataclass(frozen=True)
class TurnSettings:
    """Environments and tools, which answer the policy between its turns."""

    # what answers the policy: a built-in environment ("guess"), or "file.py:Class"; "": nothing, an
    # answer is one turn
    environment: str = ""
    # options of the environment, as low = 0; its own defaults where it says nothing
    options: dict[str, Any] = field(default_factory=dict)
    # functions that the policy may call: built-in ones ("python"), or "file.py:function"
    tools: tuple[str, ...] = ()
    # how turns are told apart: "chat", by the model's chat template; "plain", by words, or a text
    # with {role} and {text} in it; "auto": chat or plain, as the prompts are written
    template: str = "auto"
    # keep the thoughts of earlier turns, with a copy of a chat template that drops them
    keep_thoughts: bool = False
    max: Count = 8  # turns of the policy in an episode
    max_calls: Whole = 0  # calls of tools in an episode; the turn with one more ends it. 0: any
    parallel_calls: Count = 4  # calls in one turn; those beyond are answered by an error
    # the most tokens of the policy in one turn; 0: what engine.max_tokens, which is for the whole
    # episode, has left
    turn_tokens: Whole = 0
    # the most tokens of an episode, the prompt and the words of others included; 0: as many as the
    # model holds
    context: Whole = 0
    # characters of one message of an environment that the policy reads; of longer ones beginning
    # and end, and how much is gone
    observation: Count = 2_000
    timeout: Positive = 30.0  # seconds that one call of an environment or tool may take
    episode_timeout: Positive = 600.0  # seconds that the calls of an episode may take in all
    workers: Whole = 0  # processes that environments run in; 0: one a core
    # ways to end that count as cut off (see overlong): answered, done, max_turns, max_calls,
    # own_tokens, context, timeout, error, branched
    truncated: tuple[EpisodeEnd, ...] = ("max_turns", "max_calls", "own_tokens", "context")
    # ways to end that leave an episode without reward: nobody learns from it
    left_out: tuple[EpisodeEnd, ...] = ("timeout", "error", "branched")

    @property
    def used(self) -> bool:
        return bool(self.environment or self.tools)


@dataclass(frozen=True)
class Optim:
    """The update."""

    # learning rate; unless you set it, ten times as much with an adapter, and 2e-5 (2e-4) for
    # recipes that learn from the data's own answers
    learning_rate: NonNegative = 1e-6
    # course of the learning rate after the warm-up; linear and cosine end at optim.min_share of it
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    # share of the full learning rate that linear and cosine schedules end at
    min_share: Fraction = 0.0
    warmup_steps: Whole = 0  # steps in which the learning rate rises from 0 to its full value
    weight_decay: NonNegative = 0.0  # AdamW's weight decay; norms and biases have none
    beta1: Fraction = 0.9  # AdamW's decay of the mean of gradients
    beta2: Fraction = 0.999  # AdamW's decay of the mean of squared gradients
    eps: Positive = 1e-8  # AdamW's ε, added to the root of the mean of squares
    clip_norm: NonNegative = 1.0  # gradients with a larger norm are scaled down to it; 0: none are
    # tokens in one forward and backward pass; 0: 1,024 on a CPU, as memory allows on a GPU. It
    # changes memory and speed, not the update
    micro_tokens: Whole = 0
    # compute activations again in the backward pass, of all layers or of this share of them: less
    # memory, up to a third more time
    recompute: Fraction | bool = False
    # keep the optimizer's numbers (moments and, in one process, float32 masters) in the host's
    # memory, and bring each parameter's to the device for its update: less memory, slower updates,
    # the same bits
    offload: bool = False
    exponent_rate: NonNegative = 1e-2  # learning rate of the length exponent, if the recipe has one


@dataclass(frozen=True)
class ReferenceSettings:
    """The policy that KL terms compare with, for recipes that have them."""

    # the reference policy: "frozen", the starting policy; "ema:0.99", a moving average of the
    # policy; "reset:100", the policy as it was at every 100th step; "mix:0.6:512", at every 512th
    # step so much of the way to the policy
    update: ReferenceUpdate = "frozen"


@dataclass(frozen=True)
class CriticSettings:
    """The critic, for recipes that have one: it says at every token how the answer will end."""

    # start of the critic: "policy", a copy of the starting policy; or the folder of a model with
    # the same tokenizer: a smaller language model, a reward model, the critic of an earlier run
    start: str = "policy"
    # rank of a LoRA adapter that the critic trains instead of its weights; 0: as the policy does
    adapter: Whole = 0
    learning_rate: NonNegative = 0.0  # learning rate of the critic; 0: 10 x optim.learning_rate
    # course of the critic's learning rate after its warm-up; linear and cosine end at
    # critic.min_share of it
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_share: Fraction = 0.0  # share of the critic's learning rate that linear and cosine end at
    warmup_steps: Whole = 0  # steps in which the critic's learning rate rises to its full value
    weight_decay: NonNegative = 0.0  # AdamW's weight decay of the critic
    # gradients of the critic with a larger norm are scaled down to it; 0: none are
    clip_norm: NonNegative = 1.0
    # steps at the start, of those in `steps`, in which the critic learns and the policy waits;
    # "recipe": as the method's source has it, 50 for vapo and 0 for others
    alone_steps: Whole | Literal["recipe"] = "recipe"
    # critic.alone_steps end early where the best explained variance of so many steps is not 0.01
    # above the best before them; 0: they do not
    alone_patience: Whole = 0
    # held-out prompts at which every evaluation compares the critic with the truth: answers are
    # sampled on from four places of an answer, 16 from each; 0: it does not
    truth_prompts: Whole = 4


@dataclass(frozen=True)
class RewardModelSettings:
    """The implicit reward model of recipes such as PRIME: it learns beside the policy."""

    # when it learns from a step's answers: "before" its rewards for them are used, or "after"
    update: Literal["before", "after"] = "before"
    learning_rate: NonNegative = 1e-6  # learning rate of the implicit reward model
    # course of its learning rate after its warm-up; linear and cosine end at
    # reward_model.min_share of it
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    min_share: Fraction = 0.0  # share of its learning rate that linear and cosine end at
    warmup_steps: Whole = 0  # steps in which its learning rate rises to its full value
    weight_decay: NonNegative = 0.0  # AdamW's weight decay of the implicit reward model
    # gradients of it with a larger norm are scaled down to it; 0: none are
    clip_norm: NonNegative = 10.0


@dataclass(frozen=True)
class TeacherSettings:
    """The teacher of recipes that distil: another model, or the policy with more to read."""

    # the teacher, a model with the policy's tokenizer: folder, GGUF file, hub id or checkpoint of a
    # run; "policy": the policy itself, as teacher.update says
    path: str = ""
    # several teachers, name -> path; the column `teacher` of each row names its own
    paths: dict[str, str] = field(default_factory=dict)
    # with teacher.path = "policy", which: "frozen", as it started; "policy", as it is;
    # "ema:0.99", a moving average; "reset:100", as it was at every 100th step; "mix:0.6:512", at
    # every 512th step so much of the way to it
    update: TeacherUpdate = "frozen"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: as the policy
    # what the teacher reads in place of the prompt, with columns in braces:
    # "{prompt}\n\nA solution: {solution}"; empty: what the policy reads
    prompt: str = ""
    # the teacher's template, as data.template has them; empty: the policy's
    template: str = ""


@dataclass(frozen=True)
class Eval:
    """The evaluation on held-out tasks."""

    # steps between evaluations; there is one before the first and after the last step, too. 0: only
    # those two
    every: Whole = 10
    # number of evaluations, evenly over steps or budget, in place of eval.every; 0: eval.every
    # holds
    points: Whole = 0
    tasks: Whole = 128  # held-out tasks of an evaluation; 0: no evaluation
    samples: Count = 1  # samples of each held-out task
    temperature: NonNegative = 0.0  # temperature of sampling in evaluations; 0: greedy


@dataclass(frozen=True)
class Budget:
    """Limits that end a run before its last step, after the step that reaches one."""

    # the run ends when training has sampled so many tokens, dropped groups included; 0: no limit
    tokens: Whole = 0
    # the run ends after so many seconds of steps, without evaluations; 0: no limit
    seconds: NonNegative = 0.0


@dataclass(frozen=True)
class Until:
    """Gates that end a run as soon as an evaluation passes them."""

    # the run ends at the first evaluation, the one before training included, with at least this
    # held-out accuracy; 0: no such end
    accuracy: Fraction = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, from which a stopped run continues."""

    every_steps: Whole = 50  # steps between checkpoints; 0: not by steps
    every_seconds: NonNegative = 600.0  # seconds between checkpoints; 0: not by time
    keep: Count = 2  # latest checkpoints that are kept; the best one stays, too, as weights alone


@dataclass(frozen=True)
class Guard:
    """Limits at which a run stops because something is wrong."""

    # the first step stops the run if the mean |sampler − learner| of log-probabilities is larger;
    # 50 times as much is allowed in bfloat16
    mismatch: NonNegative = 1e-3
    max_skipped: Whole = 3  # updates in a row that may be skipped as not finite before a run stops


@dataclass(frozen=True)
class Watch:
    """Health rules, the cost of the run, and trackers."""

    stop: tuple[str, ...] = ()  # health rules that stop the run when they fire (docs/health.md)
    # keep the last checkpoint before a health rule fires, in snapshots/
    snapshot: bool = False
    # price of an hour of the device, in the currency that costs are shown in; 0: not known
    price: NonNegative = 0.0
    # trackers that get a copy of the run: tensorboard, wandb, trackio, mlflow (docs/mirrors.md)
    mirrors: tuple[Mirror, ...] = ()


@dataclass(frozen=True)
class Config:
    """All settings of a run. Two numbers set the batch: prompts_per_step and group_size."""

    recipe: Method
    prompts_per_step: Count = 16  # prompts in the batch of a step, each answered group_size times
    group_size: Count = 8  # answers to each prompt
    steps: Count = 100  # steps of the run: batches to sample and learn from
    # passes over the data that the run lasts, in place of steps, for recipes that learn rows of the
    # data; may be a fraction. 0: steps says how long
    epochs: NonNegative = 0.0
    seed: Whole = 0  # seed of the order of the data and of every sample
    # answers cut off at engine.max_tokens: as the recipe has it, left out, masked in the loss, or
    # penalised
    overlong: Literal["recipe", "drop", "mask", "penalise"] = "recipe"
    # rounds in which dynamic sampling replaces dropped groups before it takes a smaller batch, or
    # "until full"
    refills: Whole | Literal["until full"] = 3
    # the most tokens that dynamic sampling may sample in a step's refills; 0: no limit, but with
    # "until full" ten times what the step's first draw sampled
    refill_tokens: Whole = 0
    model: Model = field(default_factory=Model)
    adapter: Adapter = field(default_factory=Adapter)
    tiny: Tiny = field(default_factory=Tiny)
    data: Data = field(default_factory=Data)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    keep: Keep = field(default_factory=Keep)
    reward: Reward = field(default_factory=Reward)
    engine: EngineSettings = field(default_factory=EngineSettings)
    train: Train = field(default_factory=Train)
    turns: TurnSettings = field(default_factory=TurnSettings)
    optim: Optim = field(default_factory=Optim)
    reference: ReferenceSettings = field(default_factory=ReferenceSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    reward_model: RewardModelSettings = field(default_factory=RewardModelSettings)
    eval: Eval = field(default_factory=Eval)
    budget: Budget = field(default_factory=Budget)
    until: Until = field(default_factory=Until)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
    watch: Watch = field(default_factory=Watch)

    def length(self, tasks: int | None) -> int | None:
        """Return the steps of a run on so many tasks; None where only the tasks would say it."""
        if not self.epochs:
            return self.steps
        return None if tasks is None else math.ceil(self.epochs * tasks / self.prompts_per_step)
