"""Aggregation: `aggregation(batch) -> coefficient_NT`, how much each token's loss counts.

Denominators are global: over micro-batches, because the batch phase sees the whole batch, and over
ranks, because counts are gathered. Rows and groups without a token that is learned from are not
counted. The trainer sums losses over micro-batches and gradients over ranks; it averages nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.statistics import group_stats, group_sum, spread
from groupwise.methods.slots import Count, NonNegative, Real, aggregation
from groupwise.records import TokenBatch


def lengths(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the tokens learned from, for each own row and for each row of all ranks."""
    n_N = batch.length_N * batch.stream("learn_N")
    return n_N, batch.world.gather(n_N)


def _sequences(n_M: Tensor) -> Tensor:
    return (n_M > 0).sum().clamp(min=1)


@aggregation(
    equation="u = 1/N, N tokens in the batch",
    fixes="every token counts the same",
    breaks="long answers weigh more",
)
def token_mean_batch(batch: TokenBatch) -> Tensor:
    """Token mean over the batch (DAPO as everybody implements it)."""
    n_N, n_M = lengths(batch)
    return batch.learned(torch.ones_like(n_N, dtype=torch.float64) / n_M.sum().clamp(min=1))


@aggregation(
    equation="u = 1/(P·Σ_{{j∈g}} n_j), P groups",
    fixes="every prompt counts the same",
    breaks="long answers weigh more within their group",
)
def token_mean_group(batch: TokenBatch) -> Tensor:
    """Token mean in the group, then mean over groups (DAPO's printed formula)."""
    _, n_M = lengths(batch)
    tokens_P = group_sum(n_M.double(), batch)
    groups = (tokens_P > 0).sum().clamp(min=1)
    return batch.learned(spread(1.0 / (groups * tokens_P.clamp(min=1)), batch))


@aggregation(
    per_answer=True,
    equation="u = 1/(B·n_i), B sequences",
    fixes="every answer counts the same",
    breaks="favours short right answers and long wrong ones",
)
def seq_mean_token_mean(batch: TokenBatch) -> Tensor:
    """Mean over tokens, then over sequences (GRPO, 2402.03300)."""
    n_N, n_M = lengths(batch)
    return batch.learned(1.0 / (_sequences(n_M) * n_N.double().clamp(min=1)))


@aggregation(
    counts_tokens=True,
    equation="u = 1/B",
    fixes="unbiased policy gradient",
    breaks="the step grows with length",
)
def seq_mean_token_sum(batch: TokenBatch) -> Tensor:
    """Sum over tokens, mean over sequences (REINFORCE)."""
    n_N, n_M = lengths(batch)
    return batch.learned(torch.ones_like(n_N, dtype=torch.float64) / _sequences(n_M))


@aggregation(
    length="length",
    equation="u = 1/(B·{length})",
    fixes="unbiased, on a fixed scale",
    breaks="a constant to choose",
)
def seq_mean_token_sum_norm(batch: TokenBatch, *, length: Count) -> Tensor:
    """Sum over tokens over a constant, the generation budget (Dr.GRPO, 2503.20783)."""
    n_N, n_M = lengths(batch)
    one_N = torch.ones_like(n_N, dtype=torch.float64)
    return batch.learned(one_N / (_sequences(n_M) * length))


@aggregation(
    per_answer=True,
    equation="u = 1/(B·n_i), B all sequences, empty ones too",
    fixes="an answer's weight does not depend on how many others have something to learn from",
    breaks="the step shrinks with rows that teach nothing",
)
def every_seq_mean_token_mean(batch: TokenBatch) -> Tensor:
    """Mean over tokens, then over all rows of the batch, whatever they hold (SDPO)."""
    n_N, n_M = lengths(batch)
    return batch.learned(1.0 / (max(len(n_M), 1) * n_N.double().clamp(min=1)))


@aggregation(
    per_answer=True,
    equation="u = 1/n_i",
    fixes="an answer's weight does not depend on its neighbours",
    breaks="the step grows with the batch",
)
def seq_sum_token_mean(batch: TokenBatch) -> Tensor:
    """Mean over tokens, sum over sequences (DCPO, 2509.02333)."""
    n_N, _ = lengths(batch)
    return batch.learned(1.0 / n_N.double().clamp(min=1))


@aggregation(
    equation="u = 1",
    fixes="nothing is hidden in a denominator",
    breaks="the step grows with batch and length: the learning rate carries it all",
)
def token_sum(batch: TokenBatch) -> Tensor:
    """Plain sum over tokens."""
    return batch.learned(torch.ones_like(lengths(batch)[0], dtype=torch.float64))


def length_softmax(batch: TokenBatch, exponent: float, slope: float) -> tuple[Tensor, Tensor]:
    """Return f_i(λ) = G·softmax_i(h_i^λ), h = 1 + slope·z(n_i in the group), and df_i/dλ."""
    n_N, _ = lengths(batch)
    n_N = torch.where(n_N > 0, n_N.double(), torch.nan)
    stats = group_stats(n_N, batch)
    std_N = stats.std_N(0)
    z_N = torch.where(std_N > 0, (n_N - stats.mean_N) / torch.where(std_N > 0, std_N, 1.0), 0.0)
    h_N = (1.0 + slope * z_N.nan_to_num(0.0)).clamp(min=1e-6)
    power_N = h_N**exponent
    power_slope_N = power_N * h_N.log()

    def over_group(x_N: Tensor) -> Tensor:
        x_M = batch.world.gather(torch.where(n_N.isnan(), 0.0, x_N))
        return spread(group_sum(x_M, batch), batch)

    shift_N = group_stats(torch.where(n_N.isnan(), torch.nan, power_N), batch).high_N
    raised_N = torch.where(n_N.isnan(), 0.0, (power_N - shift_N).exp())
    softmax_N = raised_N / over_group(raised_N).clamp(min=1e-300)
    expected_slope_N = over_group(softmax_N * power_slope_N)
    weight_N = stats.count_N * softmax_N
    return weight_N, weight_N * (power_slope_N - expected_slope_N)


def current_exponent(batch: TokenBatch, start: float) -> float:
    """Return λ as the batch brings it, or its starting value."""
    return start if batch.length_exponent is None else float(batch.length_exponent.detach())


@aggregation(
    learns="length_exponent",
    outputs=("length_exponent",),
    equation="u = f_i(λ)/N, f = G·softmax_i((1 + {slope}·z_i)^λ), z_i the length's z-score in the"
    " group",
    fixes="learns how much length should count",
    breaks="λ chases the loss itself: log it",
)
def learned_length_weight(
    batch: TokenBatch, *, exponent: Real = 0.0, slope: NonNegative = 1 / 9
) -> tuple[Tensor, Tensor]:
    """λ-GRPO (2510.06870): coefficient and its slope in λ; λ = 0 is token_mean_batch.

    `exponent` is λ's starting value. The token phase adds slope·(λ − λ₀), so that any micro-batch
    gives its share of the exact gradient in λ.
    """
    _, n_M = lengths(batch)
    tokens = n_M.sum().clamp(min=1)
    weight_N, slope_N = length_softmax(batch, current_exponent(batch, exponent), slope)
    return batch.learned(weight_N / tokens), batch.learned(slope_N / tokens)
