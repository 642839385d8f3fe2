"""The rollouts of a step: sample, grade, and draw again for groups that teach nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from groupwise.composition import PairRecipe
from groupwise.groups.assemble import Group, assemble, group_numbers
from groupwise.groups.phase import select
from groupwise.records import Task
from groupwise.rollouts import Beside, failed, grade, write
from groupwise.setup import sampling_of
from groupwise.watch.clock import Clock

if TYPE_CHECKING:
    from groupwise.run import Run


FEW = 0.5  # of the groups that a step wants: fewer are worth a warning


@dataclass
class Collected:
    """The groups of a step, and those that dynamic sampling sent away."""

    groups: list[Group]
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
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
    """As many groups as a step wants; after the last refill, as many as there are."""
    config, recipe = run.config, run.config.recipe
    if isinstance(recipe, PairRecipe):
        if not run.grades:
            drawn = run.cursor.take(config.prompts_per_step)
            return Collected([], tasks=[run.tasks[d.task] for d in drawn])
        return Collected(draw(run, config.prompts_per_step, clock))
    groups = draw(run, config.prompts_per_step, clock)
    dropped: list[Group] = []
    for rounds in range(config.refills + 1):
        batch = assemble(
            recipe, groups, run.loaded.tokenizer, drop_truncated=config.overlong == "drop"
        )
        unwanted = set(select(recipe, batch).refill)
        number_of_row = group_numbers(recipe, groups)
        numbers = [number_of_row[row] for row in _first_rows(groups)]
        kept = [g for g, number in zip(groups, numbers, strict=True) if number not in unwanted]
        if len(kept) == len(groups) or rounds == config.refills:
            break
        dropped += [g for g, number in zip(groups, numbers, strict=True) if number in unwanted]
        groups = kept + draw(run, len(groups) - len(kept), clock)
    if len(kept) < len(groups):
        run.event(
            "refill",
            f"dynamic sampling found {len(kept)} useful groups of {config.prompts_per_step} wanted "
            f"in {len(groups) + len(dropped)} draws; going on with "
            + ("those." if kept else "the last ones, which teach nothing."),
            shown=len(kept) < FEW * config.prompts_per_step,
        )
    if kept:
        dropped += [g for g in groups if not any(g is k for k in kept)]
    used = kept or groups
    baselines = greedy(run, used, clock) if "greedy_reward_N" in recipe.streams else []
    return Collected(used, dropped, rounds, baselines)


def draw(run: Run, prompts: int, clock: Clock) -> list[Group]:
    """The next prompts, answered and graded."""
    chosen = [(run.tasks[d.task], d.number) for d in run.cursor.take(prompts)]
    top_k = run.learner.sampler_top_k
    sampling = sampling_of(run.config, record_top_k=top_k)
    beside = Beside(run.engine, run.grader, run.loaded.tokenizer, chosen, run.known)
    with clock("rollout"), beside:
        written = write(run.engine, chosen, run.config.group_size, sampling)
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
