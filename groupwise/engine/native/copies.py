"""The weights that the engine samples from: the learner's own, or a copy that differs on purpose.

Most copies are for studying a mismatch between sampler and learner: rounded to 8 bits, some updates
old, or with noise on the logits. One is there because it samples faster: products of 8-bit floats.
What is recorded is always the copy's own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor

from groupwise.engine.protocol import State, WeightSource
from groupwise.errors import EngineError
from groupwise.model.layers.fp8 import fp8_copy, round_weights
from groupwise.model.layers.transformer import PolicyModel, copy_trained
from groupwise.parallel.shards import refuse_shards

FORMS = (
    '"shared", "fp8", "int8", "stale:K" (K updates old, such as "stale:2"), "noise:S" (noise of \
standard deviation S on the logits, such as "noise:0.1")'
)


class Shared:
    """The learner's parameters themselves: there is nothing to deliver."""

    def __init__(self, learner: PolicyModel, version: int, noise: float = 0.0) -> None:
        self.model, self.version, self.noise = learner, version, noise

    def sync(self, version: int) -> None:
        self.version = version

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        _check_nothing(state)


class Int8:
    """Every matrix as 8-bit integers times a scale per output channel, and back."""

    noise = 0.0

    def __init__(self, learner: PolicyModel, version: int) -> None:
        self.learner = learner
        self.sync(version)

    def sync(self, version: int) -> None:
        # A new copy, not new numbers in the old one: adapters may have come or gone.
        self.model, self.version = detached(self.learner), version
        for _, parameter in self.model.named_parameters():
            if parameter.dim() >= 2 and parameter.is_floating_point():
                parameter.copy_(round_trip(parameter))

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        _check_nothing(state)


class Fp8:
    """The matrices of all layers in 8-bit floats (layers/fp8.py); the rest is the learner's own."""

    noise = 0.0

    def __init__(self, learner: PolicyModel, version: int) -> None:
        self.learner = learner
        self._make()
        self.sync(version)

    def _make(self) -> None:
        self.model, self.made_at = fp8_copy(self.learner), self.learner.placement

    def sync(self, version: int) -> None:
        if self.made_at != self.learner.placement:  # what is the learner's own lies elsewhere
            self._make()
        round_weights(self.learner, self.model)
        self.version = version

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        _check_nothing(state)


class Stale:
    """The parameters of some updates ago; the oldest ones known until there were as many.

    Between two versions that it was given, the older one counts.
    """

    noise = 0.0

    def __init__(self, learner: PolicyModel, version: int, lag: int) -> None:
        self.learner, self.lag = learner, lag
        self.past: dict[int, PolicyModel] = {}
        self.sync(version)

    def sync(self, version: int) -> None:
        self.past[version] = detached(self.learner, copy_trained)
        self._choose(version)

    def _choose(self, newest: int) -> None:
        old_enough = [version for version in self.past if version <= newest - self.lag]
        self.version = max(old_enough, default=min(self.past))
        self.past = {v: model for v, model in self.past.items() if v >= self.version}
        self.model = self.past[self.version]

    def state(self) -> State:
        """Return the trained tensors of all but the newest copy, which the learner holds."""
        trained = self._trained()
        return {
            f"{version}/{name}": parameter.detach().clone()
            for version in sorted(self.past)[:-1]
            for name, parameter in self.past[version].named_parameters()
            if name in trained
        }

    def _trained(self) -> set[str]:
        return {name for name, p in self.learner.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Restore an engine that was made from the learner as it was when the state was taken."""
        newest = max(self.past)
        self.past = {newest: self.past[newest]}
        wanted = self._trained()
        for version in sorted({int(name.split("/", 1)[0]) for name in state}):
            model = detached(self.learner, copy_trained)
            for name, parameter in model.named_parameters():
                if name not in wanted:
                    continue
                stored = state.get(f"{version}/{name}")
                if stored is None or stored.shape != parameter.shape:
                    raise EngineError(
                        f"The saved copy of version {version} has no {name} of shape "
                        f"{tuple(parameter.shape)} ({len(wanted)} parameters are needed): it "
                        f"belongs to another model. Resume with the model that the run began with."
                    )
                parameter.copy_(stored)
            self.past[version] = model
        self._choose(newest)


def make_source(weights: str, learner: PolicyModel, version: int) -> WeightSource:
    """Make the source of weights that a text names."""
    # The sampler reads parameters where they lie, the head between two forward passes.
    refuse_shards(learner.named_parameters(), "The native engine")
    if weights == "fp8":
        return Fp8(learner, version)
    name, _, argument = weights.partition(":")
    try:
        if weights == "shared":
            return Shared(learner, version)
        if weights == "int8":
            return Int8(learner, version)
        if name == "stale" and int(argument) >= 1:
            return Stale(learner, version, int(argument))
        if name == "noise" and 0 < float(argument) < math.inf:
            return Shared(learner, version, float(argument))
    except ValueError:
        pass  # no number: the same message
    raise EngineError(f"engine.weights is {weights!r}, which names no weights. Known: {FORMS}.")


def detached(
    model: PolicyModel, copied: Callable[[PolicyModel], PolicyModel] = copy.deepcopy
) -> PolicyModel:
    """Copy the model outside the graph: all of it, or by `copy_trained`."""
    made = copied(model)
    for _, parameter in made.named_parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return made


def round_trip(weight: Tensor) -> Tensor:
    """Return round(w/s)·s with s = max|w|/127 of each row (output channel)."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scale = wide.abs().amax(-1, keepdim=True) / 127
    return ((wide / scale.clamp(min=1e-30)).round() * scale).to(weight.dtype)


def _check_nothing(state: State) -> None:
    if state:
        raise EngineError(
            f"A saved copy of the sampler's weights was given ({len(state)} tensors), but this "
            f"engine keeps none. Resume with the engine.weights that the run began with."
        )
