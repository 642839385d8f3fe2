"""Projections that read the same input as one matrix product.

Queries, keys and values, or gate and up, are parameters of their own, as in the checkpoint. Laid
together they are neighbours in memory, and one product over the whole serves all of them: forward,
for the input's gradient, and for the weights' gradients, which are neighbours as well. Those are
summed over micro-batches where they lie, in the precision that the parameter asks for
(`grad_dtype`), so that there is never a second gradient. Where weights have gone apart again (a
copied model, another device), each has a product of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from groupwise.errors import ModelError
from groupwise.parallel.shards import refuse_shards

if TYPE_CHECKING:
    from groupwise.model.layers.linear import Linear

# x [T, D], weight [F, D], bias [F] or None -> [T, F]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@torch.no_grad()
def lay_together(modules: Sequence[Linear]) -> None:
    """Make the weights neighbours in memory, and the biases. Names, values, parameters stay.

    Call it before an optimizer or an engine takes hold of the tensors, and again after what gives
    parameters other memory: `.to(device)`, `copy.deepcopy`, loading with `assign=True`.
    """
    weights, biases = [module.weight for module in modules], biases_of(modules)
    kinds = {(w.shape[1], w.dtype, w.device) for w in weights}
    if len(kinds) != 1 or biases is None:
        found = ", ".join(f"{tuple(w.shape)} {w.dtype} {w.device}" for w in weights)
        raise ModelError(
            f"Projections of {found} can't lie together: one product needs one input width, "
            f"precision and device, and all or none with a bias. Leave them apart."
        )
    for parameters in (weights, biases):
        lay_rows(parameters)


@torch.no_grad()
def lay_rows(parameters: Sequence[nn.Parameter]) -> None:
    """Make parameters of one width neighbours in memory, along their first axis."""
    if parameters and _neighbours(parameters) is None:
        named = [("a projection", parameter) for parameter in parameters]
        refuse_shards(named, "Laying projections together in memory")
        memory = torch.cat(list[Tensor](parameters))
        for parameter, part in zip(parameters, _rows(memory, parameters), strict=True):
            parameter.data = part


def fused_weight(modules: Sequence[Linear]) -> Tensor | None:
    """Return [sum of outputs, inputs] over the weights' own memory, or None if they lie apart."""
    return _neighbours([module.weight for module in modules])


def fused_linear(x_TD: Tensor, modules: Sequence[Linear], product: Product | None = None) -> Tensor:
    """Return the modules' outputs side by side, [T, sum of outputs], biases included, adapters not.

    `product` takes the place of `F.linear`, in the forward pass only. The backward pass adds to the
    parameters' `.grad` itself: `torch.autograd.grad` with respect to them finds nothing.
    """
    biases = biases_of(modules)
    if biases is None or fused_weight(modules) is None:
        apart = [fused_linear(x_TD, [module], product) for module in modules]
        return torch.cat(apart, dim=1)
    weights = [module.weight for module in modules]
    out_TF: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x_TD, product or F.linear, len(weights), *weights, *biases
    )
    return out_TF


def fused_product(x_TD: Tensor, weight_FD: nn.Parameter, product: Product | None = None) -> Tensor:
    """Return x · weightᵀ of a bare weight, as `fused_linear` does."""
    out_TF: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x_TD, product or F.linear, 1, weight_FD
    )
    return out_TF


class _Linear(torch.autograd.Function):
    """y = x · Wᵀ + b:  ∂x = ∂y · W,  ∂W = ∂yᵀ · x,  ∂b = Σ ∂y."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, product: Product, count: int, *parameters: nn.Parameter
    ) -> Tensor:
        weights, biases = parameters[:count], parameters[count:]
        # Saved so that autograd sees a weight that changes before the backward pass; kept as well,
        # because recomputation hands back copies, and gradients belong to the parameters.
        ctx.save_for_backward(x_TD, *weights)
        ctx.weights, ctx.biases = weights, biases
        return product(x_TD, concatenated(weights), concatenated(biases) if biases else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *weights = ctx.saved_tensors
        need_x, _, _, *need = ctx.needs_input_grad
        grad_x_TD = grad_TF @ concatenated(weights) if need_x else None
        count = len(weights)
        accumulate(ctx.weights, need[:count], grad_TF, x_TD)
        accumulate(ctx.biases, need[count:], grad_TF, None)
        return (grad_x_TD, None, None, *(None for _ in need))


def accumulate(
    parameters: Sequence[nn.Parameter], need: Sequence[bool], grad_TF: Tensor, x_TD: Tensor | None
) -> None:
    """Add ∂yᵀ · x to the weights' `.grad`, or Σ ∂y (no x) to the biases', as autograd would do.

    In one go if all of them have none yet, or neighbours from the last time; else one by one.
    """
    if not any(need):
        return
    grads = [parameter.grad for parameter in parameters]
    together = _neighbours(grads)
    if all(need) and all(grad is None for grad in grads):
        dtype = parameters[0].grad_dtype or parameters[0].dtype
        fresh = grad_TF.sum(0, dtype=dtype) if x_TD is None else _product(grad_TF.t(), x_TD, dtype)
        for parameter, part in zip(parameters, _rows(fresh, parameters), strict=True):
            parameter.grad = part
    elif all(need) and together is not None:
        if x_TD is None:
            together.add_(grad_TF.sum(0, dtype=together.dtype))
        else:
            _add_product(together, grad_TF.t(), x_TD)
    else:
        columns = torch.split(grad_TF, [len(parameter) for parameter in parameters], dim=1)
        for parameter, needed, part_TF in zip(parameters, need, columns, strict=True):
            accumulate([parameter], [needed], part_TF, x_TD)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a · b, sums and result in `dtype`. CUDA does so without widening a and b."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def biases_of(modules: Sequence[Linear]) -> list[nn.Parameter] | None:
    """Return the biases of all modules, [] if none has one; None if only some have."""
    biases = [module.bias for module in modules if module.bias is not None]
    return biases if len(biases) in (0, len(modules)) else None


def _neighbours(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Return one tensor over the memory of all, along the first axis, if they are neighbours.

    Asked several times for every product: as few questions to each tensor as will do.
    """
    first = tensors[0]
    if first is None:
        return None
    if len(tensors) == 1:
        return first.detach()
    begin, size = first.data_ptr(), first.element_size()
    rest = first.shape[1:]
    end, rows = begin, 0
    for tensor in tensors:
        if (
            tensor is None
            or tensor.data_ptr() != end
            or tensor.dtype != first.dtype
            or tensor.device != first.device
            or tensor.shape[1:] != rest
            or not tensor.is_contiguous()
        ):
            return None
        end, rows = end + tensor.numel() * size, rows + tensor.shape[0]
    memory = first.untyped_storage()
    if end > memory.data_ptr() + memory.nbytes():  # another allocation that lies next to it
        return None
    return first.detach().as_strided((rows, *rest), (*rest, 1))


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Join all along the first axis: over their own memory, or copied if they lie apart."""
    together = _neighbours(tensors)
    return torch.cat(list(tensors)) if together is None else together


def _rows(together: Tensor, parameters: Sequence[Tensor]) -> Sequence[Tensor]:
    return torch.split(together, [parameter.shape[0] for parameter in parameters])
