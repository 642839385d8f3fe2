"""Reward shaping: `shaping(reward_N, batch) -> (reward_N, token_reward_NT | None)`.

A shaping function changes the reward of the sequence, or adds a reward per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.groups.kl import VALUES
from groupwise.methods.slots import Count, NonNegative, shaping
from groupwise.records import TokenBatch

Estimator = Literal["k1", "k2", "k3"]
Shaped = tuple[Tensor, Tensor | None]


def overlong_penalty(length_N: Tensor, max_length: int, cache: int) -> Tensor:
    """Return 0 up to max_length − cache, then a ramp down to −1 at max_length, −1 beyond."""
    return (((max_length - cache) - length_N.double()) / cache).clamp(-1.0, 0.0)


def _margin_too_long(params: Mapping[str, Any]) -> str:
    if params["cache"] <= params["max_length"]:
        return ""
    return ": the cache is longer than an answer may be. Keep it below max_length."


@shaping(
    lowers=True,
    refuses=_margin_too_long,
    length="max_length",
    margin="cache",
    equation="R += clamp((({max_length} − {cache}) − n) / {cache}, −1, 0)",
    fixes="a smooth cost of length before the hard limit",
    breaks="punishes long correct answers too",
)
def soft_overlong(
    reward_N: Tensor, batch: TokenBatch, *, max_length: Count = 20480, cache: Count = 4096
) -> Shaped:
    """Soft overlong punishment (DAPO, 2503.14476). max_length is the hard generation limit."""
    return reward_N + overlong_penalty(batch.length_N, max_length, cache).to(reward_N.dtype), None


@shaping(
    lowers=True,
    equation="R = +1 if R > 0 else −1",
    fixes="wrong answers carry signal without a baseline",
    breaks="throws graded rewards away",
)
def signed(reward_N: Tensor, batch: TokenBatch) -> Shaped:
    """Right or wrong as +1 or −1; rows without a grade stay without one."""
    sign_N = torch.where(reward_N > 0, 1.0, -1.0).to(reward_N.dtype)
    return torch.where(reward_N.isnan(), reward_N, sign_N), None


def kl_to_reference(batch: TokenBatch, estimator: str) -> Tensor:
    """Detached estimate of KL(old ‖ reference) per token, 0 where masked."""
    x_NT = batch.stream("old_logp_NT") - batch.stream("ref_logp_NT")
    return VALUES[estimator](x_NT)


@shaping(
    kl=True,
    lowers=True,
    needs=("old_logp_NT", "ref_logp_NT"),
    equation="R −= {coef} · Σ_t {estimator}(ℓ°_t − ℓ^ref_t)",
    fixes="∇KL(π‖ref), unbiased, inside the baseline",
    breaks="one number for a whole answer: no credit per token",
)
def kl_per_sequence(
    reward_N: Tensor, batch: TokenBatch, *, coef: NonNegative = 0.03, estimator: Estimator = "k1"
) -> Shaped:
    """KL in the reward of the sequence, before the baseline (RLOO, 2402.14740)."""
    kl_NT = kl_to_reference(batch, estimator)
    return reward_N - coef * kl_NT.sum(1).to(reward_N.dtype), None


@shaping(
    per_token=True,
    kl=True,
    needs=("old_logp_NT", "ref_logp_NT"),
    equation="r_t −= {coef} · {estimator}(ℓ°_t − ℓ^ref_t)",
    fixes="∇KL(π‖ref) with credit per token",
    breaks="needs an advantage that reads token rewards",
)
def kl_per_token(
    reward_N: Tensor, batch: TokenBatch, *, coef: NonNegative = 0.01, estimator: Estimator = "k1"
) -> Shaped:
    """KL in the reward of every token (PPO practice, REINFORCE++ 2501.03262)."""
    return reward_N, kl_to_reference(batch, estimator).mul_(-coef)
