"""Weights in memory that two processes see: the carrier between a learner and its sampler's copy.

The learner's process writes, the sampler's reads; who may do so when is agreed on elsewhere.
"""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from groupwise.model.layers.transformer import PolicyModel

ALIGNED = 64  # bytes: where a tensor may begin


class StoredParameter(NamedTuple):
    """Where a parameter lies."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte
    bytes: int


class SharedWeights:
    """A model's parameters in shared memory, and the model without them, which can be sent."""

    def __init__(self, learner: PolicyModel) -> None:
        self.learner = learner
        self.places = list(_places(learner))
        self.size = max((place.start + place.bytes for place in self.places), default=0) or 1
        self.file = _anonymous(self.size)
        self.tensors = mapped(self.file, self.size, self.places)
        self.model = skeleton(learner)
        self.write(frozen=True)

    @torch.no_grad()
    def write(self, *, frozen: bool = False) -> None:
        """Copy what the learner has learned; with `frozen`, all else too."""
        for name, parameter in self.learner.named_parameters():
            if frozen or parameter.requires_grad:
                self.tensors[name].copy_(parameter)

    def view(self) -> PolicyModel:
        """Return a model of what stands in the memory."""
        return attach(copy.deepcopy(self.model), self.tensors)


def skeleton(model: PolicyModel) -> PolicyModel:
    """Copy the model with parameters that hold nothing."""
    nothing: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().new_empty(0, device="cpu"), requires_grad=False)
        for _, p in model.named_parameters()
    }
    return copy.deepcopy(model, nothing)


def attach(model: PolicyModel, tensors: dict[str, Tensor]) -> PolicyModel:
    """Give a model without parameters these ones."""
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name]
    return model


def mapped(file: int, size: int, places: list[StoredParameter]) -> dict[str, Tensor]:
    """Return the tensors that lie in a shared file, by name."""
    flat = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    return {
        place.name: flat[place.start : place.start + place.bytes]
        .view(place.dtype)
        .view(place.shape)
        for place in places
    }


def _places(model: PolicyModel) -> Iterator[StoredParameter]:
    start = 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        yield StoredParameter(name, parameter.dtype, tuple(parameter.shape), start, size)
        start += -(-size // ALIGNED) * ALIGNED


def _anonymous(size: int) -> int:
    """Return a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("groupwise weights")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
