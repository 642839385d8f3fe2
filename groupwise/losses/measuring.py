"""Sums over the learned tokens of a micro-batch: what happened to them.

Streams are added up by rows, and a row counts or does not: so no stream has to be masked for rows
that are not learned from. What is given to `_Sums` is 0 on padding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.groups.kl import EXP_LIMIT
from groupwise.losses.corrections import mismatch
from groupwise.losses.measures import Tally
from groupwise.records import TokenBatch
from groupwise.records.masks import above, as_numbers, below, equal

RARE = 0.2  # probability: where DAPO found the tokens that an upper clip holds back
OUTSIDE = (math.log(0.9), math.log(1.1))  # of learner/sampler


class _Sums:
    """Totals and peaks over the learned rows of a micro-batch."""

    def __init__(self, batch: TokenBatch) -> None:
        self.ones_NT = batch.ones_NT
        self.learn_N = batch.stream("learn_N").double()
        self.tokens = (batch.length_N * self.learn_N).sum()
        self.totals: dict[str, tuple[Tensor, Tensor]] = {}
        self.peaks: dict[str, Tensor] = {}

    def total(self, x_NT: Tensor) -> Tensor:
        return (x_NT.sum(1).double() * self.learn_N).sum()

    def squares(self, x_NT: Tensor) -> Tensor:
        return (torch.linalg.vector_norm(x_NT, dim=1).double().square() * self.learn_N).sum()

    def mean(self, name: str, x_NT: Tensor) -> None:
        self.totals[name] = (self.total(x_NT), self.tokens)

    def peak(self, name: str, x: Tensor) -> None:
        """Keep the largest of values per row or token, none of them negative."""
        row_N = x.amax(1) if x.dim() == 2 else x
        self.peaks[name] = (row_N * self.learn_N).max() if len(row_N) else row_N.new_zeros(())

    def weights(self, name: str, log_weight_NT: Tensor) -> None:
        """Measure e^x, bounded as in `bounded_exp`; `square_off` is its distance from 1."""
        weight_NT = log_weight_NT.clamp(-EXP_LIMIT, EXP_LIMIT).exp_().mul_(self.ones_NT)
        self.mean(f"{name}/mean", weight_NT)
        self.peak(f"{name}/max", weight_NT)
        self.totals[f"{name}/second_moment"] = (self.squares(weight_NT), self.tokens)
        off_NT = weight_NT.sub_(self.ones_NT)
        self.totals[f"{name}/square_off"] = (self.squares(off_NT), self.tokens)

    def clipped(self, log_ratio_NT: Tensor, clipped_NT: Tensor, old_logp_NT: Tensor) -> None:
        """Count the tokens clipped on either side, and how many of them are rare."""
        before_NT, rare_NT = old_logp_NT.exp(), below(old_logp_NT, math.log(RARE))
        self.mean("tokens/rare_share", rare_NT)
        low_NT = as_numbers(clipped_NT, log_ratio_NT.dtype)
        high_NT = above(log_ratio_NT, 0.0).mul_(low_NT)
        low_NT = low_NT.sub_(high_NT)
        clipped_rare = rare_NT.new_zeros((), dtype=torch.float64)
        for side, side_NT in (("high", high_NT), ("low", low_NT)):
            count, rare = self.total(side_NT), self.total(rare_NT * side_NT)
            self.totals[f"clip/{side}"] = (count, self.tokens)
            self.totals[f"clip/{side}_rare_share"] = (rare, count)
            probability = self.total(side_NT.mul_(before_NT))
            self.totals[f"clip/{side}_probability"] = (probability, count)
            clipped_rare = clipped_rare + rare
        self.totals["clip/rare"] = (clipped_rare, self.totals["tokens/rare_share"][0])


@torch.no_grad()
def measure(
    batch: TokenBatch, log_ratio_NT: Tensor, clipped_NT: Tensor, weight_NT: Tensor | None
) -> Tally:
    """Sum up over the tokens of this micro-batch that are learned from."""
    sums, ones_NT = _Sums(batch), batch.ones_NT
    sums.weights("ratio", log_ratio_NT)
    sums.clipped(log_ratio_NT, clipped_NT, batch.stream("old_logp_NT"))
    mean_N = (log_ratio_NT * ones_NT).sum(1) / batch.length_N.clamp(min=1)
    ratio_N = mean_N.clamp(-EXP_LIMIT, EXP_LIMIT).exp_()
    sums.totals["ratio/sequence_mean"] = ((ratio_N * sums.learn_N).sum(), sums.learn_N.sum())
    sums.peak("ratio/sequence_max", ratio_N)
    if weight_NT is not None:
        sums.mean("correction/mean", weight_NT * ones_NT)
        sums.mean("correction/zero_share", equal(weight_NT, 0.0).mul_(ones_NT))
    if batch.ref_logp_NT is not None:
        x_NT = batch.stream("logp_NT").detach() - batch.ref_logp_NT
        sums.mean("kl/ref_k1", x_NT)
        odds_NT = (-x_NT).clamp_(-EXP_LIMIT, EXP_LIMIT).exp_()
        sums.mean("kl/ref", odds_NT.add_(x_NT).sub_(1.0))  # k3, in place
    apart_NT = batch.find("teacher_divergence_NT")
    if apart_NT is not None:
        sums.mean("teacher/divergence", apart_NT.detach())
    if batch.entropy_NT is not None:
        sums.mean("entropy/mean", batch.entropy_NT.detach())
    if batch.sampler_logp_NT is not None and not batch.moved:
        gap_NT = mismatch(batch)
        sums.weights("mismatch", gap_NT)
        outside_NT = above(gap_NT, OUTSIDE[1]).add_(below(gap_NT, OUTSIDE[0]))
        sums.mean("mismatch/outside_share", outside_NT)
        apart_NT = gap_NT.abs()
        sums.mean("mismatch/abs_mean", apart_NT)
        sums.peak("mismatch/abs_max", apart_NT)
    return Tally(sums.totals, sums.peaks)
