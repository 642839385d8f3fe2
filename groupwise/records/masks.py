"""Masks as numbers, and comparisons that give numbers or masks without a slow loop.

PyTorch's loops are vectorised where what they read and write is of one floating type. Comparing
into bools, multiplying numbers by bools and counting bools are not, and take four to ten times as
long on a CPU. Each function here has the plain form in its first line.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `mask.to(dtype)` of a mask of bools: 1 where it holds, else 0."""
    return mask.view(torch.uint8).to(dtype)


def above(x: Tensor, bound: Tensor | float) -> Tensor:
    """Return `(x > bound).to(x.dtype)`, detached."""
    return torch.gt(x.detach(), bound, out=torch.empty_like(x, requires_grad=False))


def below(x: Tensor, bound: Tensor | float) -> Tensor:
    """Return `(x < bound).to(x.dtype)`, detached."""
    return torch.lt(x.detach(), bound, out=torch.empty_like(x, requires_grad=False))


def equal(x: Tensor, y: Tensor | float) -> Tensor:
    """Return `(x == y).to(x.dtype)`, detached."""
    return torch.eq(x.detach(), y, out=torch.empty_like(x, requires_grad=False))
