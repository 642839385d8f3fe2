"""LoRA: layers that stay as they are, and beside each a narrow product that learns.

    y = x·Wᵀ + b + s·(x·Aᵀ)·Bᵀ,  A [rank, inputs], B [outputs, rank],  s = alpha/rank

B starts at 0, so the policy starts as it was. The product is computed beside the layer by sampler
and learner alike, never folded into W in between: both read the same tensors, which updates change
in place. Axes besides those of CONTRIBUTING.md: `_R` rank, `_F` outputs of a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.errors import ModelError
from groupwise.model.adapters.quantized import QuantizedLinear
from groupwise.model.adapters.targets import Spec, expert_name, matching
from groupwise.model.layers.linear import (
    ExpertLinear,
    Linear,
    is_turned,
    linear_layers,
    sizes_of,
)

Multiply = Callable[[Tensor, Tensor], Tensor]  # x [T, D], weight [F, D] -> [T, F]


class LoRA(nn.Module):
    """The narrow product of one layer. Parameters are called as PEFT calls them."""

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale
        self.dropout, self.seed = 0.0, 0
        self.dropping = False  # only within `dropping`

    def forward(self, x_TD: Tensor, multiply: Multiply = F.linear) -> Tensor:
        if self.dropping:
            x_TD = F.dropout(x_TD, self.dropout)
        narrow_TR = multiply(x_TD, self.lora_A)
        return multiply(narrow_TR, self.lora_B) * self.scale

    def delta(self) -> Tensor:
        """Return what it adds to the layer's weight: [F, D] in float32."""
        return self.lora_B.detach().float() @ self.lora_A.detach().float() * self.scale


class ExpertLoRA(nn.Module):
    """The narrow products of all experts of a layer: A [E, rank, inputs], B [E, outputs, rank]."""

    def __init__(self, count: int, inputs: int, outputs: int, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(torch.empty(count, rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(count, outputs, rank))
        self.scale = scale
        self.dropout, self.seed = 0.0, 0
        self.dropping = False  # only within `dropping`

    def apart(self) -> Callable[[int, Tensor], Tensor]:
        """Return what one expert's product is computed with."""
        narrow, wide = self.lora_A.unbind(), self.lora_B.unbind()

        def made(expert: int, x_RD: Tensor) -> Tensor:
            if self.dropping:
                x_RD = F.dropout(x_RD, self.dropout)
            return plain_product(plain_product(x_RD, narrow[expert]), wide[expert]) * self.scale

        return made

    def delta(self) -> Tensor:
        """Return what it adds to the experts' weights: [E, F, D] in float32."""
        return self.lora_B.detach().float() @ self.lora_A.detach().float() * self.scale


Adapter = LoRA | ExpertLoRA


def plain_product(x_TD: Tensor, weight_FD: Tensor) -> Tensor:
    """Multiply as `F.linear` does, except for one column.

    There the library takes another road for a few rows, and a row's bits would depend on its
    company: two columns, of which one is thrown away, do not.
    """
    if len(weight_FD) > 1:
        return F.linear(x_TD, weight_FD)
    return F.linear(x_TD, weight_FD.expand(2, -1))[..., :1]


# --- a model's layers -------------------------------------------------------------------------


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """Return adapters by the name of their layer; none where all weights are trained."""
    layers = linear_layers(model)
    found = {name: getattr(layer, "adapter", None) for name, layer in layers.items()}
    return {name: each for name, each in found.items() if isinstance(each, Adapter)}


def attach(
    model: nn.Module, spec: Spec, *, seed: int, dropout: float = 0.0, names: list[str] | None = None
) -> None:
    """Freeze the model and give layers fresh adapters: those of `names`, or the spec's targets.

    A is drawn as PEFT draws it, from the seed, in the order of names.
    """
    layers = linear_layers(model)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name in matching(spec.targets, layers) if names is None else names:
        layer = layers[name]
        like = next(p for p in model.parameters() if p.is_floating_point())
        inputs, outputs = sizes_of(layer)
        made: Adapter = LoRA(inputs, outputs, spec.rank, spec.scale)
        if isinstance(layer, ExpertLinear):
            made = ExpertLoRA(layer.count, inputs, outputs, spec.rank, spec.scale)
        bound = inputs**-0.5
        with torch.no_grad():
            made.lora_A.uniform_(-bound, bound, generator=generator)
        made.dropout, made.seed = dropout, seed
        _place(layer, made.to(like.device, like.dtype))


def _place(layer: nn.Module, made: Adapter) -> None:
    """Give our layers their adapter (layers/ops.py); a layer of others adds it behind itself."""
    if isinstance(layer, Linear | ExpertLinear):
        layer.adapter = made
        return
    if not hasattr(layer, "adapter"):  # merged, it keeps its hook
        layer.register_forward_hook(_add_adapter)
    layer.add_module("adapter", made)


def _add_adapter(layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
    adapter = getattr(layer, "adapter", None)
    if adapter is None:
        return out
    more: Tensor = adapter(given[0], plain_product)
    return out + more


# --- merging ----------------------------------------------------------------------------------


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Fold every adapter into its layer, for good. Quantised layers become plain ones."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    for name, layer in linear_layers(model).items():
        adapter = getattr(layer, "adapter", None)
        if isinstance(layer, QuantizedLinear):
            plain = layer.plain(dtype)
            parent, _, word = name.rpartition(".")
            setattr(model.get_submodule(parent), word, plain)
            layer = plain
        if isinstance(adapter, Adapter):
            fold(layer, adapter.delta())
            cast(Any, layer).adapter = None


@torch.no_grad()
def fold(layer: nn.Module, delta_FD: Tensor) -> None:
    """Add to a weight: summed in float32, rounded once."""
    weight = cast(Tensor, layer.weight)
    delta = delta_FD.T if is_turned(layer) else delta_FD
    weight.copy_(weight.float() + delta.to(weight.device))


# --- dropout ----------------------------------------------------------------------------------


@contextmanager
def dropping(model: nn.Module, *moment: int) -> Iterator[None]:
    """Let adapters drop a share of their inputs within a block: the learner's update, nothing else.

    What is dropped follows from the run's seed and the moment, so that a run repeats.
    """
    found = [adapter for adapter in adapters(model).values() if adapter.dropout]
    if not found:
        yield
        return
    device = found[0].lora_A.device
    text = repr((found[0].seed, *moment)).encode()
    number = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
    # PyTorch's own generator, because recomputation of a layer brings back its state.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(number)
        for adapter in found:
            adapter.dropping = True
        try:
            yield
        finally:
            for adapter in found:
                adapter.dropping = False


# --- tensors ----------------------------------------------------------------------------------


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every adapter's matrices, under PEFT's names for them: each expert's apart."""
    return {
        peft_name(own, part): matrix
        for name, adapter in adapters(model).items()
        for part in ("lora_A", "lora_B")
        for own, matrix in each_of(name, getattr(adapter, part).detach())
    }


@torch.no_grad()
def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the adapters these values, in place: captured steps go on reading the same memory."""
    own = tensors_of(model)
    if own.keys() != tensors.keys():
        odd = min(own.keys() ^ tensors.keys())
        side = "here" if odd in own else "in the file"
        raise ModelError(
            f"The stored adapter sits on other layers than this one: {odd} is {side} alone. Take "
            "the adapter.targets that it was made with."
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ModelError(
                f"{name} has shape {tuple(tensors[name].shape)}, here it is {tuple(tensor.shape)}. "
                "Take the adapter.rank that it was made with."
            )
        tensor.copy_(tensors[name])


def each_of(layer: str, matrix: Tensor) -> list[tuple[str, Tensor]]:
    """Return an adapter's matrix under its layer's name, or each expert's under its own."""
    if matrix.dim() == 2:
        return [(layer, matrix)]
    return [(expert_name(layer, number), own) for number, own in enumerate(matrix)]


def peft_name(layer: str, part: str) -> str:
    return f"base_model.model.{layer}.{part}.weight"
