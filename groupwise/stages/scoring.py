"""Training models that score: reward models of whole answers, process reward models of steps.

The run's model is the layers of `model.path` under one number a token. Nothing is sampled, nothing
is graded; a checkpoint is a classifier that `rm` or `prm` of another run's reward reads.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from groupwise.config import Config
from groupwise.config.reading import DEFAULTS
from groupwise.config.values import flat
from groupwise.data.judged import ranked, stepwise, text_of
from groupwise.data.steps import step_ends
from groupwise.engine.backends import Tell
from groupwise.engine.none import NoEngine
from groupwise.engine.protocol import Engine
from groupwise.errors import EngineError
from groupwise.evaluate.evaluate import Evaluation
from groupwise.methods.method import Method
from groupwise.methods.scoring import (
    ProcessRewardModelRecipe,
    RewardModelRecipe,
    ScoringMethod,
)
from groupwise.model.cost import update_cost
from groupwise.model.formats import classifier
from groupwise.model.formats.checkpoint import Contents, Loaded
from groupwise.model.layers.transformer import Policy
from groupwise.model.policy import starting_policy
from groupwise.optim.assemble import Group
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.scoring import PairComparisons, RowsAsked, ScoreLearner, ScoreLoss, StepLabels
from groupwise.parallel.world import World
from groupwise.prepare.engines import MakeEngine
from groupwise.prepare.scored import check_judged, scored_answers
from groupwise.records import Grade, Memory, Rollout, Task
from groupwise.stages import score_measures as measures
from groupwise.stages.collected import Collected
from groupwise.stages.ignored import ignored
from groupwise.stages.labelled_answers import groups_of
from groupwise.stages.parts import Parts
from groupwise.stages.stage import Stage, StepUpdates, TellEvent, update_metrics
from groupwise.testing.trial import try_labels, try_scores
from groupwise.watch.clock import Clock

R = TypeVar("R", bound=ScoringMethod)
Scores = list[list[float]]  # of each row
# Settings of a policy's run, by what would read them.
IGNORED = {
    "samples nothing": ("group_size", "overlong", "guard.mismatch", "eval.samples",
                        "eval.temperature"),
    "grades nothing": ("reward.parts", "reward.max_failed_share", "reward.timeout",
                       "data.grader_key", "data.answer_key"),
    "reads prompts as rm(...) and prm(...) will, through the chat template if there is one": (
        "data.template", "data.system", "data.instruction"),
    "learns from judgements": ("data.completion",),
}  # fmt: skip


def settings_of_a_policy(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse settings that a model that scores has no use for."""
    values = flat(config)
    engine = [x for x in values if x.startswith("engine.") and x != "engine.exact"]
    for why, names in {**IGNORED, "asks no engine": engine}.items():
        for name in names:
            if values[name] != DEFAULTS[name]:
                yield ignored(config, name, recipe.name, f", which {why}. Leave it out.")


def embedded_model(config: Config, recipe: Method) -> Iterator[str]:
    """Refuse the embedded model, which is made for tasks with solutions."""
    if config.model.path == "tiny":
        yield (
            f"recipe {recipe.name} starts from a model, and model.path=tiny is made for tasks with "
            "solutions. Set model.path to a model's folder; that of a run with the embedded model "
            "is RUN/cold_start."
        )


class ScoringStage(Stage[R, ScoreLearner]):
    """Rows of the data with judgements, and one update a step on all of them."""

    REFUSED = (settings_of_a_policy, embedded_model)
    KIND: ClassVar[classifier.Kind]
    WATCHED: ClassVar[tuple[str, ...]]  # of its measures, those of held-out rows beside accuracy

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        check_judged(self.recipe, tasks)

    # --- its model ---

    def start(self, path: str | Path) -> Loaded:
        return classifier.padded(starting_policy(self.config, path, head=False))

    def learner(self, model: Policy, roles: Mapping[str, Role], world: World) -> ScoreLearner:
        further, base = self.config.adapter.path, self.config.model.path
        begun = further if further and classifier.stored_score(further) is not None else base
        return ScoreLearner(classifier.with_score(model, begun), self.optim(model), world)

    def engine(self, loaded: Loaded, make: MakeEngine | None, tell: Tell) -> Engine:
        if make is not None:
            raise EngineError(
                f"The argument `engine` would be ignored by {self.recipe.name}, which samples "
                "nothing. Leave it out."
            )
        return NoEngine()

    def contents(self, parts: Parts[ScoreLearner]) -> Contents:
        """Return a classifier's folder, or its adapter's."""
        return classifier.contents(
            parts.learner.whole_head, parts.loaded.files, self.KIND, says=self._says()
        )

    def take_back(self, parts: Parts[ScoreLearner], path: Path) -> None:
        super().take_back(parts, path)
        own = parts.learner.whole_head.score.weight
        found = classifier.stored_score(path)
        assert found is not None
        with torch.no_grad():
            own.copy_(found)

    def _says(self) -> dict[str, Any]:
        """Return what else the folder says of itself."""
        return {}

    # --- its steps ---

    def teach(
        self,
        parts: Parts[ScoreLearner],
        memory: Memory,
        collected: Collected,
        rates: LearningRates,
        tell: TellEvent,
        clock: Clock,
    ) -> StepUpdates:
        """Make one update on the rows of a step; they are kept with the scores before it."""
        learner, groups = parts.learner, collected.groups
        assert rates.policy is not None  # nothing learns beside it that it would wait for
        with clock("update"):
            asked = self.asked(parts, groups)
            outcome, score_A, loss = learner.learn(asked, self.loss_of(groups), rates.policy)
        scores = _by_row(asked, score_A)
        collected.groups = self.graded(groups, scores)
        metrics = update_metrics(outcome)
        if not outcome.skipped:
            metrics |= {**self.measured(groups, scores), "loss/total": loss}
        sizes = asked.sequences.sizes()
        work = update_cost(learner.model.config, sizes, frozen=self.config.adapter.used)
        return StepUpdates([outcome], metrics, memory, work={"update": work})

    def evaluate(self, parts: Parts[ScoreLearner]) -> Evaluation:
        """Measure the model on rows that training never sees."""
        tasks = parts.held_out
        if not tasks:
            return Evaluation(None, None, None, None, None, None, 0, 1, ())
        groups = groups_of(self.recipe, tasks, parts.loaded.tokenizer)
        asked = self.asked(parts, groups)
        scores = _by_row(asked, parts.learner.ask(asked))
        found = self.measured(groups, scores)
        right = self.right(groups, scores)
        accuracy = measures.mean(right)
        rows = [rollout for group in self.graded(groups, scores) for rollout in group]
        return Evaluation(
            accuracy=accuracy,
            stderr=_stderr(right),
            reward=measures.mean([rollout.grade.reward for rollout in rows]),
            length=measures.mean([float(r.completion.own_length) for r in rows]),
            truncated_share=None,
            failed_share=None,
            tasks=len(tasks),
            samples=1,
            examples=(),  # the answers are the data's, before and after
            scores=tuple(right),
            by_task={"eval/accuracy": right},
            others={
                f"eval/{name.partition('/')[2]}": found[name]
                for name in self.WATCHED
                if name in found
            },
        )

    def asked(self, parts: Parts[ScoreLearner], groups: Sequence[Group]) -> RowsAsked:
        """Return the rows of the groups, and where their numbers are read."""
        rows = [rollout for group in groups for rollout in group]
        tokenizer = parts.loaded.tokenizer
        answers = [x for g in groups for x in scored_answers(self.recipe, g[0].task, tokenizer)]
        units, at = [], 0
        for group in groups:
            units.append(list(range(at, at + len(group))))
            at += len(group)
        return RowsAsked.of(
            [rollout.task.token_ids for rollout in rows],
            [rollout.completion.token_ids for rollout in rows],
            [answer.places for answer in answers],
            units,
        )

    @abstractmethod
    def loss_of(self, groups: Sequence[Group]) -> ScoreLoss:
        """Return the loss of a step's rows."""

    @abstractmethod
    def graded(self, groups: Sequence[Group], scores: Scores) -> list[Group]:
        """Return the rows with what the model says of them."""

    @abstractmethod
    def measured(self, groups: Sequence[Group], scores: Scores) -> dict[str, float]:
        """Return what there is to watch."""

    @abstractmethod
    def right(self, groups: Sequence[Group], scores: Scores) -> list[float | None]:
        """Return the share of judgements that each row's scores get right."""


class RewardModelStage(ScoringStage[RewardModelRecipe]):
    """A number for a whole answer, learned from which of two is better."""

    KIND = "sequence"
    WATCHED = ("scores/margin", "scores/length_correlation")

    def try_slots(self) -> list[str]:
        return try_scores(self.recipe)

    def batch_line(self) -> str:
        return f"{self.config.prompts_per_step} rows of compared answers a step, 1 update"

    def notes(self) -> list[str]:
        return [
            "compared: the data's columns `chosen` and `rejected`, or ranked `completions`; the "
            "score is read at the end token"
        ]

    def loss_of(self, groups: Sequence[Group]) -> PairComparisons:
        """Return all comparisons; a row counts once, however many it has."""
        made = PairComparisons(self.recipe.preference, [], [], [], [])
        at = 0
        for group in groups:
            pairs, margin = self._pairs(group), ranked(group[0].task).margin
            for better, worse in pairs:
                made.better.append(at + better)
                made.worse.append(at + worse)
                made.margin.append(margin)
                made.weight.append(1 / len(pairs) / len(groups))
            at += len(group)
        return made

    def _pairs(self, group: Group) -> list[tuple[int, int]]:
        good = ranked(group[0].task).good
        choices = self.recipe.pairing(torch.tensor(good, dtype=torch.float64))
        return [(choice.chosen, choice.rejected) for choice in choices if choice.keep]

    def graded(self, groups: Sequence[Group], scores: Scores) -> list[Group]:
        numbers = iter(score for (score,) in scores)
        return [
            [
                replace(rollout, grade=Grade(next(numbers), {"judgement": good}))
                for rollout, good in zip(group, ranked(group[0].task).good, strict=True)
            ]
            for group in groups
        ]

    def right(self, groups: Sequence[Group], scores: Scores) -> list[float | None]:
        return [
            measures.mean([measures.win(margin) for margin in margins])
            for margins in self._margins(groups, scores)
        ]

    def _margins(self, groups: Sequence[Group], scores: Scores) -> list[list[float]]:
        """Return by how far the better answer leads, for each comparison of each row."""
        found, at = [], 0
        for group in groups:
            own = [score for (score,) in scores[at : at + len(group)]]
            found.append([own[better] - own[worse] for better, worse in self._pairs(group)])
            at += len(group)
        return found

    def measured(self, groups: Sequence[Group], scores: Scores) -> dict[str, float]:
        every = [score for (score,) in scores]
        lengths = [float(r.completion.own_length) for group in groups for r in group]
        margins = self._margins(groups, scores)
        found = {
            "scores/accuracy": measures.mean(self.right(groups, scores)),
            "scores/margin": measures.mean([measures.mean(own) for own in margins]),
            "scores/mean": measures.mean(every),
            "scores/length_correlation": measures.correlation(every, lengths),
            "scores/pairs": float(sum(map(len, margins))),
        }
        return {name: x for name, x in found.items() if x is not None}


class ProcessRewardModelStage(ScoringStage[ProcessRewardModelRecipe]):
    """A number at the end of each step, learned from whether the step is good."""

    KIND = "token"
    WATCHED = ("steps/first_error_accuracy", "steps/area_under_curve", "steps/positive_share")

    def try_slots(self) -> list[str]:
        return try_labels(self.recipe)

    def batch_line(self) -> str:
        return f"{self.config.prompts_per_step} answers with labelled steps a step, 1 update"

    def notes(self) -> list[str]:
        between = self.recipe.separator
        return [f"steps: the data's `completions` with {between!r} behind each, and its `labels`"]

    def _says(self) -> dict[str, Any]:
        return {classifier.SEPARATOR: self.recipe.separator}

    def _labels(self, groups: Sequence[Group]) -> list[tuple[float | None, ...]]:
        return [stepwise(r.task, self.recipe.separator).labels for group in groups for r in group]

    def loss_of(self, groups: Sequence[Group]) -> StepLabels:
        return StepLabels(self.recipe.labelling, self._labels(groups))

    def graded(self, groups: Sequence[Group], scores: Scores) -> list[Group]:
        """Return the rows with the chance of each step, and the lowest of them as their reward."""
        numbers = iter(scores)
        return [
            [_with_steps(r, next(numbers), self.recipe.separator) for r in group]
            for group in groups
        ]

    def right(self, groups: Sequence[Group], scores: Scores) -> list[float | None]:
        return [
            measures.mean([measures.verdict(s, y) for s, y in _known(own, labels)])
            for own, labels in zip(scores, self._labels(groups), strict=True)
        ]

    def measured(self, groups: Sequence[Group], scores: Scores) -> dict[str, float]:
        rows = list(zip(scores, self._labels(groups), strict=True))
        known = [pair for own, labels in rows for pair in _known(own, labels)]
        values, labels_A = [s for s, _ in known], [y for _, y in known]
        found = {
            "steps/accuracy": measures.mean([measures.verdict(*pair) for pair in known]),
            "steps/first_error_accuracy": measures.mean(
                [measures.finds_first_error(*row) for row in rows]
            ),
            "steps/area_under_curve": measures.area(values, labels_A),
            "steps/positive_share": measures.mean([float(y >= 0.5) for y in labels_A]),
            "steps/count": float(len(known)),
        }
        return {name: x for name, x in found.items() if x is not None}


def _known(scores: Sequence[float], labels: measures.Labels) -> list[tuple[float, float]]:
    return [(s, y) for s, y in zip(scores, labels, strict=True) if y is not None]


def _with_steps(rollout: Rollout, scores: Sequence[float], separator: str) -> Rollout:
    ends = step_ends(text_of(stepwise(rollout.task, separator).steps, separator), separator)
    chances = torch.tensor(scores, dtype=torch.float64).sigmoid().tolist()
    grade = Grade(min(chances), steps=tuple(zip(ends, chances, strict=True)))
    return replace(rollout, grade=grade)


def _by_row(asked: RowsAsked, score_A: torch.Tensor) -> Scores:
    values, at, found = score_A.tolist(), 0, []
    for places in asked.places:
        found.append(values[at : at + places])
        at += places
    return found


def _stderr(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    middle = measures.mean(known)
    if middle is None or len(known) < 2:
        return None
    spread = math.fsum((x - middle) ** 2 for x in known) / (len(known) - 1)
    return math.sqrt(spread / len(known))
