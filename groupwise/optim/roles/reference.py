"""The model that KL terms hold on to: frozen, a moving average of the policy, or reset to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from groupwise.config import Config
from groupwise.errors import ConfigError, RunError
from groupwise.methods.method import Method
from groupwise.model.cost import HALF as HALF_WIDTH
from groupwise.model.cost import SINGLE, RoleSize
from groupwise.model.layers.transformer import Policy, copy_trained
from groupwise.optim.adamw import HALF, check_layout
from groupwise.optim.roles.role import Role, Score


def parse_update(text: str, setting: str = "reference.update") -> tuple[str, float]:
    """Read "frozen", "ema:DECAY" or "reset:STEPS" as (kind, number)."""
    kind, _, number = text.partition(":")
    try:
        if text == "frozen":
            return "frozen", 0.0
        if kind == "ema" and 0.0 < float(number) < 1.0:
            return "ema", float(number)
        if kind == "reset" and int(number) >= 1:
            return "reset", float(int(number))
    except ValueError:
        pass
    raise ConfigError(
        f'{setting} is {text!r}. It is "frozen" (the starting policy), "ema:DECAY" with a '
        f'decay between 0 and 1, such as "ema:0.99", or "reset:STEPS" with a whole number of '
        f'steps, such as "reset:100".'
    )


class Reference(Role):
    """A copy of the starting policy, in its precision, so that their KL is exactly 0 at first.

    What is frozen in the policy is shared, not copied: with an adapter, the reference is the same
    base with the adapter as it was at the start, and takes hardly any memory.

    Make it from the model that the run starts with, also on resume, and `restore` it then: a frozen
    reference is never stored.
    """

    name = "reference"
    settings: ClassVar[Mapping[str, str]] = {
        "reference.update": "it has no KL to a reference: add recipe.penalty='kl(coef=0.01)'"
    }

    def __init__(self, model: Policy, update: str) -> None:
        self._kind, self._number = parse_update(update)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.model = copy_trained(model).requires_grad_(False)
        self.model.ops.lay_out(self.model)
        own = self.model.named_parameters()
        self._own = {name: p.detach() for name, p in own if name in trained}
        # A bfloat16 average would not move: most steps are below its rounding.
        wide = HALF if self._kind == "ema" else ()
        self._average = {name: p.float() if p.dtype in wide else p for name, p in self._own.items()}

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> Reference:
        return cls(model, config.reference.update)

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        kind, _ = parse_update(config.reference.update)
        without: dict[str, RoleSize | None] = {"a recipe without a reference": None}
        frozen = RoleSize(cls.name, held=width, passes=1, instead=without)
        moves = {
            "frozen": frozen,
            "ema": replace(
                frozen,
                held=width + (SINGLE if width == HALF_WIDTH else 0),  # masters of the average
                saved=SINGLE,
                instead={"reference.update=frozen": frozen, **without},
            ),
            "reset": replace(frozen, saved=width),
        }
        return moves[kind]

    @classmethod
    def notes(cls, config: Config) -> list[str]:
        if not config.adapter.used:
            return []
        start = "base"
        start += "".join(f" + {Path(path).name}" for path in config.model.adapters)
        start += f" + {Path(config.adapter.path).name}" if config.adapter.path else ""
        return [f"the reference is the starting policy ({start}); it shares the frozen weights"]

    @classmethod
    def description(cls, config: Config) -> str:
        return f"reference ({config.reference.update})"

    def check_start(self, policy_NT: Tensor, score: Score) -> None:
        reference_NT = score(self.model)
        if torch.equal(policy_NT, reference_NT):
            return
        worst = float((policy_NT - reference_NT).abs().max())
        raise RunError(
            f"The reference is not the starting policy: log-probabilities differ by up to "
            f"{worst:.1e} before the first update, where the KL must be exactly 0. It was loaded "
            "from other weights or in another precision."
        )

    def streams(self, score: Score) -> dict[str, Tensor]:
        return {"ref_logp_NT": score(self.model)}

    def version(self, updates: int) -> int:
        """Return how many updates its weights have behind them, of so many of the policy.

        A step counts as one update: one that was skipped makes it a later round's number.
        """
        if self._kind == "reset":
            return updates - updates % int(self._number)
        return updates if self._kind == "ema" else 0

    @torch.no_grad()
    def after_step(self, policy: Policy, step: int) -> None:
        if self._kind == "ema":
            for name, parameter in self._trained(policy):
                average = self._average[name]
                average.lerp_(parameter.detach().to(average), 1.0 - self._number)
                self._own[name].copy_(average)
        elif self._kind == "reset" and step % int(self._number) == 0:
            for name, parameter in self._trained(policy):
                self._own[name].copy_(parameter)

    def _trained(self, policy: Policy) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in policy.named_parameters() if name in self._own]

    def state(self) -> dict[str, Tensor]:
        return {} if self._kind == "frozen" else self._average

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        if self._kind == "frozen" and state:
            raise RunError(
                "The checkpoint holds a reference that moved, and reference.update is now "
                '"frozen". Go on with the setting that the run started with, or start a new run.'
            )
        own = self.state()
        check_layout("The reference's state", state, own)
        for name, tensor in own.items():
            tensor.copy_(state[name])
            self._own[name].copy_(tensor)
