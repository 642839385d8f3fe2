"""Losses of models that score: comparisons of answers, and labels of steps.

A pairing here takes how good the answers of one row are and returns all pairs to compare; a
preference takes their scores, and a labelling the scores of steps with their labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import torch.nn.functional as F
from torch import Tensor

from groupwise.losses.pairs import Choice
from groupwise.methods.slots import Fraction, NonNegative, labelling, pairing, preference


@dataclass(frozen=True)
class ScoredPairs:
    """Scores of better and worse answers, and how far apart they should be."""

    chosen_N: Tensor
    rejected_N: Tensor
    margin_N: Tensor


@dataclass(frozen=True)
class LabelledSteps:
    """Scores of steps, before a sigmoid, and how good each is: from 0 to 1."""

    score_N: Tensor
    label_N: Tensor


@pairing(
    reads="ranks",
    equation="all (w, l) with w ranked above l; ties give no pair",
    fixes="all that a ranking says is learned, each answer computed once",
    breaks="the far ends of a long ranking are easy pairs, and most of them",
)
def every_pair(scores_C: Tensor) -> tuple[Choice, ...]:
    """Compare all answers of a row, as InstructGPT does (2203.02155)."""
    good = scores_C.tolist()
    order = sorted(range(len(good)), key=lambda row: -good[row])
    return tuple(Choice(a, b, True) for a, b in combinations(order, 2) if good[a] > good[b])


@pairing(
    reads="ranks",
    equation="(w, l) with l in the next rank below w",
    fixes="only the close calls of a ranking",
    breaks="far answers are never compared directly",
)
def neighbours(scores_C: Tensor) -> tuple[Choice, ...]:
    """Compare each answer with those of the next rank."""
    good = scores_C.tolist()
    next_below = dict(pairwise(sorted(set(good), reverse=True)))
    return tuple(
        Choice(a, b, True)
        for a in range(len(good))
        for b in range(len(good))
        if next_below.get(good[a]) == good[b]
    )


@preference(
    scores=True,
    equation="L = −log σ(r_w − r_l − m) + {centre}·(r_w + r_l)²",
    fixes="scores around 0, which a difference alone would leave anywhere",
    breaks="a margin that is never reached pulls for ever",
)
def bradley_terry(pairs: ScoredPairs, *, centre: NonNegative = 0.01) -> Tensor:
    """Bradley and Terry's likelihood with margins (2307.09288) and centring (2312.09244)."""
    apart_N = pairs.chosen_N - pairs.rejected_N - pairs.margin_N
    return -F.logsigmoid(apart_N) + centre * (pairs.chosen_N + pairs.rejected_N).square()


@labelling(
    equation="L = −y·log σ(s) − (1−y)·log(1−σ(s))",
    fixes="labels that are shares of right continuations count as such",
    breaks="noise in such shares is learned with them",
)
def soft_labels(steps: LabelledSteps) -> Tensor:
    """Take labels as they are, shares too (2312.08935, soft estimation)."""
    return F.binary_cross_entropy_with_logits(steps.score_N, steps.label_N, reduction="none")


@labelling(
    equation="y' = [y > {above}], L = −y'·log σ(s) − (1−y')·log(1−σ(s))",
    fixes="noise of shares estimated from few continuations (2501.07301)",
    breaks="a step that succeeds once in many counts like one that always does",
)
def hard_labels(steps: LabelledSteps, *, above: Fraction = 0.0) -> Tensor:
    """Make labels 0 or 1 first (2312.08935, hard estimation)."""
    label_N = (steps.label_N > above).to(steps.score_N.dtype)
    return F.binary_cross_entropy_with_logits(steps.score_N, label_N, reduction="none")
