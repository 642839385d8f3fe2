"""Preference losses beside DPO's: other shapes, label noise, and methods without a reference.

`x` is a summed log-ratio to the reference, ℓ − ℓ^ref; a bar means divided by the answer's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.groups.kl import bounded_exp
from groupwise.losses.pairs import PairLoss, Pairs, from_reference
from groupwise.methods.slots import (
    Fraction,
    NonNegative,
    Positive,
    PositiveFraction,
    likelihood,
    preference,
)


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
    equation="L = −log σ({beta}·(x_w − {share}·x_l))",
    fixes="the chosen answer's probability falls less, or rises: the rejected one pushes less",
    breaks="a smaller margin between the two",
)
def shifted(pairs: Pairs, *, beta: Positive = 0.1, share: PositiveFraction = 0.75) -> PairLoss:
    """DPO-Shift with a constant f(λ) (2502.07599)."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    margin_N = chosen_N - share * rejected_N
    return from_reference(-F.logsigmoid(margin_N), chosen_N, rejected_N)


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
    return from_reference(smoothed(chosen_N - rejected_N, noise), chosen_N, rejected_N)


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


def smoothed(h_N: Tensor, noise: float) -> Tensor:
    """Return the logistic loss of margins whose labels are flipped with this probability."""
    return -(1 - noise) * F.logsigmoid(h_N) - noise * F.logsigmoid(-h_N)


@preference(
    equation="h = {beta}·(x_w − x_l), L = KL([σ(h), σ(−h)] ‖ [1−{noise}, {noise}])",
    fixes="seeks the mode of the preferences instead of covering all of them",
    breaks="flat far from the target, and undefined without noise",
)
def exo(pairs: Pairs, *, beta: Positive = 0.1, noise: PositiveFraction = 0.001) -> PairLoss:
    """EXO on pairs (2402.00856): the reverse KL to labels that are smoothed a little."""
    if noise == 1.0:
        raise BatchError("exo with noise=1 has a target of no mass. Take less than 1.")
    chosen_N, rejected_N = _rewards(pairs, beta)
    h_N = chosen_N - rejected_N
    log_first, log_second = math.log1p(-noise), math.log(noise)
    loss_N = torch.sigmoid(h_N) * (F.logsigmoid(h_N) - log_first) + torch.sigmoid(-h_N) * (
        F.logsigmoid(-h_N) - log_second
    )
    return from_reference(loss_N, chosen_N, rejected_N)


@preference(
    equation="L = −log σ(r_w) − ½·log σ(−r_w) − ½·log σ(−r_l), r = {beta}·x",
    fixes="the chosen answer's likelihood is held up by itself, not only by the margin",
    breaks="an answer that has become twice as likely (r_w > log 2) is pushed down again",
)
def nca(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """NCA on pairs (2402.05369): noise contrast of each answer against the reference."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    loss_N = (
        -F.logsigmoid(chosen_N) - 0.5 * F.logsigmoid(-chosen_N) - 0.5 * F.logsigmoid(-rejected_N)
    )
    return from_reference(loss_N, chosen_N, rejected_N)


@preference(
    equation="L = (x_w − 1/(2·{beta}))² + (x_l + 1/(2·{beta}))²",
    fixes="each answer has a target of its own: both can't fall together",
    breaks="targets are sums over an answer, and far away for a small β",
)
def sppo_hard(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """SPPO with labels for sure (2405.00675): the squared distance from the game's next policy."""
    chosen_N, rejected_N = pairs.drifts()
    target = 1 / (2 * beta)
    loss_N = (chosen_N - target).square() + (rejected_N + target).square()
    return from_reference(loss_N, beta * chosen_N, beta * rejected_N)


@preference(
    equation="L = 1 − σ(r_w) + σ(r_l), r = {beta}·x",
    fixes="the chosen answer rises and the rejected one falls, each by itself",
    breaks="saturates on both sides, also where the model was wrong",
)
def apo_zero(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """APO-zero (2408.06266): for data that are better than the model."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    loss_N = 1 - torch.sigmoid(chosen_N) + torch.sigmoid(rejected_N)
    return from_reference(loss_N, chosen_N, rejected_N)


@preference(
    equation="L = σ(r_w) + 1 − σ(r_w − r_l), r = {beta}·x",
    fixes="both answers fall, the rejected one more: the model was better than both",
    breaks="the chosen answer becomes less likely on purpose",
)
def apo_down(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """APO-down (2408.06266): for data that are worse than the model."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    loss_N = torch.sigmoid(chosen_N) + 1 - torch.sigmoid(chosen_N - rejected_N)
    return from_reference(loss_N, chosen_N, rejected_N)


@preference(
    equation="h = {beta}·(x_w − x_l), m = σ(h/{tau}), L = −(1−m)·log σ(h) + m·e^(−h)",
    fixes="found by search: logistic where the model errs, exponential where it is right",
    breaks="not convex: two pairs of one margin may be pulled to different ends",
)
def discopop(pairs: Pairs, *, beta: Positive = 0.1, tau: Positive = 0.05) -> PairLoss:
    """DiscoPOP's blended loss (2406.08414); the blend is differentiated, too."""
    chosen_N, rejected_N = _rewards(pairs, beta)
    h_N = chosen_N - rejected_N
    blend_N = torch.sigmoid(h_N / tau)
    # The exponential's gradient is kept finite where no blend would ever look at it.
    loss_N = -(1 - blend_N) * F.logsigmoid(h_N) + blend_N * bounded_exp(-h_N)
    return from_reference(loss_N, chosen_N, rejected_N)


@preference(
    equation="L = −log σ({beta}·(x̄_w − x̄_l)), x̄ = x/n",
    fixes="as DPO, and length gives no advantage",
    breaks="β means something else than for sums: about an answer's length times as much",
)
def logistic_token_mean(pairs: Pairs, *, beta: Positive = 5.0) -> PairLoss:
    """DPO of mean log-ratios a token (2411.15124, Tülu 3)."""
    means = (x_N / n_N for x_N, n_N in zip(pairs.drifts(), pairs.lengths(), strict=True))
    chosen_N, rejected_N = (beta * x_N for x_N in means)
    return from_reference(-F.logsigmoid(chosen_N - rejected_N), chosen_N, rejected_N)


@preference(
    equation=(
        "L = −log σ({beta}·(s_w − s_l)), s = f'(e^x) of the divergence {divergence}: "
        "forward_kl 1 − e^(−x); js log 2 + log σ(x); alpha (e^((α−1)x) − 1)/(α−1), α = {alpha}"
    ),
    fixes="another divergence than the reverse KL: how much diversity is kept is a choice",
    breaks="exponentials of whole answers overflow: they are held within ±20",
)
def f_divergence(
    pairs: Pairs,
    *,
    beta: Positive = 0.1,
    divergence: Literal["forward_kl", "js", "alpha"] = "js",
    alpha: Fraction = 0.5,
) -> PairLoss:
    """f-DPO (2309.16240): the reward that another divergence's optimum implies."""
    chosen_N, rejected_N = (
        beta * _slope_of_divergence(x_N, divergence, alpha) for x_N in pairs.drifts()
    )
    return from_reference(-F.logsigmoid(chosen_N - rejected_N), chosen_N, rejected_N)


def _slope_of_divergence(x_N: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return f'(e^x); α = 1 of `alpha` is the reverse KL, and with it DPO."""
    if divergence == "forward_kl":
        return 1 - bounded_exp(-x_N)
    if divergence == "js":
        return math.log(2.0) + F.logsigmoid(x_N)
    if alpha == 1.0:
        return x_N
    return (bounded_exp((alpha - 1) * x_N) - 1) / (alpha - 1)


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
    equation=("h = {beta}·(ℓ̄_w − ℓ̄_l) − {gamma}, L = −(1−{noise})·log σ(h) − {noise}·log σ(−h)"),
    fixes="no second model in memory; a length has no advantage",
    breaks="nothing holds the policy where it was: it drifts with too many steps",
)
def simpo(
    pairs: Pairs, *, beta: Positive = 2.0, gamma: NonNegative = 0.5, noise: Fraction = 0.0
) -> PairLoss:
    """SimPO (2405.14734): mean log-probabilities a token, and a margin that they should have."""
    chosen_N, rejected_N = (beta * x_N for x_N in _per_token(pairs))
    return _alone(smoothed(chosen_N - rejected_N - gamma, noise), chosen_N, rejected_N)


@preference(
    refers=False,
    equation="h = {beta}·(ℓ_w − ℓ_l), L = −(1−{noise})·log σ(h) − {noise}·log σ(−h)",
    fixes="DPO's comparison without a second model in memory",
    breaks="a longer answer is less likely: the comparison favours the short",
)
def logistic_alone(pairs: Pairs, *, beta: Positive = 0.1, noise: Fraction = 0.0) -> PairLoss:
    """CPO's comparison (2401.08417): DPO's with a reference that holds all for equally likely."""
    chosen_N, rejected_N = beta * pairs.chosen_logp_N, beta * pairs.rejected_logp_N
    return _alone(smoothed(chosen_N - rejected_N, noise), chosen_N, rejected_N)


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


@likelihood(
    equation="{weight}·mean over pairs of −ℓ_w",
    fixes="as chosen_nll, and an answer counts by its tokens within the update's mean over pairs",
    breaks="its size grows with the answers' lengths",
)
def chosen_nll_sum(pairs: Pairs, *, weight: Positive = 1.0) -> Tensor:
    """Negative log-likelihood of each chosen answer, summed over its tokens, as NeMo has it."""
    return -weight * pairs.chosen_logp_N
