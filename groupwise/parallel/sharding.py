"""Models of which every rank holds a part: FSDP2, with sums in place of means.

A sharded model is made from a whole one that stays as it is: on the meta device first, so that no
rank ever holds a second whole. A parameter that learns in half precision is kept in float32, which
is its master, and gathered in the precision of the whole one; gradients are summed in float32.
Bits of a quantised base, which nobody changes, are those of the whole model: every rank has them
once, and shards nothing of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from groupwise.parallel.shards import is_shard

M = TypeVar("M", bound=nn.Module)
HALF = (torch.bfloat16, torch.float16)


def sharded(model: M, mesh: Any) -> M:
    """Return a copy of the model of which each rank of the mesh holds a part."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(model.parameters()).device
    made = _without_memory(model)
    shared = _quantised(model)
    ignored = {p for name, p in made.named_parameters() if name in shared}
    units: list[nn.Module] = [*blocks(made), *_apart(made), made]
    for unit in units:
        own = [p for p in unit.parameters() if p.requires_grad and not is_shard(p)]
        half = next((p.dtype for p in own if p.dtype in HALF), None)
        for parameter in own:
            if parameter.dtype in HALF:
                _keep_wide(parameter)
        # Inputs stay as they are: rotary tables and what follows a float32 layer must not be cast.
        policy = MixedPrecisionPolicy(
            param_dtype=half,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        )
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True, ignored_params=ignored
        )
    for module in _units(made):
        # Both, on every unit: the factor alone asks for an operation that NCCL alone has.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    for name, parameter in shared.items():
        _put(made, name, parameter)
    # Not to_empty: what is shared is filled already, and must stay.
    move: Callable[..., object] = made._apply
    move(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)
    _mark(made, model)
    fill(made, model)
    return made


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that are gathered one after the other: the members of outermost lists."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


@torch.no_grad()
def fill(made: nn.Module, whole: nn.Module) -> None:
    """Give each rank its part of a whole model's numbers."""
    theirs = dict(whole.named_parameters())
    for name, parameter in made.named_parameters():
        if parameter is not theirs[name]:
            part(parameter).copy_(own_part(parameter, theirs[name]))
    buffers = dict(whole.named_buffers())
    for name, buffer in made.named_buffers():
        buffer.copy_(buffers[name])


@torch.no_grad()
def gather_into(whole: nn.Module, made: nn.Module) -> None:
    """Give a whole model what the ranks hold of what learns. All ranks call it.

    One parameter at a time, in the precision of the whole one: nothing else is held meanwhile.
    """
    theirs = dict(whole.named_parameters())
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            target = theirs[name]
            target.copy_(gathered(parameter.detach().to(target.dtype)))


@torch.no_grad()
def differing(whole: nn.Module, made: nn.Module) -> str | None:
    """Return the first parameter whose part here is not what the whole model has there."""
    theirs = dict(whole.named_parameters())
    for name, parameter in made.named_parameters():
        here = part(parameter).to(theirs[name].dtype)
        if not torch.equal(here, own_part(parameter, theirs[name])):
            return name
    return None


@torch.no_grad()
def checksum(model: nn.Module) -> int:
    """Return a sum over all bits of a model: cheap, and another one for another model's file."""
    total = 0
    for parameter in model.parameters():
        raw = parameter.detach().contiguous().view(-1)
        words = all(n * raw.element_size() % 4 == 0 for n in (len(raw), raw.storage_offset()))
        total += int(raw.view(torch.int32 if words else torch.uint8).sum(dtype=torch.int64))
    return total


# --- one parameter ----------------------------------------------------------------------------


def part(x: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: all of it, where it is not sharded."""
    held: Any = x
    return held.to_local() if is_shard(x) else x


def gathered(x: Tensor) -> Tensor:
    """Return the whole of a tensor. All ranks call it."""
    held: Any = x
    return held.full_tensor() if is_shard(x) else x


def own_part(like: Tensor, whole: Tensor) -> Tensor:
    """Return the rows of a whole tensor that this rank holds of one that is sharded `like` that."""
    held: Any = like
    if not is_shard(like):
        return whole
    # As FSDP2 cuts: along the first axis, all parts of one size but for the last ones.
    rows = -(-len(whole) // held.device_mesh.size())
    first = held.device_mesh.get_local_rank() * rows
    return whole[first : first + rows]


def sharded_like(like: Tensor, mine: Tensor) -> Tensor:
    """Return a tensor of which `mine` is this rank's part, sharded as another one is.

    A part that lies on the host stays there.
    """
    if not is_shard(like):
        return mine
    from torch.distributed.tensor import DTensor

    held: Any = like
    mesh = held.device_mesh
    if mine.device.type != mesh.device_type:
        mesh = held.host_mesh
    return DTensor.from_local(mine, mesh, held.placements, shape=held.shape, stride=held.stride())


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """Return the precision that a checkpoint has a parameter in: that of the whole model."""
    dtype: torch.dtype = getattr(parameter, "stored_dtype", parameter.dtype)
    return dtype


# --- how it is made ---------------------------------------------------------------------------


def _without_memory(model: M) -> M:
    """Copy the model's shape: parameters and buffers on the meta device, ties kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def _quantised(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name what quantised layers hold: bits, which are whole numbers, and scales."""
    return {
        f"{where}.{name}": parameter
        for where, module in model.named_modules()
        if any(not p.is_floating_point() for p in module.parameters(recurse=False))
        for name, parameter in module.named_parameters(recurse=False)
    }


def _put(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Set a parameter by its full name."""
    where, _, own = name.rpartition(".")
    model.get_submodule(where).register_parameter(own, parameter)


def _apart(model: nn.Module) -> list[nn.Module]:
    """Return modules outside the blocks that learn in another precision than the rest."""
    inside = {id(module) for block in blocks(model) for module in block.modules()}
    rest = [m for m in model.modules() if id(m) not in inside and list(m.parameters(False))]
    kinds = [p.dtype for p in model.parameters() if p.is_floating_point()]
    usual = max(set(kinds), key=kinds.count)
    return [
        module
        for module in rest
        if all(p.requires_grad and p.dtype != usual for p in module.parameters(False))
    ]


def _keep_wide(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.float()


def _mark(made: nn.Module, whole: nn.Module) -> None:
    """Note on each parameter the precision that it is stored in."""
    theirs: Mapping[str, nn.Parameter] = dict(whole.named_parameters())
    for name, parameter in made.named_parameters():
        parameter.stored_dtype = theirs[name].dtype  # type: ignore[attr-defined]


def _units(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
