"""Order statistics over all tokens of a batch, exact, without sorting them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.records import TokenBatch
from groupwise.records.masks import above, below

FEW = 50_000  # values of which an order statistic is found at once
STRIDE = 61  # of the sample: no divisor of usual widths, so that it has tokens of all columns


def order_statistics(x: Tensor, places: Sequence[int]) -> list[Tensor]:
    """Return `x.flatten().kthvalue(place).values` for each place; the smallest is 1.

    A sample tells between which two values the places lie, and counts whether they do: then only
    what lies between them is looked at (Floyd and Rivest's SELECT, 1975).
    """
    smaller, near_X = _near(x, min(places), max(places)) if x.numel() > FEW else (0, x.flatten())
    return [near_X.kthvalue(place - smaller).values for place in places]


def largest(x: Tensor, count: int) -> Tensor:
    """Return the value that so many values reach: `x.flatten().topk(count).values[-1]`."""
    return order_statistics(x, [x.numel() - count + 1])[0]


def _near(x: Tensor, first: int, last: int) -> tuple[int, Tensor]:
    """Return values among which these places are, and how many smaller values are left out."""
    sample_X = x.flatten()[::STRIDE]
    low, high = _bracket(sample_X, first / x.numel(), last / x.numel())
    smaller_NT, larger_NT = below(x, low), above(x, high)
    smaller, larger = (int(counted) for counted in (_count(smaller_NT), _count(larger_NT)))
    if not smaller < first <= last <= x.numel() - larger:  # the sample is not like the whole
        return 0, x.flatten()
    return smaller, x[~smaller_NT.add_(larger_NT).bool()]


def _bracket(sample_X: Tensor, first: float, last: float) -> tuple[Tensor | float, Tensor | float]:
    """Return values of a sample between which these quantiles of the whole surely lie, nearly."""
    size = len(sample_X)
    low, high = (
        share * size + side * (4.0 * math.sqrt(size * share * (1.0 - share)) + 4.0)
        for share, side in ((first, -1), (last, 1))
    )
    return (
        -math.inf if low < 1 else sample_X.kthvalue(math.floor(low)).values,
        math.inf if high > size else sample_X.kthvalue(math.ceil(high)).values,
    )


def _count(ones_NT: Tensor) -> Tensor:
    """Add up ones by rows: a sum of so many in float32 would not be exact."""
    return ones_NT.sum(-1).double().sum()


def tokens_learned(batch: TokenBatch) -> int:
    """Return how many tokens the loss learns from, on all ranks."""
    return int(batch.world.gather(batch.learned_NT.sum(1)).double().sum())


def everywhere(x_NT: Tensor, batch: TokenBatch, otherwise: float) -> Tensor:
    """Return the rows of all ranks; narrower ones are filled up with `otherwise`."""
    gather, (rows, width) = batch.world.gather, x_NT.shape
    missing = int(gather(torch.full((rows,), width, device=x_NT.device)).max()) - width
    filled_NT = torch.nn.functional.pad(x_NT, (0, missing), value=otherwise) if missing else x_NT
    return gather(filled_NT)


def learned_or(otherwise: float, x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Return a value per token of all rows of all ranks, `otherwise` where nothing is learned."""
    own_NT = torch.where(batch.learned_NT.bool(), x_NT, otherwise)
    return everywhere(own_NT, batch, otherwise)
