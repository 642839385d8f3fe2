"""Penalties: `penalty(batch) -> loss_NT`; several add up. Aggregated like the policy term."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from groupwise.groups.kl import VALUES, bounded_exp, k3
from groupwise.losses.ratios import anchor_logp
from groupwise.losses.whole_update import largest_covariances
from groupwise.methods.slots import Fraction, NonNegative, Stream, penalty
from groupwise.records import TokenBatch


@penalty(
    kl=True,
    needs=("ref_logp_NT",),
    equation="+ {coef}·{estimator}(ℓ − ℓ^ref)",
    fixes="stays near the reference",
    breaks="a second model in memory; k3 in the loss is ∇KL(ref‖π), k1 in the loss is nothing",
)
def kl(
    batch: TokenBatch,
    *,
    coef: NonNegative = 0.04,
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3",
) -> Tensor:
    """Add KL to the reference model to the loss."""
    x_NT = batch.stream("logp_NT") - batch.stream("ref_logp_NT")
    return coef * VALUES[estimator](x_NT)


@penalty(
    kl=True,
    needs=("ref_logp_NT", "old_logp_NT"),
    equation="+ {coef}·(π/π_old)·k3(ℓ − ℓ^ref)",
    fixes="∇KL(π‖ref) also when sampled from π_old",
    breaks="a second model in memory",
)
def kl_importance(batch: TokenBatch, *, coef: NonNegative = 0.001) -> Tensor:
    """Weigh k3 by a differentiable importance ratio (DeepSeek-V3.2)."""
    logp_NT = batch.stream("logp_NT")
    ratio_NT = bounded_exp(logp_NT - anchor_logp(batch, "old"))
    return coef * ratio_NT * k3(logp_NT - batch.stream("ref_logp_NT"))


@penalty(
    needs=("sampler_logp_NT",),
    equation="+ {coef}·(ℓ − ℓ^μ)²",
    fixes="pulls the learner back to the policy that sampled",
    breaks="a brake on learning itself",
)
def drift(batch: TokenBatch, *, coef: NonNegative = 0.001) -> Tensor:
    """Squared log-ratio to the sampler."""
    x_NT = batch.stream("logp_NT") - batch.stream("sampler_logp_NT")
    return coef * x_NT.square()


@penalty(
    equation="+ ½·{beta}·(ℓ − ℓ^{anchor})²",
    fixes="off-policy learning without a ratio",
    breaks="pulls back to the policy that sampled, also where that one was wrong",
)
def proximal(batch: TokenBatch, *, beta: NonNegative = 0.1, anchor: Stream = "old") -> Tensor:
    """DRO's term (2405.19107), which ships as Kimi-1.5's, too: a square a token."""
    x_NT = batch.stream("logp_NT") - anchor_logp(batch, anchor)
    return 0.5 * beta * x_NT.square()


@penalty(
    equation="+ ½·{beta}·(Σ_t (ℓ − ℓ^{anchor}))² an answer",
    fixes="as proximal, of the whole answer's log-ratio",
    breaks="grows with the square of the length",
)
def proximal_sequence(
    batch: TokenBatch, *, beta: NonNegative = 0.1, anchor: Stream = "old"
) -> Tensor:
    """Kimi-1.5's term as printed (2501.12599): the square of the summed log-ratio.

    A row's tokens share it in proportion to their own log-ratio, so that their sum is the square.
    """
    x_NT = batch.stream("logp_NT") - anchor_logp(batch, anchor)
    return 0.5 * beta * x_NT.sum(1, keepdim=True) * x_NT


@penalty(
    prepare=largest_covariances,
    needs=("now_logp_NT", "old_logp_NT"),
    equation="+ {coef}·|ℓ − ℓ°| on the max(1, ⌊{fraction}·N⌋) tokens of the largest (A−Ā)(ℓ−ℓ̄)",
    fixes="entropy does not collapse: the tokens that would lower it most are held back",
    breaks="no trust region; its gradient is ±{coef} at any distance",
)
def cov_drift(batch: TokenBatch, *, coef: NonNegative = 1.0, fraction: Fraction = 2e-4) -> Tensor:
    """KL-Cov (2505.22617)."""
    apart_NT = (batch.stream("logp_NT") - anchor_logp(batch, "old")).abs()
    return coef * batch.prepared["cov_drift"]["selected_NT"].to(apart_NT.dtype) * apart_NT


@penalty(
    needs=("entropy_NT",),
    equation="− {coef}·H",
    fixes="keeps the policy from going deterministic too early",
    breaks="can blow the entropy up",
)
def entropy_bonus(batch: TokenBatch, *, coef: NonNegative = 1e-3) -> Tensor:
    """Entropy bonus, ∂H/∂z_v = −p_v(log p_v + H)."""
    return -coef * batch.stream("entropy_NT")
