"""The model that KL terms hold on to: frozen, or following the policy in steps or on average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.errors import ConfigError, RunError
from groupwise.methods.method import Method
from groupwise.model.cost import HALF as HALF_WIDTH
from groupwise.model.cost import SINGLE, RoleSize
from groupwise.model.layers.transformer import Policy, copy_trained
from groupwise.optim.adamw import HALF, check_layout
from groupwise.optim.roles.role import Role, Score
from groupwise.parallel.sharding import part, stored_dtype
from groupwise.parallel.world import World


class Follows(NamedTuple):
    """How a reference follows the policy: at every so many steps, so much of the way to it."""

    kind: Literal["frozen", "ema", "reset", "mix"]
    share: float = 0.0
    every: int = 1

    def due(self, step: int) -> bool:
        return self.share > 0 and step % self.every == 0


def parse_update(text: str, setting: str = "reference.update") -> Follows:
    """Read "frozen", "ema:DECAY", "reset:STEPS" or "mix:SHARE:STEPS"."""
    kind, _, number = text.partition(":")
    share, _, steps = number.partition(":")
    try:
        if text == "frozen":
            return Follows("frozen")
        if kind == "ema" and 0.0 < float(number) < 1.0:
            return Follows("ema", 1.0 - float(number))
        if kind == "reset" and int(number) >= 1:
            return Follows("reset", 1.0, int(number))
        if kind == "mix" and 0.0 < float(share) < 1.0 and int(steps) >= 1:
            return Follows("mix", float(share), int(steps))
    except ValueError:
        pass
    raise ConfigError(
        f'{setting} is {text!r}. It is "frozen" (the starting policy), "ema:DECAY" with a '
        f'decay between 0 and 1, such as "ema:0.99", "reset:STEPS" with a whole number of '
        f'steps, such as "reset:100", or "mix:SHARE:STEPS", which goes a share between 0 and 1 '
        f'of the way to the policy at every so many steps, such as "mix:0.6:512".'
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
        self._follows = parse_update(update)
        self._names = {name for name, p in model.named_parameters() if p.requires_grad}
        self.model = copy_trained(model).requires_grad_(False)
        self.model.ops.lay_out(self.model)
        self._hold()

    def _hold(self) -> None:
        """Take hold of what moves: of the parts that this rank has of it."""
        own = self.model.named_parameters()
        self._own = {name: p.detach() for name, p in own if name in self._names}
        # A bfloat16 average would not move: most steps are below its rounding.
        wide = HALF if self._follows.kind in ("ema", "mix") else ()
        self._average = {name: p.float() if p.dtype in wide else p for name, p in self._own.items()}

    def spread(self, world: World) -> None:
        self.model = world.shard(self.model)
        self._hold()

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> Reference:
        return cls(model, config.reference.update)

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        without: dict[str, RoleSize | None] = {"a recipe without a reference": None}
        frozen = RoleSize(cls.name, held=width, passes=1, instead=without)
        averaged = replace(
            frozen,
            held=width + (SINGLE if width == HALF_WIDTH else 0),  # masters of the average
            saved=SINGLE,
            instead={"reference.update=frozen": frozen, **without},
        )
        moves = {
            "frozen": frozen,
            "ema": averaged,
            "mix": averaged,
            "reset": replace(frozen, saved=width),
        }
        return moves[parse_update(config.reference.update).kind]

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
        return updates - updates % self._follows.every if self._follows.share else 0

    @torch.no_grad()
    def after_step(self, policy: Policy, step: int) -> None:
        if not self._follows.due(step):
            return
        for name, parameter in self._trained(policy):
            average = part(self._average[name])
            average.lerp_(parameter.to(average), self._follows.share)
            part(self._own[name]).copy_(average)

    def _trained(self, policy: Policy) -> list[tuple[str, Tensor]]:
        """Return what the policy has learned, as it samples with it: rounded where it is stored."""
        named = ((name, p) for name, p in policy.named_parameters() if name in self._own)
        return [(name, part(p.detach()).to(stored_dtype(p))) for name, p in named]

    def state(self) -> dict[str, Tensor]:
        return {} if self._follows.kind == "frozen" else self._average

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        if self._follows.kind == "frozen" and state:
            raise RunError(
                "The checkpoint holds a reference that moved, and reference.update is now "
                '"frozen". Go on with the setting that the run started with, or start a new run.'
            )
        own = self.state()
        check_layout("The reference's state", state, own)
        for name, tensor in own.items():
            part(tensor).copy_(part(state[name]))
            part(self._own[name]).copy_(part(tensor))
