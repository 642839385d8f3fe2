"""The parts that a role can take. It takes none by itself: each overrides those that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor

from groupwise.config import Config
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.layers.transformer import Policy
from groupwise.optim.packs import Pack

Score = Callable[[Policy], Tensor]  # logp_NT of the rows of a step under a model


class Role:
    """Something that takes part in learning beside the policy: a model, or a few numbers.

    It is made when a run is opened, from the policy that the run starts with, and `restore` then
    brings it to where a checkpoint left it. In a step it is asked in the order of the methods here.
    """

    name: ClassVar[str]  # as recipes and checkpoints have it: a key of ROLES and ROLE_FACTS
    # Settings that only this role reads, and what would give them a role to be read by.
    settings: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Config) -> Role:
        """Make it from the policy as it starts, for a recipe and a configuration."""
        raise NotImplementedError

    @classmethod
    def size(cls, config: Config, width: int) -> RoleSize:
        """Return what it takes in memory, on disk and in passes; a weight has `width` bytes."""
        raise NotImplementedError

    @classmethod
    def notes(cls, config: Config) -> list[str]:
        """Return what a person should know of it when the run starts."""
        return []

    @classmethod
    def description(cls, config: Config) -> str:
        """Return its name with what the configuration makes of it."""
        return cls.name

    def check_start(self, policy_NT: Tensor, score: Score) -> None:
        """Refuse to go on if it is not what it should be before the first step.

        `policy_NT` are the policy's log-probabilities of some rows, `score` gives a model's.
        """

    def streams(self, score: Score) -> dict[str, Tensor]:
        """Return what it says of the rows of a step before the batch phase, without gradient."""
        return {}

    def moved(self) -> dict[str, Tensor]:
        """Return the streams of a whole batch that an update has changed, without gradient."""
        return {}

    def clear(self) -> None:
        """Forget gradients: an update begins."""

    def outputs(self, packed: Pack) -> dict[str, Tensor]:
        """Return what it says of the rows of a micro-batch, with gradient."""
        return {}

    def update(self) -> None:
        """Apply its own gradients: the policy's were applied just now."""

    def after_step(self, policy: Policy, step: int) -> None:
        """Follow the policy; `step` counts finished steps, the first is 1."""

    def state(self) -> dict[str, Tensor]:
        """Return what can't be had from the starting policy: the tensors, not copies."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
