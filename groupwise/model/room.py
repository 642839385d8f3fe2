"""Room in a device's memory: whether a run fits, how much at a time, and what would fit instead.

All of it counted from sizes (cost.py), before anything is loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from groupwise.common.sizes import size
from groupwise.model.adapters.targets import ALPHA, Spec
from groupwise.model.config import ModelConfig
from groupwise.model.cost import (
    HALF,
    Frozen,
    RoleSize,
    active_parameters,
    cache_bytes,
    lora,
    memory,
    parameters,
    peak,
    weight_bytes,
)

CPU_TOKENS = 1024  # of a micro-batch: more are no faster there
# Beyond so many tokens a GPU computes hardly faster. A small model's micro-batch, or a mixture's of
# which a token meets little, is over before the host has asked for the next one, so it takes larger
# ones. Where an adapter learns, twice as many: its narrow products keep the host longer, and the
# memory of a full update's state is free.
SMALL_MODEL, SMALL_TOKENS, LARGE_TOKENS = 5e8, 32_768, 8_192
# Of a GPU's memory, and of that a share: for captured decoding steps, workspaces, pieces too small
# to use. Little, as too small a micro-batch stays so, and one too large is halved when it is met.
SPARE, SPARE_SHARE = 2**30, 0.02
# Of a GPU's memory, for a sampler's process beside the learner: copy of the weights, caches. Both
# are at work at once, and neither knows what the other will ask for.
SAMPLER_SHARE = 0.5
LONGEST = 2**24  # tokens: as far as a search goes
USUAL = Spec(16, ALPHA)  # the adapter that is offered where all weights are too many


@dataclass(frozen=True)
class Demand:
    """The memory that a run asks of a device, at the least: one sequence at a time."""

    shape: ModelConfig
    max_tokens: int  # of an answer
    prompt: int = 1  # tokens; one where prompts are not known yet
    training: bool = True  # or sampling alone
    recompute: float = False
    roles: tuple[RoleSize, ...] = ()  # what takes part beside the policy
    width: int = HALF  # bytes of a weight
    frozen: Frozen | None = None  # where an adapter learns
    ranks: int = 1  # that share what learns
    offload: bool = False  # whether the optimizer's numbers lie on the host

    def parts(self, micro_tokens: int | None = None) -> dict[str, int]:
        """Count bytes by what they are for, with one sequence in a micro-batch by default."""
        if not self.training:
            held = weight_bytes(self.shape, self.width, self.frozen)
            cache = cache_bytes(self.shape, 1, self.max_tokens, self.prompt, 1, self.width)
            return {"weights": held, "cache": cache}
        return memory(
            self.shape,
            slots=1,
            max_tokens=self.max_tokens,
            prompt=self.prompt,
            group=1,
            micro_tokens=self.prompt + self.max_tokens if micro_tokens is None else micro_tokens,
            recompute=self.recompute,
            roles=self.roles,
            width=self.width,
            frozen=self.frozen,
            ranks=self.ranks,
            offload=self.offload,
        )

    @property
    def least(self) -> int:
        return peak(self.parts())


def fitting_tokens(demand: Demand, available: float) -> int:
    """Return the most tokens in a micro-batch that so many bytes hold; 0 if the rest won't fit."""
    return _most(lambda tokens: peak(demand.parts(tokens)), available)


def automatic_tokens(demand: Demand, available: float) -> int:
    """Return the tokens of a micro-batch on a GPU: as many as fit, up to where more are of no use.

    A power of two, so that a little more or less of free memory does not change the order of sums.
    """
    large = LARGE_TOKENS if demand.frozen is None else 2 * LARGE_TOKENS
    most = SMALL_TOKENS if active_parameters(demand.shape) < SMALL_MODEL else large
    fitting = max(fitting_tokens(demand, available * (1 - SPARE_SHARE) - SPARE), 1)
    return min(most, 1 << (fitting.bit_length() - 1))


def refusal(demand: Demand, available: float) -> str:
    """Say what does not fit, and what would; "" where it fits."""
    if demand.least <= available:
        return ""
    count = parameters(demand.shape)
    doing = "Training" if demand.training else "Sampling from"
    sequence = f"{demand.prompt + demand.max_tokens:,} tokens"
    names = {"micro-batch": f"a micro-batch of {sequence}", "cache": f"a cache for {sequence}"}
    parts = [f"{names.get(name, name)} {size(x)}" for name, x in demand.parts().items() if x]
    turns = "; the cache takes turns with gradients and micro-batch" if demand.training else ""
    return (
        f"{doing} a model of {_count(count)} parameters takes at least {size(demand.least)} "
        f"({', '.join(parts)}{turns}), and {size(available)} are free. What would fit: "
        f"{'; '.join(_alternatives(demand, available))}."
    )


def _alternatives(demand: Demand, available: float) -> list[str]:
    changes = {
        "optim.recompute=true": replace(demand, recompute=True),
        "model.dtype=bfloat16": replace(demand, width=HALF),
        **{text: _with_role(demand, role, other) for role, text, other in _lighter(demand)},
    }
    if demand.training:
        changes["optim.offload=true"] = replace(demand, offload=True)
    if demand.training and demand.frozen is None:
        changes["adapter.rank=16 (LoRA)"] = replace(demand, frozen=lora(demand.shape, USUAL))
    elif demand.frozen is not None and demand.frozen.quantize == "none":
        few = replace(demand.frozen, quantize="nf4")
        changes["model.quantize=nf4"] = replace(demand, frozen=few)
    found = [text for text, other in changes.items() if other.least <= available]
    found += [text for role in demand.roles if (text := _smaller(demand, role, available))]
    longest = _most(lambda tokens: replace(demand, max_tokens=tokens).least, available)
    if longest:
        found.append(f"engine.max_tokens={longest} or less")
    largest = available * parameters(demand.shape) / demand.least
    return [*found, f"a dense model of about {_count(largest)} parameters or fewer"]


def _lighter(demand: Demand) -> Iterator[tuple[RoleSize, str, RoleSize | None]]:
    for role in demand.roles:
        for text, other in role.instead.items():
            yield role, text, other


def _with_role(demand: Demand, role: RoleSize, other: RoleSize | None) -> Demand:
    """Return the demand with another role in a role's place, or without it."""
    new = tuple(other if each is role else each for each in demand.roles)
    return replace(demand, roles=tuple(each for each in new if each is not None))


def _smaller(demand: Demand, role: RoleSize, available: float) -> str:
    """Say how large a model of the role's may be beside all else; "" where it can't be chosen."""
    left = available - _with_role(demand, role, None).least
    if not role.smaller or role.model is None or left <= 0:
        return ""
    model = role.model.beside(demand.shape, demand.frozen)
    count = left * parameters(model.shape) / model.held(demand.width)
    return f"{role.smaller} of about {_count(count)} parameters or fewer" if count > 1e6 else ""


def _most(cost: Callable[[int], int], available: float) -> int:
    """Return the largest number whose cost, which grows with it, is no more than what there is."""
    return max(bisect_right(range(LONGEST), available, key=cost) - 1, 0)


def _count(number: float) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.0f}M"
