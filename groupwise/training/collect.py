"""The rollouts of a step: sample, grade, and draw again for groups that teach nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groupwise.groups.phase import select
from groupwise.methods.composition import PairRecipe
from groupwise.optim.assemble import Group, assemble, group_numbers
from groupwise.prepare.rollouts import Beside, failed, grade, write
from groupwise.prepare.setup import sampling_of
from groupwise.records import Task
from groupwise.watch.clock import Clock

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.training.run import Run

# With refills = "until full": in refills, unless refill_tokens says otherwise, so many times the
# tokens of the first draw; and so many whole batches in a row without a useful group. Where no
# group can be useful, because all answers are right or all wrong, drawing on would not end.
FIRST_DRAWS, BARREN_DRAWS = 10, 4
FEW = 0.5  # of the groups that a step wants: fewer are worth a warning


@dataclass
class Collected:
    """The groups of a step, and those that dynamic sampling sent away."""

    groups: list[Group]
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
    refill_tokens: int = 0  # sampled after the first draw
    greedy: list[Group] = field(default_factory=list)  # one baseline a group, where asked for
    tasks: list[Task] = field(default_factory=list)  # where nothing is sampled, only these

    @property
    def unused(self) -> list[Group]:
        """Sampled, and not learned from."""
        return self.dropped + self.greedy

    @property
    def tokens(self) -> int:
        return tokens_of(self.groups + self.unused)

    def metrics(self) -> dict[str, float]:
        """Of all that was sampled: what dynamic sampling drops is part of the picture."""
        rows = [r for group in self.groups + self.dropped for r in group]
        if not rows:
            return {}
        found = {
            "refill/rounds": float(self.rounds),
            "refill/tokens": float(self.refill_tokens),
            "refill/drawn_groups": float(len(self.groups) + len(self.dropped)),
            "length/sampled_mean": sum(len(r.completion.token_ids) for r in rows) / len(rows),
            "length/truncated_share": sum(r.completion.truncated for r in rows) / len(rows),
            "reward/sampled_mean": _mean([r.grade.reward for r in rows]),
            "reward/failed_share": sum(failed(r.grade) for r in rows) / len(rows),
            "reward/missing_share": sum(r.grade.reward is None for r in rows) / len(rows),
            "correct/mean": _mean([r.grade.correct for r in rows]),
        }
        for name in dict.fromkeys(name for r in rows for name in r.grade.parts):
            found[f"reward/part/{name}"] = _mean([r.grade.parts.get(name) for r in rows])
        for source in sorted({r.task.source for r in rows if r.task.source}):
            own = [r for r in rows if r.task.source == source]
            found[f"data/source/{source}/share"] = len(own) / len(rows)
            found[f"data/source/{source}/reward"] = _mean([r.grade.reward for r in own])
            found[f"data/source/{source}/correct"] = _mean([r.grade.correct for r in own])
        return {name: value for name, value in found.items() if value is not None}


def collect(run: Run, clock: Clock) -> Collected:
    """As many groups as a step wants; where refills end before that, as many as there are."""
    config, recipe = run.config, run.config.recipe
    if isinstance(recipe, PairRecipe):
        if not run.grades:
            drawn = run.cursor.take(config.prompts_per_step)
            return Collected([], tasks=[run.tasks[d.task] for d in drawn])
        return Collected(draw(run, config.prompts_per_step, clock))
    groups = draw(run, config.prompts_per_step, clock)
    spent, dropped = Spent(first=tokens_of(groups)), list[Group]()
    kept, unwanted = _sorted_out(run, groups)
    spent.note(drawn=len(groups), useful=len(kept))
    while unwanted and not spent.why_stop(config):
        dropped += unwanted
        fresh = draw(run, len(unwanted), clock)
        before, groups = len(kept), kept + fresh
        kept, unwanted = _sorted_out(run, groups)
        spent.rounds, spent.tokens = spent.rounds + 1, spent.tokens + tokens_of(fresh)
        spent.note(drawn=len(fresh), useful=len(kept) - before)
    if unwanted:
        few = len(kept) < FEW * config.prompts_per_step
        text = _not_full(config, spent, kept, dropped + unwanted)
        run.event("refill", text, shown=few)
    used = kept or groups
    dropped += unwanted if kept else []
    baselines = greedy(run, used, clock) if "greedy_reward_N" in recipe.streams else []
    return Collected(used, dropped, spent.rounds, spent.tokens, baselines)


def _sorted_out(run: Run, groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """The groups that the recipe's filters keep, and those that they want others for."""
    config, recipe = run.config, run.config.recipe
    assert not isinstance(recipe, PairRecipe)
    batch = assemble(recipe, groups, run.loaded.tokenizer, drop_truncated=config.overlong == "drop")
    refill, number_of_row = set(select(recipe, batch).refill), group_numbers(recipe, groups)
    leaves = [number_of_row[row] in refill for row in _first_rows(groups)]
    kept = [group for group, leaving in zip(groups, leaves, strict=True) if not leaving]
    return kept, [group for group, leaving in zip(groups, leaves, strict=True) if leaving]


@dataclass
class Spent:
    """What dynamic sampling has cost in this step: by it, it is decided whether to go on."""

    first: int  # tokens of the first draw
    rounds: int = 0
    tokens: int = 0  # of the refills
    barren: int = 0  # groups in a row of which none was useful

    def note(self, *, drawn: int, useful: int) -> None:
        self.barren = 0 if useful > 0 else self.barren + drawn

    def why_stop(self, config: Config) -> str:
        """Why nothing more is drawn; "" while it may go on. A function of the samples alone."""
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


def _not_full(config: Config, spent: Spent, kept: Sequence[Group], useless: Sequence[Group]) -> str:
    """What is said of a batch that stays smaller than it was meant to be."""
    right = sum(all(r.grade.correct for r in group) for group in useless)
    wrong = sum(all(r.grade.correct is False for r in group) for group in useless)
    found = f"{len(kept)} useful groups of {config.prompts_per_step} wanted"
    on = "those" if kept else "the last ones, which teach nothing"
    return (
        f"dynamic sampling found {found} in {len(kept) + len(useless)} draws ({right} of the "
        f"others all right, {wrong} all wrong); {spent.why_stop(config)}, so it goes on with {on}."
    )


def draw(run: Run, prompts: int, clock: Clock) -> list[Group]:
    """The next prompts, answered and graded."""
    chosen = [(run.tasks[d.task], d.number) for d in run.cursor.take(prompts)]
    top_k = run.learner.sampler_top_k
    sampling = sampling_of(run.config, record_top_k=top_k)
    beside = Beside(run.grader, run.loaded.tokenizer, chosen, run.known)
    with clock("rollout"), beside:
        written = write(run.engine, chosen, run.config.group_size, sampling, done=beside.take)
    with clock("grade"):
        return beside.rollouts(written)


def greedy(run: Run, groups: Sequence[Group], clock: Clock) -> list[Group]:
    """Each group's greedy completion, for a recipe whose baseline it is."""
    # Its number is -1: beside the group's own.
    prompts = [(group[0].task, group[0].draw) for group in groups]
    with clock("rollout"):
        written = write(run.engine, prompts, 1, sampling_of(run.config, temperature=0.0))
    with clock("grade"):
        return grade(run.grader, run.loaded.tokenizer, written, run.known, first=-1)


def tokens_of(groups: Sequence[Group]) -> int:
    """Of the completions."""
    return sum(len(r.completion.token_ids) for group in groups for r in group)


def _first_rows(groups: Sequence[Group]) -> list[int]:
    at, starts = 0, []
    for group in groups:
        starts.append(at)
        at += len(group)
    return starts


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(x) for x in values if x is not None]
    return sum(known) / len(known) if known else None
