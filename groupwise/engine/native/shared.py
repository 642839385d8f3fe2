"""Weights in memory that two processes see: the carrier between a learner and its sampler's copy.

In the machine's memory, or on the learner's GPU, where the other process finds it by CUDA IPC. The
learner's process writes, the sampler's reads; who may do so when is agreed on elsewhere. What
nothing changes is not copied on a GPU: both processes read the learner's own.
"""

from __future__ import annotations

import copy
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from groupwise.model.layers.transformer import PolicyModel

ALIGNED = 256  # bytes: where a tensor may begin that is nobody's neighbour
Handle = tuple[Any, ...]  # how another process finds a tensor on the same GPU


class StoredParameter(NamedTuple):
    """Where a parameter lies in the memory."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # byte
    bytes: int


class Lent(NamedTuple):
    """All that another process reads the weights by; good for one process."""

    model: PolicyModel  # without its parameters
    places: list[StoredParameter]
    size: int
    memory: int | Handle  # a file that it inherits, by its number; or on a GPU
    frozen: dict[str, Handle]  # parameters that lie where the learner has them

    @property
    def files(self) -> tuple[int, ...]:
        return (self.memory,) if isinstance(self.memory, int) else ()


class SharedWeights:
    """A model's parameters in shared memory, and the model without them, which can be sent."""

    def __init__(self, learner: PolicyModel) -> None:
        self.learner, self.device = learner, learner.head_weight.device
        on_gpu = self.device.type == "cuda"
        # Of the learner's own process: what it may lend as it lies.
        self.frozen = {
            name: p.detach()
            for name, p in learner.named_parameters()
            if on_gpu and not p.requires_grad
        }
        own = [(name, p) for name, p in learner.named_parameters() if name not in self.frozen]
        self.places = list(_places(own))
        self.size = max((place.start + place.bytes for place in self.places), default=0) or 1
        self.file: int | None = None
        if on_gpu:
            self.memory = torch.empty(self.size, dtype=torch.uint8, device=self.device)
        else:
            self.file = _anonymous(self.size)
            self.memory = _mapped(self.file, self.size)
        self.tensors = parts_of(self.memory, self.places)
        self.model = skeleton(learner)
        self.write(frozen=True)

    @torch.no_grad()
    def write(self, *, frozen: bool = False) -> None:
        """Copy what the learner has learned; with `frozen`, all else too. Return when it is done:
        another process does not wait for this one's GPU."""
        for name, parameter in self.learner.named_parameters():
            if name in self.tensors and (frozen or parameter.requires_grad):
                self.tensors[name].copy_(parameter)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def view(self) -> PolicyModel:
        """Return a model of what stands in the memory."""
        return attach(copy.deepcopy(self.model), self.tensors | self.frozen)

    def lend(self) -> Lent:
        """Return what a process is given that is to read the weights."""
        memory = handle(self.memory) if self.file is None else self.file
        frozen = {name: handle(tensor) for name, tensor in self.frozen.items()}
        return Lent(self.model, self.places, self.size, memory, frozen)


def borrowed(lent: Lent) -> PolicyModel:
    """Return the model in the other process: its parameters are what is lent."""
    if isinstance(lent.memory, int):
        memory = _mapped(lent.memory, lent.size)
    else:
        memory = opened(lent.memory)
    frozen = {name: opened(each) for name, each in lent.frozen.items()}
    return attach(lent.model, parts_of(memory, lent.places) | frozen)


def given_back(lent: Lent) -> None:
    """Note that the process is gone, which may not have said so: PyTorch counts who reads what, and
    keeps memory for good that somebody may still read."""
    handles = [] if isinstance(lent.memory, int) else [lent.memory]
    release = cast(Callable[..., None], torch.UntypedStorage._release_ipc_counter)
    for each in (*handles, *lent.frozen.values()):
        release(each[11], each[12], device=each[6])  # counter, place among counters


def handle(tensor: Tensor) -> Handle:
    """Return how another process finds a tensor on this GPU."""
    reduce = cast(Callable[[Tensor], tuple[Any, Handle]], reduce_tensor)
    return reduce(tensor.detach())[1]


def opened(found: Handle) -> Tensor:
    rebuild = cast(Callable[..., Tensor], rebuild_cuda_tensor)
    return rebuild(*found)


def skeleton(model: PolicyModel) -> PolicyModel:
    """Copy the model with parameters that hold nothing."""
    nothing: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().new_empty(0, device="cpu"), requires_grad=False)
        for _, p in model.named_parameters()
    }
    return copy.deepcopy(model, nothing)


def attach(model: PolicyModel, tensors: Mapping[str, Tensor]) -> PolicyModel:
    """Give a model without parameters these ones."""
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name]
    return model


def parts_of(memory: Tensor, places: Sequence[StoredParameter]) -> dict[str, Tensor]:
    """Return the tensors that lie in a memory, by name."""
    return {
        place.name: memory[place.start : place.start + place.bytes]
        .view(place.dtype)
        .view(place.shape)
        for place in places
    }


def _mapped(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _places(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[StoredParameter]:
    """Choose where parameters lie. Neighbours stay neighbours: one product reads several."""
    start, end = 0, None
    for name, parameter in sorted(named, key=lambda each: each[1].data_ptr()):
        if parameter.data_ptr() != end:
            start += -start % ALIGNED
        size = parameter.numel() * parameter.element_size()
        yield StoredParameter(name, parameter.dtype, tuple(parameter.shape), start, size)
        start, end = start + size, parameter.data_ptr() + size


def _anonymous(size: int) -> int:
    """Return a file without a name, in memory where the system has such files."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("groupwise weights")
    else:
        with tempfile.TemporaryFile() as temporary:
            file = os.dup(temporary.fileno())
    os.ftruncate(file, size)
    return file
