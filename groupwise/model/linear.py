"""A layer that multiplies: what adapters sit on and what can be quantised."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Module):
    """A weight, perhaps a bias, perhaps an adapter whose output is added."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapter: nn.Module | None = None
