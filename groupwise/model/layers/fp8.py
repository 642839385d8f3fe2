"""A policy whose layers multiply in 8-bit floats: a copy to sample from, faster where a GPU has
such products.

Each row of a matrix has a scale, a weight's rows (outputs) as an input's (tokens):

    s = max|row| / 448,  b = row / s, rounded to e4m3;    y = (b_x · b_wᵀ) · s_x · s_w + bias

An adapter is folded in before rounding. Norms, biases, embedding and head are the policy's own.
Nothing here has a gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from groupwise.errors import ModelError
from groupwise.model.adapters.lora import LoRA
from groupwise.model.adapters.quantized import QuantizedLinear
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.layers.fused_linear import biases_of, concatenated
from groupwise.model.layers.linear import Linear
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.transformer import PolicyModel, Transformer

KIND = torch.float8_e4m3fn
LARGEST = 448.0  # number of that kind
TINY = 1e-30  # the largest of a row of zeros, so that it can be divided by
STEP = 16  # GPUs multiply widths that are multiples of this
SINCE = (8, 9)  # compute capability


class Rounded(NamedTuple):
    """Rows of 8-bit floats, and what each row is multiplied by."""

    bits_TD: Tensor
    scale_T: Tensor  # float32


Round = Callable[[Tensor], Rounded]


def rounded(x_TD: Tensor) -> Rounded:
    """Round rows in plain PyTorch; the kernel is in kernels/fp8.py."""
    wide_TD = x_TD.float()
    scale_T = wide_TD.abs().amax(-1).clamp(min=TINY) / LARGEST
    in_range_TD = (wide_TD / scale_T[:, None]).clamp(-LARGEST, LARGEST)
    return Rounded(in_range_TD.to(KIND), scale_T)


class Fp8Linear(Linear):
    """A `Linear` without a weight: its bits and scales, and the bias of the layer it is made of."""

    def __init__(self, layer: Linear, bits_FD: Tensor, scale_F: Tensor) -> None:
        nn.Module.__init__(self)
        self.inputs, self.outputs = layer.inputs, layer.outputs
        self.bits = nn.Parameter(bits_FD, requires_grad=False)
        self.scale = nn.Parameter(scale_F, requires_grad=False)
        self.bias, self.adapter = layer.bias, None


class PlainFp8(Plain):
    """The same products on any device: 8-bit floats fit float32, in which they are summed."""

    def linear(self, module: Linear, x_TD: Tensor) -> Tensor:
        if not isinstance(module, Fp8Linear):
            return super().linear(module, x_TD)
        x = rounded(x_TD)
        out_TF = x.bits_TD.float() @ module.bits.float().T
        out_TF = out_TF * x.scale_T[:, None] * module.scale
        return (out_TF if module.bias is None else out_TF + module.bias).to(x_TD.dtype)


def scaled_product(x: Rounded, modules: Sequence[Linear], dtype: torch.dtype) -> Tensor:
    """Return what layers make of one input, side by side, by a product of the GPU."""
    biases = biases_of(modules)
    if biases is None:
        return torch.cat([scaled_product(x, [each], dtype) for each in modules], dim=1)
    layers = cast(Sequence[Fp8Linear], modules)
    bits_FD = concatenated([each.bits for each in layers])
    scale_F = concatenated([each.scale for each in layers])
    out_TF: Tensor = torch._scaled_mm(
        x.bits_TD,
        bits_FD.t(),
        scale_a=x.scale_T[:, None],
        scale_b=scale_F[None, :],
        bias=concatenated(biases) if biases else None,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return out_TF


# --- copies -----------------------------------------------------------------------------------


def fp8_copy(model: PolicyModel) -> PolicyModel:
    """Copy a policy with room for 8-bit matrices in its layers, which `round_weights` fills."""
    check_fp8(model)
    own: dict[int, Any] = {id(p): p for _, p in model.named_parameters()}
    for together in _together(model):
        device, rows = model.head_weight.device, [each.outputs for each in together]
        # One memory for layers that read one input: a single product serves them.
        bits_FD = torch.zeros(sum(rows), together[0].inputs, dtype=KIND, device=device)
        scale_F = torch.zeros(sum(rows), device=device)
        parts = (torch.split(bits_FD, rows), torch.split(scale_F, rows))
        for layer, bits, scale in zip(together, *parts, strict=True):
            own[id(layer)] = Fp8Linear(layer, bits, scale)
    made = cast(Transformer, copy.deepcopy(model, own))
    if model.ops.name == "plain":
        made.ops = PlainFp8()
    else:
        from groupwise.model.layers.fast_fp8 import FastFp8  # needs Triton

        made.ops = FastFp8()
    return made


@torch.no_grad()
def round_weights(model: PolicyModel, copied: PolicyModel) -> None:
    """Round a policy's matrices, in place: captured steps go on reading the same memory."""
    turn: Round = rounded
    if copied.ops.name != "plain":
        from groupwise.model.kernels.fp8 import round_rows as turn
    for layer, into in zip(
        chain.from_iterable(_together(model)), chain.from_iterable(_together(copied)), strict=True
    ):
        assert isinstance(into, Fp8Linear)
        found = turn(_whole(layer, model.head_weight.dtype))
        into.bits.copy_(found.bits_TD)
        into.scale.copy_(found.scale_T)


def check_fp8(model: PolicyModel) -> None:
    """Refuse a policy or a device that has no such products."""
    if isinstance(model, Borrowed):
        raise ModelError(
            f"8-bit floats are multiplied by groupwise's own layers, and {model.config.family} "
            "runs through transformers. Set engine.weights=shared."
        )
    if model.config.experts is not None:
        raise ModelError(
            "8-bit floats are for dense layers, and this is a mixture of experts, whose matrices "
            "lie in one. Set engine.weights=shared."
        )
    if not model.head_weight.is_cuda:
        return
    device = model.head_weight.device
    if torch.cuda.get_device_capability(device) < SINCE:
        raise ModelError(
            f"{torch.cuda.get_device_name(device)} has no products of 8-bit floats (they came with "
            f"compute capability {SINCE[0]}.{SINCE[1]}). Set engine.weights=shared."
        )
    for layer in chain.from_iterable(_together(model)):
        if layer.inputs % STEP or layer.outputs % STEP:
            raise ModelError(
                f"A layer of {layer.inputs} inputs and {layer.outputs} outputs can't be multiplied "
                f"in 8-bit floats: both must be multiples of {STEP}. Set engine.weights=shared."
            )


def _together(model: PolicyModel) -> Iterator[list[Linear]]:
    """Yield the layers that are rounded, those that read one input together."""
    for layer in cast(Transformer, model).layers:
        attention, mlp = layer.self_attn, cast(Any, layer.mlp)
        yield [attention.q_proj, attention.k_proj, attention.v_proj]
        yield [attention.o_proj]
        yield [mlp.gate_proj, mlp.up_proj]
        yield [mlp.down_proj]


def _whole(layer: Linear, dtype: torch.dtype) -> Tensor:
    """Return a layer's weight with what its adapter adds: summed in float32, rounded once."""
    held = layer.dequantised(dtype) if isinstance(layer, QuantizedLinear) else layer.weight
    if not isinstance(layer.adapter, LoRA):
        return held.detach()
    return (held.detach().float() + layer.adapter.delta()).to(held.dtype)
