"""Divergence between the heads of two models, without tokens x vocabulary in memory.

Both heads' logits are made a chunk of tokens at a time, and made again in the backward pass. The
other model gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupwise.losses.distillation import divergence, divergence_slope
from groupwise.model.layers.head import (
    CHUNK_NUMBERS,
    CHUNK_NUMBERS_CUDA,
    HeadGradients,
    HeadRule,
    Opposite,
    chunks,
    logits,
    steepness,
)

HELD = 4  # times a chunk's logits: both heads' log-probabilities and what is made of them


def divergences(
    hidden_AD: Tensor,
    weight_VD: Tensor,
    others: Sequence[Opposite],
    temperature: float,
    rule: HeadRule,
    chunk: int | None = None,
) -> Tensor:
    """Return how far the policy is from the other model of each token; 0 where there is none.

    Where one head is longer than the other, for padding, tokens that both know are compared.
    """
    wide = torch.float64 if weight_VD.dtype == torch.float64 else torch.float32
    found_A = torch.zeros(len(hidden_AD), dtype=wide, device=hidden_AD.device)
    room = CHUNK_NUMBERS_CUDA if weight_VD.is_cuda else CHUNK_NUMBERS
    for other in others:
        known = min(len(weight_VD), len(other.weight_VD))
        rows = chunk or max(1, room // (HELD * known))
        apart_B = _Divergence.apply(  # type: ignore[no-untyped-call]
            hidden_AD.index_select(0, other.at_B),
            weight_VD[:known],
            None if rule.bias_V is None else rule.bias_V[:known],
            other,
            temperature,
            rows,
            rule,
        )
        found_A = found_A.index_copy(0, other.at_B, apart_B)
    return found_A


class _Divergence(torch.autograd.Function):
    """D_β of softmax(z) from the other's softmax, token by token; its slope in z is closed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_BD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        other: Opposite,
        temperature: float,
        rows: int,
        rule: HeadRule,
    ) -> Tensor:
        rule = _cut(rule, bias_V)
        ctx.save_for_backward(hidden_BD, weight_VD)
        ctx.other, ctx.temperature, ctx.rows, ctx.rule = other, temperature, rows, rule
        parts = []
        for part in chunks(len(hidden_BD), rows):
            z_CV = logits(hidden_BD[part], weight_VD, temperature, rule=rule)
            parts.append(
                divergence(
                    z_CV.log_softmax(-1), _other(other, part, weight_VD, temperature), other.beta
                )
            )
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:
        hidden_BD, weight_VD = ctx.saved_tensors
        sums = HeadGradients(
            hidden_BD, weight_VD, ctx.temperature, ctx.rule, ctx.needs_input_grad[:3], grad_B.dtype
        )
        for part in chunks(len(hidden_BD), ctx.rows):
            z_CV = logits(hidden_BD[part], weight_VD, ctx.temperature, rule=ctx.rule)
            steep_CV = steepness(ctx.rule, z_CV, ctx.temperature)
            other_CV = _other(ctx.other, part, weight_VD, ctx.temperature)
            slope_CV = divergence_slope(z_CV.log_softmax(-1), other_CV, ctx.other.beta)
            sums.add(part, slope_CV.mul_(grad_B[part, None]), steep_CV)
        return *sums.found(), None, None, None, None


def _other(other: Opposite, part: slice, like_VD: Tensor, temperature: float) -> Tensor:
    """Return the other model's log-probabilities of the tokens that both know, in our precision."""
    known = len(like_VD)
    bias_V = other.rule.bias_V
    rule = _cut(other.rule, None if bias_V is None else bias_V[:known])
    z_CV = logits(other.hidden_BD[part], other.weight_VD[:known], temperature, rule=rule)
    wide = torch.float64 if like_VD.dtype == torch.float64 else torch.float32
    return z_CV.to(wide).log_softmax(-1)


def _cut(rule: HeadRule, bias_V: Tensor | None) -> HeadRule:
    """Return the rule with the bias of those tokens alone; the very same where it has none."""
    return rule if bias_V is None else HeadRule(rule.scale, rule.cap, bias_V)
