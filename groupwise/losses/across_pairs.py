"""Preference losses that compare all pairs of an update with each other: AOT and BCO.

What they read of the other pairs is made before the update, from passes over all of them
(`prepare`), and has no gradient there. So any micro-batches give the update's gradient, which is
exact: an order does not change under small steps, and BCO's baseline is fixed by its definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.losses.pairs import PairLoss, Pairs, from_reference
from groupwise.losses.preferences import smoothed
from groupwise.methods.slots import Fraction, Positive, preference


def _of_same_rank(x_N: Tensor, other_N: Tensor) -> Tensor:
    """Return for each number the one of `other_N` that has the same rank."""
    rank_N = x_N.argsort(stable=True).argsort(stable=True)
    return other_N.sort().values[rank_N]


def _ranked_margins(pairs: Pairs, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the reference's margin of the same rank as each pair's own margin."""
    chosen_N, rejected_N = pairs.drifts()
    own_N = pairs.chosen_logp_N - pairs.rejected_logp_N
    return {"ranked_N": _of_same_rank(own_N, own_N - (chosen_N - rejected_N))}


@preference(
    prepare=_ranked_margins,
    equation=(
        "a = sort(ℓ_w − ℓ_l), b = sort(ℓ^ref_w − ℓ^ref_l) over the update, h = {beta}·(a − b), "
        "L = −(1−{noise})·log σ(h) − {noise}·log σ(−h)"
    ),
    fixes="all margins together should stand above the reference's, not each above its own",
    breaks="what a pair teaches depends on which others are in the update",
)
def aot(pairs: Pairs, *, beta: Positive = 0.1, noise: Fraction = 0.0) -> PairLoss:
    """AOT (2406.05882): first-order dominance of the policy's margins over the reference's."""
    margin_N = pairs.chosen_logp_N - pairs.rejected_logp_N
    h_N = beta * (margin_N - pairs.column("ranked_N"))
    chosen_N, rejected_N = (beta * x_N for x_N in pairs.drifts())
    return from_reference(smoothed(h_N, noise), chosen_N, rejected_N)


def _ranked_drifts(pairs: Pairs, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the other side's log-ratio of the same rank, for each answer of each pair."""
    chosen_N, rejected_N = pairs.drifts()
    return {
        "ranked_rejected_N": _of_same_rank(chosen_N, rejected_N),
        "ranked_chosen_N": _of_same_rank(rejected_N, chosen_N),
    }


@preference(
    prepare=_ranked_drifts,
    equation=(
        "a = sort(x_w), b = sort(x_l) over the update, h = {beta}·(a − b), "
        "L = −(1−{noise})·log σ(h) − {noise}·log σ(−h)"
    ),
    fixes="chosen and rejected answers need not belong to the same prompts",
    breaks="an easy prompt's answers are compared with a hard one's",
)
def aot_unpaired(pairs: Pairs, *, beta: Positive = 0.1, noise: Fraction = 0.0) -> PairLoss:
    """AOT for answers that are no pairs (2406.05882): all chosen ones above all rejected ones."""
    chosen_N, rejected_N = pairs.drifts()
    from_chosen_N = smoothed(beta * (chosen_N - pairs.column("ranked_rejected_N")), noise)
    from_rejected_N = smoothed(beta * (pairs.column("ranked_chosen_N") - rejected_N), noise)
    # Each comparison is met twice, from either side, and has its gradient from both.
    together_N = from_chosen_N + from_rejected_N
    loss_N = together_N - together_N.detach() / 2
    return from_reference(loss_N, beta * chosen_N, beta * rejected_N)


def _running_reward(pairs: Pairs, params: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the mean reward of all steps so far, each counting once, this one included."""
    here = params["beta"] * torch.stack(pairs.drifts()).mean()
    before = pairs.average
    mean = (before.mean * before.steps + here) / (before.steps + 1)
    return {"baseline_N": mean.expand(len(pairs.chosen_logp_N))}


@preference(
    prepare=_running_reward,
    remembers="pair_reward",
    equation=(
        "L = −log σ(r_w − δ) − log σ(δ − r_l), r = {beta}·x, δ = mean over steps of their mean r"
    ),
    fixes="each answer is told good from bad by itself; the baseline follows the policy",
    breaks="the baseline is of rewards long ago, too",
)
def bco_pair(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """BCO on pairs (2404.04656): a classifier of good and bad answers around a running mean."""
    chosen_N, rejected_N = (beta * x_N for x_N in pairs.drifts())
    baseline_N = pairs.column("baseline_N")
    loss_N = -F.logsigmoid(chosen_N - baseline_N) - F.logsigmoid(baseline_N - rejected_N)
    return from_reference(loss_N, chosen_N, rejected_N)
