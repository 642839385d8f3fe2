"""Sums over groups, over the batch, and along a sequence: what advantages are made of.

Everything that crosses rows goes through `batch.world`, as one number per row, so that a result
does not depend on how rows are spread over ranks, even when a group is. Sequence-level statistics
are taken in float64: they are tiny, and rewards that are equal must cancel exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.records import TokenBatch


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
        """All values of the group are exactly equal (or there is at most one)."""
        return self.low_N == self.high_N


def group_sum(x_M: Tensor, batch: TokenBatch) -> Tensor:
    """Sum over groups of gathered rows, [M] -> [P]."""
    return x_M.new_zeros(len(batch.groups)).index_add(0, batch.groups.index_M, x_M)


def spread(x_P: Tensor, batch: TokenBatch) -> Tensor:
    """A value per group -> a value per own row."""
    return batch.world.own(x_P[batch.groups.index_M])


def group_stats(x_N: Tensor, batch: TokenBatch) -> GroupStats:
    """Count, mean, extremes and spread of a value per row; NaN rows are left out."""
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
    """The same over all selected tokens of all rows of a group."""
    gather, inf = batch.world.gather, float("inf")
    chosen_NT = torch.where(select_NT, x_NT, 0.0).double()
    return _stats(
        gather(select_NT.sum(1).double()),
        gather(chosen_NT.sum(1)),
        gather(torch.where(select_NT, x_NT, inf).amin(1).double()),
        gather(torch.where(select_NT, x_NT, -inf).amax(1).double()),
        batch,
        lambda mean_M: gather(
            torch.where(select_NT, (chosen_NT - batch.world.own(mean_M)[:, None]) ** 2, 0.0).sum(1)
        ),
    )


def _stats(count_M, total_M, low_M, high_M, batch: TokenBatch, squares) -> GroupStats:  # type: ignore[no-untyped-def]
    """Per-row counts, sums and extremes -> statistics per group, repeated on its own rows."""
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


def dead_groups(batch: TokenBatch) -> tuple[int, int]:
    """Groups of the batch, and those whose task rewards are all equal (all ranks)."""
    stats = group_stats(batch.task_reward_N, batch)
    index_M = batch.groups.index_M
    dead_P = torch.zeros(len(batch.groups), dtype=torch.bool, device=index_M.device)
    dead_P[index_M] = batch.world.gather(stats.uniform_N | (stats.count_N <= 1))
    return len(dead_P), int(dead_P.sum())


def batch_stats(x_N: Tensor, batch: TokenBatch, ddof: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a value per row over the whole batch, NaN rows left out."""
    x_M = batch.world.gather(x_N).double()
    x_M = x_M[~x_M.isnan()]
    if len(x_M) == 0:
        return x_M.new_zeros(()), x_M.new_zeros(())
    mean = x_M[0] if (x_M == x_M[0]).all() else x_M.mean()
    return mean, ((x_M - mean).square().sum() / max(len(x_M) - ddof, 1)).sqrt()


def token_moments(
    x_NT: Tensor, select_NT: Tensor, batch: TokenBatch, ddof: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance over all selected tokens of the batch, from one number per row."""
    gather = batch.world.gather
    count = gather(select_NT.sum(1).double()).sum().clamp(min=1)
    mean = gather(torch.where(select_NT, x_NT, 0.0).sum(1, dtype=torch.float64)).sum() / count
    squares_NT = torch.where(select_NT, (x_NT - mean.to(x_NT.dtype)) ** 2, 0.0)
    squares = gather(squares_NT.sum(1, dtype=torch.float64)).sum()
    return mean, squares / (count - ddof).clamp(min=1)


def discounted_suffix_sums(x_NT: Tensor, decay_N: Tensor, mask_NT: Tensor) -> Tensor:
    """`y_t = x_t + decay·y_{t+1}` over the valid tokens of each row; masked tokens do not count.

    log2(T) doubling steps: after step k, y_t covers 2^k tokens.
    """
    y_NT, place_NT = close_holes(x_NT, mask_NT)
    y_NT = y_NT.clone()
    decay_N1 = decay_N.to(x_NT.dtype)[:, None]
    reach = 1
    while reach < y_NT.shape[1]:
        y_NT[:, :-reach] += decay_N1 * y_NT[:, reach:]
        decay_N1, reach = decay_N1 * decay_N1, reach * 2
    return reopen_holes(y_NT, place_NT, mask_NT)


def following(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The value at the next valid token of the row, 0 after the last."""
    y_NT, place_NT = close_holes(x_NT, mask_NT)
    shifted_NT = torch.cat([y_NT[:, 1:], torch.zeros_like(y_NT[:, :1])], 1)
    return reopen_holes(shifted_NT, place_NT, mask_NT)


def close_holes(x_NT: Tensor, mask_NT: Tensor) -> tuple[Tensor, Tensor | None]:
    """Valid tokens moved together, so that a tool's output between them does not count.

    Gives where each token went, or None if no row has a hole and nothing had to move. Streams are 0
    where the mask is.
    """
    rises_NT = mask_NT[:, 1:] & ~mask_NT[:, :-1]
    starts_N = rises_NT.sum(1, dtype=torch.int32) + mask_NT[:, 0].int()
    if int(starts_N.max()) <= 1:
        return x_NT, None
    width = mask_NT.shape[1]
    place_NT = torch.where(mask_NT, mask_NT.cumsum(1) - 1, width)
    packed_NT = x_NT.new_zeros(len(x_NT), width + 1).scatter(1, place_NT, x_NT)
    return packed_NT, place_NT


def reopen_holes(x_NT: Tensor, place_NT: Tensor | None, mask_NT: Tensor) -> Tensor:
    """Undo `close_holes`: every token back in its place, 0 where masked."""
    if place_NT is not None:
        x_NT = x_NT.gather(1, place_NT)
    return torch.where(mask_NT, x_NT, 0.0)
