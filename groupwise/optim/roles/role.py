"""The parts that a role can take. It takes none by itself: each overrides those that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from groupwise.config import Config
from groupwise.losses.measures import Tally
from groupwise.methods.composition import Recipe
from groupwise.methods.method import Method
from groupwise.model.cost import RoleSize
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.head import Opposite
from groupwise.model.layers.transformer import Policy
from groupwise.optim.packs import Pack, Sequences
from groupwise.optim.step import Named, StepOutcome
from groupwise.parallel.world import World
from groupwise.records import Task, TokenBatch


class Score(Protocol):
    """Reads the rows of a step without gradient, in the passes that the updates will make."""

    def __call__(self, model: Policy) -> Tensor:
        """Return logp_NT under a model."""
        ...

    @property
    def sequences(self) -> Sequences:
        """Return the rows."""
        ...

    def streams(self, read: Callable[[Pack], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return several x_NT..., put together from what `read` says of each pass."""
        ...

    def values(self, read: Callable[[Pack], Tensor]) -> Tensor:
        """Return x_NT, put together from what `read` says of each pass."""
        ...


class Role:
    """Something that takes part in learning beside the policy: a model, or a few numbers.

    It is made when a run is opened, from the policy that the run starts with, and `restore` then
    brings it to where a checkpoint left it. In a step it is asked in the order of the methods here.
    """

    name: ClassVar[str]  # as recipes and checkpoints have it: a key of ROLES and ROLE_FACTS
    # Settings that only this role reads, and what would give them a role to be read by.
    settings: ClassVar[Mapping[str, str]] = {}
    # Whether it learns in passes of its own: what trains it is then no part of the policy's loss.
    apart: ClassVar[bool] = False

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

    @classmethod
    def refused(cls, config: Config) -> list[str]:
        """Return what of a configuration it can't be made from, before anything is loaded."""
        return []

    @classmethod
    def check_tasks(cls, config: Config, tasks: Sequence[Task]) -> None:
        """Refuse tasks that it can't be asked about, before anything is loaded."""

    @classmethod
    def check_tokens(cls, config: Config, tasks: Sequence[Task], tokenizer: Tokenizer) -> None:
        """Refuse tasks that it reads as other tokens than the policy does."""

    @classmethod
    def reads_otherwise(cls, config: Config) -> bool:
        """Tell whether it reads something else than the policy does before an answer."""
        return False

    @classmethod
    def alone_steps(cls, config: Config) -> int:
        """Return the steps at the start in which it learns and the policy waits."""
        return 0

    @classmethod
    def rate(cls, config: Config, step: int, total_steps: int) -> float:
        """Return its learning rate at a step, counted from 0."""
        return 0.0

    def spread(self, world: World) -> None:
        """Hold what a rank of this world holds of its models; asked once, before anything else."""

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

    def measures(self, recipe: Recipe, batch: TokenBatch) -> dict[str, float]:
        """Measure what it said of a batch behind its phase, before it learns from it."""
        return {}

    def columns(self, recipe: Recipe, batch: TokenBatch) -> dict[str, Tensor]:
        """Return what it says of each token of a batch behind its phase, for the rollout file."""
        return {}

    @classmethod
    def alone(cls, recipe: Recipe) -> Recipe:
        """Return the recipe as it runs while this role learns and the policy waits."""
        return recipe

    def learns_first(self) -> bool:
        """Tell whether it learns from a batch before what it says of it is used."""
        return False

    def clear(self) -> None:
        """Forget gradients: an update begins."""

    def outputs(self, packed: Pack) -> dict[str, Tensor]:
        """Return what it says of the rows of a micro-batch, with gradient."""
        return {}

    def opposites(self, packed: Pack) -> Sequence[Opposite]:
        """Return what the policy's distributions of a micro-batch are compared with as a whole."""
        return ()

    def tally(self, recipe: Recipe, batch: TokenBatch) -> Tally:
        """Measure a micro-batch that holds its outputs; for a role that learns apart."""
        return Tally({}, {})

    def update(self, rate: float, seen: list[Named]) -> StepOutcome | None:
        """Apply its own gradients; what is not finite in those or in what was `seen` skips it.

        One that learns apart is asked before the policy learns, others behind it.
        """
        return None

    def after_step(self, policy: Policy, step: int) -> None:
        """Follow the policy; `step` counts finished steps, the first is 1."""

    def state(self) -> dict[str, Tensor]:
        """Return what can't be had from the starting policy: the tensors, not copies."""
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `state` returned."""
