"""Preference losses beside DPO's: other shapes, label noise, and methods without a reference.

`x` is a summed log-ratio to the reference, ℓ − ℓ^ref; a bar means divided by the answer's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.losses.pairs import PairLoss, Pairs, from_reference
from groupwise.methods.slots import Fraction, NonNegative, Positive, likelihood, preference


def _rewards(pairs: Pairs, beta: float) -> tuple[Tensor, Tensor]:
    chosen_N, rejected_N = pairs.drifts()
    return beta * chosen_N, beta * rejected_N


@preference(
    equation="h = {beta}·(x_w − x_l), L = max(0, 1 − h)",
    fixes="a pair that is told apart well enough teaches nothing more",
    breaks="a kink: pairs leave all at once, and noise in those that are left counts fully",
)
def hinge(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """Hinge loss on DPO's margin, SLiC's without its calibration set (2305.10425)."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    return from_reference((1 - (chosen_N - rejected_N)).relu(), chosen_N, rejected_N)


@preference(
    equation="L = (x_w − x_l − 1/(2·{beta}))²",
    fixes="the margin has a target: labels that are sure can't drive it to infinity",
    breaks="the target is for sums, so long answers reach it with small changes a token",
)
def ipo_sum(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """IPO of summed log-probabilities (2310.12036), as OpenRLHF computes it."""
    chosen_N, rejected_N = pairs.drifts()
    loss_N = (chosen_N - rejected_N - 1 / (2 * beta)).square()
    return from_reference(loss_N, beta * chosen_N, beta * rejected_N)


@preference(
    equation="L = (x̄_w − x̄_l − 1/(2·{beta}))², x̄ = x/n",
    fixes="as IPO, and answers of any length have the same target a token",
    breaks="β means something else than for sums: 1/(2β) is a log-ratio a token",
)
def ipo_token_mean(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """IPO of log-probabilities a token (2310.12036), as TRL computes it."""
    drifts, lengths = pairs.drifts(), pairs.lengths()
    chosen_N, rejected_N = (x_N / n_N for x_N, n_N in zip(drifts, lengths, strict=True))
    loss_N = (chosen_N - rejected_N - 1 / (2 * beta)).square()
    return from_reference(loss_N, beta * chosen_N, beta * rejected_N)


@preference(
    equation="h = {beta}·(x_w − x_l), L = −(1−{noise})·log σ(h) − {noise}·log σ(−h)",
    fixes="labels of which a share is wrong: the margin stops at logit(1−ε)",
    breaks="pairs that are sure and right are pulled back, too",
)
def cdpo(pairs: Pairs, *, beta: Positive = 0.1, noise: Fraction = 0.1) -> PairLoss:
    """Conservative DPO: smoothed labels, the expected loss where `noise` of them are flipped."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    return from_reference(_smoothed(chosen_N - rejected_N, noise), chosen_N, rejected_N)


def _less_than_half(params: Mapping[str, Any]) -> str:
    if params["noise"] < 0.5:
        return ""
    return (
        f"noise={params['noise']:g}: with half of the labels flipped there is nothing to learn, "
        "and the loss divides by 1 − 2·noise. Take less than 0.5."
    )


@preference(
    refuses=_less_than_half,
    equation=(
        "h = {beta}·(x_w − x_l), L = [−(1−{noise})·log σ(h) + {noise}·log σ(−h)]/(1−2·{noise})"
    ),
    fixes="label noise without bias: in expectation it is DPO's loss on the true labels",
    breaks="unbounded below: a sure pair is pushed further for ever",
)
def robust(pairs: Pairs, *, beta: Positive = 0.1, noise: Fraction = 0.1) -> PairLoss:
    """Robust DPO (2403.00409): the unbiased loss where `noise` of the labels are flipped."""
    if problem := _less_than_half({"noise": noise}):
        raise BatchError(problem)
    chosen_N, rejected_N = _rewards(pairs, beta)
    h_N = chosen_N - rejected_N
    loss_N = (-(1 - noise) * F.logsigmoid(h_N) + noise * F.logsigmoid(-h_N)) / (1 - 2 * noise)
    return from_reference(loss_N, chosen_N, rejected_N)


def _smoothed(h_N: Tensor, noise: float) -> Tensor:
    return -(1 - noise) * F.logsigmoid(h_N) - noise * F.logsigmoid(-h_N)


# --- without a reference --------------------------------------------------------------------------


def _per_token(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return ℓ̄, the mean log-probability of a token, of chosen and rejected answers."""
    chosen_len_N, rejected_len_N = pairs.lengths()
    return pairs.chosen_logp_N / chosen_len_N, pairs.rejected_logp_N / rejected_len_N


def _alone(loss_N: Tensor, chosen_N: Tensor, rejected_N: Tensor) -> PairLoss:
    margin_N = chosen_N - rejected_N
    return PairLoss(
        loss_N=loss_N,
        margin_N=margin_N.detach(),
        chosen_reward_N=chosen_N.detach(),
        rejected_reward_N=rejected_N.detach(),
        displaced_N=torch.zeros_like(margin_N, dtype=torch.bool),
    )


@preference(
    refers=False,
    equation="L = −log σ({beta}·(ℓ̄_w − ℓ̄_l) − {gamma})",
    fixes="no second model in memory; a length has no advantage",
    breaks="nothing holds the policy where it was: it drifts with too many steps",
)
def simpo(pairs: Pairs, *, beta: Positive = 2.0, gamma: NonNegative = 0.5) -> PairLoss:
    """SimPO (2405.14734): mean log-probabilities a token, and a margin that they should have."""
    chosen_N, rejected_N = (beta * x_N for x_N in _per_token(pairs))
    return _alone(-F.logsigmoid(chosen_N - rejected_N - gamma), chosen_N, rejected_N)


@preference(
    refers=False,
    equation="o = logit(e^ℓ̄_w) − logit(e^ℓ̄_l), L = −{beta}·log σ(o)",
    fixes="no second model and no stage of its own: it goes with the likelihood of the answers",
    breaks="odds explode where an answer becomes certain",
)
def odds_ratio(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """ORPO's comparison (2403.07691); its likelihood term is `chosen_nll`."""
    chosen_N, rejected_N = (_log_odds(x_N) for x_N in _per_token(pairs))
    return _alone(-beta * F.logsigmoid(chosen_N - rejected_N), chosen_N, rejected_N)


def _log_odds(logp_N: Tensor) -> Tensor:
    """Return log p/(1−p) of p = e^ℓ̄, precise for small p and finite up to p = 1."""
    smallest = torch.finfo(logp_N.dtype).eps
    return logp_N - torch.log((-torch.expm1(logp_N)).clamp_min(smallest))


# --- the chosen answer's own likelihood -----------------------------------------------------------


@likelihood(
    equation="{weight}·NLL, NLL = −Σℓ_w/Σn_w over all chosen answers of the update",
    fixes="the chosen answer can't become less likely for the sake of the margin",
    breaks="learns the data's style with its preference",
)
def chosen_nll(pairs: Pairs, *, weight: Positive = 1.0) -> Tensor:
    """Negative log-likelihood a token of the chosen answers (2404.19733, 2403.07691)."""
    if pairs.mean_chosen_len is None:
        raise BatchError(
            "chosen_nll is a mean over the tokens of the whole update, and the pairs have no "
            "mean_chosen_len. Pass it."
        )
    return -weight * pairs.chosen_logp_N / pairs.mean_chosen_len


@likelihood(
    equation="{weight}·mean over pairs of −ℓ_w/n_w",
    fixes="as chosen_nll, and every answer counts the same, however long",
    breaks="a token of a short answer counts more",
)
def chosen_nll_by_answer(pairs: Pairs, *, weight: Positive = 1.0) -> Tensor:
    """Negative log-likelihood a token of each chosen answer, as the paper of RPO writes it."""
    return -weight * pairs.chosen_logp_N / pairs.lengths()[0]
