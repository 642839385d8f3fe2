"""Rows as steps, against a loop over tokens."""

from __future__ import annotations

import torch

from groupwise.groups.statistics import suffix_sums
from groupwise.groups.step_table import divide


def test_steps_of_a_row() -> None:
    end_NT = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 1]]).bool()
    x_NT = torch.arange(18.0).reshape(3, 6)
    steps = divide(end_NT)
    assert steps.count_N.tolist() == [2, 0, 3]
    assert steps.number_NT.tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6, [0, 1, 2, 2, 2, 2]]
    table_NK = steps.at_ends(x_NT, 4)
    assert table_NK.tolist() == [[1, 4, 0, 0], [0, 0, 0, 0], [12, 13, 17, 0]]
    spread_NT = steps.spread(table_NK[:, :3])
    assert spread_NT.tolist() == [[1, 1, 4, 4, 4, 0], [0] * 6, [12, 13, 17, 17, 17, 17]]


def test_suffix_sums_are_those_of_a_loop() -> None:
    g = torch.Generator().manual_seed(1)
    for width in (1, 2, 37):
        x_NT = torch.randn(5, width, generator=g, dtype=torch.float64)
        for decay in (1.0, 1, 0.9, 0.0, torch.tensor([1.0, 0.5, 0.0, 0.9, 0.99])):
            wanted_NT, total_N = torch.zeros_like(x_NT), torch.zeros(5, dtype=torch.float64)
            for t in reversed(range(width)):
                total_N = x_NT[:, t] + decay * total_N
                wanted_NT[:, t] = total_N
            torch.testing.assert_close(
                suffix_sums(x_NT.clone(), decay), wanted_NT, rtol=0, atol=1e-13
            )
