"""The groups of answers that a step learns from, and those that were drawn and sent away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from groupwise.model.cost import Group as Size
from groupwise.optim.assemble import Group, sequences_of
from groupwise.prepare.rollouts import failed
from groupwise.records import Rollout, TokenBatch


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
    branches: list[Group] = field(default_factory=list)  # of each group's answers, where asked for

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
        return tokens_of(self.drawn + self.greedy + self.branches)

    def sizes(self) -> list[Size]:
        """Return prompts and completions that were sampled, by their tokens."""
        found = sequences_of(self.drawn + self.greedy).sizes()
        rows = [r for group in self.branches for r in group if r.branch is not None]
        for (prompt, _), same in groupby(rows, key=_begins):
            found.append(Size(prompt, [r.completion.own_length for r in same]))
        return found

    def metrics(self) -> dict[str, float]:
        """Measure all that was sampled: what dynamic sampling drops is part of the picture."""
        rows = [r for group in self.drawn for r in group]
        if not rows:
            return {}
        found = {
            "refill/rounds": float(self.rounds),
            "refill/tokens": float(self.refill_tokens),
            "refill/drawn_groups": float(len(self.groups) + len(self.dropped)),
            "length/sampled_mean": sum(r.completion.own_length for r in rows) / len(rows),
            "length/truncated_share": sum(r.completion.truncated for r in rows) / len(rows),
            "reward/sampled_mean": _mean([r.grade.reward for r in rows]),
            "reward/failed_share": sum(failed(r.grade) for r in rows) / len(rows),
            "reward/missing_share": sum(r.grade.reward is None for r in rows) / len(rows),
            "correct/mean": _mean([r.grade.correct for r in rows]),
        }
        if self.branches:
            found |= self._of_branches()
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
