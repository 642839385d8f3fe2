"""Statistics of a whole update, found before its micro-batches.

`prepare` functions of slots run in the batch phase, once for each update, on all its rows. They
read the policy as the update begins (`now_logp_NT`, `now_entropy_NT`), so that any micro-batches
give the gradient of the whole. What they return is a number per row or token.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from groupwise.groups.draws import TokenNames, scattered
from groupwise.groups.kl import bounded_exp
from groupwise.groups.selection import (
    largest,
    learned_or,
    order_statistics,
    tokens_learned,
)
from groupwise.groups.statistics import all_tokens, token_total
from groupwise.records import TokenBatch
from groupwise.records.masks import above, as_numbers, below

Prepared = dict[str, Tensor]
Params = dict[str, Any]
NOTHING = 1e-12  # that an observed square is lowered by, so that a bound holds its own token


def covariances(batch: TokenBatch) -> Tensor:
    """Return (A − Ā)(ℓ − ℓ̄) per token, means over all learned tokens; 0 where none is learned."""
    product_NT, tokens = batch.learned_NT, max(tokens_learned(batch), 1)
    for name in ("advantage_NT", "now_logp_NT"):
        x_NT = batch.stream(name)
        product_NT = product_NT * (x_NT - (token_total(x_NT, batch) / tokens).to(x_NT.dtype))
    return product_NT


def share_of_tokens(fraction: float, batch: TokenBatch) -> int:
    """Return max(1, ⌊fraction·N⌋)."""
    return max(1, math.floor(fraction * tokens_learned(batch)))


def log_ratio_now(batch: TokenBatch) -> Tensor:
    """Return ℓ − ℓ° as the update begins."""
    return batch.stream("now_logp_NT") - batch.stream("old_logp_NT")


def dead_under_clip(batch: TokenBatch, low: float, high: float) -> Tensor:
    """Return 1 where PPO's clip takes the gradient away as the update begins, else 0."""
    ratio_NT, advantage_NT = bounded_exp(log_ratio_now(batch)), batch.stream("advantage_NT")
    up_NT = above(advantage_NT, 0.0).mul_(above(ratio_NT, 1.0 + high))
    return up_NT.add_(below(advantage_NT, 0.0).mul_(below(ratio_NT, 1.0 - low)))


def cov_candidates(batch: TokenBatch, params: Params) -> Tensor:
    """Return the tokens that Clip-Cov draws from."""
    cov_NT = covariances(batch)
    inside_NT = above(cov_NT, params["cov_low"]).mul_(below(cov_NT, params["cov_high"]))
    live_NT = batch.learned_NT - dead_under_clip(batch, params["low"], params["high"])
    return inside_NT.mul_(live_NT).bool()


def drawn_candidates(batch: TokenBatch, params: Params) -> Prepared:
    """Return which candidates Clip-Cov silences: so many, at random."""
    candidate_NT = cov_candidates(batch, params)
    count = share_of_tokens(params["fraction"], batch)
    silenced_NT = as_numbers(candidate_NT, batch.dtype)
    row_X, column_X = candidate_NT.nonzero().unbind(1)
    # The same on every rank and in any order of rows, another for every answer.
    chance_X = scattered(TokenNames(batch).up_to(row_X, column_X))
    found_N = silenced_NT.sum(1).long()
    found_M = batch.world.gather(found_N)
    if int(found_M.sum()) <= count:
        return {"silenced_NT": silenced_NT}
    # The candidates of each row side by side, as many columns on every rank.
    chance_NK = chance_X.new_full((batch.rows, int(found_M.max())), 2.0)
    before_N = found_N.cumsum(0) - found_N
    number_X = torch.arange(len(row_X), device=row_X.device) - before_N[row_X]
    chance_NK[row_X, number_X] = chance_X
    (bound,) = order_statistics(batch.world.gather(chance_NK), [count])
    silenced_NT[row_X, column_X] = (chance_X <= bound).to(batch.dtype)
    return {"silenced_NT": silenced_NT}


def largest_covariances(batch: TokenBatch, params: Params) -> Prepared:
    """Return the tokens of the largest covariance: so many, more where several are equal."""
    cov_NT, tokens = covariances(batch), tokens_learned(batch)
    count = min(share_of_tokens(params["fraction"], batch), tokens)
    if not count:
        return {"selected_NT": torch.zeros_like(batch.ones_NT)}
    bound = largest(learned_or(-math.inf, cov_NT, batch), count)
    return {"selected_NT": batch.learned_NT - below(cov_NT, bound).mul_(batch.learned_NT)}


def harmful_tokens(batch: TokenBatch) -> Tensor:
    """Return 1 on the tokens whose ratio has moved the way that A pushes, else 0."""
    moved_NT = batch.stream("advantage_NT").sign() * log_ratio_now(batch)
    return above(moved_NT, 0.0).mul_(batch.learned_NT)


def moment_bounds(batch: TokenBatch, params: Params) -> Prepared:
    """Return M2PO's bounds of the ratio, alike on all rows, and the second moment they hold down.

    τ is the largest |d| of a harmful token such that Σ min(d², τ²) stays within the budget.
    """
    harmful_NT = harmful_tokens(batch)
    square_NT = log_ratio_now(batch).square_()
    count = batch.world.gather(harmful_NT.sum(1)).double().sum()
    mean = token_total(square_NT * harmful_NT, batch) / count.clamp(min=1)
    low, high = 0.0, math.inf
    if mean > params["budget"]:
        square_X = all_tokens(torch.where(harmful_NT > 0, square_NT, -1.0), batch)
        square_X = square_X[square_X >= 0.0].sort().values
        left_X = torch.arange(len(square_X) - 1, -1, -1, device=square_X.device)
        held_X = square_X.cumsum(0) + left_X * square_X
        within_X = held_X < params["budget"] * len(square_X)
        most = float(square_X[within_X].max()) if bool(within_X.any()) else 0.0
        slack = max(NOTHING, 8 * torch.finfo(batch.dtype).eps * most)
        if batch.dtype == torch.float64:
            slack = NOTHING
        tau = math.sqrt(max(most - slack, 0.0))
        low, high = math.exp(-tau), math.exp(tau)
    low = min(low, 1.0 - params["floor_low"])
    high = max(high, 1.0 + params["floor_high"])
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    high_N = one_N * min(high, 1e300)
    return {"low_N": one_N * low, "high_N": high_N, "moment_N": one_N * mean}


def kept_mismatches(batch: TokenBatch, params: Params) -> Prepared:
    """Return AReaL's mask: the largest squared mismatches leave until the mean is in budget."""
    square_NT = (batch.stream("old_logp_NT") - batch.stream("sampler_logp_NT")).square_()
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    mean = token_total(square_NT, batch) / max(tokens_learned(batch), 1)
    if mean <= params["budget"]:  # what is usual: nothing leaves
        return {"keep_NT": batch.ones_NT, "moment_N": one_N * mean}
    square_X = all_tokens(square_NT, batch)
    square_X = square_X.sort().values
    mean_X = square_X.cumsum(0) / torch.arange(1, len(square_X) + 1, device=square_X.device)
    within = int((mean_X <= params["budget"]).sum().clamp(min=1))
    bound, mean = square_X[within - 1], mean_X[within - 1]
    return {"keep_NT": batch.valid((square_NT <= bound).double()), "moment_N": one_N * mean}


def entropy_quantile(batch: TokenBatch, params: Params) -> Prepared:
    """Return the entropy above which a share of all tokens lies, on every row."""
    tokens = tokens_learned(batch)
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    if not tokens:
        return {"threshold_N": one_N}
    entropy_NT = learned_or(math.inf, batch.stream("now_entropy_NT"), batch)
    place = (1.0 - params["fraction"]) * (tokens - 1)
    under = min(math.floor(place), tokens - 1)
    low, high = order_statistics(entropy_NT, [under + 1, min(under + 2, tokens)])
    return {"threshold_N": one_N * (low + (place - under) * (high.double() - low))}
