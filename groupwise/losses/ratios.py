"""Ratios: `ratio(batch) -> log_ratio_NT`, the policy against an anchor.

The anchor `old` is the learner's own log-probabilities before the update (the mismatch with the
sampler is then a correction's business); `sampler` puts that mismatch inside the ratio. In a batch
without old log-probabilities the policy is its own anchor (the token phase sees to it): one update
per batch, ratio exactly 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.groups.kl import EXP_LIMIT
from groupwise.methods.slots import Fraction, Stream, ratio
from groupwise.records import TokenBatch


def anchor_logp(batch: TokenBatch, anchor: str) -> Tensor:
    """Return the log-probabilities that the ratio divides by, detached."""
    if anchor == "sampler":
        return batch.stream("sampler_logp_NT")
    return batch.stream("old_logp_NT")


def _difference(batch: TokenBatch, anchor: str) -> Tensor:
    return batch.stream("logp_NT") - anchor_logp(batch, anchor)


def row_mean(x_NT: Tensor, batch: TokenBatch) -> Tensor:
    """Mean over the valid tokens of each row (streams are 0 elsewhere), [N, 1]."""
    return x_NT.sum(1, keepdim=True) / batch.length_N.clamp(min=1)[:, None]


@ratio(
    level="none",
    equation="no ratio: the objective is A·ℓ",
    fixes="nothing to go wrong",
    breaks="right only for the policy that sampled",
)
def on_policy(batch: TokenBatch) -> Tensor:
    """Pure on-policy: log-ratio 0."""
    return torch.zeros_like(batch.stream("logp_NT"))


@ratio(
    level="token",
    equation="r_t = π(y_t) / π_{anchor}(y_t)",
    fixes="simple",
    breaks="noisy; the product over a long answer is unbounded",
)
def token(batch: TokenBatch, *, anchor: Stream = "old") -> Tensor:
    """Take one ratio per token (PPO, GRPO)."""
    return _difference(batch, anchor)


@ratio(
    averages=True,
    level="sequence",
    equation="s = exp(mean_t log π/π_{anchor})",
    fixes="low variance; one decision per answer, as the reward is",
    breaks="not an importance weight (that is s^n)",
)
def sequence_geomean(batch: TokenBatch, *, anchor: Stream = "old") -> Tensor:
    """Geometric mean over the answer (GSPO, 2507.18071)."""
    mean_N1 = row_mean(_difference(batch, anchor), batch)
    return mean_N1.expand_as(batch.mask_NT)


@ratio(
    level="sequence",
    equation="s = exp(Σ_t log π/π_{anchor})",
    fixes="the true importance weight",
    breaks="explodes with length",
)
def sequence_product(batch: TokenBatch, *, anchor: Stream = "old") -> Tensor:
    """Product over the answer."""
    total_N1 = _difference(batch, anchor).sum(1, keepdim=True)
    return total_N1.expand_as(batch.mask_NT)


@ratio(
    token_gradient=True,
    averages=True,
    level="sequence",
    equation="s_t = sg[exp(mean_t log π/π_{anchor})] · exp(ℓ_t − sg ℓ_t)",
    fixes="the sequence's ratio with advantages per token",
    breaks="equals sequence_geomean when they are constant",
)
def geomean_token_grad(batch: TokenBatch, *, anchor: Stream = "old") -> Tensor:
    """GSPO-token (2507.18071): value of the geometric mean, gradient of the own token."""
    logp_NT = batch.stream("logp_NT")
    mean_N1 = row_mean(_difference(batch, anchor).detach(), batch)
    # Bounded here, so that the token's own gradient outlives the bound on exp's argument.
    limit = EXP_LIMIT * (1.0 - torch.finfo(logp_NT.dtype).eps)
    return mean_N1.clamp(-limit, limit) + (logp_NT - logp_NT.detach())


def segment_mean(x_NT: Tensor, segment_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Mean over the valid tokens of each segment, on each of its tokens."""
    total_NT = torch.zeros_like(x_NT).scatter_add(1, segment_NT, x_NT)
    count_NT = torch.zeros_like(x_NT).scatter_add(1, segment_NT, mask_NT.to(x_NT.dtype))
    return (total_NT / count_NT.clamp(min=1)).gather(1, segment_NT)


@ratio(
    level="segment",
    needs=("segment_NT",),
    equation="s_k = exp(mean_(t∈k) log π/π_{anchor}) for sub-sentence k",
    fixes="a compromise between token and sequence",
    breaks="needs a splitter",
)
def segment_geomean(batch: TokenBatch, *, anchor: Stream = "old") -> Tensor:
    """Geometric mean over each sub-sentence (SSPO, 2511.04256)."""
    segment_NT = batch.stream("segment_NT")
    difference_NT = _difference(batch, anchor)
    return segment_mean(difference_NT, segment_NT, batch.mask_NT)


def router_drift(batch: TokenBatch) -> Tensor:
    """Return Δ = mean over layers and old top-k experts of |log g_new − log g_old|, detached."""
    new = batch.stream("router_NTLK").detach()
    old = batch.stream("old_router_NTLK")
    tiny = torch.finfo(new.dtype).tiny  # an expert that nobody chooses any more
    gap = new.clamp(min=tiny).log() - old.clamp(min=tiny).log()
    return gap.abs().mean((-2, -1))


@ratio(
    level="token",
    needs=("old_router_NTLK", "router_NTLK"),
    equation="log r_t = ℓ − ℓ_{anchor} + sg[log max(e^−Δ_t, {floor})], Δ the router's drift",
    fixes="tokens whose experts changed count less (mixtures of experts)",
    breaks="needs router scores of both passes",
)
def router_shift(batch: TokenBatch, *, floor: Fraction = 0.8, anchor: Stream = "old") -> Tensor:
    """RSPO (2510.23027)."""
    log_weight_NT = (-router_drift(batch)).clamp(min=math.log(floor) if floor else -math.inf)
    return batch.valid(_difference(batch, anchor) + log_weight_NT)


def anchor_share(batch: TokenBatch) -> Tensor:
    """Return α = (age − 1)/age of each token, 0 for tokens that no update came behind."""
    age_NT = batch.stream("age_NT")
    return torch.where(age_NT > 0, ((age_NT - 1.0) / age_NT.clamp(min=1e-9)).clamp(0.0, 1.0), 0.0)


def interpolated(batch: TokenBatch) -> Tensor:
    """Return ℓ^μ + α·(sg ℓ − ℓ^μ): a guess at the policy one update ago."""
    sampler_NT, logp_NT = batch.stream("sampler_logp_NT"), batch.stream("logp_NT").detach()
    return sampler_NT + anchor_share(batch) * (logp_NT - sampler_NT)


@ratio(
    level="token",
    needs=("sampler_logp_NT", "age_NT"),
    equation="r_t = π/π_a, log π_a = ℓ^μ + α·(sg ℓ − ℓ^μ), α = (age−1)/age",
    fixes="no forward pass for the policy before the update",
    breaks="very stale tokens are hardly clipped at all: r = (π/μ)^(1−α)",
)
def interpolated_token(batch: TokenBatch) -> Tensor:
    """Take one ratio per token, to an anchor between sampler and policy (AReaL)."""
    return batch.stream("logp_NT") - interpolated(batch)
