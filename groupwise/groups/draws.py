"""Rows of a batch drawn anew by their rewards: how often each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.aggregation import lengths
from groupwise.groups.filters import Drawing, draw_weights
from groupwise.methods.slots import Positive, aggregation
from groupwise.records import TokenBatch

_PRIME, _SPREAD = 2_147_483_647, 1_000_003


class TokenNames:
    """Numbers of answers and of their beginnings that are made of the ids and places of tokens.

    The name of a beginning is Σ (id + 1)·key(place) over its own tokens, place counted from 1.
    """

    def __init__(self, batch: TokenBatch) -> None:
        mask_NT = batch.mask_NT
        key_T = torch.arange(mask_NT.shape[1] + 1, device=mask_NT.device) * 2_654_435_761 % _SPREAD
        key_T[0] = 0
        at_left = batch.place_NT is None and mask_NT[:, 0].all()  # columns number own tokens
        self.place_NT = None if at_left else mask_NT.cumsum(1)
        key_NT = key_T[1:] if self.place_NT is None else key_T[self.place_NT]
        self.mixed_NT = batch.stream("token_NT") * key_NT  # ids are 0 where masked
        self.keys_T = key_T.cumsum(0)
        self.length_N = batch.length_N

    def of_rows(self) -> Tensor:
        return self.mixed_NT.sum(1) + self.keys_T[self.length_N]

    def up_to(self, row_X: Tensor, column_X: Tensor) -> Tensor:
        """Return the names of beginnings that end at these own tokens."""
        place_X = column_X + 1 if self.place_NT is None else self.place_NT[row_X, column_X]
        return self.mixed_NT.cumsum(1)[row_X, column_X] + self.keys_T[place_X]


def scattered(name: Tensor) -> Tensor:
    """Return a number in [0, 1) that looks random for each name."""
    return (name * 48_271 % _PRIME).double() / _PRIME


def times_drawn(batch: TokenBatch, how: Drawing, power: float) -> Tensor:
    """Return how often each row is drawn, as often as there are rows with a grade in all.

    Chance is a function of the tokens of all rows together, and rows are counted in the order of
    their own tokens: draws are the same in any order of the rows and on every rank.
    """
    gather = batch.world.gather
    known_N = batch.stream("learn_N") & ~batch.task_reward_N.isnan() & (batch.length_N > 0)
    known_M, name_M = gather(known_N.long()) > 0, gather(TokenNames(batch).of_rows())
    count_M = torch.zeros(len(known_M), dtype=torch.float64, device=known_M.device)
    if not known_M.any():
        return batch.world.own(count_M)
    reward_M, row_X = gather(batch.task_reward_N), known_M.nonzero()[:, 0]
    for by_M in (reward_M, name_M):  # equal answers may have other rewards
        row_X = row_X[by_M[row_X].argsort(stable=True)]
    upto_X = draw_weights(reward_M[row_X], how, power).cumsum(0)
    chance = torch.Generator().manual_seed(int(name_M[row_X].sum()))
    drawn_D = torch.rand(len(row_X), generator=chance, dtype=torch.float64).to(upto_X.device)
    chosen_D = torch.searchsorted(upto_X, drawn_D * upto_X[-1]).clamp(max=len(row_X) - 1)
    count_M[row_X] = torch.bincount(chosen_D, minlength=len(row_X)).double()
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
