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

from groupwise.groups.kl import bounded_exp
from groupwise.groups.statistics import all_tokens
from groupwise.records import TokenBatch

Prepared = dict[str, Tensor]
Params = dict[str, Any]
NOTHING = 1e-12  # that an observed square is lowered by, so that a bound holds its own token


def own_mean(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Return the mean over all tokens that are learned from, of all ranks."""
    found_X = all_tokens(x_NT, batch)
    return found_X.mean() if len(found_X) else found_X.new_zeros(())


def covariances(batch: TokenBatch) -> Tensor:
    """Return (A − Ā)(ℓ − ℓ̄) per token in float64, 0 where nothing is learned."""
    parts = [batch.stream(name).double() for name in ("advantage_NT", "now_logp_NT")]
    first_NT, second_NT = (x_NT - own_mean(x_NT, batch) for x_NT in parts)
    return batch.learned_NT.double() * first_NT * second_NT


def share_of_tokens(fraction: float, batch: TokenBatch) -> int:
    """Return max(1, ⌊fraction·N⌋)."""
    tokens = int(batch.world.gather(batch.learned_NT.sum(1)).sum())
    return max(1, math.floor(fraction * tokens))


def log_ratio_now(batch: TokenBatch) -> Tensor:
    """Return ℓ − ℓ° as the update begins, in float64."""
    return batch.stream("now_logp_NT").double() - batch.stream("old_logp_NT").double()


def live_under_clip(batch: TokenBatch, low: float, high: float) -> Tensor:
    """Return where PPO's clip leaves a gradient, as the update begins."""
    ratio_NT, advantage_NT = bounded_exp(log_ratio_now(batch)), batch.stream("advantage_NT")
    dead_NT = ((advantage_NT > 0) & (ratio_NT > 1.0 + high)) | (
        (advantage_NT < 0) & (ratio_NT < 1.0 - low)
    )
    return batch.learned_NT.bool() & ~dead_NT


def cov_candidates(batch: TokenBatch, params: Params) -> Tensor:
    """Return the tokens that Clip-Cov draws from."""
    cov_NT = covariances(batch)
    inside_NT = (cov_NT > params["cov_low"]) & (cov_NT < params["cov_high"])
    return live_under_clip(batch, params["low"], params["high"]) & inside_NT


def _chance(batch: TokenBatch) -> Tensor:
    """Return a number in [0, 1) per token that looks random and is a function of its answer.

    Made of the token ids up to there: the same on every rank and in any order of rows, another for
    every answer.
    """
    place_NT = batch.mask_NT.long().cumsum(1)
    mixed_NT = (
        (batch.stream("token_NT") + 1) * (place_NT * 2_654_435_761 % 1_000_003) * batch.mask_NT
    )
    return (mixed_NT.cumsum(1) * 48_271 % 2_147_483_647).double() / 2_147_483_647


def drawn_candidates(batch: TokenBatch, params: Params) -> Prepared:
    """Return which candidates Clip-Cov silences: so many, at random."""
    candidate_NT = cov_candidates(batch, params)
    count = share_of_tokens(params["fraction"], batch)
    chance_NT = torch.where(candidate_NT, _chance(batch), 2.0)
    chance_X = all_tokens(chance_NT, batch)
    chance_X = chance_X[chance_X < 2.0]
    if len(chance_X) <= count:
        return {"silenced_NT": candidate_NT.to(batch.dtype)}
    bound = chance_X.kthvalue(count).values
    return {"silenced_NT": (candidate_NT & (chance_NT <= bound)).to(batch.dtype)}


def largest_covariances(batch: TokenBatch, params: Params) -> Prepared:
    """Return the tokens of the largest covariance: so many, more where several are equal."""
    cov_NT = covariances(batch)
    cov_X = all_tokens(cov_NT, batch)
    if not len(cov_X):
        return {"selected_NT": torch.zeros_like(batch.ones_NT)}
    count = min(share_of_tokens(params["fraction"], batch), len(cov_X))
    bound = cov_X.topk(count).values[-1]
    return {"selected_NT": batch.learned((cov_NT >= bound).double())}


def harmful_tokens(batch: TokenBatch) -> Tensor:
    """Return the tokens whose ratio has moved the way that A pushes."""
    moved_NT = batch.stream("advantage_NT").double() * log_ratio_now(batch)
    return batch.learned_NT.bool() & (moved_NT > 0)


def moment_bounds(batch: TokenBatch, params: Params) -> Prepared:
    """Return M2PO's bounds of the ratio, alike on all rows, and the second moment they hold down.

    τ is the largest |d| of a harmful token such that Σ min(d², τ²) stays within the budget.
    """
    harmful_NT = harmful_tokens(batch)
    square_X = all_tokens(torch.where(harmful_NT, log_ratio_now(batch).square(), torch.nan), batch)
    square_X = square_X[~square_X.isnan()]
    mean = square_X.mean() if len(square_X) else square_X.new_zeros(())
    low, high = 0.0, math.inf
    if len(square_X) and mean > params["budget"]:
        square_X = square_X.sort().values
        left_X = torch.arange(len(square_X) - 1, -1, -1, device=square_X.device)
        held_X = square_X.cumsum(0) + left_X * square_X
        within_X = held_X < params["budget"] * len(square_X)
        largest = float(square_X[within_X].max()) if bool(within_X.any()) else 0.0
        slack = max(NOTHING, 8 * torch.finfo(batch.dtype).eps * largest)
        if batch.dtype == torch.float64:
            slack = NOTHING
        tau = math.sqrt(max(largest - slack, 0.0))
        low, high = math.exp(-tau), math.exp(tau)
    low = min(low, 1.0 - params["floor_low"])
    high = max(high, 1.0 + params["floor_high"])
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    high_N = one_N * min(high, 1e300)
    return {"low_N": one_N * low, "high_N": high_N, "moment_N": one_N * mean}


def kept_mismatches(batch: TokenBatch, params: Params) -> Prepared:
    """Return AReaL's mask: the largest squared mismatches leave until the mean is in budget."""
    gap_NT = batch.stream("old_logp_NT").double() - batch.stream("sampler_logp_NT").double()
    square_NT = gap_NT.square()
    square_X = all_tokens(square_NT, batch)
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    if not len(square_X):
        return {"keep_NT": batch.ones_NT, "moment_N": 0.0 * one_N}
    if square_X.mean() <= params["budget"]:  # what is usual: nothing leaves
        return {"keep_NT": batch.ones_NT, "moment_N": one_N * square_X.mean()}
    square_X = square_X.sort().values
    mean_X = square_X.cumsum(0) / torch.arange(1, len(square_X) + 1, device=square_X.device)
    within = int((mean_X <= params["budget"]).sum().clamp(min=1))
    bound, mean = square_X[within - 1], mean_X[within - 1]
    return {"keep_NT": batch.valid((square_NT <= bound).double()), "moment_N": one_N * mean}


def entropy_quantile(batch: TokenBatch, params: Params) -> Prepared:
    """Return the entropy above which a share of all tokens lies, on every row."""
    found_X = all_tokens(batch.stream("now_entropy_NT"), batch)
    one_N = torch.ones(batch.rows, dtype=torch.float64, device=batch.mask_NT.device)
    if not len(found_X):
        return {"threshold_N": one_N}
    place = (1.0 - params["fraction"]) * (len(found_X) - 1)
    below = min(math.floor(place), len(found_X) - 1)
    above = min(below + 1, len(found_X) - 1)
    low, high = (found_X.kthvalue(at + 1).values for at in (below, above))
    return {"threshold_N": one_N * (low + (place - below) * (high - low))}
