"""Preference pairs: selection (`pairing`) and loss (`preference`), for DPO and its relatives.

Log-probabilities here are sums over the answer, one number per pair. The trait `reads` of a pairing
says where the two answers come from: `labels` of the data, the data's written `answers` and one
sample, the `grades` of a group of samples, or the policy's own `judgements` of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.methods.slots import (
    Count,
    NonNegative,
    Positive,
    PositiveFraction,
    pairing,
    preference,
)
from groupwise.records import Average


@dataclass(frozen=True)
class Pairs:
    """Summed log-probabilities of chosen and rejected answers under policy and reference.

    A loss without a reference gets none. Lengths are in tokens of the policy; the mean over the
    chosen answers of the whole update makes a mean over tokens the same in any micro-batches.
    `columns` are what the loss's `prepare` made of all pairs of the update, a number a pair.
    """

    chosen_logp_N: Tensor
    rejected_logp_N: Tensor
    ref_chosen_logp_N: Tensor | None = None
    ref_rejected_logp_N: Tensor | None = None
    chosen_len_N: Tensor | None = None
    rejected_len_N: Tensor | None = None
    mean_chosen_len: float | None = None
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    average: Average = field(default_factory=Average)  # of rewards in the steps before

    def __post_init__(self) -> None:
        shape = self.chosen_logp_N.shape
        for name, x in (vars(self) | dict(self.columns)).items():
            if not isinstance(x, Tensor):
                continue
            if x.dim() != 1 or x.shape != shape or not len(x):
                raise BatchError(
                    f"{name} has shape {tuple(x.shape)}, chosen_logp_N {tuple(shape)}: give one "
                    "summed log-probability per pair, and at least one pair."
                )
            if not x.isfinite().all():
                raise BatchError(f"{name} is not finite: a pair's log-probability is a finite sum.")

    def drifts(self) -> tuple[Tensor, Tensor]:
        """Return x = ℓ − ℓ^ref of chosen and rejected answers."""
        if self.ref_chosen_logp_N is None or self.ref_rejected_logp_N is None:
            raise BatchError(
                "This preference measures from a reference, and the pairs have no "
                "ref_chosen_logp_N and ref_rejected_logp_N. Pass them, or take one without a "
                "reference (simpo)."
            )
        return (
            self.chosen_logp_N - self.ref_chosen_logp_N,
            self.rejected_logp_N - self.ref_rejected_logp_N,
        )

    def column(self, name: str) -> Tensor:
        """Return what was made of all pairs of the update, of these pairs."""
        if name not in self.columns:
            raise BatchError(
                "This preference compares all pairs of an update, and these have no column "
                f"{name}. Call its prepare on all of them and pass what it returns as columns=."
            )
        return self.columns[name]

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Return the tokens of chosen and rejected answers."""
        if self.chosen_len_N is None or self.rejected_len_N is None:
            raise BatchError(
                "This preference takes means over tokens, and the pairs have no chosen_len_N and "
                "rejected_len_N. Pass them."
            )
        return self.chosen_len_N, self.rejected_len_N


@dataclass(frozen=True)
class PairLoss:
    """The losses of the pairs and what to watch.

    Without a reference a reward is β times the mean log-probability a token, and nothing tells
    whether the chosen answer became less likely.
    """

    loss_N: Tensor
    margin_N: Tensor
    chosen_reward_N: Tensor
    rejected_reward_N: Tensor
    displaced_N: Tensor  # preferred, although the chosen answer became less likely

    @property
    def loss(self) -> Tensor:
        return self.loss_N.mean()

    def metrics(self) -> dict[str, float]:
        return {
            "pairs/margin": float(self.margin_N.mean()),
            "pairs/accuracy": float((self.margin_N > 0).double().mean()),
            "pairs/chosen_reward": float(self.chosen_reward_N.mean()),
            "pairs/rejected_reward": float(self.rejected_reward_N.mean()),
            "pairs/displaced_share": float(self.displaced_N.double().mean()),
        }


@preference(
    equation="h = {beta}·[(ℓ_w − ℓ^ref_w) − (ℓ_l − ℓ^ref_l)], L = −log σ(h)",
    fixes="no reward model, no sampling",
    breaks="the chosen answer's own probability may fall; a small β moves far from the reference",
)
def logistic(pairs: Pairs, *, beta: Positive = 0.1) -> PairLoss:
    """DPO (2305.18290); SPIN (2401.01335) with its own samples as rejected answers."""
    chosen_N, rejected_N = (beta * x_N for x_N in pairs.drifts())
    return from_reference(-F.logsigmoid(chosen_N - rejected_N), chosen_N, rejected_N)


def from_reference(loss_N: Tensor, chosen_N: Tensor, rejected_N: Tensor) -> PairLoss:
    """Return losses with what there is to watch, of rewards that are 0 for the reference itself."""
    margin_N = chosen_N - rejected_N
    return PairLoss(
        loss_N=loss_N,
        margin_N=margin_N.detach(),
        chosen_reward_N=chosen_N.detach(),
        rejected_reward_N=rejected_N.detach(),
        displaced_N=((margin_N > 0) & (chosen_N < 0)).detach(),
    )


def optimal_log_odds_shift(preference_probability: float, beta: float) -> float:
    """Return logit(p)/β, how far the log-odds move at DPO's optimum: the smaller β, the further."""
    p = torch.tensor(preference_probability, dtype=torch.float64)
    return float(torch.logit(p)) / beta


@dataclass(frozen=True)
class Choice:
    """One prompt's pair by row number; `keep` is False where the scores can't tell them apart."""

    chosen: int
    rejected: int
    keep: bool


@pairing(
    reads="grades",
    equation="chosen = argmax, rejected = argmin of the mean score; a tie gives no pair",
    fixes="a pair from the model's own answers",
    breaks="only as good as the judge",
)
def best_and_worst(scores_C: Tensor) -> Choice:
    """Self-rewarding pair selection (2401.10020) from one averaged score per candidate."""
    if scores_C.dim() != 1 or len(scores_C) < 2 or not scores_C.isfinite().all():
        raise BatchError("best_and_worst needs finite scores of at least two candidates.")
    best, worst = int(scores_C.argmax()), int(scores_C.argmin())
    return Choice(best, worst, bool(scores_C[best] > scores_C[worst]))


@pairing(
    reads="grades",
    equation="as best_and_worst, of scores that are {penalty} lower where an answer was cut off",
    fixes="an answer that never ends is not preferred for what it says on the way",
    breaks="the penalty is in units of the judge's scores",
)
def best_and_worst_ended(scores_C: Tensor, *, penalty: Positive = 1.0) -> Choice:
    """Online DPO's pair (2402.04792): the better of two samples, a missing end token punished.

    Who pairs the answers knows which were cut off, and lowers their scores.
    """
    choice: Choice = best_and_worst()(scores_C)
    return choice


@pairing(
    reads="judgements",
    equation=(
        "score = mean of {judgements} judgements by the policy (0 to 5 points, T = {temperature}, "
        "top-p {top_p}); chosen = argmax, rejected = argmin; a tie gives no pair"
    ),
    fixes="needs no verifier and no other judge",
    breaks="a judge that errs teaches its errors, to itself as well",
)
def judged_best_and_worst(
    scores_C: Tensor,
    *,
    judgements: Count = 3,
    temperature: NonNegative = 0.7,
    top_p: PositiveFraction = 0.9,
    max_tokens: Count = 256,
) -> Choice:
    """Self-rewarding (2401.10020): the policy judges its candidates, several times each.

    Who samples judgements reads the settings; the choice is by the means.
    """
    choice: Choice = best_and_worst()(scores_C)
    return choice


@pairing(
    reads="answers",
    equation="chosen = the data's written solution, rejected = a sample of the previous iterate",
    fixes="needs no judge",
    breaks="nothing left to learn once the samples match the data",
)
def data_against_own_sample(scores_C: Tensor) -> Choice:
    """SPIN (2401.01335): row 0 is the data's solution, row 1 the previous iterate's sample."""
    return Choice(0, 1, True)


@pairing(
    reads="labels",
    equation="chosen and rejected as labelled",
    fixes="",
    breaks="offline: the pairs are another policy's",
)
def labelled(scores_C: Tensor) -> Choice:
    """Given pairs (DPO): row 0 is the preferred answer, row 1 the other."""
    return Choice(0, 1, True)
