"""The groups of answers that a step learns from, and those that were drawn and sent away."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from groupwise.model.cost import Group as Size
from groupwise.optim.assemble import Group, sequences_of
from groupwise.prepare.judgements import JudgedAnswer
from groupwise.prepare.rollouts import failed
from groupwise.records import Rollout, Task, TokenBatch
from groupwise.watch.samples import passed


@dataclass
class Collected:
    """The groups of a step, and those that dynamic sampling sent away."""

    groups: list[Group]
    dropped: list[Group] = field(default_factory=list)
    rounds: int = 0
    refill_tokens: int = 0  # sampled after the first draw
    greedy: list[Group] = field(default_factory=list)  # one baseline a group, where asked for
    sampled: bool = True  # or taken from the data
    batch: TokenBatch | None = None  # of the groups, where filters looked at it
    lessons: list[Rollout] = field(
        default_factory=list
    )  # an expert's, one a group, where asked for
    branches: list[Group] = field(default_factory=list)  # of each group's answers, where asked for
    judged: list[JudgedAnswer] = field(
        default_factory=list
    )  # by the policy itself, where it is asked to

    @property
    def unused(self) -> list[Group]:
        """Return what was sampled and not learned from."""
        return self.dropped + self.greedy

    @property
    def drawn(self) -> list[Group]:
        """Return the groups that the policy wrote: what dropping left, and what it dropped."""
        return self.groups + self.dropped if self.sampled else []

    @property
    def tokens(self) -> int:
        """Return how many tokens were sampled."""
        judgements = sum(said.tokens for answer in self.judged for said in answer.said)
        return tokens_of(self.drawn + self.greedy + self.branches) + judgements

    def sizes(self) -> list[Size]:
        """Return prompts and completions that were sampled, by their tokens."""
        found = sequences_of(self.drawn + self.greedy).sizes()
        rows = [r for group in self.branches for r in group if r.branch is not None]
        for (prompt, _), same in groupby(rows, key=_begins):
            found.append(Size(prompt, [r.completion.own_length for r in same]))
        for answer in self.judged:
            if answer.said:
                found.append(Size(answer.prompt_tokens, [said.tokens for said in answer.said]))
        return found

    def pass_rates(self) -> Iterator[tuple[Task, float]]:
        """Yield the task of each group and the share of its graded answers that passed."""
        for group in self.drawn:
            marks = [mark for row in group if (mark := passed(row)) is not None]
            if marks:
                yield group[0].task, sum(marks) / len(marks)

    def metrics(self, reads_rewards: bool = True) -> dict[str, float]:
        """Measure all that was sampled: what dynamic sampling drops is part of the picture.

        No reward is missed by a recipe that reads none.
        """
        rows = [r for group in self.drawn for r in group]
        if not rows:
            return {}
        missing = sum(r.grade.reward is None for r in rows) if reads_rewards else 0
        found = {
            "refill/rounds": float(self.rounds),
            "refill/tokens": float(self.refill_tokens),
            "refill/drawn_groups": float(len(self.groups) + len(self.dropped)),
            "length/sampled_mean": sum(r.completion.own_length for r in rows) / len(rows),
            "length/truncated_share": sum(r.completion.truncated for r in rows) / len(rows),
            "reward/sampled_mean": _mean([r.grade.reward for r in rows]),
            "reward/failed_share": sum(failed(r.grade) for r in rows) / len(rows),
            "reward/missing_share": missing / len(rows),
            "correct/mean": _mean([r.grade.correct for r in rows]),
        }
        sizes = {len(group) for group in self.drawn}
        if len(sizes) > 1:
            found["curriculum/smallest_group"] = float(min(sizes))
            found["curriculum/largest_group"] = float(max(sizes))
        if self.branches:
            found |= self._of_branches()
        if self.judged:
            found |= self._of_judgements()
        for name in dict.fromkeys(name for r in rows for name in r.grade.parts):
            found[f"reward/part/{name}"] = _mean([r.grade.parts.get(name) for r in rows])
        for source in sorted({r.task.source for r in rows if r.task.source}):
            own = [r for r in rows if r.task.source == source]
            found[f"data/source/{source}/share"] = len(own) / len(rows)
            found[f"data/source/{source}/reward"] = _mean([r.grade.reward for r in own])
            found[f"data/source/{source}/correct"] = _mean([r.grade.correct for r in own])
        return {name: value for name, value in found.items() if value is not None}

    def _of_branches(self) -> dict[str, float]:
        rows = [r for group in self.branches for r in group]
        answers = sum(map(len, self.groups))
        found = {
            "vineppo/branches": float(len(rows)),
            "vineppo/branch_tokens": float(tokens_of(self.branches)),
            "vineppo/valued_steps": len({_begins(r) for r in rows}) / answers,
        }
        if rows:
            truncated = sum(r.completion.truncated for r in rows)
            ungraded = sum(r.grade.reward is None for r in rows)
            found["vineppo/truncated_share"] = truncated / len(rows)
            found["vineppo/ungraded_share"] = ungraded / len(rows)
        return found

    def _of_judgements(self) -> dict[str, float]:
        said = [each for answer in self.judged for each in answer.said]
        unasked = sum(not answer.said for answer in self.judged)
        found = {
            "judge/judgements": float(len(said)),
            "judge/tokens": float(sum(each.tokens for each in said)),
            "judge/unasked_share": unasked / len(self.judged),
        }
        if said:
            found["judge/failed_share"] = sum(each.score is None for each in said) / len(said)
        pairs = [pair for group in self.groups if (pair := _best_and_worst(group))]
        if pairs:
            found["judge/gap"] = sum(best - worst for (best, _), (worst, _) in pairs) / len(pairs)
        lengths = [more - less for (best, more), (worst, less) in pairs if best > worst]
        if lengths:
            found["judge/length_gap"] = sum(lengths) / len(lengths)
        return found


def _best_and_worst(group: Group) -> tuple[tuple[float, int], tuple[float, int]] | None:
    """Return reward and length of the answers with the highest reward and with the lowest.

    None where fewer than two have one.
    """
    known = [(r.grade.reward, r.completion.own_length) for r in group if r.grade.reward is not None]
    if len(known) < 2:
        return None
    return max(known, key=lambda each: each[0]), min(known, key=lambda each: each[0])


def _begins(rollout: Rollout) -> tuple[int, tuple[int, int, int, int]]:
    """Return how long what a branch goes on from is, and which it is."""
    assert rollout.branch is not None
    at = rollout.branch.at
    return len(rollout.task.token_ids) + at, (rollout.task.id, rollout.draw, rollout.sample, at)


def tokens_of(groups: Sequence[Group]) -> int:
    """Count the tokens that the policy wrote: those of others are on nobody's budget."""
    return sum(r.completion.own_length for group in groups for r in group)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [float(x) for x in values if x is not None]
    return sum(known) / len(known) if known else None
