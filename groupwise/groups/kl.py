"""KL estimators on x = log π − log π_ref of sampled tokens, and the bounded exp they share.

To read a value, take k1 or k3: on-policy both estimate KL(π‖ref) without bias, k2 does not. To
learn from one in the loss, mind what its gradient is on average: nothing for k1, ∇KL(π‖ref) for k2,
∇KL(ref‖π) for k3; each of the next token, the prefix held fixed. Only KL in the reward also teaches
to avoid prefixes that lead far away.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import hardtanh

EXP_LIMIT = 20.0

# hardtanh is clamp with a fused backward pass, several times faster on a CPU. It takes the gradient
# away at the bound itself, clamp only beyond: the helpers move the bound by one rounding step.


def bounded_exp(x: Tensor) -> Tensor:
    """Return exp with its argument held in ±20: finite everywhere, no gradient beyond."""
    return hardtanh(x, -EXP_LIMIT, EXP_LIMIT).exp()


def at_most(x: Tensor, bound: float) -> Tensor:
    """Return min(x, bound), with a gradient up to the bound and none beyond."""
    return hardtanh(x, -math.inf, bound + abs(bound) * torch.finfo(x.dtype).eps)


def at_least(x: Tensor, bound: float) -> Tensor:
    """Return max(x, bound), with a gradient down to the bound and none beyond."""
    return hardtanh(x, bound - abs(bound) * torch.finfo(x.dtype).eps, math.inf)


def k1(x: Tensor) -> Tensor:
    """Return x."""
    return x


def k2(x: Tensor) -> Tensor:
    """Return x²/2."""
    return 0.5 * x.square()


def k3(x: Tensor) -> Tensor:
    """Return e^{−x} + x − 1."""
    return bounded_exp(-x) + x - 1.0


def k3_plus(x: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2."""
    straight = k2(x)
    return straight + (k3(x) - straight).detach()


VALUES = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus}
