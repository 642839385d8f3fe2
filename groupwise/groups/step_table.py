"""Rows as steps: which step each token is in, and a table with a column for each step.

What is said of a step stands at its last token. Tables are as wide as a row has steps, so that
statistics over steps do not walk over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepTable:
    """The steps that the marked ends divide rows into; what is behind the last is in no step."""

    number_NT: Tensor  # the ends before each token: the step that it is in
    count_N: Tensor
    row_X: Tensor  # of each end
    column_X: Tensor

    def at_ends(self, x_NT: Tensor, most: int) -> Tensor:
        """Return the value at the end of each step, 0 where there is none, [N, most]."""
        found_NK = x_NT.new_zeros(len(x_NT), most)
        number_X = self.number_NT[self.row_X, self.column_X]
        found_NK[self.row_X, number_X] = x_NT[self.row_X, self.column_X]
        return found_NK

    def spread(self, x_NK: Tensor) -> Tensor:
        """Return a number per step on its tokens, 0 behind the last step."""
        return torch.nn.functional.pad(x_NK, (0, 1)).gather(1, self.number_NT)


def divide(end_NT: Tensor) -> StepTable:
    """Divide rows into steps by marks (bools) on the last token of each."""
    ends_NT = torch.nn.functional.pad(end_NT.cumsum(1), (1, 0))
    row_X, column_X = end_NT.nonzero().unbind(1)
    return StepTable(ends_NT[:, :-1], ends_NT[:, -1], row_X, column_X)
