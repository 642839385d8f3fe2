"""Sums over groups, over the batch, and along a sequence: what advantages are made of.

Everything that crosses rows goes through `batch.world`, as one number per row, so that a result
does not depend on how rows are spread over ranks, even when a group is. Sequence-level statistics
are taken in float64: they are tiny, and rewards that are equal must cancel exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.records import TokenBatch

MOST_EMPTY = 4  # numbers per value, beyond which sorting costs less than the unused ones


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each row's group, repeated on every row of the group."""

    count_N: Tensor
    mean_N: Tensor
    low_N: Tensor
    high_N: Tensor
    squares_N: Tensor  # sum of squared deviations from the mean

    def std_N(self, ddof: int) -> Tensor:
        """Standard deviation; 0 where there are not more than `ddof` values."""
        return (self.squares_N / (self.count_N - ddof).clamp(min=1)).sqrt()

    @property
    def uniform_N(self) -> Tensor:
        """Tell where all values of the group are exactly equal (or there is at most one)."""
        return self.low_N >= self.high_N


def group_sum(x_M: Tensor, batch: TokenBatch) -> Tensor:
    """Sum over groups of gathered rows, [M] -> [P], in the order of the rows.

    Unlike `index_add`, which on a GPU adds in the order of chance.
    """
    zeros_P = x_M.new_zeros(len(batch.groups))
    return zeros_P.index_put((batch.groups.index_M,), x_M, accumulate=True)


def spread(x_P: Tensor, batch: TokenBatch) -> Tensor:
    """Spread a value per group over the group's own rows."""
    return batch.world.own(x_P[batch.groups.index_M])


def group_stats(x_N: Tensor, batch: TokenBatch) -> GroupStats:
    """Count, mean, extremes and spread of a value per row; NaN rows are left out."""
    return batch.once("group_stats", (x_N, batch.group_N), lambda: _group_stats(x_N, batch))


def _group_stats(x_N: Tensor, batch: TokenBatch) -> GroupStats:
    x_M = batch.world.gather(x_N).double()
    counts_M = ~x_M.isnan()
    return _stats(
        counts_M.double(),
        torch.where(counts_M, x_M, 0.0),
        x_M,
        x_M,
        batch,
        lambda mean_M: torch.where(counts_M, (x_M - mean_M) ** 2, 0.0),
    )


def group_token_stats(x_NT: Tensor, select_NT: Tensor, batch: TokenBatch) -> GroupStats:
    """Compute the same over all selected tokens of all rows of a group."""
    gather, weight_NT = batch.world.gather, select_NT.to(x_NT.dtype)
    far_NT = (1.0 - weight_NT) * 1e30  # keeps the others out of the extremes; cheaper than where

    def squares(mean_M: Tensor) -> Tensor:
        centred_NT = x_NT - batch.world.own(mean_M).to(x_NT.dtype)[:, None]
        return gather((centred_NT.square() * weight_NT).sum(1).double())

    return _stats(
        gather(weight_NT.sum(1).double()),
        gather((x_NT * weight_NT).sum(1).double()),
        gather((x_NT + far_NT).amin(1).double()),
        gather((x_NT - far_NT).amax(1).double()),
        batch,
        squares,
    )


def _stats(
    count_M: Tensor,
    total_M: Tensor,
    low_M: Tensor,
    high_M: Tensor,
    batch: TokenBatch,
    squares: Callable[[Tensor], Tensor],
) -> GroupStats:
    """Turn counts, sums and extremes per row into statistics per group, on its own rows."""
    index_M, inf = batch.groups.index_M, float("inf")
    count_P = group_sum(count_M, batch)
    mean_P = group_sum(total_M, batch) / count_P.clamp(min=1)
    low_P = torch.full_like(mean_P, inf).scatter_reduce(
        0, index_M, low_M.nan_to_num(nan=inf, posinf=inf, neginf=-inf), "amin"
    )
    high_P = torch.full_like(mean_P, -inf).scatter_reduce(
        0, index_M, high_M.nan_to_num(nan=-inf, posinf=inf, neginf=-inf), "amax"
    )
    # The mean of equal numbers need not round to that number; where all are equal it is exact.
    mean_P = torch.where(low_P == high_P, low_P, mean_P)
    squares_P = group_sum(squares(mean_P[index_M]), batch)
    return GroupStats(*(spread(x, batch) for x in (count_P, mean_P, low_P, high_P, squares_P)))


@dataclass(frozen=True)
class DeadGroups:
    """How many groups have a graded row, and how many of them have equal task rewards."""

    groups: int
    dead: int
    failed: int  # of the dead: no reward above 0


def dead_groups(batch: TokenBatch) -> DeadGroups:
    """Counted over all ranks."""
    stats = group_stats(batch.task_reward_N, batch)
    graded_N = stats.count_N > 0
    dead_N = stats.uniform_N & graded_N
    index_M = batch.groups.index_M

    def count(rows_N: Tensor) -> int:
        return int(torch.bincount(index_M[batch.world.gather(rows_N)]).count_nonzero())

    return DeadGroups(count(graded_N), count(dead_N), count(dead_N & (stats.high_N <= 0)))


def batch_stats(x_N: Tensor, batch: TokenBatch, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a value per row over the whole batch, NaN rows left out."""
    x_M = batch.world.gather(x_N).double()
    x_M = x_M[~x_M.isnan()]
    if len(x_M) == 0:
        return x_M.new_zeros(()), x_M.new_zeros(())
    mean = x_M[0] if (x_M == x_M[0]).all() else x_M.mean()
    return mean, ((x_M - mean).square().sum() / max(len(x_M) - ddof, 1)).sqrt()


def token_total(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Sum over all tokens that the loss learns from, from one number per row."""
    return batch.world.gather(batch.learned(x_NT).sum(1).double()).sum()


def centred_tokens(x_NT: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return deviations from the mean over all tokens that are learned from, and their number."""
    learned_N = batch.length_N * batch.stream("learn_N")
    learned_M = batch.world.gather(learned_N).double()
    count = learned_M.sum().clamp(min=1)
    # Deviations from one of the values: where all are equal, the mean is exact and so are zeros.
    last_M = batch.world.gather(x_NT.gather(1, batch.last_N[:, None])[:, 0])
    pivot = last_M[learned_M.argmax()]
    from_pivot_NT = x_NT - pivot
    shift = token_total(from_pivot_NT, batch) / count
    return from_pivot_NT.sub_(shift.to(x_NT.dtype)), count


def discounted_suffix_sums(x_NT: Tensor, decay: Tensor | float, batch: TokenBatch) -> Tensor:
    """Compute `y_t = x_t + decay·y_{t+1}` over each row's valid tokens; masked ones don't count.

    `x_NT` is used up.
    """
    return reopen_holes(suffix_sums(close_holes(x_NT, batch), decay), batch)


def suffix_sums(y_NT: Tensor, decay: Tensor | float) -> Tensor:
    """Sum without masks; `decay` is one number, or one a row. `y_NT` is used up."""
    if not isinstance(decay, Tensor) and decay == 1:
        return y_NT.flip(1).cumsum(1).flip(1)
    # log2(T) doubling steps: after step k, y_t covers 2^k tokens. From one buffer into the other.
    decay_N1 = decay[:, None].to(y_NT.dtype) if isinstance(decay, Tensor) else decay
    other_NT, reach = torch.empty_like(y_NT), 1
    while reach < y_NT.shape[1]:
        now_NT, later_NT, out_NT = y_NT[:, :-reach], y_NT[:, reach:], other_NT[:, :-reach]
        if isinstance(decay_N1, Tensor):
            torch.addcmul(now_NT, decay_N1, later_NT, out=out_NT)
        else:
            torch.add(now_NT, later_NT, alpha=decay_N1, out=out_NT)
        other_NT[:, -reach:] = y_NT[:, -reach:]
        y_NT, other_NT = other_NT, y_NT
        decay_N1, reach = decay_N1 * decay_N1, reach * 2
    return y_NT


def close_holes(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Valid tokens moved together, so that a tool's output between them does not count."""
    if batch.place_NT is None:
        return x_NT
    rows, width = x_NT.shape
    return x_NT.new_zeros(rows, width + 1).scatter(1, batch.place_NT, x_NT)


def reopen_holes(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Put every token back in its place, 0 where masked; `x_NT` is used up."""
    back_NT = x_NT if batch.place_NT is None else x_NT.gather(1, batch.place_NT)
    return back_NT.to(batch.dtype).mul_(batch.ones_NT)


@dataclass(frozen=True)
class KeyedStats:
    """Statistics of the values that share a key, repeated on each of them."""

    count_X: Tensor
    mean_X: Tensor
    squares_X: Tensor  # sum of squared deviations from the mean
    total_X: Tensor
    uniform_X: Tensor

    def std_X(self, ddof: int) -> Tensor:
        """Standard deviation; 0 where there are not more than `ddof` values."""
        return (self.squares_X / (self.count_X - ddof).clamp(min=1)).sqrt()

    def centred(self, x_X: Tensor) -> Tensor:
        """Return x − mean; exactly 0 where all values are equal, or there is one alone."""
        return torch.where(self.uniform_X, 0.0, x_X - self.mean_X)


def keyed_stats(x_X: Tensor, key_X: Tensor) -> KeyedStats:
    """Count, mean and spread of values by key (a row of whole numbers each); NaN is left out.

    All values of all ranks: gather them first. Sums are in the order of the values.
    """
    index_X, counts_X = _numbered(key_X), ~x_X.isnan()
    size = int(index_X.max()) + 1 if len(index_X) else 0
    known_X, inf = torch.where(counts_X, x_X, 0.0), float("inf")

    def summed(values_X: Tensor) -> Tensor:
        zeros_K = values_X.new_zeros(size)
        return zeros_K.index_put((index_X,), values_X, accumulate=True)[index_X]

    count_X, total_X = summed(counts_X.double()), summed(known_X)
    low_K = x_X.new_full((size,), inf).scatter_reduce(
        0, index_X, torch.where(counts_X, x_X, inf), "amin"
    )
    high_K = x_X.new_full((size,), -inf).scatter_reduce(
        0, index_X, torch.where(counts_X, x_X, -inf), "amax"
    )
    low_X, high_X = low_K[index_X], high_K[index_X]
    mean_X = torch.where(low_X == high_X, low_X, total_X / count_X.clamp(min=1))
    squares_X = summed(torch.where(counts_X, (known_X - mean_X) ** 2, 0.0))
    return KeyedStats(count_X, mean_X, squares_X, total_X, low_X >= high_X)


def _numbered(key_X: Tensor) -> Tensor:
    """Return one small number per key (a row of whole numbers each); some may stand for none."""
    index_X = torch.zeros_like(key_X[:, 0])
    for column_X in key_X.unbind(1) if len(key_X) else ():
        own_X = _close_together(column_X)
        index_X = _close_together(index_X * (own_X.max() + 1) + own_X)
    return index_X


def _close_together(number_X: Tensor) -> Tensor:
    """Return numbers from 0 on, equal where the given ones are; sorted anew where few are used."""
    low, high = (int(x) for x in number_X.aminmax())
    if high - low < MOST_EMPTY * len(number_X):
        return number_X - low
    return torch.unique(number_X, return_inverse=True)[1]


def all_tokens(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Return a value per token that is learned from, of all rows of all ranks, in their order."""
    gather, (rows, width) = batch.world.gather, x_NT.shape
    widest = int(gather(torch.full((rows,), width, device=x_NT.device)).max())
    learned_NT = batch.mask_NT & batch.stream("learn_N")[:, None]
    both_NT = [torch.nn.functional.pad(x, (0, widest - width)) for x in (x_NT, learned_NT)]
    x_MT, learned_MT = (gather(x) for x in both_NT)
    return x_MT[learned_MT].double()
