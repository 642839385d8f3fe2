"""The exponent λ of an aggregation that learns how much long answers count (λ-GRPO, 2510.06870)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise.config import Config, Optim
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.layers.transformer import Policy
from groupwise.optim.adamw import make_optimizer
from groupwise.optim.packs import Pack
from groupwise.optim.roles.role import Role, Score
from groupwise.optim.step import Named, StepOutcome, apply
from groupwise.parallel.world import ALONE, World

OPTIMIZER = "exponent_optimizer/"


class LengthExponent(Role):
    """One number. Its gradient comes through the weights of the tokens, which are made from it."""

    name = "length_exponent"
    settings: ClassVar[Mapping[str, str]] = {
        "optim.exponent_rate": "it learns no length exponent: take lambda_grpo"
    }

    def __init__(self, start: Tensor, optim: Optim) -> None:
        self._exponent = nn.Parameter(start)
        self._optimizer = make_optimizer([(self.name, self._exponent)], optim, 0.0)
        self._world = ALONE

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> LengthExponent:
        (aggregation,) = recipe.of("aggregation")
        start = torch.tensor(float(aggregation["exponent"]), device=model.head_weight.device)
        return cls(start, config.optim)

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        return RoleSize(cls.name)

    @classmethod
    def rate(cls, config: Config, step: int, total_steps: int) -> float:
        return config.optim.exponent_rate

    def spread(self, world: World) -> None:
        self._world = world  # every rank has the number, and a part of its gradient

    def streams(self, score: Score) -> dict[str, Tensor]:
        return self.moved()

    def moved(self) -> dict[str, Tensor]:
        return {self.name: self._exponent.detach()}

    def clear(self) -> None:
        self._exponent.grad = None

    def outputs(self, packed: Pack) -> dict[str, Tensor]:
        return {self.name: self._exponent}

    def update(self, rate: float, seen: list[Named]) -> StepOutcome:
        named = [(self.name, self._exponent)]
        return apply(
            named, self._optimizer, clip_norm=0.0, learning_rate=rate, seen=seen, world=self._world
        )

    def state(self) -> dict[str, Tensor]:
        inner = {f"{OPTIMIZER}{name}": x for name, x in self._optimizer.state().items()}
        return {"exponent": self._exponent.detach(), **inner}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._exponent.copy_(state["exponent"])
        inner = {k.removeprefix(OPTIMIZER): x for k, x in state.items() if k.startswith(OPTIMIZER)}
        self._optimizer.restore(inner)
