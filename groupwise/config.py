"""The configuration: one typed tree. From TOML, dotted overrides and Python keywords, all alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.composition import PairRecipe, Recipe


@dataclass(frozen=True)
class Model:
    """The policy."""

    path: str = "tiny"  # a Hugging Face folder, a .gguf file, or "tiny": made on the spot
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    threads: int = 0  # of the CPU; 0: as many as PyTorch takes. Other numbers give other last bits


@dataclass(frozen=True)
class Tiny:
    """The embedded model: a small transformer over characters with a supervised cold start."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    cold_start_steps: int = 150  # of supervised learning on the task's own solutions
    cold_start_batch: int = 64
    cold_start_rate: float = 3e-3


@dataclass(frozen=True)
class Data:
    """Prompts."""

    train: str = "arithmetic"  # a .jsonl file, or a generator: arithmetic, countdown
    eval: str = ""  # the same; "" holds tasks out of a generator, and none of a file
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    template: Literal["auto", "chat", "plain"] = "auto"  # auto: chat for messages, else plain
    system: str = ""  # a system message in front of chat prompts
    instruction: str = "{prompt}"  # what a string prompt becomes
    max_prompt_tokens: int = 0  # longer prompts are dropped, and reported; 0: what the model holds
    size: int = 10_000  # tasks that a generator makes
    options: dict[str, Any] = field(default_factory=dict)  # of a generator, such as digits = 2
    shuffle: bool = True


@dataclass(frozen=True)
class Reward:
    """What an answer is worth: a weighted sum of parts."""

    # name -> weight: "number", "exact", "format(...)", "file.py:function"
    parts: dict[str, float] = field(default_factory=lambda: {"number": 1.0})
    max_failed_share: float = 0.05  # of a step's rewards that may fail before the run stops


@dataclass(frozen=True)
class Engine:
    """The sampler."""

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    stop: tuple[str, ...] = ()
    slots: int = 64  # sequences in flight
    weights: str = "shared"  # the learner's own; to study a mismatch: "int8", "stale:K", "noise:S"


@dataclass(frozen=True)
class Optim:
    """The update."""

    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_norm: float = 1.0  # 0: no clipping
    micro_tokens: int = 4096  # in one forward and backward pass; changes memory, not the update
    recompute: bool = False  # activations in the backward pass: less memory, a third more time
    exponent_rate: float = 1e-2  # of the length exponent, where the recipe learns one


@dataclass(frozen=True)
class Reference:
    """What KL terms hold on to, for recipes that have them."""

    update: str = "frozen"  # the starting policy; "ema:0.99": moving average; "reset:100": steps


@dataclass(frozen=True)
class Eval:
    """Held-out accuracy."""

    every: int = 10  # steps; also before the first and after the last. 0: only those two
    tasks: int = 128
    samples: int = 1
    temperature: float = 0.0  # 0: greedy


@dataclass(frozen=True)
class Checkpoint:
    every_steps: int = 50  # 0: not by steps
    every_seconds: float = 600.0  # 0: not by time
    keep: int = 2  # the latest; the best is kept beside them


@dataclass(frozen=True)
class Guard:
    """When not to go on."""

    mismatch: float = 1e-3  # mean |sampler − learner| log-probability that the first step may have
    max_skipped: int = 3  # updates in a row that may be skipped because they are not finite


@dataclass(frozen=True)
class Config:
    """All of a run. Two numbers set the batch: prompts_per_step and group_size."""

    recipe: Recipe | PairRecipe
    prompts_per_step: int = 16
    group_size: int = 8
    steps: int = 100
    seed: int = 0
    overlong: Literal["recipe", "drop", "mask", "penalise"] = "recipe"  # answers that hit the limit
    refills: int = 3  # rounds of dynamic sampling before a smaller batch is taken
    model: Model = field(default_factory=Model)
    tiny: Tiny = field(default_factory=Tiny)
    data: Data = field(default_factory=Data)
    reward: Reward = field(default_factory=Reward)
    engine: Engine = field(default_factory=Engine)
    optim: Optim = field(default_factory=Optim)
    reference: Reference = field(default_factory=Reference)
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    guard: Guard = field(default_factory=Guard)
