"""Gates that look at more of the distribution than a ratio: divergence masks and top-k smoothing.

Same signature as in gates.py: `(log_ratio_NT, advantage_NT, batch) -> (objective_NT, clipped_NT)`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.groups.kl import bounded_exp
from groupwise.losses.gates import Gated, clip_within
from groupwise.methods.slots import Count, Fraction, NonNegative, Positive, gate
from groupwise.records import TokenBatch
from groupwise.records.masks import above, as_numbers

# --- divergence masks (DPPO) ------------------------------------------------------------------


def keep_unless_further_out(
    divergence_NT: Tensor, delta: float, log_ratio_NT: Tensor, advantage_NT: Tensor
) -> Tensor:
    """Drop a token iff the step leads further away from the sampler and it is beyond delta."""
    # A and log r of one sign: the step goes the way the policy has already gone.
    outward_NT = above(advantage_NT * log_ratio_NT, 0.0)
    return ~outward_NT.mul_(above(divergence_NT, delta)).bool()


def _masked(
    divergence_NT: Tensor,
    delta: float,
    cap: float,
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
) -> Gated:
    """Return sg[min(r, cap)]·M·A·ℓ, and the tokens that the mask M dropped."""
    log_ratio_NT = log_ratio_NT.detach()
    keep_NT = keep_unless_further_out(divergence_NT, delta, log_ratio_NT, advantage_NT)
    weight_NT = (
        bounded_exp(log_ratio_NT).clamp_(max=cap).mul_(as_numbers(keep_NT, log_ratio_NT.dtype))
    )
    objective_NT = weight_NT * advantage_NT * batch.stream("logp_NT")
    return objective_NT, ~keep_NT & batch.mask_NT


def _of_sampled_token(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return log π and log μ of the sampled token, without gradient."""
    logp_NT = batch.stream("logp_NT").detach()
    return logp_NT, batch.stream("sampler_logp_NT")


def binary_tv(logp_NT: Tensor, sampler_NT: Tensor) -> Tensor:
    """Return |π − μ| of the sampled token."""
    return (logp_NT.exp() - sampler_NT.exp()).abs()


def binary_kl(logp_NT: Tensor, sampler_NT: Tensor) -> Tensor:
    """Return KL(μ‖π) of 'this token or another'."""
    (rest_mu_NT, log_mu_NT), (_, log_pi_NT) = another_token(sampler_NT), another_token(logp_NT)
    rest_NT = rest_mu_NT * (log_mu_NT - log_pi_NT)
    return sampler_NT.exp() * (sampler_NT - logp_NT) + rest_NT


def another_token(logp_NT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probability of all other tokens together, and its logarithm."""
    rest_NT = torch.expm1(logp_NT).neg_()
    return rest_NT, rest_NT.clamp(min=torch.finfo(logp_NT.dtype).tiny).log_()


@gate(
    ratio="token",
    anchor="sampler",
    needs=("sampler_logp_NT",),
    equation="S = sg[min(r, {cap})]·M·A·ℓ, M = 0 iff the step leads further out and |π−μ| >"
    " {delta}",
    fixes="bounds probability mass, not ratios: rare tokens may move",
    breaks="ignores where the rest of the mass went",
)
def tv_mask(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    delta: NonNegative = 0.2,
    cap: Positive = 5.0,
) -> Gated:
    """DPPO with binary total variation (2602.04879)."""
    divergence_NT = binary_tv(*_of_sampled_token(batch))
    return _masked(divergence_NT, delta, cap, log_ratio_NT, advantage_NT, batch)


@gate(
    ratio="token",
    anchor="sampler",
    needs=("sampler_logp_NT",),
    equation="S = sg[min(r, {cap})]·M·A·ℓ, M = 0 iff the step leads further out and KL₂(μ‖π) >"
    " {delta}",
    fixes="as tv_mask, stricter where the sampler was nearly sure",
    breaks="ignores where the rest of the mass went",
)
def kl_mask(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    delta: NonNegative = 0.05,
    cap: Positive = 5.0,
) -> Gated:
    """DPPO with binary KL(μ‖π) (2602.04879)."""
    divergence_NT = binary_kl(*_of_sampled_token(batch))
    return _masked(divergence_NT, delta, cap, log_ratio_NT, advantage_NT, batch)


@gate(
    ratio="token",
    anchor="sampler",
    needs=("sampler_logp_NT",),
    equation="S = M·r·A, M = 0 iff A > 0 and π−μ > {high}, or A ≤ 0 and π−μ < −{low}",
    fixes="bounds probability mass on the side that an answer is pushed to",
    breaks="r is unbounded for rare tokens",
)
def tv_one_sided(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
) -> Gated:
    """prime-rl's default mask (after DPPO, 2602.04879): by the side that A pushes to."""
    logp_NT, sampler_NT = _of_sampled_token(batch)
    moved_NT = logp_NT.exp() - sampler_NT.exp()
    far_NT = torch.where(advantage_NT > 0, moved_NT > high, moved_NT < -low)
    return _importance(~far_NT, log_ratio_NT, advantage_NT, batch)


@gate(
    ratio="token",
    anchor="sampler",
    needs=("sampler_logp_NT",),
    equation="S = M·r·A, M = 0 iff |π−μ| > {delta}",
    fixes="tokens on which the two policies disagree teach nothing, in either direction",
    breaks="what should be pushed back is dropped, too",
)
def tv_symmetric(
    log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch, *, delta: NonNegative = 0.1
) -> Gated:
    """Mask both directions, whatever the sign of A (prime-rl's IPO)."""
    kept_NT = binary_tv(*_of_sampled_token(batch)) <= delta
    return _importance(kept_NT, log_ratio_NT, advantage_NT, batch)


def _importance(
    kept_NT: Tensor, log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch
) -> Gated:
    """Return M·r·A, with r's gradient."""
    return bounded_exp(log_ratio_NT) * advantage_NT * kept_NT, ~kept_NT & batch.mask_NT


def first_k(batch: TokenBatch, name: str, k: int) -> Tensor:
    """Return the first k entries of a top-k stream, which must have that many."""
    x = batch.stream(name)
    if x.shape[-1] < k:
        raise BatchError(
            f"{name} has {x.shape[-1]} entries per token, the gate's k is {k}: give it at least k, "
            "or lower recipe.gate.k."
        )
    return x[..., :k]


def topk_divergences(batch: TokenBatch, k: int, members: str) -> tuple[Tensor, Tensor]:
    """Return TV and KL(μ‖π) over the sampler's top-k tokens and one bucket for the rest.

    With members = "top+sampled" the sampled token gets a bucket of its own if it is not among them.
    """
    mu = first_k(batch, "sampler_topk_logp_NTK", k).exp()
    pi = first_k(batch, "logp_at_sampler_topk_NTK", k).detach().exp()
    if members == "top+sampled":
        ids, token_NT = (
            first_k(batch, "sampler_topk_id_NTK", k),
            batch.stream("token_NT"),
        )
        new_NT = (ids != token_NT[..., None]).all(-1)
        own_mu_NT = batch.stream("sampler_logp_NT").exp()
        own_pi_NT = batch.stream("logp_NT").detach().exp()
        mu = torch.cat([mu, torch.where(new_NT, own_mu_NT, 0.0)[..., None]], -1)
        pi = torch.cat([pi, torch.where(new_NT, own_pi_NT, 0.0)[..., None]], -1)
    mu = torch.cat([mu, (1.0 - mu.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
    pi = torch.cat([pi, (1.0 - pi.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
    tiny = torch.finfo(mu.dtype).tiny
    kl_NT = (mu * (mu.clamp(min=tiny).log() - pi.clamp(min=tiny).log())).sum(-1)
    tv_NT = 0.5 * (mu - pi).abs().sum(-1)
    mask_NT = batch.mask_NT
    return torch.where(mask_NT, tv_NT, 0.0), torch.where(mask_NT, kl_NT, 0.0)


@gate(
    ratio="token",
    anchor="sampler",
    needs=(
        "sampler_logp_NT",
        "sampler_topk_logp_NTK",
        "sampler_topk_id_NTK",
        "logp_at_sampler_topk_NTK",
        "token_NT",
    ),
    equation="S = sg[min(r, {cap})]·M·A·ℓ, M = 0 iff the step leads further out and"
    " {divergence} over the sampler's top {k} ({members}) and the rest > {delta}",
    fixes="sees where the mass went",
    breaks="needs top-k log-probabilities from both engines",
)
def topk_mask(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    delta: NonNegative = 0.2,
    k: Count = 20,
    divergence: Literal["tv", "kl"] = "tv",
    members: Literal["top", "top+sampled"] = "top",
    cap: Positive = 5.0,
) -> Gated:
    """DPPO with the top-k divergence (2602.04879)."""
    tv_NT, kl_NT = topk_divergences(batch, k, members)
    divergence_NT = tv_NT if divergence == "tv" else kl_NT
    return _masked(divergence_NT, delta, cap, log_ratio_NT, advantage_NT, batch)


# --- top-k smoothing (SimKO) ------------------------------------------------------------------


def entropy_threshold(batch: TokenBatch, quantile: float) -> Tensor:
    """Return the quantile (linear interpolation) of each row's valid token entropies, [N, 1]."""
    entropy_NT = batch.stream("entropy_NT").detach()
    if not len(entropy_NT):  # a rank without rows
        return entropy_NT[:, :1]
    valid_NT = torch.where(batch.mask_NT, entropy_NT, torch.nan)
    return valid_NT.nanquantile(quantile, dim=1, keepdim=True).nan_to_num(0.0)


def simko_branches(
    batch: TokenBatch, advantage_NT: Tensor, quantile: float
) -> tuple[Tensor, Tensor]:
    """Tell where to spread (right answers) and push harder (wrong, sampled the top token)."""
    entropy_NT = batch.stream("entropy_NT").detach()
    forking_NT = batch.mask_NT & (entropy_NT > entropy_threshold(batch, quantile))
    top1_NT = batch.stream("topk_id_NTK")[..., 0]
    is_top1_NT = top1_NT == batch.stream("token_NT")
    return forking_NT & (advantage_NT > 0), forking_NT & (advantage_NT < 0) & is_top1_NT


@gate(
    below_one=True,
    ratio="token",
    needs=("entropy_NT", "topk_logp_NTK", "topk_id_NTK", "token_NT"),
    equation="clip({low}, {high}) with, on the tokens above the {quantile} entropy quantile of"
    " their row:"
    " ∇ℓ_y → (1−{alpha})∇ℓ_y + ({alpha}/{k})Σ_topk ∇ℓ_k where A > 0; A·{top1} where A <"
    " 0 and y is the top token",
    fixes="mass concentrating on the top token: pass@k",
    breaks="needs top-k log-probabilities with gradient",
)
def topk_smoothing(
    log_ratio_NT: Tensor,
    advantage_NT: Tensor,
    batch: TokenBatch,
    *,
    alpha: Fraction = 0.01,
    k: Count = 3,
    quantile: Fraction = 0.8,
    top1: NonNegative = 1.1,
    low: NonNegative = 0.2,
    high: NonNegative = 0.2,
) -> Gated:
    """SimKO (2510.14807). The ratio's value is unchanged; only its gradient is spread."""
    spread_NT, harder_NT = simko_branches(batch, advantage_NT, quantile)
    logp_NT = batch.stream("logp_NT")
    top_NTK = first_k(batch, "topk_logp_NTK", k)
    smooth_NT = (1.0 - alpha) * logp_NT + alpha * top_NTK.mean(-1)
    smooth_NT = log_ratio_NT.detach() + smooth_NT - smooth_NT.detach()
    spread_ratio_NT = torch.where(spread_NT, smooth_NT, log_ratio_NT)
    scaled_NT = torch.where(harder_NT, top1 * advantage_NT, advantage_NT)
    return clip_within(bounded_exp(spread_ratio_NT), scaled_NT, 1.0 - low, 1.0 + high)
