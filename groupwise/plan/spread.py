"""A configuration spread over several GPUs: which sample, which learn, memory, seconds, bytes sent.

All of it is arithmetic from sizes and data sheets; nothing was measured on several GPUs, and what
is printed says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from groupwise.config import Config
from groupwise.errors import ConfigError
from groupwise.model import cost
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group
from groupwise.optim.roles import role_sizes
from groupwise.plan.estimate import Place, learned_groups, micro_tokens, rollout_seconds, seconds
from groupwise.prepare.setup import frozen_of, weight_bytes
from groupwise.prepare.sizes import Prompts, sizes_of

NODE = 8  # GPUs of a machine
# Bytes a second that a GPU sends: within a machine (NVLink of an H100, 450 GB/s by its data sheet),
# and to others (one port of 400 Gb/s a GPU); and the share of that which collectives reach.
WITHIN, ACROSS, REACHED = 450e9, 50e9, 0.7
HOST = 25e9  # bytes a second between a GPU and its machine's memory, one way
TOGETHER = (1, 2, 4, 8)  # GPUs that a server may spread a model over: tensor parallel
SERVER_SHARE = 0.9  # of a sampling GPU's memory that its server takes
SPARE = 0.05  # of a learning GPU's memory, for workspaces and pieces too small to use
MOMENTS, MASTER, GRADIENT = 8, 4, 4  # bytes of a number that learns
NOT_MEASURED = (
    "by arithmetic: nothing of this was measured on several GPUs; seconds are those of one GPU's "
    "measured shares of its peaks, and of 70 % of what data sheets say of links; a server of "
    "several GPUs counts as one that is as many times faster"
)


@dataclass(frozen=True)
class Split:
    """Which GPUs do what: all of them both, or some sample in servers of so many GPUs each."""

    gpus: int
    sampling: int  # 0: all sample, and all learn
    together: int = 1  # GPUs of a server

    @property
    def learning(self) -> int:
        return self.gpus - self.sampling

    @property
    def servers(self) -> int:
        return (self.sampling or self.gpus) // self.together

    def __str__(self) -> str:
        if not self.sampling:
            return f"all {self.gpus} sample and learn in turns"
        each = "" if self.together == 1 else f" ({self.servers} servers of {self.together})"
        return f"{self.sampling} sample{each}, {self.learning} learn"


@dataclass(frozen=True)
class SpreadWay:
    """One way of spreading a run over GPUs, with its bytes and seconds."""

    split: Split
    learner: dict[str, int]  # bytes of a learning GPU, by part
    sampler: dict[str, int]  # bytes of a GPU that samples; empty where all do both
    slots: int  # sequences in flight on a server
    available: float | None  # bytes of a GPU
    seconds: dict[str, float] | None
    host: int  # bytes of host memory on a machine with the learners, where states are offloaded
    sync_bytes: int  # to each sampling GPU after an update
    binds: str = ""

    @property
    def fits(self) -> bool | None:
        if self.available is None:
            return None
        learner = sum(self.learner.values()) <= self.available * (1 - SPARE)
        return learner and self.slots > 0

    @property
    def step(self) -> float | None:
        """Return the seconds of a step whose phases follow each other."""
        return None if self.seconds is None else sum(self.seconds.values())

    @property
    def overlapped(self) -> float | None:
        """Return the least seconds of a step where sampling goes on beside learning."""
        if self.seconds is None or not self.split.sampling:
            return None
        rollout = self.seconds["rollout"]
        return max(rollout, sum(self.seconds.values()) - rollout)

    def as_dict(self) -> dict[str, Any]:
        more = {"fits": self.fits, "step_seconds": self.step, "overlapped": self.overlapped}
        return {**asdict(self), **more, "how": str(self.split), "simulated": NOT_MEASURED}


@dataclass(frozen=True)
class SpreadPlan:
    """The ways that were looked at, the fastest that fits first."""

    config: Config
    shape: ModelConfig
    place: Place
    prompts: Prompts
    tokens: int
    ways: list[SpreadWay] = field(default_factory=list)

    @property
    def best(self) -> SpreadWay:
        return self.ways[0]


def spread(
    config: Config, place: Place, gpus: int, tokens: int | None = None, sampling: int | None = None
) -> SpreadPlan:
    """Return the ways to spread a configuration over so many GPUs, the best of them first.

    `sampling` GPUs sample apart from those that learn; None: whatever is best.
    """
    if place.cpu:
        raise ConfigError("--gpus plans for GPUs: name one with --gpu, such as --gpu H100.")
    shape, prompts = sizes_of(config)
    tokens = tokens or prompts.answers or config.engine.max_tokens
    splits = [x for x in _splits(gpus) if sampling in (None, x.sampling)]
    if not splits:
        raise ConfigError(
            f"--sampling {sampling}: of {gpus} GPUs some must learn: 0 to {gpus - 1}."
        )
    ways = [way(config, place, shape, prompts, tokens, split) for split in splits]
    ways.sort(key=lambda x: (x.fits is False, x.step or 0.0, sum(x.learner.values())))
    return SpreadPlan(config, shape, place, prompts, tokens, ways)


def _splits(gpus: int) -> Iterator[Split]:
    yield Split(gpus, 0)
    for sampling in range(1, gpus):
        for together in TOGETHER:
            if sampling % together == 0:
                yield Split(gpus, sampling, together)


def way(
    config: Config, place: Place, shape: ModelConfig, prompts: Prompts, tokens: int, split: Split
) -> SpreadWay:
    """Count one way."""
    width, count = weight_bytes(config), cost.trained(shape, frozen_of(config, shape))
    learner = learner_bytes(config, place, shape, prompts, tokens, split)
    rows = config.prompts_per_step * config.group_size
    most = ceil(rows / split.servers)
    each = cost.cache_bytes(shape, 1, tokens, prompts.mean, config.group_size, width)
    weights = cost.parameters(shape) * width
    sampler: dict[str, int] = {}
    if split.sampling:
        room = (place.memory or math.inf) * SERVER_SHARE * split.together - weights
        slots = min(most, config.engine.slots or most, int(max(room, 0) // each))
        sampler = {
            "weights": weights // split.together,
            "cache": slots * each // split.together,
        }
    else:  # while learning there is none, and while sampling no activations
        held = sum(learner[x] for x in ("shards", "copy that samples", "roles"))
        room = (place.memory or math.inf) * (1 - SPARE) - held
        slots = min(most, config.engine.slots or most, int(max(room, 0) // each))
    found = _seconds(config, place, shape, prompts, tokens, split, slots)
    made = SpreadWay(
        split,
        learner,
        sampler,
        slots,
        place.memory,
        found,
        host=min(split.learning, NODE) * MOMENTS * count // split.learning
        if config.optim.offload
        else 0,
        sync_bytes=weights,
    )
    return replace(made, binds=_binds(made))


def learner_bytes(
    config: Config, place: Place, shape: ModelConfig, prompts: Prompts, tokens: int, split: Split
) -> dict[str, int]:
    """Return what a learning GPU holds, by part: 16 bytes a number over the ranks, and the rest."""
    width, ranks = weight_bytes(config), split.learning
    frozen = frozen_of(config, shape)
    count, roles = cost.trained(shape, frozen), role_sizes(config, width)
    on_device = MASTER + GRADIENT + (0 if config.optim.offload else MOMENTS)
    # Prompts are counted whole, and an answer is never cut.
    passed = max(
        min(micro_tokens(config, place, shape, prompts, tokens), 8192), prompts.mean + tokens
    )
    apart = sum(role.model_bytes(shape, width, frozen) + count * role.held for role in roles)
    parts = {
        "shards": on_device * count // ranks,
        "roles": apart // ranks,
        "gathered": cost.gathered(shape, width),
        "activations": passed
        * cost.activations(shape, width, recompute=config.optim.recompute, frozen=frozen),
        "logits": cost.head_bytes(shape, passed, width, frozen=frozen),
        "copy that samples": 0 if split.sampling else cost.parameters(shape) * width,
    }
    if frozen is not None:  # the base stays, a part on each rank
        parts["base"] = cost.weight_bytes(shape, width, frozen) // ranks
    return parts


def _seconds(
    config: Config,
    place: Place,
    shape: ModelConfig,
    prompts: Prompts,
    tokens: int,
    split: Split,
    slots: int,
) -> dict[str, float] | None:
    one = seconds(config, place, shape, prompts.mean, tokens, max(slots, 1))
    width = weight_bytes(config)
    if one is None or width != cost.HALF or not slots:
        return None
    device, server = place.device, split.together
    assert device.flops is not None and device.bandwidth is not None
    larger = replace(device, flops=device.flops * server, bandwidth=device.bandwidth * server)
    answers = ceil(config.group_size * config.prompts_per_step / split.servers)
    held = (tokens + config.engine.max_tokens) // 2
    groups = [Group(prompts.mean, [held] * config.group_size)] * (answers // config.group_size)
    rest = answers % config.group_size
    groups += [Group(prompts.mean, [held] * rest)] * bool(rest)
    rollout = rollout_seconds(replace(place, device=larger), shape, groups, slots, width)
    assert rollout is not None
    ranks = split.learning
    link = (WITHIN if ranks <= NODE else ACROSS) * REACHED
    micro = micro_tokens(config, place, shape, prompts, tokens)
    batch = learned_groups(config, prompts.mean, tokens)
    total = sum(group.prompt + sum(group.completions) for group in batch)
    passes = max(1, ceil(total / ranks / max(micro, 1)))
    count = cost.trained(shape, frozen_of(config, shape))
    # A rank sends its share of the weights to all others before each pass, forward and backward,
    # and float32 gradients behind the last: they go on beside the arithmetic.
    moved = (2 * passes * cost.parameters(shape) * width + 4 * count) * (ranks - 1) / ranks
    compute = one["update"] / ranks
    found = {"rollout": rollout}
    if "score" in one:
        found["score"] = one["score"] / ranks
    found["update"] = max(compute, moved / link)
    found |= {name: x / ranks for name, x in one.items()
              if name not in ("rollout", "score", "update")}  # fmt: skip
    if config.optim.offload:  # there and back
        found["optimizer"] += 2 * MOMENTS * count / ranks / HOST
    across = WITHIN if split.gpus <= NODE else ACROSS
    found["sync"] = cost.parameters(shape) * width / (across * REACHED)
    return found


def _binds(made: SpreadWay) -> str:
    """Return in words what would have to give first."""
    if made.fits is False:
        if not made.slots:
            return "no sequence fits beside the weights of the GPUs that sample"
        largest = max(made.learner, key=lambda name: made.learner[name])
        return f"memory of the GPUs that learn: {largest}"
    if made.seconds is None:
        return ""
    longest = max(made.seconds, key=lambda name: (made.seconds or {})[name])
    return longest
