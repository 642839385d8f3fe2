"""Frozen weights in 8 or 4 bits: what an adapter learns beside (QLoRA).

    int8  integers times a scale for each output, in plain PyTorch
    nf4   4-bit normal floats in blocks of 64, by bitsandbytes

A weight is made whole again for each product and thrown away behind it, in the backward pass once
more: sampler and learner multiply by the same numbers. Embedding, norms and head keep theirs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.common.extras import install
from groupwise.errors import ModelError
from groupwise.model.layers.fused_linear import Product
from groupwise.model.layers.linear import Linear

if TYPE_CHECKING:
    from groupwise.model.layers.transformer import Policy, Transformer

Kind = Literal["int8", "nf4"]
BLOCK = 64  # weights of nf4 with one scale
# Of the largest weight: half of the widest gap between two numbers that the bits can mean.
LARGEST_ERROR = {"int8": 0.005, "nf4": 0.16}


class QuantizedLinear(Linear):
    """A `Linear` without a weight: its bits and scales, which no optimizer touches."""

    def __init__(self, kind: Kind, bits: Tensor, scale: Tensor, layer: Linear) -> None:
        nn.Module.__init__(self)
        self.kind = kind
        self.inputs, self.outputs = layer.inputs, layer.outputs
        self.bits = nn.Parameter(bits, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias, self.adapter = layer.bias, layer.adapter

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers that the bits stand for, [F, D]."""
        if self.kind == "int8":
            return (self.bits.float() * self.scale[:, None]).to(dtype)
        library = bitsandbytes()
        shape = torch.Size((len(self.scale), BLOCK))
        state = library.QuantState(
            self.scale, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype
        )
        flat = library.dequantize_4bit(self.bits.detach(), state).flatten()
        return flat[: self.outputs * self.inputs].view(self.outputs, self.inputs)

    def plain(self, dtype: torch.dtype) -> Linear:
        with torch.device("meta"):
            made = Linear(self.inputs, self.outputs, bias=False)
        made.weight = nn.Parameter(self.dequantised(dtype), requires_grad=False)
        made.bias = self.bias
        return made


def quantize(model: Policy, kind: Kind, device: torch.device | str) -> None:
    """Quantise all layers' matrices, one at a time on the device; move the rest as it is."""
    for layer in cast("Transformer", model).layers:  # borrowed layers are refused before
        for parent in (layer.self_attn, layer.mlp):
            for name, module in list(parent.named_children()):
                if isinstance(module, Linear):
                    setattr(parent, name, _quantized(module, kind, device))
    model.to(device)


@torch.no_grad()
def _quantized(layer: Linear, kind: Kind, device: torch.device | str) -> QuantizedLinear:
    weight = layer.weight.detach().to(device)
    if kind == "int8":
        wide = weight.float()
        scale = (wide.abs().amax(1) / 127).clamp(min=1e-30)
        bits = (wide / scale[:, None]).round().to(torch.int8)
    else:
        # A block a row: for other widths bitsandbytes 0.50 mixes up blocks on a CPU.
        rows = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
        bits, state = bitsandbytes().quantize_4bit(rows, blocksize=BLOCK, quant_type="nf4")
        scale = state.absmax
    made = QuantizedLinear(kind, bits, scale, layer)
    _check_close(made, weight)
    return made


def _check_close(made: QuantizedLinear, weight: Tensor) -> None:
    """Refuse a library that gives back other numbers: it would train beside another model."""
    off = float((made.dequantised(torch.float32) - weight.float()).abs().max())
    largest = float(weight.abs().max())
    if not off <= LARGEST_ERROR[made.kind] * largest:
        raise ModelError(
            f"model.quantize={made.kind} is broken on this machine: a weight comes back {off:.2g} "
            f"away, and {LARGEST_ERROR[made.kind] * largest:.2g} is the most that rounding can do. "
            "Take another version of bitsandbytes, or model.quantize=int8."
        )


def bitsandbytes() -> Any:
    try:
        import bitsandbytes.functional as library
    except ImportError as error:
        raise ModelError(
            f"model.quantize=nf4 needs bitsandbytes, which can't be imported ({error}). Install it "
            f"with `{install('quantize')}`, or set model.quantize=int8, which needs "
            "nothing."
        ) from error
    return library


def frozen_product(x_TD: Tensor, layer: QuantizedLinear, product: Product | None = None) -> Tensor:
    """Return x · Wᵀ + b; only x has a gradient."""
    out_TF: Tensor = _Frozen.apply(  # type: ignore[no-untyped-call]
        x_TD, layer, product or F.linear
    )
    return out_TF


class _Frozen(torch.autograd.Function):
    """Keeps nothing for the backward pass but the bits, which are there anyway.

    int8's scales multiply what is narrower than the weight: outputs here, their gradient on the
    way back. The integers themselves are exact in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, layer: QuantizedLinear, product: Product) -> Tensor:
        ctx.layer = layer
        if layer.kind == "nf4":
            return product(x_TD, layer.dequantised(x_TD.dtype), layer.bias)
        out_TF = product(x_TD, layer.bits.to(x_TD.dtype), None) * layer.scale
        return (out_TF if layer.bias is None else out_TF + layer.bias).to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        layer, dtype = ctx.layer, grad_TF.dtype
        if layer.kind == "nf4":
            return grad_TF @ layer.dequantised(dtype), None, None
        return (grad_TF * layer.scale).to(dtype) @ layer.bits.to(dtype), None, None
