"""Layers that multiply: what adapters sit on and what can be quantised."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """A weight, perhaps a bias, perhaps an adapter whose output is added."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: nn.Module | None = None


class ExpertLinear(nn.Module):
    """One of the products of all experts of a layer; the weights are a part of `parent`'s.

    Under one name, so that an adapter sits on all of them or on none. The parent is no child:
    parameters have one name.
    """

    def __init__(self, parent: nn.Module, part: str, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.__dict__["parent"] = parent
        self.part, self.count, self.inputs, self.outputs = part, count, inputs, outputs
        self.adapter: nn.Module | None = None

    @property
    def weight(self) -> Tensor:
        """Return [E, F, D], in the parent's memory."""
        found: Tensor = self.__dict__["parent"].matrices(self.part)
        return found


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every layer that can have an adapter, by its full name.

    Of a policy those that a text passes through below the head: the head's logits never lie in
    memory, and a tower for images learns nothing from a text.
    """
    return layers_within(model, getattr(model, "body", model))


def layers_within(model: nn.Module, body: nn.Module) -> dict[str, nn.Module]:
    """Return those in a part of a model, by their names in the whole."""
    inside = {id(module) for module in body.modules()}
    found = {name: module for name, module in model.named_modules() if id(module) in inside}
    return {
        name: m
        for name, m in found.items()
        if isinstance(m, Linear | ExpertLinear | nn.Linear) or is_turned(m)
    }


def layer_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of each layer that can have an adapter."""
    return {name: sizes_of(layer) for name, layer in linear_layers(model).items()}


def sizes_of(layer: nn.Module) -> tuple[int, int]:
    """Return (inputs, outputs)."""
    if isinstance(layer, Linear | ExpertLinear):
        return layer.inputs, layer.outputs
    first, second = cast(Tensor, layer.weight).shape
    return (first, second) if is_turned(layer) else (second, first)


def is_turned(layer: nn.Module) -> bool:
    """Tell whether the weight lies as [inputs, outputs]: GPT-2's layers, in transformers."""
    return type(layer).__name__ == "Conv1D"
