"""Learning from groups of graded answers: GRPO and all its relatives, PPO's and SFT's included."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.errors import ConfigError
from groupwise.evaluate.evaluate import Evaluation
from groupwise.explain.idle import told, updates_of
from groupwise.groups.phase import batch_phase, select
from groupwise.groups.steps import branching_of
from groupwise.losses.measures import quantile
from groupwise.methods.composition import Recipe
from groupwise.model.cost import add, forward_cost, update_cost
from groupwise.model.layers.transformer import Policy
from groupwise.optim.assemble import Group, assemble, batch_of, group_numbers, sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.packs import Sequences
from groupwise.optim.roles import ROLES, role_sizes
from groupwise.optim.roles.role import Role
from groupwise.optim.row_streams import ages, check_row_columns
from groupwise.optim.schedules import LearningRates
from groupwise.optim.step import StepOutcome, first_bad
from groupwise.optim.step_values import value_streams
from groupwise.parallel.world import World
from groupwise.prepare.setup import weight_bytes
from groupwise.prepare.supervised import check_lessons
from groupwise.prepare.teacher_prompts import check_teacher_prompts
from groupwise.records import Memory, Task, TokenBatch
from groupwise.stages import group_checks
from groupwise.stages.branches import branches_of
from groupwise.stages.collected import Collected, tokens_of
from groupwise.stages.consequences import anchored, idle_slots, sampled_from
from groupwise.stages.data_answers import check_weights
from groupwise.stages.demonstrations import with_demonstrations
from groupwise.stages.earlier_answers import READS as DRIFT
from groupwise.stages.earlier_answers import drift_of, earlier, with_answers
from groupwise.stages.lessons import READS as LESSONS
from groupwise.stages.lessons import (
    check_lessons_there,
    lessons_of,
    own_rows,
    with_lessons,
    without_lessons,
)
from groupwise.stages.likelihood import judge_rows
from groupwise.stages.parts import Parts
from groupwise.stages.policy_answers import greedy
from groupwise.stages.rows import token_streams
from groupwise.stages.stage import Stage, StepUpdates, TellEvent
from groupwise.testing.trial import try_groups
from groupwise.watch.clock import Clock

# With refills = "until full": in refills, unless refill_tokens says otherwise, so many times the
# tokens of the first draw; and so many whole batches in a row without a useful group. Where no
# group can be useful, because all answers are right or all wrong, drawing on would not end.
FIRST_DRAWS, BARREN_DRAWS = 10, 4
FEW = 0.5  # of the groups that a step wants: fewer are worth a warning


class GroupStage(Stage[Recipe, PolicyLearner]):
    """Answers in groups, a batch phase over all of them, and one or several updates."""

    REFUSED = group_checks.REFUSED
    DOUBTFUL = group_checks.DOUBTFUL

    @property
    def explains_loss(self) -> bool:  # type: ignore[override]
        # Where advantages of rewards add up to nothing, so does the loss.
        return self.recipe.samples and self.recipe.reads_rewards

    def try_slots(self) -> list[str]:
        return try_groups(self.recipe)

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        for name in self.recipe.roles:
            ROLES[name].check_tasks(self.config, tasks)
        check_teacher_prompts(self.config, tasks)
        for text in group_checks.routes_not_told(self.config, self.recipe):
            raise ConfigError(text)
        check_row_columns(self.recipe.streams, tasks)
        check_lessons_there(self.recipe.streams, tasks)
        if not self.recipe.supervised:
            return super().check_tasks(tasks)
        check_lessons(self.config, tasks)
        check_weights(tasks)

    def batch_line(self) -> str:
        config, weights = self.config, sampled_from(self.config)
        prompts, samples = config.prompts_per_step, config.group_size
        updates = updates_of(self.recipe)
        if not self.recipe.samples:
            return f"{prompts} answers of the data a step, {updates} update{'s' * (updates > 1)}"
        line = f"{prompts} prompts x {samples} samples = {prompts * samples} completions a step"
        if updates > 1:
            return f"{line}, {updates} updates, all but the first off-policy"
        if config.adapter.dropout and weights == "shared":
            return f"{line}, 1 update, on-policy but for dropout"
        if config.train.lag:
            return (
                f"{line}, 1 update, sampled up to {config.train.lag} steps ahead "
                f"(train.sync={config.train.sync})"
            )
        policy = "on-policy" if weights == "shared" else f"sampled from other weights ({weights})"
        return f"{line}, 1 update, {policy}"

    def notes(self) -> list[str]:
        lines = [_refill_line(self.config, name) for name in self.recipe.refilling]
        how = branching_of(self.recipe)
        if how is not None:
            lines.append(
                f"{how.branches} answers go on from each of up to {how.most_steps} steps (by "
                f"{how.split}) of every answer, for their values: graded, and not learned from"
            )
        idle = told(idle_slots(self.config))
        return lines + [f"idle, updates are the same without: {line}" for line in idle]

    def learner(self, model: Policy, roles: Mapping[str, Role], world: World) -> PolicyLearner:
        recipe = anchored(self.config, self.recipe)
        temperature = self.config.engine.temperature if recipe.samples else 1.0
        return PolicyLearner(model, recipe, self.optim(model), temperature, roles, world)

    def collect(
        self, parts: Parts[PolicyLearner], cursor: TaskCursor, tell: TellEvent, clock: Clock
    ) -> Collected:
        """Return as many groups as a step wants; where refills end before that, what there is."""
        config, wanted = self.config, self.config.prompts_per_step
        groups = self.source.draw(parts, cursor, wanted, clock)
        spent, dropped = RefillCost(first=tokens_of(groups)), list[Group]()
        batch = self.as_batch(parts, groups)
        kept, unwanted = self._sorted_out(groups, batch)
        spent.note(drawn=len(groups), useful=len(kept))
        while unwanted and not spent.why_stop(config):
            dropped += unwanted
            fresh = self.source.draw(parts, cursor, len(unwanted), clock)
            before, groups = len(kept), kept + fresh
            batch = self.as_batch(parts, groups)
            kept, unwanted = self._sorted_out(groups, batch)
            spent.rounds, spent.tokens = spent.rounds + 1, spent.tokens + tokens_of(fresh)
            spent.note(drawn=len(fresh), useful=len(kept) - before)
        if unwanted:
            text = _not_full(config, spent, kept, dropped + unwanted)
            tell("refill", text, shown=len(kept) < FEW * wanted)
        used = kept or groups
        if kept and unwanted:  # without them the rows are fewer, and perhaps shorter
            dropped += unwanted
            batch = self.as_batch(parts, kept)
        asks_greedy = "greedy_reward_N" in self.recipe.streams
        baselines = greedy(config, parts, used, clock) if asks_greedy else []
        how = branching_of(self.recipe)
        model, tokenizer = parts.loaded.model, parts.loaded.tokenizer
        return Collected(
            used,
            dropped,
            spent.rounds,
            spent.tokens,
            baselines,
            self.source.sampled,
            batch,
            lessons=(
                lessons_of(used, tokenizer, model.config.context)
                if LESSONS in self.recipe.streams
                else []
            ),
            branches=branches_of(config, parts, used, how, clock) if how is not None else [],
        )

    def as_batch(self, parts: Parts[PolicyLearner], groups: Sequence[Group]) -> TokenBatch:
        """Return the groups as filters and learner read them."""
        drop = self.config.overlong == "drop"
        weights = dict(self.config.reward.parts)
        return batch_of(
            self.recipe, groups, parts.loaded.tokenizer, drop_truncated=drop, weights=weights
        )

    def _sorted_out(
        self, groups: Sequence[Group], batch: TokenBatch
    ) -> tuple[list[Group], list[Group]]:
        """Return the groups that the filters keep, and those that they want others for."""
        recipe = self.recipe
        refill, number_of_row = set(select(recipe, batch).refill), group_numbers(recipe, groups)
        leaves = [number_of_row[row] in refill for row in _first_rows(groups)]
        kept = [group for group, leaving in zip(groups, leaves, strict=True) if not leaving]
        return kept, [group for group, leaving in zip(groups, leaves, strict=True) if leaving]

    def teach(
        self,
        parts: Parts[PolicyLearner],
        memory: Memory,
        collected: Collected,
        rates: LearningRates,
        tell: TellEvent,
        clock: Clock,
    ) -> StepUpdates:
        """Score the rollouts, run the batch phase over all groups, make the updates."""
        learner, groups = parts.learner, with_lessons(collected.groups, collected.lessons)
        recipe, sequences = learner.recipe_at(rates), sequences_of(groups)
        split = learner.parts(group_numbers(recipe, groups))
        own_N, before = own_rows(groups), earlier(memory, groups)
        with clock("score") if self._score_passes(recipe) else nullcontext():
            sequences, known = self._known_of_rows(parts, memory, groups, sequences, before)
            streams, routes = learner.look_back(recipe, sequences, split)
            streams |= learner.role_streams(sequences, split) | known
        bad = first_bad(streams.items())
        if bad is not None:  # no batch can be made of it: the rollout file has what was sampled
            outcome = StepOutcome(grad_norm=float("nan"), clipped=False, skipped=True, bad=bad)
            return StepUpdates([outcome], {"updates/count": 1.0, "optim/skipped": 1.0}, memory)
        if collected.branches:
            drop = self.config.overlong == "drop"
            streams |= value_streams(groups, collected.branches, drop_truncated=drop)
        batch = assemble(
            recipe,
            groups,
            collected.batch if collected.batch and own_N is None else self.as_batch(parts, groups),
            greedy=[group[0].grade.reward for group in collected.greedy] or None,
            memory=memory,
            device=learner.device,
            world=learner.world,
            **streams,
        )
        result = batch_phase(recipe, batch)
        measured = learner.measures(result.batch, rates)
        with clock("update"):
            first = learner.learn_first(result.batch, sequences, split, rates)
        if first:  # what they say now, having learned, is what counts
            with clock("score"):
                fresh = learner.role_streams(sequences, split, [role.name for role in first])
            result = batch_phase(recipe, batch.with_streams(**fresh))
        if not result.metrics["tokens/learned_share"]:
            tell(
                "nothing learned",
                "no answer of this step counts (without a reward, or cut off and left out): look "
                "at grader_reason and finish in its rollout file.",
            )
        with clock("update"):
            learned = learner.learn(result.batch, sequences, split, rates, routes)
        shape, sizes = learner.model.config, sequences.sizes()
        learned.roles |= {role.name: role for role in first}
        for role in learned.roles.values():
            for bad in [outcome.bad for outcome in role.outcomes if outcome.skipped]:
                tell("not finite", f"an update of the {role.name} was skipped: {bad}.")
        passes = len(learned.outcomes) // len(split)
        taught = sum(len(role.outcomes) for role in learned.roles.values()) // len(split)
        frozen = self.config.adapter.used
        streams_NT = token_streams(result.batch, learned.trace if learned.outcomes else None)
        streams_NT |= learner.columns(result.batch, rates)
        streams_NT = without_lessons(streams_NT, own_N)
        kept = result.batch if own_N is None else result.batch.select(own_N.to(learner.device))
        tail = mismatch_tail(kept, streams_NT) if collected.sampled else {}
        routed = {} if routes is None else routes.metrics()
        if self.recipe.supervised:
            tail = likelihood(result.batch, streams_NT, sequences)
        return StepUpdates(
            outcomes=learned.outcomes,
            metrics=result.metrics | measured | learned.metrics() | tail | routed,
            memory=self._memory(result.memory, collected.groups, streams_NT),
            batch=kept,
            streams=streams_NT,
            work={
                "score": add(
                    *[forward_cost(shape, sizes)] * self._score_passes(recipe),
                    *([forward_cost(shape, before.sizes())] if before else []),
                ),
                "update": update_cost(shape, sizes, passes=passes + taught, frozen=frozen),
            },
        )

    def _known_of_rows(
        self,
        parts: Parts[PolicyLearner],
        memory: Memory,
        groups: Sequence[Group],
        sequences: Sequences,
        before: Sequences | None,
    ) -> tuple[Sequences, dict[str, Tensor]]:
        """Return the rows as models read them, and the streams that hang on more than a row."""
        learner, wanted, found = parts.learner, self.recipe.streams, dict[str, Tensor]()
        if "age_NT" in wanted:
            found["age_NT"] = ages(groups, learner.optimizer.steps)
        if DRIFT in wanted:
            found[DRIFT] = drift_of(learner, memory, groups, before)
        if "taught_N" in wanted:
            tokenizer, context = parts.loaded.tokenizer, learner.model.config.context
            shown = with_demonstrations(self.config, groups, sequences, tokenizer, context)
            sequences, found["taught_N"] = shown
        return sequences, found

    def _memory(
        self, memory: Memory, groups: Sequence[Group], streams: Mapping[str, Tensor | None]
    ) -> Memory:
        """Return the memory behind a step, with the answers that the next visit is measured by."""
        logp_NT = streams["learner_logp"]
        if DRIFT not in self.recipe.streams or logp_NT is None:
            return memory
        return with_answers(memory, groups, logp_NT)

    def evaluate(self, parts: Parts[PolicyLearner]) -> Evaluation:
        """Measure held-out tasks by samples; rows that are learned as they stand by likelihood."""
        if not self.recipe.supervised:
            return super().evaluate(parts)
        return judge_rows(
            parts.learner, parts.held_out, lambda tasks: self.sampled_evaluation(parts, tasks)
        )

    def _score_passes(self, recipe: Recipe) -> int:
        """Count the forward passes over a step's rows before its batch phase."""
        roles = role_sizes(self.config, weight_bytes(self.config))
        return recipe.looks_back + sum(role.passes for role in roles)


@dataclass
class RefillCost:
    """The cost of dynamic sampling in this step: by it, it is decided whether to go on."""

    first: int  # tokens of the first draw
    rounds: int = 0
    tokens: int = 0  # of the refills
    barren: int = 0  # groups in a row of which none was useful

    def note(self, *, drawn: int, useful: int) -> None:
        """Count groups in a row without a useful one."""
        self.barren = 0 if useful > 0 else self.barren + drawn

    def why_stop(self, config: Config) -> str:
        """Say why nothing more is drawn; "" while it may go on. A function of the samples alone."""
        full = config.refills == "until full"
        if self.rounds == config.refills:
            return f"refills={config.refills} rounds are done"
        if full and self.barren >= BARREN_DRAWS * config.prompts_per_step:
            return f"none of the last {self.barren} groups was useful"
        limit = config.refill_tokens or (FIRST_DRAWS * self.first if full else math.inf)
        if self.tokens >= limit:
            named = "refill_tokens" if config.refill_tokens else "ten times the first draw"
            return f"refills have taken {self.tokens:,} tokens ({named})"
        return ""


def _not_full(
    config: Config, spent: RefillCost, kept: Sequence[Group], useless: Sequence[Group]
) -> str:
    """Say that a batch stays smaller than it was meant to be, and why."""
    right = sum(all(r.grade.correct for r in group) for group in useless)
    wrong = sum(all(r.grade.correct is False for r in group) for group in useless)
    found = f"{len(kept)} useful groups of {config.prompts_per_step} wanted"
    on = "those" if kept else "the last ones, which teach nothing"
    return (
        f"dynamic sampling found {found} in {len(kept) + len(useless)} draws ({right} of the "
        f"others all right, {wrong} all wrong); {spent.why_stop(config)}, so it goes on with {on}."
    )


def _refill_line(config: Config, name: str) -> str:
    drawn = f"groups that {name} drops are drawn anew"
    most = f"; refills take {config.refill_tokens:,} tokens a step at most"
    if config.refills == "until full":
        most = most if config.refill_tokens else "; refills take ten times its tokens at most"
        return f"{drawn} until the batch is full{most}"
    after = ", then the batch is smaller"
    return f"{drawn}, up to {config.refills} times a step{after}" + (
        most if config.refill_tokens else ""
    )


def _first_rows(groups: Sequence[Group]) -> list[int]:
    at, starts = 0, []
    for group in groups:
        starts.append(at)
        at += len(group)
    return starts


def likelihood(
    batch: TokenBatch, streams: Mapping[str, Tensor | None], sequences: Sequences
) -> dict[str, float]:
    """Return how well the rows of a step were known before it, and how much of them is learned."""
    read = int(sequences.prompt_R.sum() + sequences.length_N.sum())
    found = {"supervised/learned_share": float(batch.mask_NT.sum()) / read}
    learner_NT = streams["learner_logp"]
    if learner_NT is not None:
        logp = learner_NT[batch.mask_NT.to(learner_NT.device)]
        found["supervised/nll"] = -float(logp.double().mean())
    return found


def mismatch_tail(batch: TokenBatch, streams: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the 99th percentile of |learner − sampler| of the whole batch.

    It can't be had from those of micro-batches: quantiles do not add up.
    """
    learner_NT = streams["learner_logp"]
    if learner_NT is None or batch.sampler_logp_NT is None or batch.learn_N is None:
        return {}
    own_NT = batch.mask_NT & batch.learn_N[:, None] & ~learner_NT.isnan()
    gap = (learner_NT - batch.sampler_logp_NT)[own_NT].abs()
    return {"mismatch/abs_p99": float(quantile(gap, 0.99))} if len(gap) else {}
