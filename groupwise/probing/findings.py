"""Figures of a probe by setting: pass rates, useful groups, lengths, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.errors import ConfigError
from groupwise.evaluate.estimates import (
    SUBSETS,
    Estimate,
    PassCount,
    Rates,
    all_alike,
    over_prompts,
)
from groupwise.graders.by_row import ROW
from groupwise.graders.rubric import Grader
from groupwise.prepare.rollouts import failed
from groupwise.records import Grade, Rollout, Task

PASS_AT = 8
GROUPS = (2, 4, 8, 16, 32, 64)
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "longest": 1.0}


@dataclass
class Sampled:
    """One template and temperature: its prompts as the model reads them, and the samples."""

    template: str
    temperature: float
    tasks: list[Task]
    groups: list[list[Rollout]] = field(default_factory=list)


@dataclass(frozen=True)
class PassRule:
    """The rule for a pass, as a function and in words."""

    words: str
    passed: Callable[[Grade], bool]


@dataclass(frozen=True)
class SettingFigures:
    """The figures of one template and temperature. Samples whose reward failed are left out of all
    but the lengths; shares are of graded samples unless their names say otherwise.
    """

    template: str
    temperature: float
    prompts: int
    sampled: int
    passing: Estimate
    pass_at: Estimate
    useful: Estimate  # groups with passes and failures, of the configuration's size
    useful_by_group: dict[int, Estimate]
    spread: Estimate  # groups whose rewards differ, of `spread_group` samples
    spread_group: int
    binary: bool  # whether rewards have two values at most
    histogram: dict[str, int]  # prompts by pass rate
    reward: float
    parts: dict[str, float]  # means, before weights
    format_share: float | None  # None: no part of the reward looks at the format
    lengths: dict[str, int]
    truncated_share: float  # of all samples
    failed: int  # samples whose reward failed
    abstained: int  # samples that the reward says nothing about
    reason: str  # why they failed, most often
    example: dict[str, Any]  # one that did not pass, or else one that did
    turns: float | None  # of the policy in an episode; None: nothing answered it
    stops: dict[str, float]  # shares of all episodes by why they ended, the most frequent first

    @property
    def name(self) -> str:
        return f"{self.template} at {self.temperature:g}"

    @property
    def never(self) -> int:
        return self.histogram["never"]

    @property
    def always(self) -> int:
        return self.histogram["always"]

    @property
    def signal(self) -> Estimate:
        """Return the groups that teach something: by passes, or by rewards where those have more
        values.
        """
        return self.useful if self.binary else self.spread


def passing(grader: Grader, threshold: float | None = None) -> PassRule:
    """Choose the rule: a reward of the threshold; else what the reward calls correct; else full
    marks.
    """
    if threshold is None and grader.decider is not None:
        judge = "its row's grader" if grader.decider == ROW else grader.decider
        return PassRule(f"{judge} gives 1", lambda grade: bool(grade.correct))
    if threshold is None:
        threshold = sum(max(weight, 0.0) for weight in grader.weights.values())
        words = f"a reward of {threshold:g}, which all parts give together, or more"
    else:
        words = f"a reward of {threshold:g} or more"
    least = threshold - 1e-9  # parts are added up in floating point

    def passed(grade: Grade) -> bool:
        return grade.reward is not None and grade.reward >= least

    return PassRule(words, passed)


def finding(sampled: Sampled, passing: PassRule, group: int) -> SettingFigures:
    """Compute all figures of one setting."""
    rows = [rollout for rollouts in sampled.groups for rollout in rollouts]
    graded = [[r for r in rollouts if r.grade.reward is not None] for rollouts in sampled.groups]
    counts = [PassCount(len(g), sum(passing.passed(r.grade) for r in g)) for g in graded]
    rates = Rates(counts)
    if not rates.counts:
        raise ConfigError(
            f"None of {len(rows)} samples has a reward; most often: {_reason(rows) or 'no reason'}."
            " Mend reward.parts."
        )
    rewards = [[r.grade.reward for r in g] for g in graded]
    usual = min(group, max(map(len, rewards)))
    differ = [1 - all_alike(values, usual) for values in rewards if len(values) >= usual]
    ok = [r for g in graded for r in g]
    episodes = [r.completion.episode for r in rows if r.completion.episode is not None]
    stops = Counter(episode.stop for episode in episodes)
    parts = {name: _mean([r.grade.parts.get(name) for r in ok]) for name in rows[0].grade.parts}
    formats = [name for name in parts if name.startswith("format(")]
    return SettingFigures(
        template=sampled.template,
        temperature=sampled.temperature,
        prompts=len(sampled.groups),
        sampled=len(rows),
        passing=rates.passing,
        pass_at=rates.pass_at(PASS_AT),
        useful=rates.useful(group),
        useful_by_group={size: rates.useful(size) for size in sorted({*GROUPS, group})},
        spread=over_prompts(differ, len(ok) // usual, SUBSETS),
        spread_group=usual,
        binary=len({r.grade.reward for r in ok}) <= 2,
        histogram=histogram(rates.counts),
        reward=sum(r.grade.reward or 0.0 for r in ok) / len(ok),
        parts=parts,
        format_share=_format_share(ok, formats),
        lengths=quantiles([r.completion.own_length for r in rows]),
        truncated_share=sum(r.completion.truncated for r in rows) / len(rows),
        failed=sum(failed(r.grade) for r in rows),
        abstained=sum(r.grade.status == "abstained" for r in rows),
        reason=_reason(rows),
        example=_example(ok, passing),
        turns=_mean([len(x.turns) for x in episodes]) if episodes else None,
        stops={stop: number / len(episodes) for stop, number in stops.most_common()},
    )


def histogram(counts: Sequence[PassCount]) -> dict[str, int]:
    """Count prompts by the share of their samples that passed."""
    bins = {"never": 0, "to 25 %": 0, "to 50 %": 0, "to 75 %": 0, "to 100 %": 0, "always": 0}
    names = list(bins)
    for samples, passed in counts:
        if passed == 0:
            bins["never"] += 1
        elif passed == samples:
            bins["always"] += 1
        else:  # up to a quarter, a half, three quarters, and less than all
            bins[names[-(-4 * passed // samples)]] += 1
    return bins


def quantiles(lengths: Sequence[int]) -> dict[str, int]:
    """Return the least length that so large a share does not exceed."""
    ordered = sorted(lengths)
    return {
        name: ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
        for name, share in QUANTILES.items()
    }


def _mean(values: Sequence[float | None]) -> float:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else 0.0


def _format_share(rows: Sequence[Rollout], formats: Sequence[str]) -> float | None:
    """Return the share of samples that every part about the format accepts."""
    if not formats:
        return None
    return sum(all((r.grade.parts[f] or 0) >= 1 for f in formats) for r in rows) / len(rows)


def _reason(rows: Sequence[Rollout]) -> str:
    found = Counter(r.grade.reason for r in rows if failed(r.grade))
    found = found or Counter(r.grade.reason for r in rows if r.grade.status == "abstained")
    return found.most_common(1)[0][0] if found else ""


def _example(rows: Sequence[Rollout], passing: PassRule) -> dict[str, Any]:
    shown = next((r for r in rows if not passing.passed(r.grade)), rows[0])
    return {
        "prompt_id": shown.task.id,
        "answer": shown.task.answer,
        "completion": shown.text,
        "reward": shown.grade.reward,
        "finish": shown.completion.finish,
    }
