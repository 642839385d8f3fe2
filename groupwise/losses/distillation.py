"""Learning from a teacher: how far two distributions are apart, and penalties made of that.

With p_S of the policy and p_T of the teacher, at one temperature, m = (1−β)·p_S + β·p_T:

    D_β = β·KL(p_T‖m) + (1−β)·KL(p_S‖m),   D_0 = KL(p_T‖p_S),   D_1 = KL(p_S‖p_T)

The ends are cases of their own, since the mixture's divergence vanishes towards them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from groupwise.methods.slots import Count, Fraction, NonNegative, penalty
from groupwise.records import TokenBatch

NEAR_END = 0.05  # closer to 0 or 1 the mixture's divergence is next to nothing


def divergence(logp_V: Tensor, teacher_V: Tensor, beta: float) -> Tensor:
    """Return D_β of distributions along the last axis, given their log-probabilities."""
    if beta == 0.0:
        return (teacher_V.exp() * (teacher_V - logp_V)).sum(-1)
    if beta == 1.0:
        return (logp_V.exp() * (logp_V - teacher_V)).sum(-1)
    mixed_V = mixture(logp_V, teacher_V, beta)
    to_teacher = (teacher_V.exp() * (teacher_V - mixed_V)).sum(-1)
    to_policy = (logp_V.exp() * (logp_V - mixed_V)).sum(-1)
    return beta * to_teacher + (1.0 - beta) * to_policy


def divergence_slope(logp_V: Tensor, teacher_V: Tensor, beta: float) -> Tensor:
    """Return ∂D_β/∂z of the policy's logits z.

    D_0: p_S − p_T. Else p_S·(g − Σ p_S·g) with g = log p_S − log p_T for D_1, and
    g = (1−β)·(log p_S − log m) between the ends.
    """
    p_V = logp_V.exp()
    if beta == 0.0:
        return p_V - teacher_V.exp()
    if beta == 1.0:
        gain_V = logp_V - teacher_V
    else:
        gain_V = (1.0 - beta) * (logp_V - mixture(logp_V, teacher_V, beta))
    return p_V * (gain_V - (p_V * gain_V).sum(-1, keepdim=True))


def mixture(logp_V: Tensor, teacher_V: Tensor, beta: float) -> Tensor:
    """Return log((1−β)·p_S + β·p_T)."""
    return torch.logaddexp(logp_V + math.log1p(-beta), teacher_V + math.log(beta))


def with_rest(logp_K: Tensor) -> Tensor:
    """Put log(1 − Σp) behind the log-probabilities of some tokens: all others, as one.

    What is left is no smaller than rounding: below that it is a constant, without a gradient.
    """
    least = 1e-6 if logp_K.dtype == torch.float32 else 1e-12
    rest_1 = -torch.expm1(logp_K.logsumexp(-1, keepdim=True))
    return torch.cat((logp_K, rest_1.clamp(min=least).log()), dim=-1)


def _near_an_end(params: Mapping[str, Any]) -> str:
    off = min(params["beta"], 1.0 - params["beta"])
    if off == 0.0 or off >= NEAR_END:
        return ""
    end, name = (0, "KL(teacher‖policy)") if params["beta"] < 0.5 else (1, "KL(policy‖teacher)")
    return (
        f" would teach next to nothing: towards the ends the mixture's divergence vanishes. Take "
        f"beta={end}, which is {name} itself, or one from {NEAR_END:g} to {1 - NEAR_END:g}."
    )


@penalty(
    outputs=("teacher_divergence_NT",),
    refuses=_near_an_end,
    equation="+ {coef}·D_β(p_T, p_S), β={beta}: 0 KL(p_T‖p_S), 1 KL(p_S‖p_T), else the"
    " generalised Jensen–Shannon divergence",
    fixes="every token learns from the teacher's whole distribution",
    breaks="the teacher's hidden states beside each micro-batch, and two heads' work",
)
def teacher_divergence(
    batch: TokenBatch, *, coef: NonNegative = 1.0, beta: Fraction = 0.5
) -> Tensor:
    """Add the generalised JSD to the teacher, over the whole vocabulary (GKD, 2306.13649)."""
    return coef * batch.stream("teacher_divergence_NT")


@penalty(
    needs=("teacher_topk_logp_NTK", "teacher_topk_id_NTK", "logp_at_teacher_topk_NTK"),
    refuses=_near_an_end,
    equation="+ {coef}·D_β over the teacher's {k} likeliest tokens and all others as one, β={beta}",
    fixes="the teacher is asked once a step, and its head once",
    breaks="what is outside its likeliest tokens is told apart from nothing",
)
def teacher_topk_divergence(
    batch: TokenBatch, *, coef: NonNegative = 1.0, beta: Fraction = 0.0, k: Count = 32
) -> Tensor:
    """Add the divergence to the teacher's likeliest tokens and a rest.

    Without the rest, whatever the policy holds likely outside would cost nothing.
    """
    policy_NTK = with_rest(batch.stream("logp_at_teacher_topk_NTK"))
    teacher_NTK = with_rest(batch.stream("teacher_topk_logp_NTK"))
    return coef * batch.valid(divergence(policy_NTK, teacher_NTK, beta))
