"""The experts of a layer as two grouped products: every visit's rows in one call, on any device.

Visits are put in the order of their experts; where each expert's rows end stays on the device, so
that the host waits for nothing and the shapes are the same whatever is chosen: captured steps can
hold it. Of the forward pass the input and the gates' and ups' products are kept, and all else is
made again: the weight of a visit is multiplied into the narrow activations on the way back.

Axes: `_S` visit of a token to an expert, in the order of experts; else as in experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.model.adapters.lora import ExpertLoRA
from groupwise.model.kernels.experts import combine, gated_backward
from groupwise.model.kernels.swiglu import swiglu, swiglu_forward
from groupwise.model.layers.experts import ExpertChoice, Experts
from groupwise.model.layers.linear import ExpertLinear

WHOLE = 8  # numbers of half precision in 16 bytes

# x [S, D], weight [E, F, D], ends [E] -> [S, F]
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


class Visits(NamedTuple):
    """Who visits whom, in the order of experts."""

    token_S: Tensor
    back_TK: Tensor  # where a token's visits are in that order
    end_E: Tensor  # where the visits of each expert end, int32


def in_order(expert_TK: Tensor, experts: int) -> Visits:
    sorted_S, order_S = expert_TK.flatten().sort(stable=True)
    number_S = torch.arange(len(order_S), device=order_S.device)
    back_S = torch.empty_like(order_S).scatter_(0, order_S, number_S)
    every_E = torch.arange(experts, device=order_S.device)
    end_E = torch.searchsorted(sorted_S, every_E, right=True, out_int32=True)
    return Visits(order_S // expert_TK.shape[1], back_S.view_as(expert_TK), end_E)


def grouped(x_SD: Tensor, weight_EFD: Tensor, end_E: Tensor) -> Tensor:
    """Return x · weightᵀ of each visit's expert, by the library."""
    return F.grouped_mm(x_SD, weight_EFD.mT, offs=end_E)


def visit_together(
    x_TD: Tensor,
    expert_TK: Tensor,
    gate_TK: Tensor,
    gate_up_EF2D: nn.Parameter,
    down_EDF: nn.Parameter,
    product: GroupedProduct | None = None,
) -> Tensor:
    """Return Σ_k gate · expert(x) of every token. `product` counts in the forward pass only.

    The backward pass adds to the parameters' `.grad` itself, as in fused_linear.py.
    """
    visits = in_order(expert_TK, len(down_EDF))
    out_TD: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        x_TD, gate_TK, visits, product or grouped, gate_up_EF2D, down_EDF
    )
    return out_TD


def visit_adapted(x_TD: Tensor, choice: ExpertChoice, experts: Experts) -> Tensor:
    """Return the same with adapters beside frozen experts: by the library's own gradients."""
    each = experts.each
    visits = in_order(choice.expert_TK, len(experts.down_proj))
    # An embedding's gradient adds up in one order.
    x_SD = F.embedding(visits.token_S, x_TD)
    gate_up_SF2 = grouped(x_SD, experts.gate_up_proj, visits.end_E)
    more = [_narrow(each.gate_proj, x_SD, visits.end_E), _narrow(each.up_proj, x_SD, visits.end_E)]
    act_SF = swiglu(gate_up_SF2 + torch.cat([x.expand(len(x_SD), experts.width) for x in more], 1))
    made_SD = grouped(act_SF, experts.down_proj, visits.end_E)
    made_SD = made_SD + _narrow(each.down_proj, act_SF, visits.end_E)
    made_TKD = F.embedding(visits.back_TK, made_SD)
    return (made_TKD * choice.gate_TK.to(made_SD.dtype)[..., None]).sum(1)


def _narrow(layer: ExpertLinear, x_SD: Tensor, end_E: Tensor) -> Tensor:
    """Return s · (x · Aᵀ) · Bᵀ of each visit's expert; 0 where there is no adapter."""
    if layer.adapter is None:
        return x_SD.new_zeros(1, 1)
    adapter = cast(ExpertLoRA, layer.adapter)
    if adapter.dropping:
        x_SD = F.dropout(x_SD, adapter.dropout)
    # Rows of whole 16 bytes, which grouped products ask for.
    filling = -adapter.lora_A.shape[1] % WHOLE
    narrow_ERD = F.pad(adapter.lora_A, (0, 0, 0, filling))
    wide_EFR = F.pad(adapter.lora_B, (0, filling))
    return grouped(grouped(x_SD, narrow_ERD, end_E), wide_EFR, end_E) * adapter.scale


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        gate_TK: Tensor,
        visits: Visits,
        product: GroupedProduct,
        gate_up_EF2D: nn.Parameter,
        down_EDF: nn.Parameter,
    ) -> Tensor:
        gate_up_SF2 = product(x_TD.index_select(0, visits.token_S), gate_up_EF2D, visits.end_E)
        made_SD = product(swiglu_forward(gate_up_SF2), down_EDF, visits.end_E)
        # Gradients belong to the parameters, of which recomputation hands back copies.
        ctx.save_for_backward(x_TD, gate_TK, gate_up_SF2, gate_up_EF2D, down_EDF, *visits)
        ctx.parameters = gate_up_EF2D, down_EDF
        return combine(made_SD, visits.back_TK, gate_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gate_TK, gate_up_SF2, gate_up_EF2D, down_EDF, *kept = ctx.saved_tensors
        visits = Visits(*kept)
        need_gate_up, need_down = ctx.needs_input_grad[4:]
        grad_SD = grad_TD.index_select(0, visits.token_S)
        back_S = visits.back_TK.flatten()
        gate_S = torch.empty_like(gate_TK).flatten().scatter_(0, back_S, gate_TK.flatten())
        grad_SF = F.grouped_mm(grad_SD, down_EDF, offs=visits.end_E)
        grad_gate_up_SF2, act_SF, grad_gate_S = gated_backward(gate_up_SF2, grad_SF, gate_S)
        if need_down:
            _accumulate(ctx.parameters[1], grad_SD, act_SF, visits.end_E)
        if need_gate_up:
            x_SD = x_TD.index_select(0, visits.token_S)
            _accumulate(ctx.parameters[0], grad_gate_up_SF2, x_SD, visits.end_E)
        grad_x_SD = F.grouped_mm(grad_gate_up_SF2, gate_up_EF2D, offs=visits.end_E)
        grad_x_TD = combine(grad_x_SD, visits.back_TK, None)
        grad_gate_TK = grad_gate_S.index_select(0, back_S).view_as(gate_TK)
        return grad_x_TD, grad_gate_TK, None, None, None, None


def _accumulate(parameter: nn.Parameter, grad_SF: Tensor, x_SD: Tensor, end_E: Tensor) -> None:
    """Add ∂yᵀ · x of each expert's visits to `.grad`, in the precision that it asks for."""
    fresh_EFD = F.grouped_mm(grad_SF.t(), x_SD, offs=end_E)
    if parameter.grad is None:
        parameter.grad = fresh_EFD.to(parameter.grad_dtype or parameter.dtype)
    else:
        parameter.grad.add_(fresh_EFD)
