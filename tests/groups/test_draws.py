"""Rows that are drawn anew by their rewards: counts, chances, and that any order draws the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from groupwise.groups.draws import TokenNames, times_drawn, token_mean_of_drawn
from groupwise.records import TokenBatch


def batch(rewards: list[float | None], seed: int = 0, order: list[int] | None = None) -> TokenBatch:
    rows, chance = len(rewards), torch.Generator().manual_seed(seed)
    token_NT = torch.randint(0, 50_000, (rows, 4), generator=chance)
    length_N = torch.randint(1, 5, (rows,), generator=chance)
    mask_NT = torch.arange(4) < length_N[:, None]
    at = torch.tensor(order or list(range(rows)))
    learn_N = torch.tensor([x is not None for x in rewards])[at]
    made = TokenBatch.build(
        mask_NT=mask_NT[at],
        group_N=[0] * rows,
        reward_N=[rewards[i] for i in at.tolist()],
        token_NT=token_NT[at],
    )
    return made._holding({"learn_N": learn_N})


def test_as_many_rows_are_drawn_as_there_are_and_those_without_a_grade_never() -> None:
    given = batch([2.0, None, 1.0, 0.5, -1.0, None, 3.0])
    count_N = times_drawn(given, "pow", 2.0)
    assert count_N.sum() == 5 and count_N[1] == count_N[5] == 0
    share_NT = token_mean_of_drawn()(given)
    assert float(share_NT.sum()) == pytest.approx(1.0)
    drawn_N = share_NT[:, 0] * (count_N * given.length_N).sum()
    assert drawn_N.tolist() == pytest.approx(count_N.tolist())


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_rows_changes_nothing(seed: int) -> None:
    rewards = [1.0, 0.5, -2.0, 0.1, 0.7, 1.5]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist()
    plain, mixed = (
        times_drawn(batch(rewards, seed, at), "max_random", 1.0) for at in (None, order)
    )
    assert mixed.tolist() == [plain[i].item() for i in order]


@pytest.mark.parametrize(("how", "shares"), [
    ("pow", [4 / 7, 1 / 7, 1 / 7, 1 / 7]),
    ("max_min", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ("max_random", [4 / 7, 1 / 7, 1 / 7, 1 / 7]),
])  # fmt: skip
def test_chances_are_those_of_the_weights(how: str, shares: list[float]) -> None:
    """Within four standard errors over 2,000 batches of answers."""
    rewards: list[float | None] = [2.0, -1.0, -1.0, -1.0]
    trials = 2000
    total = sum(times_drawn(batch(rewards, seed), how, 2.0) for seed in range(trials))  # type: ignore[arg-type]
    for found, share in zip((total / (4 * trials)).tolist(), shares, strict=True):
        assert abs(found - share) < 4 * (share * (1 - share) / (4 * trials)) ** 0.5


def test_equal_answers_with_other_rewards_are_drawn_alike_in_any_order() -> None:
    same = torch.tensor([[7, 8], [7, 8], [9, 8]])

    def drawn(order: list[int]) -> list[float]:
        rewards = [(2.0, -1.0, 0.5)[row] for row in order]
        given = TokenBatch.build(
            mask_NT=torch.ones(3, 2, dtype=torch.bool), group_N=[0, 1, 2], reward_N=rewards,
            token_NT=same[order],
        )  # fmt: skip
        counts = times_drawn(given._holding({"learn_N": torch.ones(3).bool()}), "pow", 1.0).tolist()
        return [counts[order.index(row)] for row in range(3)]

    assert drawn([0, 1, 2]) == drawn([1, 0, 2]) == drawn([2, 1, 0])


@pytest.mark.parametrize("own", [
    {(0, 1, 2): [5, 0, 7], (0, 1): [0, 0], (0,): [4]},
    {(0, 2, 4): [5, 0, 7], (3, 4): [9, 1], (0, 1): [0, 0]},
])  # fmt: skip
def test_names_are_the_sums_that_they_are_said_to_be_wherever_tokens_stand(own: Any) -> None:
    """Id 0 counts, and a tool's output between own tokens and padding before them do not."""
    mask_NT, token_NT = torch.zeros(len(own), 5, dtype=torch.bool), torch.full((len(own), 5), 3)
    for row, (columns, ids) in enumerate(own.items()):
        mask_NT[row, list(columns)], token_NT[row, list(columns)] = True, torch.tensor(ids)
    group_N, reward_N = [0] * len(own), [1.0] * len(own)
    names = TokenNames(
        TokenBatch.build(mask_NT=mask_NT, group_N=group_N, reward_N=reward_N, token_NT=token_NT)
    )
    wanted = [
        [sum((x + 1) * (at * 2_654_435_761 % 1_000_003) for at, x in enumerate(ids[:n], 1))
         for n in range(1, len(ids) + 1)]
        for ids in own.values()
    ]  # fmt: skip
    assert names.of_rows().tolist() == [found[-1] for found in wanted]
    row_X, column_X = mask_NT.nonzero().unbind(1)
    assert names.up_to(row_X, column_X).tolist() == [x for found in wanted for x in found]
