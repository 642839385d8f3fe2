"""Learning from pairs of answers, labelled in the data or made from samples: DPO's relatives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.engine.backends import Tell
from groupwise.engine.protocol import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.evaluate.evaluate import Evaluation, measured
from groupwise.methods.composition import PairRecipe
from groupwise.methods.slots import Slot
from groupwise.model.cost import add, forward_cost, update_cost
from groupwise.model.formats.checkpoint import Loaded
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Policy
from groupwise.optim.assemble import Group
from groupwise.optim.packs import Ids, Sequences
from groupwise.optim.pairs import PairLearner
from groupwise.optim.roles.role import Role
from groupwise.optim.schedules import LearningRates
from groupwise.parallel.world import World
from groupwise.prepare.answers import answer_ids, has_answers
from groupwise.prepare.engines import MakeEngine
from groupwise.prepare.judgements import read_rubric
from groupwise.records import Completion, Memory, Task
from groupwise.stages.collected import Collected
from groupwise.stages.held_out_labels import judged
from groupwise.stages.ignored import ignored
from groupwise.stages.parts import Parts
from groupwise.stages.score_measures import win
from groupwise.stages.self_judging import held_out_judgements, judge_groups, self_judge
from groupwise.stages.stage import Stage, StepUpdates, TellEvent, update_metrics
from groupwise.testing.trial import try_pairs
from groupwise.watch.clock import Clock

Answer = tuple[Ids, Tensor | None]  # with its mask_T


def pairs_without_a_choice(config: Config, recipe: PairRecipe) -> Iterator[str]:
    """Refuse groups of one where the best is set against the worst."""
    if recipe.reads_rewards and config.group_size < 2:
        yield (
            f"recipe {recipe.name} pairs the best answer of a group with its worst, and group_size "
            "is 1. Take 4 or more."
        )
    if config.overlong != "recipe":
        why = ", which learns from pairs. Leave it out."
        yield ignored(config, "overlong", recipe.name, why)


def unreadable_rubric(config: Config, recipe: PairRecipe) -> Iterator[str]:
    """Refuse a rubric that can't be read, before anything is loaded."""
    if recipe.judging is not None:
        try:
            read_rubric(config.reward.rubric)
        except ConfigError as error:
            yield str(error)


def pairs_from_one_sample(config: Config, recipe: PairRecipe) -> Iterator[str]:
    """Doubt samples that nobody reads, and a previous iterate that never moves on."""
    if recipe.reads == "answers" and config.group_size > 1:
        yield (
            f"recipe {recipe.name} reads one sample a prompt: group_size={config.group_size} is "
            "sampled for nothing. Set group_size=1."
        )
    if recipe.reference == "a mixture that follows the policy" and (
        config.reference.update == "frozen"
    ):
        yield (
            f"{recipe.name} is dpo where the reference stays the starting policy. Set "
            "reference.update=mix:0.6:512, or as many steps as fit a run several times."
        )
    if recipe.reference == "the previous iterate" and config.reference.update == "frozen":
        yield (
            f"{recipe.name}'s reference is the previous iterate, and here it stays the starting "
            "policy: one round. Set reference.update=reset:STEPS to begin a new one every so "
            "often, or make it a [[stage]] with repeat."
        )


class PairStage(Stage[PairRecipe, PairLearner]):
    """A chosen and a rejected answer to each prompt, and one update on all pairs of a step."""

    REFUSED = (pairs_without_a_choice, unreadable_rubric)
    DOUBTFUL = (pairs_from_one_sample,)

    def try_slots(self) -> list[str]:
        return try_pairs(self.recipe)

    def batch_line(self) -> str:
        prompts, samples = self.config.prompts_per_step, self.config.group_size
        if not self.recipe.samples:
            return f"{prompts} labelled pairs a step, 1 update"
        return f"{prompts} prompts x {samples} samples, at most {prompts} pairs a step, 1 update"

    def notes(self) -> list[str]:
        """Say where the two answers come from, and where that is not what the source does."""
        reward = self.config.reward.parts.items()
        parts = ", ".join(f"{name} x {weight:g}" for name, weight in reward)
        pairs = {
            "labels": "the data's columns `chosen` and `rejected`",
            "answers": "chosen: the data's written `completion` or `solution`, rejected: a "
            "sample of the previous iterate, which is the reference",
            "grades": f"chosen and rejected: the best and the worst of {self.config.group_size} "
            f"samples by the reward ({parts})",
            "judgements": f"chosen and rejected: the best and the worst of "
            f"{self.config.group_size} samples, by what the policy itself says of them",
        }
        departs = [f"not as published: {x}" for x in self.recipe.departs]
        return [f"pairs: {pairs[self.recipe.reads]}", *self._judge_lines(parts), *departs]

    def _judge_lines(self, parts: str) -> list[str]:
        how, config = self.recipe.judging, self.config
        if how is None:
            return []
        answers = config.prompts_per_step * config.group_size
        most = answers * how["judgements"] * how["max_tokens"]
        return [
            f"judged by the policy: {how['judgements']} judgements of each answer, temperature "
            f"{how['temperature']:g}, top-p {how['top_p']:g}; at most {most:,} tokens a step more",
            f"reward.parts ({parts}) says which answers are right, where it can: it is measured "
            "against the judgements, and nothing is learned from it",
            f"stops by itself when a rule of {', '.join(self.recipe.stops)} fires",
        ]

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        if self.recipe.reads == "answers":
            check_solutions(self.recipe, tasks)
        super().check_tasks(tasks)

    def engine(self, loaded: Loaded, make: MakeEngine | None, tell: Tell) -> Engine:
        if self.recipe.judging is not None:
            self_judge(self.config, self.recipe.judging, loaded).check()
        return super().engine(loaded, make, tell)

    def collect(
        self, parts: Parts[PairLearner], cursor: TaskCursor, tell: TellEvent, clock: Clock
    ) -> Collected:
        """Return graded groups; judged by the policy where the recipe says so."""
        collected = super().collect(parts, cursor, tell, clock)
        if self.recipe.judging is None:
            return collected
        judge = self_judge(self.config, self.recipe.judging, parts.loaded)
        with clock("rollout"):
            return judge_groups(judge, parts.engine, collected)

    def learner(self, model: Policy, roles: Mapping[str, Role], world: World) -> PairLearner:
        temperature = self.config.engine.temperature
        return PairLearner(model, self.recipe, self.optim(model), temperature, roles, world)

    def teach(
        self,
        parts: Parts[PairLearner],
        memory: Memory,
        collected: Collected,
        rates: LearningRates,
        tell: TellEvent,
        clock: Clock,
    ) -> StepUpdates:
        """Make one update on the pairs that the groups give; none if there are none."""
        learner = parts.learner
        pairs = pairs_of(self.recipe, collected.groups, parts.loaded.tokenizer)
        if not pairs.completions:
            tell("pairs", "no group of this step has two answers of different reward: no update.")
            return StepUpdates([], {"pairs/count": 0.0, "updates/count": 0.0}, memory)
        with clock("update"):
            every = list(range(len(pairs.completions)))
            reference = _reference(learner, pairs, every)
            outcome, metrics, memory = learner.learn_pairs(pairs, reference, rates, memory)
        metrics |= update_metrics(outcome)
        shape, sizes = learner.model.config, pairs.sizes()
        update = update_cost(shape, sizes, frozen=self.config.adapter.used)
        for _ in range(
            self.recipe.refers + self.recipe.looks_first
        ):  # passes over all pairs before the update
            update = add(update, forward_cost(shape, sizes))
        return StepUpdates([outcome], metrics, memory, work={"update": update})

    def evaluate(self, parts: Parts[PairLearner]) -> Evaluation:
        """Measure samples where rows can be verified, and how held-out pairs are told apart."""
        if self.recipe.judging is not None:
            return self._judged_evaluation(parts, self.recipe.judging)
        columns = self.recipe.columns if self.recipe.judges_held_out else ()
        own = [task for task in parts.held_out if columns and has_answers(task, columns)]
        if not own:
            return super().evaluate(parts)
        tokenizer, learner = parts.loaded.tokenizer, parts.learner
        pairs = _rows(
            [
                (
                    task.token_ids,
                    (answer_ids(task, columns[0], tokenizer), None),
                    (answer_ids(task, columns[1], tokenizer), None),
                )
                for task in own
            ]
        )
        every = list(range(len(pairs.completions)))
        looked, chosen_N = learner.look_at(pairs, _reference(learner, pairs, every))
        margins = looked.margin_N.tolist()
        right: list[float | None] = [win(margin) for margin in margins]
        tokens = sum(len(ids) for ids in pairs.completions[0::2])
        others = {
            "eval/pairs_accuracy": math.fsum(x for x in right if x is not None) / len(right),
            "eval/margin": math.fsum(margins) / len(margins),
            "eval/nll": -float(chosen_N.double().sum()) / tokens,
            "eval/preference_loss": float(looked.loss),
        }
        return judged(super().evaluate, parts, own, right, others)

    def _judged_evaluation(self, parts: Parts[PairLearner], how: Slot) -> Evaluation:
        """Measure samples, and whether the policy's judgements of them agree with the verifier."""
        groups = self.held_out_groups(parts, parts.held_out)
        found = measured(parts.held_out, groups, self.config.eval.samples)
        judge = self_judge(self.config, how, parts.loaded)
        return replace(found, others=held_out_judgements(judge, parts.engine, groups))


def _reference(learner: PairLearner, pairs: Sequences, rows: list[int]) -> Tensor | None:
    """Return the reference's log-probabilities, where the loss measures from it."""
    if not learner.recipe.refers:
        return None
    return learner.role_streams(pairs, [rows])["ref_logp_NT"]


def check_solutions(recipe: PairRecipe, tasks: Sequence[Task]) -> None:
    """Refuse rows without a written solution: a bare answer would teach to write no more."""
    lacking = [task for task in tasks if not has_answers(task, recipe.columns)]
    if lacking:
        raise DataError(
            f"{len(lacking):,} of {len(tasks):,} rows have no written solution (column "
            f"`completion` or `solution`), first row {lacking[0].id}, and {recipe.name} makes the "
            "data's text likelier than the model's own: a bare answer would teach it to write "
            "nothing else. Add the solutions, drop such rows, or take a recipe that learns from "
            "rewards."
        )


def pairs_of(recipe: PairRecipe, groups: Sequence[Group], tokenizer: Tokenizer) -> Sequences:
    """Return chosen and rejected answers of the groups, row by row."""
    made = []
    for group in groups:
        task = group[0].task
        if recipe.reads == "answers":
            right = (answer_ids(task, recipe.columns[0], tokenizer), None)
            made.append((task.token_ids, right, _answer(group[0].completion)))
            continue
        cut_off = float(recipe.pairing.get("penalty", 0.0))
        known = [
            (r.grade.reward - cut_off * r.completion.truncated, _answer(r.completion))
            for r in group
            if r.grade.reward is not None
        ]
        if len(known) < 2:
            continue
        choice = recipe.pairing(torch.tensor([reward for reward, _ in known]))
        if choice.keep:
            made.append((task.token_ids, known[choice.chosen][1], known[choice.rejected][1]))
    return _rows(made)


def _answer(completion: Completion) -> Answer:
    return completion.token_ids, completion.mask_T


def _rows(pairs: Sequence[tuple[Ids, Answer, Answer]]) -> Sequences:
    """Return rows whose log-probability is that of the policy's own tokens."""
    answers = [answer for _, *both in pairs for answer in both]
    return Sequences(
        [prompt for prompt, _, _ in pairs for _ in range(2)],
        [ids for ids, _ in answers],
        [mask_T for _, mask_T in answers],
    )
