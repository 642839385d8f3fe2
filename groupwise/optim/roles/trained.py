"""A whole model that learns beside the policy: passes, optimizer, clip norm and skips of its own.

Its loss is the recipe's auxiliary terms that name it. The learner computes and differentiates them
before the policy's pass begins, so that the activations of two models never lie in memory together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise import config
from groupwise.optim.adamw import HALF, check_layout, make_optimizer
from groupwise.optim.roles.role import Role
from groupwise.optim.step import Named, StepOutcome, apply

WEIGHTS, OPTIMIZER, MASTER = "weights/", "optimizer/", "master/"


class TrainedModel(Role):
    """The common part of the critic and the implicit reward model."""

    apart: ClassVar[bool] = True

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        optim: config.Optim,
        *,
        weight_decay: float,
        clip_norm: float,
    ) -> None:
        self._parameters = dict(named)
        self._optimizer = make_optimizer(self._parameters.items(), optim, weight_decay)
        self._clip_norm = clip_norm

    def clear(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def update(self, rate: float, seen: list[Named]) -> StepOutcome:
        return apply(
            self._parameters.items(),
            self._optimizer,
            clip_norm=self._clip_norm,
            learning_rate=rate,
            seen=seen,
        )

    def state(self) -> dict[str, Tensor]:
        # A weight in half precision is its master, rounded: one of the two is enough.
        weights = {
            f"{WEIGHTS}{name}": p.detach()
            for name, p in self._parameters.items()
            if p.dtype not in HALF
        }
        inner = {f"{OPTIMIZER}{name}": x for name, x in self._optimizer.state().items()}
        return weights | inner

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        check_layout(f"The state of the {self.name}", state, self.state())
        for name, parameter in self._parameters.items():
            half = parameter.dtype in HALF
            parameter.copy_(state[f"{OPTIMIZER}{MASTER}{name}" if half else f"{WEIGHTS}{name}"])
        inner = {k.removeprefix(OPTIMIZER): x for k, x in state.items() if k.startswith(OPTIMIZER)}
        self._optimizer.restore(inner)
