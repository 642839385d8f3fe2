"""A transformer that says one number for a token, in place of the next token's probabilities.

As a critic it is asked at every token, as a reward model at the last one, as a process reward
model at the ends of steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from groupwise.model.layers.attention import Attend
from groupwise.model.layers.transformer import Policy

SCORE = "score"  # the map to a number, as classifiers of Hugging Face call it


class ScoreLayer(nn.Linear):
    """One linear map of a hidden state to a number, in its own precision at least."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False)

    def forward(self, asked_AD: Tensor) -> Tensor:
        weight_1D = self.weight
        wide = torch.promote_types(asked_AD.dtype, weight_1D.dtype)
        # A product and a sum: a matrix with one row goes other ways for few tokens than for many,
        # and a number would depend on its company.
        return (asked_AD.to(wide) * weight_1D[0].to(wide)).sum(1)


class ScalarHead(nn.Module):
    """The layers of a policy, and one linear map of their last hidden state to a number.

    The map has no bias and starts at 0, so that the first gradient reaches the map alone: a random
    one would begin with values of any size, and shake the layers below before it knows anything.
    It is float32, whatever the layers are.
    """

    def __init__(self, trunk: Policy) -> None:
        super().__init__()
        self.trunk = trunk
        self.score = ScoreLayer(trunk.config.hidden_size)
        self.score.to(trunk.head_weight.device)
        nn.init.zeros_(self.score.weight)

    @property
    def device(self) -> torch.device:
        return self.score.weight.device

    def forward(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, take_A: Tensor
    ) -> Tensor:
        """Return one number for each hidden state that is asked for, in float32 at least."""
        hidden_TD = self.trunk.hidden(token_T, position_T, attend)
        # A group's answers all read their prompt's last row: see Policy.forward.
        numbers_A: Tensor = self.score(F.embedding(take_A, hidden_TD))
        return numbers_A

    def learning_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what learns by name: an untied head of the vocabulary is never read here."""
        unread = None if self.trunk.config.tied else self.trunk.head_weight
        for name, parameter in self.named_parameters():
            if parameter is not unread and parameter.requires_grad:
                yield name, parameter
