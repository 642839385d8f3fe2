"""Auxiliary terms: losses with their own weights, and parts with their own parameters.

`auxiliary(batch, prepared) -> scalar`. The trait `prepare` runs in the batch phase and gives each
row its targets and weights, so that the sum over micro-batches is exact here as well. The trait
`learns` names the part that the term trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from groupwise.groups.aggregation import seq_mean_token_mean, token_mean_batch
from groupwise.groups.credit import gae_with_one_lambda
from groupwise.groups.kl import VALUES
from groupwise.methods.slots import Fraction, NonNegative, Positive, auxiliary
from groupwise.records import TokenBatch
from groupwise.records.masks import above

Prepared = Mapping[str, Tensor]


def _value_targets(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return returns = GAE(λ of the critic) + values, and the token mean's weights."""
    reward_N = batch.stream("reward_N")
    gae_NT = gae_with_one_lambda(reward_N, batch, params["gamma"], params["lam"])
    return {
        "return_NT": gae_NT + batch.stream("old_value_NT"),
        "coefficient_NT": token_mean_batch.function(batch),
    }


def clipped_value_error(
    value_NT: Tensor, old_value_NT: Tensor, return_NT: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """Return max((v−R)², (clip(v, v_old±ε)−R)²) and where the clipped branch is larger."""
    plain_NT = (value_NT - return_NT).square()
    with torch.no_grad():  # where the clipped branch wins it is constant in v
        moved_NT = value_NT - old_value_NT
        # Within the range the two branches are one: their rounding must not take a gradient away.
        outside_NT = above(moved_NT.abs(), limit)
        near_NT = moved_NT.clamp_(-limit, limit).add_(old_value_NT)
        bounded_NT = near_NT.sub_(return_NT).square_()
        clipped_NT = above(bounded_NT, plain_NT).mul_(outside_NT)
        constant_NT = bounded_NT.mul_(clipped_NT)
    return plain_NT * (1.0 - clipped_NT) + constant_NT, clipped_NT.bool()


@auxiliary(
    learns="critic",
    prepare=_value_targets,
    needs=("old_value_NT",),
    outputs=("value_NT",),
    equation="+ {weight}·½·mean max((v−R̂)², (clip(v, v_old±{limit})−R̂)²), R̂ = GAE(γ={gamma},"
    " λ={lam}) + V",
    fixes="trains the critic",
    breaks="no gradient where the clipped branch wins",
)
def value_loss(
    batch: TokenBatch,
    prepared: Prepared,
    *,
    limit: Positive = 0.2,
    weight: NonNegative = 1.0,
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
) -> Tensor:
    """Clipped value loss (PPO practice; the paper's is the plain squared error)."""
    error_NT, _ = clipped_value_error(
        batch.stream("value_NT"),
        batch.stream("old_value_NT"),
        prepared["return_NT"],
        limit,
    )
    return 0.5 * weight * (prepared["coefficient_NT"] * error_NT).sum()


def _right_token_mean(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return 1/N₊ on the tokens of right answers, N₊ of them in the batch."""
    right_N = batch.stream("correct_N")
    learned_N = batch.length_N * batch.stream("learn_N")
    tokens = batch.world.gather(right_N * learned_N).sum().clamp(min=1)
    return {"coefficient_NT": batch.learned(right_N.double() / tokens)}


@auxiliary(
    prepare=_right_token_mean,
    needs=("correct_N",),
    equation="− {weight}·mean_(tokens of right answers) ℓ",
    fixes="holds on to what was right",
    breaks="imitation: sharpens what is already likely",
)
def positive_nll(batch: TokenBatch, prepared: Prepared, *, weight: NonNegative = 0.1) -> Tensor:
    """Negative log-likelihood of right answers (VAPO, 2504.05118)."""
    logp_NT = batch.stream("logp_NT")
    return -weight * (prepared["coefficient_NT"] * logp_NT).sum()


def _row_mean(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return 1/B on rows that have tokens to learn from."""
    counts_N = batch.stream("learn_N") & (batch.length_N > 0)
    rows = batch.world.gather(counts_N.long()).sum().clamp(min=1)
    return {"coefficient_N": counts_N.to(batch.dtype) / rows}


@auxiliary(
    learns="prm",
    prepare=_row_mean,
    needs=("prm_logp_NT", "ref_logp_NT", "correct_N"),
    outputs=("prm_logp_NT",),
    equation="+ mean_rows BCE(σ(Σ_t {beta}·(ℓ^φ_t − ℓ^ref_t)), right)",
    fixes="trains the implicit reward model on outcomes alone",
    breaks="can be hacked like any reward model",
)
def outcome_bce(batch: TokenBatch, prepared: Prepared, *, beta: Positive = 0.05) -> Tensor:
    """Cross-entropy of the implicit reward model (PRIME, 2502.01456)."""
    prm_NT = batch.stream("prm_logp_NT")
    ref_NT = batch.stream("ref_logp_NT")
    logit_N = beta * (prm_NT - ref_NT).sum(1)
    right_N = batch.stream("correct_N").to(logit_N.dtype)
    losses_N = torch.nn.functional.binary_cross_entropy_with_logits(
        logit_N, right_N, reduction="none"
    )
    return (prepared["coefficient_N"] * losses_N).sum()


def _sequence_mean(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    return {"coefficient_NT": seq_mean_token_mean.function(batch)}


@auxiliary(
    kl=True,
    prepare=_sequence_mean,
    needs=("ref_logp_NT",),
    equation="+ {coef}·mean_sequences mean_tokens {estimator}(ℓ − ℓ^ref)",
    fixes="a KL term that does not grow with length",
    breaks="weighs tokens otherwise than the policy term does",
)
def kl_sequence_mean(
    batch: TokenBatch,
    prepared: Prepared,
    *,
    coef: NonNegative = 0.001,
    estimator: Literal["k1", "k2", "k3", "k3+"] = "k3",
) -> Tensor:
    """Average KL to the reference per sequence, whatever the policy term's aggregation."""
    ref_NT = batch.stream("ref_logp_NT")
    x_NT = batch.stream("logp_NT") - ref_NT
    return coef * (prepared["coefficient_NT"] * VALUES[estimator](x_NT)).sum()


def _load_of_batch(batch: TokenBatch, params: dict[str, Any]) -> dict[str, Tensor]:
    """Return how often a learned token visits each expert, in the batch, and the token mean."""
    learned_NT = batch.learned_NT
    load_NE = (batch.stream("expert_load_NTE") * learned_NT[..., None]).sum(1)
    tokens = batch.world.gather(learned_NT.sum(1)).sum().clamp(min=1)
    load_E = batch.world.gather(load_NE).sum(0) / tokens
    return {
        "load_NE": load_E.expand_as(load_NE),
        "coefficient_NT": learned_NT / tokens,
    }


@auxiliary(
    prepare=_load_of_batch,
    needs=("expert_load_NTE", "router_NTE"),
    equation="+ {weight}·E·Σ_e f_e·P_e, f_e: a token's visits of expert e before the updates, P_e:"
    " mean probability of e",
    fixes="experts that nobody visits any more, of a mixture of experts",
    breaks="pulls the router away from what the reward asks for; a forward pass more a step",
)
def balance(batch: TokenBatch, prepared: Prepared, *, weight: NonNegative = 0.001) -> Tensor:
    """Load balance of experts (Switch, 2101.03961), over the tokens that are learned.

    Visits are a statistic of the batch, and probabilities a mean over its tokens: any split into
    micro-batches gives the gradient of the whole.
    """
    probability_NTE = batch.stream("router_NTE")
    each_NT = (probability_NTE * prepared["load_NE"][:, None].to(probability_NTE.dtype)).sum(-1)
    experts = probability_NTE.shape[-1]
    return weight * experts * (prepared["coefficient_NT"] * each_NT).sum()
