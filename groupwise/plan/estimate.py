"""The memory by part and seconds by phase of a configuration on a device, and what would fit.

Counted from sizes (prepare/sizes.py, model/cost.py, model/room.py) before anything is loaded.
Seconds are counted work over the shares of a device's peaks that were measured; they are rough, and
a plan says what they rest on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from groupwise.common.sizes import size
from groupwise.config import Config
from groupwise.engine.native.scheduler import ROW_STEP, round_up
from groupwise.explain.idle import passes_of
from groupwise.groups.steps import branching_of
from groupwise.model import cost, room
from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group
from groupwise.model.devices import KNOWN, Device, floor_seconds
from groupwise.optim.roles import alone_steps, role_sizes
from groupwise.prepare.setup import demand_of, frozen_of, weight_bytes
from groupwise.prepare.sizes import Prompts, sizes_of
from groupwise.stages.consequences import sampled_from
from groupwise.stages.groups import FIRST_DRAWS
from groupwise.sync.saver import SPARE as HOST_SPARE
from groupwise.sync.space import Space

CPU_SLOTS, GPU_SLOTS = 64, 1024  # sequences in flight, unless asked otherwise
# Shares of a device's peaks that were measured: on an H200 for 135M and 1.5B parameters, on two
# CPU cores for 135M. Decoding: of its floor in operations and bytes. Learning: of the operations.
# A GPU decodes a token of every sequence in the time that its layers take to start, whatever the
# batch, and what their work takes at this share of the roofline: within 18 % of fifteen rollouts of
# 135M to 7B parameters, 64 to 1,024 sequences and 256 to 4,096 tokens (docs/performance.md).
LAYER_START, DECODE_SHARE, CPU_DECODE_SHARE = 32e-6, 0.71, 0.4
UPDATE_SHARES, CPU_UPDATE_SHARE = ((135e6, 0.28), (1.5e9, 0.59)), 0.55
QUESTION_TOKENS = 400  # about, that a policy is asked with to judge an answer, that aside
STEP_TOKENS = 20  # of a written step: a line of a worked sum; not known before the run
OPTIMIZER_SHARE = 0.5  # of the bandwidth; not measured by itself


@dataclass(frozen=True)
class Place:
    """The device that is planned for."""

    device: Device
    cpu: bool
    memory: float | None  # bytes that training may take; None: not known


@dataclass(frozen=True)
class Host:
    """The machine around the device, as it is now: disk and memory for checkpoints."""

    folder: str
    disk: int  # bytes that are free there
    memory: int  # bytes of the host's own that a process can still get


@dataclass(frozen=True)
class Plan:
    """The resources that a configuration would take, in bytes and seconds."""

    config: Config
    shape: ModelConfig
    place: Place
    prompts: Prompts
    answer_tokens: int  # on average
    micro_tokens: int
    slots: int
    memory: dict[str, int]  # by part; the cache takes turns with what learning needs
    peak: int
    seconds: dict[str, float] | None  # by phase; None where peaks are not known
    space: Space  # of checkpoints on the disk; one is copied to the host before it is written
    host: Host | None = None  # None: another machine is planned for
    advice: list[str] = field(default_factory=list)  # what would fit, or do better

    @property
    def lacks_precision(self) -> bool:
        return self.config.model.dtype == "bfloat16" and not self.place.device.bfloat16

    @property
    def fits(self) -> bool | None:
        """Return whether it fits; False also for a precision that the device does not have."""
        if self.lacks_precision:
            return False
        return None if self.place.memory is None else self.peak <= self.place.memory

    @property
    def tight(self) -> bool:
        """Return whether it fits with less to spare than captured steps and workspaces take on a
        GPU.
        """
        free = self.place.memory
        if free is None or self.place.cpu:
            return False
        return free * (1 - room.SPARE_SHARE) - room.SPARE < self.peak <= free

    @property
    def lacks_disk(self) -> str | None:
        """Return why training would be refused for its checkpoints; None where it would not, or
        nobody can tell.
        """
        return None if self.host is None else self.space.missing(self.host.disk)

    @property
    def copies(self) -> bool | None:
        """Return whether the host holds a copy of a checkpoint, so that training does not wait for
        it.
        """
        return None if self.host is None else self.space.whole + HOST_SPARE < self.host.memory

    @property
    def step_seconds(self) -> float | None:
        return None if self.seconds is None else sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all of it in numbers and words, without the configuration."""
        return {
            "model": self.config.model.path,
            "parameters": cost.parameters(self.shape),
            "active_parameters": cost.active_parameters(self.shape),
            "device": asdict(self.place.device),
            "prompts": asdict(self.prompts),
            "answer_tokens": self.answer_tokens,
            "micro_tokens": self.micro_tokens,
            "slots": self.slots,
            "memory": self.memory,
            "peak": self.peak,
            "available": self.place.memory,
            "fits": self.fits,
            "checkpoints": {**asdict(self.space), "most": self.space.most},
            "host": None if self.host is None else asdict(self.host),
            "host_copy": self.space.whole,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "assumptions": assumptions(self),
            "advice": self.advice,
        }


def plan(config: Config, place: Place, tokens: int | None = None, host: Host | None = None) -> Plan:
    """Plan a configuration on a device, with answers of so many tokens on average."""
    shape, prompts = sizes_of(config)
    usual = prompts.answers or config.engine.max_tokens
    made = count(config, place, shape, prompts, tokens or usual)
    return replace(made, advice=advice(made), host=host)


# --- counting ---------------------------------------------------------------------------------


def count(config: Config, place: Place, shape: ModelConfig, prompts: Prompts, tokens: int) -> Plan:
    width, rows = weight_bytes(config), config.prompts_per_step * config.group_size
    rows = max(rows, sum(len(group.completions) for group in branches(config, 1, tokens)))
    slots = min(config.engine.slots or (CPU_SLOTS if place.cpu else GPU_SLOTS), rows)
    micro = micro_tokens(config, place, shape, prompts, tokens)
    (group, *_) = learned_groups(config, prompts.mean, tokens)
    filled = max(whole_answers(micro, group), min(micro, prompts.longest + tokens))
    frozen = frozen_of(config, shape)
    parts = cost.memory(
        shape,
        slots=rows_held(slots, cpu=place.cpu) if config.recipe.samples else 0,
        max_tokens=config.engine.max_tokens,
        prompt=prompts.longest if place.cpu else prompts.mean,
        group=1 if place.cpu else config.group_size,  # a CPU's cache has a copy for each sample
        micro_tokens=filled,
        recompute=config.optim.recompute,
        roles=role_sizes(config, width),
        width=width,
        cpu=place.cpu,
        frozen=frozen,
        offload=config.optim.offload,
    )
    # The head's logits are counted with the micro-batch; to people they are something else.
    _, _, head = cost.largest_update(
        shape,
        filled,
        width,
        recompute=config.optim.recompute,
        roles=role_sizes(config, width),
        cpu=place.cpu,
        frozen=frozen,
    )
    if config.recipe.scores:  # one number in place of logits
        parts["micro-batch"], head = parts["micro-batch"] - head, 0
    peak = cost.peak(parts)
    if place.cpu:
        # What learning freed stays with the process in pieces too small for a cache, which comes
        # on top of it from the second step on. Only the head's buffers are given back.
        peak = max(peak, sum(parts.values()) - head, cost.loading(shape, width, frozen))
    together, cache = parts.pop("micro-batch"), parts.pop("cache")
    parts |= {"activations": together - head, "head": head, "cache": cache}
    return Plan(
        config=config,
        shape=shape,
        place=place,
        prompts=prompts,
        answer_tokens=tokens,
        micro_tokens=micro,
        slots=slots,
        memory={name: x for name, x in parts.items() if x},
        peak=peak,
        seconds=seconds(config, place, shape, prompts.mean, tokens, slots),
        space=space_of(config, shape),
    )


def space_of(config: Config, shape: ModelConfig) -> Space:
    """Return the bytes of the checkpoints: weights or adapter, optimizer's state, copies."""
    width, frozen = weight_bytes(config), frozen_of(config, shape)
    learned = cost.trained(shape, frozen)
    master = 0 if width == cost.SINGLE else cost.SINGLE
    state = learned * (2 * cost.SINGLE + master)
    state += cost.saved(shape, role_sizes(config, width), frozen)
    kind, _, lag = config.engine.weights.partition(":")
    state += learned * width * (int(lag) if kind == "stale" else 0)
    best = learned * width
    return Space(best + state, best, config.checkpoint.keep)


def rows_held(slots: int, *, cpu: bool) -> int:
    """Return the rows of the cache: a CPU's come in whole steps."""
    return round_up(slots, ROW_STEP) if cpu else slots


def micro_tokens(
    config: Config, place: Place, shape: ModelConfig, prompts: Prompts, tokens: int
) -> int:
    """Return the tokens of a micro-batch: as set or automatic; from one sequence to the whole
    batch.
    """
    asked = config.optim.micro_tokens
    if not asked and place.cpu:
        asked = room.CPU_TOKENS
    elif not asked:
        demand = demand_of(config, shape, training=True)
        asked = room.automatic_tokens(demand, place.memory or math.inf)
    groups = learned_groups(config, prompts.mean, tokens)
    batch = sum(group.prompt + sum(group.completions) for group in groups)
    return min(max(asked, prompts.longest + tokens), batch)


def whole_answers(most: int, group: Group) -> int:
    """Return the tokens used of so many: answers are not cut, so a part may stay empty."""
    answer, whole = group.completions[0], group.prompt + sum(group.completions)
    groups, left = divmod(most, whole)
    more = max(0, left - group.prompt) // answer  # answers of another group
    return groups * whole + (group.prompt + more * answer if more else 0)


def learned_groups(config: Config, prompt: int, tokens: int) -> list[Group]:
    """Return what one step learns from: groups, or one pair a prompt."""
    rows = config.recipe.rows(config.group_size)
    return [Group(prompt, [tokens] * rows)] * config.prompts_per_step


def branches(config: Config, prompt: int, tokens: int) -> list[Group]:
    """Return what is sampled from within answers, for values of steps of `STEP_TOKENS`."""
    how = branching_of(config.recipe)
    if how is None:
        return []
    steps = min(how.most_steps, max(tokens - 1, 0) // STEP_TOKENS)
    starts = [tokens * number // (steps + 1) for number in range(1, steps + 1)]
    starts = [0, *starts] if config.group_size == 1 else starts
    answer = [Group(prompt + at, [max(tokens - at, 1)] * how.branches) for at in starts]
    return answer * (config.group_size * config.prompts_per_step)


def judgements(config: Config, prompt: int, tokens: int) -> list[Group]:
    """Return what the policy writes about its answers, where it judges them."""
    how = config.recipe.judging
    if how is None:
        return []
    judged = Group(QUESTION_TOKENS + prompt + tokens, [how["max_tokens"]] * how["judgements"])
    return [judged] * (config.group_size * config.prompts_per_step)


def seconds(
    config: Config, place: Place, shape: ModelConfig, prompt: int, tokens: int, slots: int
) -> dict[str, float] | None:
    """Return seconds by phase; None where the device's peaks are not known for this precision."""
    device, width, recipe = place.device, weight_bytes(config), config.recipe
    if device.flops is None or device.bandwidth is None:
        return None
    if not place.cpu and width != cost.HALF:
        return None  # plain PyTorch, and peaks are those of bfloat16
    found = {}
    if recipe.samples:
        # Answers end one by one, and a batch thins out more slowly than they do.
        held = (tokens + config.engine.max_tokens) // 2
        sampled = [Group(prompt, [held] * config.group_size)] * config.prompts_per_step
        rollout = rollout_seconds(place, shape, sampled, slots, width)
        assert rollout is not None
        found["rollout"] = rollout
        if more := branches(config, prompt, tokens):
            valued = rollout_seconds(place, shape, more, slots, width)
            assert valued is not None
            found["branches"] = valued
        if asked := judgements(config, prompt, tokens):
            judging = rollout_seconds(place, shape, asked, slots, width)
            assert judging is not None
            found["judgements"] = judging
    device_flops = device.flops
    rate = device_flops * update_share(cost.active_parameters(shape), cpu=place.cpu)
    batch = learned_groups(config, prompt, tokens)
    forward = cost.total(cost.forward_cost(shape, batch)).flops / rate
    old = "old_logp_NT" in recipe.anchored(sampled_from(config)).streams
    passes = passes_of(recipe)
    updates = recipe.updates * passes
    frozen = frozen_of(config, shape)
    beside = [(role, role.learning(shape, frozen)) for role in role_sizes(config, width)]

    def one_pass(model: cost.Learning) -> float:
        share = update_share(cost.active_parameters(model.shape), cpu=place.cpu)
        return model.forward_flops(batch) / (device_flops * share)

    scored = old * forward + sum(role.passes * one_pass(model) for role, model in beside)
    if scored:
        found["score"] = scored

    # A measured share is of what the mathematics asks for, three times a forward pass. What is
    # computed again to save memory is one more, and frozen weights have no gradients: one less.
    def times(part: cost.Frozen | None) -> float:
        return (3 if part is None else 2) + config.optim.recompute

    found["update"] = times(frozen) * passes * forward
    moved = cost.optimizer_cost(shape, width, frozen).bytes * updates
    for role, model in beside:
        if role.updates:
            name = f"{role.name} update"
            found[name] = role.updates * times(model.frozen) * passes * one_pass(model)
            moved += model.count * cost.OPTIMIZER_BYTES[width] * updates
    found["optimizer"] = moved / (device.bandwidth * OPTIMIZER_SHARE)
    return found


def rollout_seconds(
    place: Place, shape: ModelConfig, groups: Sequence[Group], slots: int, width: int
) -> float | None:
    """Return the seconds of sampling; None where the device's peaks are not known for this
    precision.
    """
    if not place.cpu and width != cost.HALF:
        return None
    floor = floor_seconds(cost.rollout_cost(shape, groups, slots, width), place.device)
    if floor is None or place.cpu:
        return None if floor is None else floor / CPU_DECODE_SHARE
    lengths = [length for group in groups for length in group.completions]
    steps = max(max(lengths), sum(lengths) / slots)
    return steps * shape.num_layers * LAYER_START + floor / DECODE_SHARE


def update_share(parameters: int, *, cpu: bool) -> float:
    """Return the share of peak operations: measured for two sizes, interpolated between."""
    if cpu:
        return CPU_UPDATE_SHARE
    (small, low), (large, high) = UPDATE_SHARES
    at = math.log(parameters / small) / math.log(large / small)
    return low + (high - low) * min(max(at, 0.0), 1.0)


# --- in words ---------------------------------------------------------------------------------


def assumptions(made: Plan) -> list[str]:
    """Return what the figures rest on."""
    config, place, tokens = made.config, made.place, made.answer_tokens
    most = tokens == config.engine.max_tokens
    said = ": the most that they can have; --tokens N for what you expect" if most else ""
    if tokens == made.prompts.answers:
        said = ", the mean of those in data.train"
    found = [f"answers of {tokens} tokens{said}"]
    if made.seconds is None:
        known = ", ".join(device.name for device in KNOWN if device.flops)
        return [*found, f"no times: they are known for bfloat16 on {known}, and for a CPU"]
    share = f"{update_share(cost.active_parameters(made.shape), cpu=place.cpu):.0%}"
    found.append(
        f"{_rate(place.device)}, measured just now; decoding at {CPU_DECODE_SHARE:.0%} and "
        f"learning at {share} of that, as measured for 135M parameters on two quiet cores"
        if place.cpu
        else f"{_rate(place.device)}; decoding at {DECODE_SHARE:.0%} of that, and "
        f"{LAYER_START * 1e6:.0f} us a layer and token to start; learning at {share} of the "
        "operations; as measured on an H200 (135M to 7B parameters)"
    )
    if not made.shape.native:
        found.append(
            f"{made.shape.family} runs through transformers: times and activations are counted as "
            "for groupwise's own layers, and are too low"
        )
    found.append(
        "time is that of steps: loading, compilation in the first of them, grading, evaluation, "
        "checkpoints and the report are not counted"
    )
    alone = alone_steps(config)
    if alone:
        found.append(f"in the first {alone} steps the critic learns alone: they are shorter")
    if config.recipe.refilling:
        found.append(_refill_line(config))
    how = branching_of(config.recipe)
    if how is not None:
        found.append(
            f"steps of {STEP_TOKENS} tokens, {how.most_steps} valued at the most, and "
            f"{how.branches} branches from each"
        )
    judging = config.recipe.judging
    if judging is not None:
        found.append(
            f"{judging['judgements']} judgements of every answer, of {judging['max_tokens']} "
            f"tokens each, behind a question of about {QUESTION_TOKENS} tokens and the answer"
        )
    weights = sampled_from(config)
    if weights != "shared":
        found.append(f"the sampler's copy of the weights ({weights}) not counted")
    return found


def _refill_line(config: Config) -> str:
    """Describe how much more than its first draw a step may sample, as far as the settings say."""
    if config.refills != "until full":
        most = f"up to {config.refills + 1} times as much"
    else:
        most = f"up to {FIRST_DRAWS + 1} times as much"
    if config.refill_tokens:
        most = f"{config.refill_tokens:,} tokens a step more, and what one round goes beyond"
    return f"dynamic sampling may draw {most}"


def _rate(device: Device) -> str:
    assert device.flops is not None and device.bandwidth is not None
    flops, unit = (device.flops / 1e12, "T") if device.flops >= 1e12 else (device.flops / 1e9, "G")
    return f"{flops:.0f} {unit}FLOP/s and {device.bandwidth / 1e9:,.0f} GB/s"


def advice(made: Plan) -> list[str]:
    """Return changes that would fit or, where all fits, that would do better."""
    config, place = made.config, made.place
    if made.fits is None:
        return []

    def again(changed: Config) -> Plan:
        return count(changed, place, made.shape, made.prompts, made.answer_tokens)

    if made.lacks_precision:
        wide = again(replace(config, model=replace(config.model, dtype="float32")))
        alone = f"model.dtype=float32: {_brief(wide)}"
        return [alone] if wide.fits else [f"model.dtype=float32 and {x}" for x in advice(wide)]
    if made.fits and (place.cpu or config.model.dtype == "bfloat16" or not place.device.bfloat16):
        return []
    others = {text: again(changed) for text, changed in changes(made).items()}
    if made.fits:
        fast = "model.dtype=bfloat16"
        return [f"{fast} runs the kernels, several times as fast: {_brief(others[fast])}"]
    found = [f"{text}: {_brief(other)}" for text, other in others.items() if other.fits]
    if found:
        return found
    demand = replace(demand_of(config, made.shape, training=True), prompt=made.prompts.mean)
    assert place.memory is not None
    return [room.refusal(demand, place.memory) or "no single change is enough"]


def changes(made: Plan) -> dict[str, Config]:
    """Return single changes that take less memory, by how they are written."""
    config = made.config
    model, optim, engine = config.model, config.optim, config.engine
    found = {}
    tokens = made.micro_tokens // 2
    while tokens >= made.prompts.longest + engine.max_tokens:
        found[f"optim.micro_tokens={tokens}"] = replace(
            config, optim=replace(optim, micro_tokens=tokens)
        )
        tokens //= 2
    if not optim.recompute:
        found["optim.recompute=true"] = replace(config, optim=replace(optim, recompute=True))
    if not (optim.offload or made.place.cpu):
        found["optim.offload=true"] = replace(config, optim=replace(optim, offload=True))
    if model.dtype != "bfloat16" and made.place.device.bfloat16:
        found["model.dtype=bfloat16"] = replace(config, model=replace(model, dtype="bfloat16"))
    if "critic" in config.recipe.roles and not (config.critic.adapter or config.adapter.used):
        found["critic.adapter=16"] = replace(config, critic=replace(config.critic, adapter=16))
    if not config.adapter.used:
        found["adapter.rank=16"] = replace(config, adapter=replace(config.adapter, rank=16))
    elif model.quantize == "none":
        found["model.quantize=nf4"] = replace(config, model=replace(model, quantize="nf4"))
    slots = made.slots // 2
    if slots:
        found[f"engine.slots={slots}"] = replace(config, engine=replace(engine, slots=slots))
    return found


def _brief(made: Plan) -> str:
    step = made.step_seconds
    return size(made.peak) + ("" if step is None else f", {step:.3g} s a step")
