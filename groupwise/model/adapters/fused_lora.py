"""Adapters beside layers that are one product: as few products as there can be.

The narrow ones of queries, keys and values, or of gate and up, read the same input: laid together
they are one product. The wide ones add to the layers' output where it lies. What is left is less
work than a full update's, which pays for the weights' gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.model.adapters.lora import LoRA
from groupwise.model.layers.fused_linear import Product, accumulate, concatenated, lay_rows
from groupwise.model.layers.linear import Linear

Columns = tuple[int, int]  # of the layers' outputs side by side: from, to


def lay_adapters(modules: Sequence[Linear]) -> None:
    """Make the narrow matrices neighbours in memory."""
    lay_rows([adapter.lora_A for adapter, _ in _placed(modules)])


def add_adapters(
    out_TF: Tensor, x_TD: Tensor, modules: Sequence[Linear], product: Product | None
) -> Tensor:
    """Join the modules' outputs side by side, and add what their adapters make in place."""
    placed = _placed(modules)
    if any(adapter.dropping for adapter, _ in placed):  # each drops inputs of its own
        for adapter, columns in placed:
            out_TF = _add(out_TF, F.dropout(x_TD, adapter.dropout), [(adapter, columns)], product)
        return out_TF
    return _add(out_TF, x_TD, placed, product) if placed else out_TF


def _placed(modules: Sequence[Linear]) -> list[tuple[LoRA, Columns]]:
    found, end = [], 0
    for module in modules:
        start, end = end, end + module.outputs
        if module.adapter is not None:
            found.append((cast(LoRA, module.adapter), (start, end)))
    return found


def _add(
    out_TF: Tensor, x_TD: Tensor, placed: list[tuple[LoRA, Columns]], product: Product | None
) -> Tensor:
    narrow = [adapter.lora_A for adapter, _ in placed]
    wide = [adapter.lora_B for adapter, _ in placed]
    where = [(columns, adapter.scale) for adapter, columns in placed]
    summed_TF: Tensor = _AddAdapters.apply(  # type: ignore[no-untyped-call]
        out_TF, x_TD, product, where, *narrow, *wide
    )
    return summed_TF


class _AddAdapters(torch.autograd.Function):
    """y += s·n·Bᵀ in the layer's columns, n = x·Aᵀ of all layers at once.

    ∂n = s·∂y·B,  ∂B = ∂yᵀ·s·n,  ∂A = ∂nᵀ·x,  ∂x = ∂n·A
    """

    @staticmethod
    def forward(
        ctx: Any,
        out_TF: Tensor,
        x_TD: Tensor,
        product: Product | None,
        where: Sequence[tuple[Columns, float]],
        *parameters: nn.Parameter,
    ) -> Tensor:
        narrow, wide = parameters[: len(where)], parameters[len(where) :]
        narrow_TR = (product or F.linear)(x_TD, concatenated(narrow), None)
        for own_TR, b_FR, ((start, end), scale) in zip(
            _split(narrow_TR, wide), wide, where, strict=True
        ):
            part_TF = out_TF[:, start:end]
            if product is None:
                part_TF.addmm_(own_TR, b_FR.t(), alpha=scale)
            else:
                part_TF.add_(product(own_TR.contiguous(), b_FR, None), alpha=scale)
        ctx.mark_dirty(out_TF)
        ctx.save_for_backward(x_TD, narrow_TR, *parameters)
        # Gradients belong to the parameters, of which recomputation hands back copies.
        ctx.parameters, ctx.where = parameters, where
        return out_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, narrow_TR, *parameters = ctx.saved_tensors
        count = len(ctx.where)
        wide, need = parameters[count:], ctx.needs_input_grad[4:]
        grad_narrow_TR = torch.empty_like(narrow_TR)
        grads = _split(grad_narrow_TR, wide)
        for row, (own_TR, ((start, end), scale)) in enumerate(
            zip(_split(narrow_TR, wide), ctx.where, strict=True)
        ):
            part_TF = grad_TF[:, start:end]
            grads[row].copy_(part_TF @ wide[row]).mul_(scale)
            kept = ctx.parameters[count + row]
            accumulate([kept], [need[count + row]], part_TF, own_TR * scale)
        accumulate(ctx.parameters[:count], need[:count], grad_narrow_TR, x_TD)
        grad_x_TD = grad_narrow_TR @ concatenated(parameters[:count])
        return (grad_TF, grad_x_TD, None, None, *(None for _ in need))


def _split(narrow_TR: Tensor, wide: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(narrow_TR, [b_FR.shape[1] for b_FR in wide], dim=1)
