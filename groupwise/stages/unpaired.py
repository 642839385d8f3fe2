"""Learning from single answers of the data that were called good or bad: KTO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from groupwise.config import Config
from groupwise.data.verdicts import check_verdicts, verdict_of
from groupwise.evaluate.evaluate import Evaluation
from groupwise.methods.composition import UnpairedRecipe
from groupwise.model.cost import add, forward_cost, update_cost
from groupwise.model.layers.transformer import Policy
from groupwise.optim.assemble import Group
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.optim.unpaired import AnswersWithLabels, UnpairedLearner
from groupwise.parallel.world import World
from groupwise.prepare.answers import answer_ids, has_answers
from groupwise.records import Memory, Task
from groupwise.stages.collected import Collected
from groupwise.stages.held_out_labels import judged
from groupwise.stages.ignored import ignored
from groupwise.stages.parts import Parts
from groupwise.stages.score_measures import area, verdict
from groupwise.stages.stage import Stage, StepUpdates, TellEvent, update_metrics
from groupwise.testing.trial import try_unpaired
from groupwise.watch.clock import Clock


def one_answer_a_step(config: Config, recipe: UnpairedRecipe) -> Iterator[str]:
    """Refuse a step without a second answer: the baseline is about answers to other prompts."""
    if config.prompts_per_step < 2:
        yield (
            f"recipe {recipe.name} takes its baseline from answers to other prompts of the step, "
            "and prompts_per_step is 1. Take 8 or more."
        )
    if config.overlong != "recipe":
        yield ignored(config, "overlong", recipe.name, ", which samples nothing. Leave it out.")


def few_answers_a_step(config: Config, recipe: UnpairedRecipe) -> Iterator[str]:
    """Doubt a baseline of a handful of answers."""
    if 2 <= config.prompts_per_step < 4:
        yield (
            f"recipe {recipe.name} estimates a KL from prompts_per_step={config.prompts_per_step} "
            "answers: that is mostly noise. Take 8 or more."
        )


class UnpairedStage(Stage[UnpairedRecipe, UnpairedLearner]):
    """Answers of the data with a label each, and one update a step on all of them."""

    REFUSED = (one_answer_a_step,)
    DOUBTFUL = (few_answers_a_step,)

    def try_slots(self) -> list[str]:
        return try_unpaired(self.recipe)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        super().check_tasks(tasks)
        check_verdicts(tasks)

    def batch_line(self) -> str:
        return f"{self.config.prompts_per_step} labelled answers a step, 1 update"

    def notes(self) -> list[str]:
        return ["answers: the data's column `completion`; good or bad: its column `label`"]

    def learner(self, model: Policy, roles: Mapping[str, Role], world: World) -> UnpairedLearner:
        temperature = self.config.engine.temperature
        return UnpairedLearner(model, self.recipe, self.optim(model), temperature, roles, world)

    def teach(
        self,
        parts: Parts[UnpairedLearner],
        memory: Memory,
        collected: Collected,
        rates: LearningRates,
        tell: TellEvent,
        clock: Clock,
    ) -> StepUpdates:
        """Make one update on the answers of a step."""
        learner = parts.learner
        given = labelled_of(collected.groups, learner.model.config.context)
        if given.others is None:
            tell("baseline", "no answer of this step belongs to another prompt: the baseline is 0.")
        with clock("update"):
            outcome, metrics = learner.learn_labels(given, rates)
        metrics |= update_metrics(outcome)
        shape, sizes = learner.model.config, given.answers.sizes()
        work = add(
            update_cost(shape, sizes, frozen=self.config.adapter.used),
            forward_cost(shape, sizes),  # the reference's
        )
        if given.others is not None:
            others = given.others.sizes()
            work = add(add(work, forward_cost(shape, others)), forward_cost(shape, others))
        return StepUpdates([outcome], metrics, memory, work={"update": work})

    def evaluate(self, parts: Parts[UnpairedLearner]) -> Evaluation:
        """Measure samples where rows can be verified, and whether labels are told apart."""
        own = [t for t in parts.held_out if has_answers(t, self.recipe.columns) and _labelled(t)]
        found: dict[str, float] = {}
        right: list[float | None] = []
        if own:
            tokenizer = parts.loaded.tokenizer
            given = AnswersWithLabels.of(
                [task.token_ids for task in own],
                [answer_ids(task, "completion", tokenizer) for task in own],
                [verdict_of(task) for task in own],
                parts.learner.model.config.context,
            )
            looked = parts.learner.look_at(given)
            drift = looked.reward_N.tolist()
            labels = [float(verdict_of(task)) for task in own]
            right += [verdict(*each) for each in zip(drift, labels, strict=True)]
            found["eval/preference_loss"] = float(looked.loss_N.mean())
            apart = area(drift, labels)
            if apart is not None:
                found["eval/area_under_curve"] = apart
        return judged(super().evaluate, parts, own, right, found)


def _labelled(task: Task) -> bool:
    return task.columns.get("label") is not None


def labelled_of(groups: Sequence[Group], context: int) -> AnswersWithLabels:
    """Return the answers of the groups with their labels."""
    rows = [group[0] for group in groups]
    return AnswersWithLabels.of(
        [row.task.token_ids for row in rows],
        [row.completion.token_ids for row in rows],
        [verdict_of(row.task) for row in rows],
        context,
    )
