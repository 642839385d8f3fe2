"""A whole model that learns beside the policy: passes, optimizer, clip norm and skips of its own.

Its loss is the recipe's auxiliary terms that name it. The learner computes and differentiates them
before the policy's pass begins, so that the activations of two models never lie in memory together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from groupwise import config
from groupwise.optim.adamw import HALF, AdamW, check_layout, make_optimizer
from groupwise.optim.roles.role import Role
from groupwise.optim.step import Named, StepOutcome, apply
from groupwise.parallel.sharding import part, stored_dtype
from groupwise.parallel.world import ALONE, World

WEIGHTS, OPTIMIZER, MASTER = "weights/", "optimizer/", "master/"


class TrainedModel(Role):
    """The common part of the critic and the implicit reward model."""

    apart: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        optim: config.Optim,
        *,
        weight_decay: float,
        clip_norm: float,
    ) -> None:
        self.model: Any = model
        self._optim, self._weight_decay, self._clip_norm = optim, weight_decay, clip_norm
        self._world = ALONE

    def learning(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return what learns of the model, by name."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    @cached_property
    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.learning())

    @cached_property
    def _optimizer(self) -> AdamW:
        # When it is first needed: of the part of the model that this rank holds.
        return make_optimizer(self._parameters.items(), self._optim, self._weight_decay)

    def spread(self, world: World) -> None:
        self.model, self._world = world.shard(self.model), world
        self.__dict__.pop("_parameters", None)
        self.__dict__.pop("_optimizer", None)

    def clear(self) -> None:
        assert self._optimizer  # which says in what precision gradients are summed
        for parameter in self._parameters.values():
            parameter.grad = None

    def update(self, rate: float, seen: list[Named]) -> StepOutcome:
        return apply(
            self._parameters.items(),
            self._optimizer,
            clip_norm=self._clip_norm,
            learning_rate=rate,
            seen=seen,
            world=self._world,
        )

    def state(self) -> dict[str, Tensor]:
        # A weight in half precision is its master, rounded: one of the two is enough.
        weights = {
            f"{WEIGHTS}{name}": p.detach()
            for name, p in self._parameters.items()
            if stored_dtype(p) not in HALF
        }
        inner = {f"{OPTIMIZER}{name}": x for name, x in self._optimizer.state().items()}
        return weights | inner

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        check_layout(f"The state of the {self.name}", state, self.state())
        for name, parameter in self._parameters.items():
            half = stored_dtype(parameter) in HALF
            saved = state[f"{OPTIMIZER}{MASTER}{name}" if half else f"{WEIGHTS}{name}"]
            part(parameter).copy_(part(saved))
        inner = {k.removeprefix(OPTIMIZER): x for k, x in state.items() if k.startswith(OPTIMIZER)}
        self._optimizer.restore(inner)
