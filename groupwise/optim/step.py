"""One optimizer step: measure the gradient, clip it, apply it, or skip what is not finite.

Gradients are sums over micro-batches and ranks already; nothing here averages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from groupwise.optim.adamw import AdamW, gradient_of
from groupwise.parallel.shards import is_shard
from groupwise.parallel.world import ALONE, World

Named = tuple[str, Tensor]


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float  # before clipping
    clipped: bool
    skipped: bool  # weights and optimizer are what they were, to the bit
    bad: str | None  # the first tensor that is not finite, where it was skipped


@torch.no_grad()
def apply(
    parameters: Iterable[tuple[str, nn.Parameter]],
    optimizer: AdamW,
    *,
    clip_norm: float,
    learning_rate: float,
    seen: Sequence[Named] = (),
    world: World = ALONE,
) -> StepOutcome:
    """Update with the gradients of the parameters, then clear them. `clip_norm` 0: no clipping.

    A gradient, or a tensor `seen` on the way to it, that is not finite skips the update: on all
    ranks, whoever saw it.
    """
    trained = {name: p for name, p in parameters if p.requires_grad}
    gradients = {name: gradient_of(name, p) for name, p in trained.items()}
    counted = list(gradients.values())
    if world.size > 1:
        counted = _meet(world, trained, gradients)
    norm, finite = _norm_and_finite(counted, seen)
    bad = None if finite else first_bad([*seen, *gradients.items()])
    if world.size > 1:
        norm, bad = _of_all(world, norm, bad)
    if bad is None and not math.isfinite(norm):  # only the float32 squares overflowed
        norm = float(gradient_norm(counted, torch.float64))
        norm, _ = _of_all(world, norm, None)
    clipped = bad is None and 0.0 < clip_norm < norm
    if clipped:
        torch._foreach_mul_(list(gradients.values()), clip_norm / norm)
    if bad is None:
        optimizer.step(learning_rate)
    for parameter in trained.values():
        parameter.grad = None
    return StepOutcome(norm, clipped=clipped, skipped=bad is not None, bad=bad)


def _meet(
    world: World, trained: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]
) -> list[Tensor]:
    """Sum gradients of what every rank holds whole; return those that this rank counts."""
    counted = []
    for name, gradient in gradients.items():
        whole = not is_shard(trained[name])
        if whole:
            gradient.copy_(world.total(gradient))
        if world.leads or not whole:
            counted.append(gradient)
    return counted


def _of_all(world: World, norm: float, bad: str | None) -> tuple[float, str | None]:
    """Return the norm of all ranks' parts, and what the first of them found that is not finite."""
    every = world.merge({world.rank: (norm, bad)})
    return math.hypot(*(each for each, _ in every)), next((x for _, x in every if x), None)


def gradient_norm(gradients: list[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return √Σg² over all of them, in float64.

    Squares are summed in `dtype` along the last axis alone: over a whole embedding, float32 sums
    are off by percents, and float64 ones twenty times slower on a CPU.
    """
    rows = [
        torch.linalg.vector_norm(
            x.reshape(-1, x.shape[-1] if x.dim() else 1),
            dim=1,
            dtype=torch.promote_types(x.dtype, dtype),
        )
        for x in gradients
        if x.numel()
    ]
    if not rows:  # of a rank that holds nothing
        return torch.zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat(rows).double())


def first_bad(named_tensors: Iterable[Named]) -> str | None:
    """Find the first tensor with values that are not finite: its name, and how many there are."""
    named = list(named_tensors)
    if not named or bool(torch.stack(_sums(named)).isfinite().all()):  # waits for the device once
        return None
    for name, tensor in named:
        bad = int((~tensor.isfinite()).sum())
        if bad:
            nan = int(tensor.isnan().sum())
            return f"{name} has {nan} NaN and {bad - nan} infinite of {tensor.numel()} values"
    return None


def _sums(named: Iterable[Named]) -> list[Tensor]:
    return [tensor.detach().sum().double() for _, tensor in named]


def _norm_and_finite(gradients: list[Tensor], seen: Sequence[Named]) -> tuple[float, bool]:
    """Return the norm, and whether it and all that was seen is finite; wait for the device once."""
    values = torch.stack([gradient_norm(gradients), *_sums(seen)]).tolist()
    return values[0], all(math.isfinite(x) for x in values)
