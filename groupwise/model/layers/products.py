"""Products of float32 on a processor whose widest instructions PyTorch's own products leave unused.

PyTorch multiplies float32 by MKL, which takes AVX2 on processors of AMD, also where they have
AVX-512; oneDNN, which PyTorch brings along for other types, takes all of it: twice as many products
a second, of the same numbers in the same precision. An element's sum there depends neither on how
many rows there are (from two on) nor on which factor comes first, so that sampler and learner agree
as they do with MKL. Small weights stay with MKL: a step of a small model costs calls, not products.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

SMALL = 2**16  # numbers of a weight up to which it stays with PyTorch's products


@cache
def left_unused(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this is such a processor, and this PyTorch one that can do better."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and processor.is_file()
        and "AuthenticAMD" in processor.read_text("utf-8", "replace")
    )


def is_wide(weight: Tensor) -> bool:
    """Tell whether products with a weight are worth it: by the weight alone, not by the rows."""
    of_kind = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return of_kind and weight.numel() > SMALL and left_unused()


def times(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a · bᵀ + bias, whichever way the factors lie in memory."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")
    return found


def times_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Write a · bᵀ where `out` lies, by rows or by columns."""
    if out.stride(0) == 1:
        out.t().copy_(times(b, a))
    else:
        out.copy_(times(a, b))
    return out


def linear(x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """Multiply as `F.linear` does, by whichever library is faster here."""
    if not is_wide(weight_FD):
        return F.linear(x_TD, weight_FD, bias_F)
    found: Tensor = _WideLinear.apply(x_TD, weight_FD, bias_F)  # type: ignore[no-untyped-call]
    return found


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TD, weight_FD)
        return times(x_TD, weight_FD, bias_F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_FD = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_TF = grad_TF.contiguous()
        return (
            times(grad_TF, weight_FD.t()) if of_x else None,
            times(grad_TF.t(), x_TD.t()) if of_weight else None,
            grad_TF.sum(0) if of_bias else None,
        )
