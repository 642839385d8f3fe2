"""Rows of a batch drawn anew by their rewards: how often each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.groups.aggregation import lengths
from groupwise.groups.filters import Drawing, draw_weights
from groupwise.methods.slots import Positive, aggregation
from groupwise.records import TokenBatch
from groupwise.records.masks import as_numbers

_PRIME, _SPREAD = 2_147_483_647, 1_000_003


def mixed_tokens(batch: TokenBatch) -> Tensor:
    """Return a whole number per own token that is made of its id and its place, 0 elsewhere."""
    mask_NT = batch.mask_NT
    key_T = torch.arange(mask_NT.shape[1] + 1, device=mask_NT.device) * 2_654_435_761 % _SPREAD
    at_left = batch.place_NT is None and mask_NT[:, 0].all()  # columns number own tokens
    key_NT = key_T[1:] if at_left else key_T[mask_NT.cumsum(1)]
    return (batch.stream("token_NT") + 1).mul_(key_NT).mul_(as_numbers(mask_NT, torch.long))


def scattered(mixed: Tensor) -> Tensor:
    """Return a number in [0, 1) that looks random for each sum of `mixed_tokens`."""
    return (mixed * 48_271 % _PRIME).double() / _PRIME


def times_drawn(batch: TokenBatch, how: Drawing, power: float) -> Tensor:
    """Return how often each row is drawn, as often as there are rows with a grade in all.

    Chance is a function of the tokens of all rows together, and rows are counted in the order of
    their own tokens: draws are the same in any order of the rows and on every rank.
    """
    gather = batch.world.gather
    known_N = batch.stream("learn_N") & ~batch.task_reward_N.isnan() & (batch.length_N > 0)
    known_M, name_M = gather(known_N.long()) > 0, gather(mixed_tokens(batch).sum(1))
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
