"""Rows of a batch drawn anew by their rewards: how often each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.aggregation import lengths
from groupwise.groups.filters import Drawing, draw_weights
from groupwise.methods.slots import Positive, aggregation
from groupwise.records import TokenBatch

_PRIME, _SPREAD = 2_147_483_647, 1_000_003


def _names(batch: TokenBatch) -> Tensor:
    """Return a number per row that is a function of its tokens alone, in [1, prime)."""
    place_NT = batch.mask_NT.long().cumsum(1)
    mixed_NT = (batch.stream("token_NT") + 1) * (place_NT * 2_654_435_761 % _SPREAD)
    return (mixed_NT * batch.mask_NT).sum(1) * 48_271 % (_PRIME - 1) + 1


def times_drawn(batch: TokenBatch, how: Drawing, power: float) -> Tensor:
    """Return how often each row is drawn, as often as there are rows with a grade in all.

    A draw takes the row with the largest log w + Gumbel noise, which is one with chance w/Σw. The
    noise is a function of the row's tokens and the number of the draw: it is the same in any order
    of the rows and on every rank.
    """
    gather = batch.world.gather
    known_N = batch.stream("learn_N") & ~batch.task_reward_N.isnan() & (batch.length_N > 0)
    known_M, name_M = gather(known_N.long()) > 0, gather(_names(batch))
    reward_X, name_X = gather(batch.task_reward_N).double()[known_M], name_M[known_M]
    count_M = torch.zeros(len(known_M), dtype=torch.float64, device=known_M.device)
    if not len(reward_X):
        return batch.world.own(count_M)
    weight_X = draw_weights(reward_X, how, power)
    draw_D = torch.arange(1, len(reward_X) + 1, device=name_X.device) * 2_654_435_761 % _SPREAD
    mixed_DX = name_X * (draw_D[:, None] + 1) % _PRIME * 48_271 % _PRIME
    noise_DX = -(-((mixed_DX.double() + 0.5) / _PRIME).log()).log()
    chosen_D = (weight_X.log() + noise_DX).argmax(1)
    count_M[known_M] = torch.bincount(chosen_D, minlength=len(reward_X)).double()
    return batch.world.own(count_M)


@aggregation(
    needs=("token_NT",),
    equation="u = m_i/Σ_j m_j·n_j, m_i how often row i was drawn, by its reward ({how}, {power})",
    fixes="rewards in the middle, which are noisy, teach less",
    breaks="biased: with rewards of 0 and 1 no wrong answer is left; groups break up",
)
def token_mean_of_drawn(
    batch: TokenBatch, *, how: Drawing = "pow", power: Positive = 2.0
) -> Tensor:
    """Draw the rows of a batch anew by their rewards, then token mean (PF-PPO, 2409.06957)."""
    count_N = times_drawn(batch, how, power)
    n_N, _ = lengths(batch)
    tokens = batch.world.gather(count_N * n_N).sum().clamp(min=1)
    return batch.learned(count_N / tokens)
