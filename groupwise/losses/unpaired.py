"""Losses of single answers that were called good or bad: no pairs are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.methods.slots import NonNegative, Positive, preference


@dataclass(frozen=True)
class CalledAnswers:
    """Summed log-probabilities of answers, whether each is good, and the batch's baseline.

    The baseline is one number for all of an update, without gradient: the estimate of
    KL(policy‖reference) on answers that belong to other prompts, and at least 0.
    """

    logp_N: Tensor
    ref_logp_N: Tensor
    good_N: Tensor  # bool
    baseline: Tensor  # a scalar

    def __post_init__(self) -> None:
        shape = self.logp_N.shape
        for name in ("logp_N", "ref_logp_N", "good_N"):
            x_N = getattr(self, name)
            if x_N.dim() != 1 or x_N.shape != shape or not len(x_N):
                raise BatchError(
                    f"{name} has shape {tuple(x_N.shape)}, logp_N {tuple(shape)}: give one number "
                    "per answer, and at least one answer."
                )


@dataclass(frozen=True)
class AnswerLoss:
    """The losses of the answers and what to watch."""

    loss_N: Tensor
    reward_N: Tensor  # β·(ℓ − ℓ^ref)
    good_N: Tensor


def baseline_of(logp_N: Tensor, ref_logp_N: Tensor) -> Tensor:
    """Return max(0, mean(ℓ' − ℓ'^ref)) of answers behind other prompts than their own."""
    return (logp_N.detach() - ref_logp_N.detach()).mean().clamp_min(0.0)


@preference(
    unpaired=True,
    equation=(
        "L = {desirable}·(1 − σ({beta}·(x − z))) for good answers, {undesirable}·(1 − "
        "σ({beta}·(z − x))) for bad ones, z = sg[max(0, mean(ℓ' − ℓ'^ref))] of answers to other "
        "prompts"
    ),
    fixes="learns from single answers with a thumb up or down, however many of each",
    breaks="z is a biased estimate, and poor for small batches",
)
def kto(
    answers: CalledAnswers,
    *,
    beta: Positive = 0.1,
    desirable: NonNegative = 1.0,
    undesirable: NonNegative = 1.0,
) -> AnswerLoss:
    """KTO (2402.01306): gains and losses against a point of reference, which saturate."""
    drift_N = answers.logp_N - answers.ref_logp_N
    one = drift_N.new_ones(())
    sign_N = torch.where(answers.good_N, one, -one)
    weight_N = torch.where(answers.good_N, desirable * one, undesirable * one)
    value_N = torch.sigmoid(sign_N * beta * (drift_N - answers.baseline.detach()))
    return AnswerLoss(weight_N * (1 - value_N), (beta * drift_N).detach(), answers.good_N)
