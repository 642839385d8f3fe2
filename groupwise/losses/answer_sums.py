"""From log-probabilities of tokens to one of an answer (`summing`), and weights of pairs.

`place_NT` numbers the policy's tokens of a row from 1, and is 0 elsewhere; `shorter_N` is the
number of tokens of the pair's shorter answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.kl import bounded_exp
from groupwise.methods.slots import Fraction, Positive, summing, weighing


@summing(equation="ℓ = Σ_t ℓ_t")
def whole_answer(logp_NT: Tensor, place_NT: Tensor, shorter_N: Tensor) -> Tensor:
    """Sum over all tokens of an answer."""
    return logp_NT.sum(1)


@summing(
    equation="ℓ = Σ_(t≤m) ℓ_t + {alpha}·Σ_(t>m) ℓ_t, m = min(n_w, n_l)",
    fixes="a longer answer is not preferred, or shunned, for what only it says",
    breaks="what an answer says late counts less, however good it is",
)
def shared_length(
    logp_NT: Tensor, place_NT: Tensor, shorter_N: Tensor, *, alpha: Fraction = 0.5
) -> Tensor:
    """Weigh tokens beyond the shorter answer's length less: LD-DPO (2409.06411)."""
    behind_NT = place_NT > shorter_N[:, None]
    return torch.where(behind_NT, alpha * logp_NT, logp_NT).sum(1)


@weighing(
    equation="w = exp(s_w + s_l), s = mean_t(ℓ_t − log Σ_v p_v²)",
    fixes="pairs that the policy would hardly write itself count less",
    breaks="an answer of rare words counts little, however good it is",
)
def on_policy_weight(chosen_N: Tensor, rejected_N: Tensor) -> Tensor:
    """Weigh by how likely both answers are, against the policy's own samples: WPO (2406.11827)."""
    return bounded_exp(chosen_N + rejected_N)


@weighing(
    equation="w = min(exp(s_w + s_l), {cap}), s = mean_t(ℓ_t − log Σ_v p_v²)",
    fixes="as on_policy_weight, and no pair counts more than the cap",
    breaks="an answer of rare words counts little, however good it is",
)
def on_policy_weight_capped(chosen_N: Tensor, rejected_N: Tensor, *, cap: Positive = 1.0) -> Tensor:
    """Weigh as WPO does, with a cap, as TRL 0.24 has it."""
    return bounded_exp(chosen_N + rejected_N).clamp(max=cap)
