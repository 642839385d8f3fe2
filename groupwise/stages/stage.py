"""The base of all stages: a recipe as it runs, checks, a source, a learner, and a step's work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from groupwise import config as configuration
from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.engine.backends import Tell
from groupwise.engine.protocol import Engine
from groupwise.errors import RecipeError, RunError, nearest
from groupwise.evaluate.evaluate import Evaluation, held_out_answers, measured
from groupwise.methods.method import Method
from groupwise.model.adapters.lora import adapters, fill
from groupwise.model.adapters.peft_files import read as read_adapter
from groupwise.model.cost import Parts as Costs
from groupwise.model.formats.checkpoint import Contents, Loaded, load_weights
from groupwise.model.layers.linear import layer_sizes
from groupwise.model.layers.transformer import Policy
from groupwise.model.policy import starting_policy
from groupwise.optim.assemble import Group
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import StepOutcome
from groupwise.parallel.world import World
from groupwise.prepare.answers import check_columns
from groupwise.prepare.engines import MakeEngine, engine_of, judge_of
from groupwise.prepare.setup import micro_tokens_of, sampling_of
from groupwise.records import Memory, Task, TokenBatch
from groupwise.stages.collected import Collected
from groupwise.stages.parts import L, Parts
from groupwise.stages.sources import SOURCES
from groupwise.sync.checkpoints import policy_contents
from groupwise.watch.clock import Clock

M = TypeVar("M", bound=Method)
StageRule = Callable[[Config, M], Iterator[str]]


class TellEvent(Protocol):
    """Takes what people should know: its kind, and a sentence."""

    def __call__(self, kind: str, text: str, *, shown: bool = True, **fields: Any) -> None: ...


@dataclass(frozen=True)
class StepUpdates:
    """The updates of one step and what they leave."""

    outcomes: list[StepOutcome]
    metrics: dict[str, float]
    memory: Memory
    batch: TokenBatch | None = None
    streams: dict[str, Tensor | None] = field(default_factory=dict)  # per token, for the files
    work: dict[str, Costs] = field(default_factory=dict)  # what the phases had to compute


def update_metrics(outcome: StepOutcome) -> dict[str, float]:
    """Return what a step's only update did."""
    found = {"updates/count": 1.0, "optim/skipped": float(outcome.skipped)}
    return found if outcome.skipped else found | {"optim/grad_norm": outcome.grad_norm}


class Stage(ABC, Generic[M, L]):
    """A run's kind: it draws samples, learns from them, and knows what can go wrong.

    It holds no state. What a run has learned is in its parts and its progress.
    """

    REFUSED: tuple[StageRule[Any], ...] = ()  # beside the rules for every stage
    DOUBTFUL: tuple[StageRule[Any], ...] = ()
    explains_loss = False  # whether people may wonder why the loss stays near 0

    def __init__(self, config: Config, recipe: M) -> None:
        self.config, self.recipe = config, recipe
        name, _, place = str(recipe.source).partition(":")
        if name not in SOURCES:
            raise RecipeError(
                f"recipe.source={recipe.source!r} is no place that answers come from. "
                f"{nearest(name, SOURCES)}"
            )
        self.source = SOURCES[name](config, place)

    # --- before a run ---

    def refused(self) -> list[str]:
        """Return what can't be trained."""
        return [text for rule in self.REFUSED for text in rule(self.config, self.recipe)]

    def doubtful(self) -> list[str]:
        """Return what can be trained and is probably not meant."""
        found = [text for rule in self.DOUBTFUL for text in rule(self.config, self.recipe)]
        # A dialect repeats what a tool does, doubtful or not.
        dialect = self.recipe.about.family == "dialect"
        return found if dialect else self.recipe.doubts() + found

    @abstractmethod
    def try_slots(self) -> list[str]:
        """Refuse a faulty slot of the user's by name; return doubts."""

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks that it can't learn from, before there is a model."""
        check_columns(self.recipe, tasks)

    @abstractmethod
    def batch_line(self) -> str:
        """Return what a step learns from, in numbers."""

    def notes(self) -> list[str]:
        """Return what else a person should know."""
        return []

    # --- its model ---

    def start(self, path: str | Path) -> Loaded:
        """Load the model that a run begins with."""
        return starting_policy(self.config, path)

    def engine(self, loaded: Loaded, make: MakeEngine | None, tell: Tell) -> Engine:
        """Return who samples from it."""
        return engine_of(self.config, loaded, make, tell)

    def contents(self, parts: Parts[L]) -> Contents:
        """Return the folder that a checkpoint is."""
        return policy_contents(parts.loaded.model, parts.loaded.files)

    def take_back(self, parts: Parts[L], path: Path) -> None:
        """Load a checkpoint's weights; where an adapter learns, it is all that it holds."""
        model, head = parts.loaded.model, not self.recipe.scores
        if adapters(model):
            stored = read_adapter(path, layer_sizes(model), scores=not head)
            fill(model, stored.named())
            return
        whole = load_weights(path, device=parts.learner.device, head=head)
        same = {k: v.shape for k, v in model.state_dict().items()}
        if same != {k: v.shape for k, v in whole.state_dict().items()}:
            raise RunError(
                f"The checkpoint {path} is of another model than {self.config.model.path}. "
                "Take another run folder (--run), or set model.path back."
            )
        model.load_state_dict(whole.state_dict())

    # --- in a run ---

    @abstractmethod
    def learner(self, model: Policy, roles: Mapping[str, Role], world: World) -> L:
        """Return who makes the updates, in a world of one or several processes."""

    def optim(self, model: Policy) -> configuration.Optim:
        """Return the optimizer's settings with micro-batches that suit the device."""
        size = micro_tokens_of(self.config, model.config)
        return replace(self.config.optim, micro_tokens=size)

    def collect(
        self, parts: Parts[L], cursor: TaskCursor, tell: TellEvent, clock: Clock
    ) -> Collected:
        """Return what a step learns from."""
        groups = self.source.draw(parts, cursor, self.config.prompts_per_step, clock)
        return Collected(groups, sampled=self.source.sampled)

    @abstractmethod
    def teach(
        self,
        parts: Parts[L],
        memory: Memory,
        collected: Collected,
        rates: LearningRates,
        tell: TellEvent,
        clock: Clock,
    ) -> StepUpdates:
        """Make all updates on what was collected."""

    def evaluate(self, parts: Parts[L]) -> Evaluation:
        """Measure the policy on tasks that training never sees, by the run's own engine.

        Where engine.weights asks for a copy that differs on purpose, that copy is not measured.
        """
        return self.sampled_evaluation(parts, parts.held_out)

    def sampled_evaluation(self, parts: Parts[L], tasks: Sequence[Task]) -> Evaluation:
        """Sample and grade these tasks."""
        return measured(tasks, self.held_out_groups(parts, tasks), self.config.eval.samples)

    def held_out_groups(self, parts: Parts[L], tasks: Sequence[Task]) -> list[Group]:
        """Return graded answers to these tasks, a group each."""
        config = self.config
        own = config.engine.weights == "shared"
        return held_out_answers(
            parts.engine if own else judge_of(config, parts.loaded),
            parts.loaded.tokenizer,
            parts.grader,
            tasks,
            sampling_of(config, temperature=config.eval.temperature),
            config.eval.samples,
            parts.turns,
        )
