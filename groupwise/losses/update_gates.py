"""Gates that go by a statistic of the whole update, and gates of whole answers against a target.

Same signature as in gates.py: `(log_ratio_NT, advantage_NT, batch) -> (objective_NT, clipped_NT)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.losses.gates import Gated, clip_within, nothing_clipped
from groupwise.losses.whole_update import drawn_candidates, moment_bounds
from groupwise.methods.slots import Fraction, NonNegative, Positive, Real, gate
from groupwise.records import TokenBatch


@gate(
    ratio="none",
    mute=True,
    equation="S = 0",
    fixes="rewards teach through another term alone",
    breaks="teaches nothing by itself",
)
def silent(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Gated:
    """Leave the policy's term out: an auxiliary term reads the advantages."""
    return torch.zeros_like(advantage_NT) * batch.stream("logp_NT"), nothing_clipped(batch)


@gate(
    below_one=True,
    ratio="token",
    prepare=drawn_candidates,
    needs=("now_logp_NT", "old_logp_NT", "token_NT"),
    equation="clip({low}, {high}); max(1, ⌊{fraction}·N⌋) of its live tokens with {cov_low} <"
    " (A−Ā)(ℓ−ℓ̄) < {cov_high}, at random, teach nothing",
    fixes="entropy does not collapse: the tokens that would lower it most are left out",
    breaks="random; a statistic of the update",
)
def cov_clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
    fraction: Fraction = 2e-4,
    cov_low: Real = 1.0,
    cov_high: Real = 5.0,
) -> Gated:
    """Clip-Cov (2505.22617). Chance is a function of the answers' tokens: it repeats."""
    ratio_NT = bounded_exp(log_ratio_NT)
    objective_NT, clipped_NT = clip_within(ratio_NT, advantage_NT, 1.0 - low, 1.0 + high)
    silenced_NT = batch.prepared["cov_clip"]["silenced_NT"] > 0
    return torch.where(silenced_NT, 0.0, objective_NT), clipped_NT | silenced_NT


@gate(
    ratio="token",
    prepare=moment_bounds,
    needs=("now_logp_NT", "old_logp_NT"),
    equation="S = min(r·A, clip(r, lo, hi)·A), lo = min(e^−τ, 1−{floor_low}), hi = max(e^τ,"
    " 1+{floor_high}); τ the largest |d| of tokens that moved as A pushes with mean min(d², τ²)"
    " < {budget}",
    fixes="very stale batches: the clip goes by how far they are off",
    breaks="a statistic of the update; the floors usually bind",
)
def moment_clip(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    budget: Positive = 0.04,
    floor_low: Fraction = 0.3,
    floor_high: NonNegative = 0.5,
) -> Gated:
    """M2PO (2510.01161), as its authors' code computes it: no tighter than its floors."""
    bounds = batch.prepared["moment_clip"]
    low_N1, high_N1 = (bounds[key][:, None].to(log_ratio_NT.dtype) for key in ("low_N", "high_N"))
    ratio_NT = bounded_exp(log_ratio_NT)
    dead_NT = ((advantage_NT > 0) & (ratio_NT > high_N1)) | (
        (advantage_NT < 0) & (ratio_NT < low_N1)
    )
    bound_NT = torch.where(advantage_NT > 0, high_N1, low_N1)
    objective_NT = torch.where(dead_NT, bound_NT.clamp(max=1e30), ratio_NT) * advantage_NT
    return objective_NT, dead_NT & batch.mask_NT


def residuals(advantage_NT: Tensor, batch: TokenBatch, beta: float) -> Tensor:
    """Return β·Σ_t(ℓ − ℓ^ref) − A of each answer, with gradient, [N, 1]."""
    drift_NT = (batch.stream("logp_NT") - batch.stream("ref_logp_NT")) * batch.ones_NT
    own_N1 = advantage_NT.gather(1, batch.last_N[:, None])
    return beta * drift_NT.sum(1, keepdim=True) - own_N1


@gate(
    ratio="none",
    per_answer=True,
    counts_tokens=True,
    needs=("ref_logp_NT",),
    equation="Σ_t S_t = −({beta}·Σ_t(ℓ − ℓ^ref) − A)² an answer",
    fixes="a regression: no ratio, no clip, no group",
    breaks="A must be an advantage over V*; β here and there are not one optimum's",
)
def squared_residual(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch, *, beta: Positive = 1e-3
) -> Gated:
    """A*-PO (2505.20686): an answer's square in equal shares on its tokens."""
    length_N1 = batch.length_N.clamp(min=1)[:, None]
    share_NT = residuals(advantage_NT, batch, beta).square() / length_N1 * batch.ones_NT
    return -share_NT, nothing_clipped(batch)
