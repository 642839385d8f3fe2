"""Answers that the policy judges itself, in a step and held out: for a recipe that rewards so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from groupwise.config import Config
from groupwise.engine.protocol import Engine, Sampling
from groupwise.methods.slots import Slot
from groupwise.model.formats.checkpoint import Loaded
from groupwise.optim.assemble import Group
from groupwise.prepare.judgements import SelfJudge, read_rubric, with_judgements
from groupwise.prepare.rollouts import failed, verdict
from groupwise.records import Rollout
from groupwise.stages.collected import Collected


def self_judge(config: Config, how: Slot, loaded: Loaded) -> SelfJudge:
    """Return the judge that the policy is, as a slot and the rubric have it."""
    tokenizer = loaded.tokenizer
    ends = [tokenizer.decode([number]) for number in tokenizer.eos_ids]
    return SelfJudge(
        tokenizer,
        read_rubric(config.reward.rubric),
        how["judgements"],
        Sampling(how["max_tokens"], temperature=how["temperature"], top_p=how["top_p"]),
        loaded.model.config.context,
        (*ends, *config.engine.stop),
    )


def judge_groups(judge: SelfJudge, engine: Engine, collected: Collected) -> Collected:
    """Return the groups with mean judgements as rewards, and all that was judged.

    Answers of a group that say the same are judged once: else chance would prefer one to its copy.
    One whose verification failed has no reward, as with any part that fails, and is not judged.
    """
    asked: dict[tuple[int, str], Rollout] = {}
    for number, group in enumerate(collected.groups):
        for rollout in group:
            if not failed(rollout.grade):
                asked.setdefault((number, rollout.said), rollout)
    found = dict(zip(asked, judge.ask(engine, list(asked.values()), "train"), strict=True))
    groups = [
        [r if failed(r.grade) else with_judgements(r, found[number, r.said]) for r in group]
        for number, group in enumerate(collected.groups)
    ]
    return replace(collected, groups=groups, judged=list(found.values()))


def held_out_judgements(
    judge: SelfJudge, engine: Engine, groups: Sequence[Group]
) -> dict[str, float]:
    """Measure the judge on held-out answers of which it is known whether they are right."""
    known = [r for group in groups for r in group if verdict(r.grade) is not None]
    judged = judge.ask(engine, known, "eval")
    scores: dict[bool, list[float]] = {True: [], False: []}
    for answer, each in zip(known, judged, strict=True):
        if each.mean is not None:
            scores[bool(answer.grade.correct)].append(each.mean)
    found = dict(agreement(scores[True], scores[False]))
    means = [*scores[True], *scores[False]]
    if means:
        found["eval/judge_score"] = math.fsum(means) / len(means)
    said = [x.score for each in judged for x in each.said]
    if said:
        found["eval/judge_failed_share"] = sum(score is None for score in said) / len(said)
    return found


def agreement(right: Sequence[float], wrong: Sequence[float]) -> Iterator[tuple[str, float]]:
    """Measure how often a right answer is judged above a wrong one; a tie counts half.

    All right ones against all wrong ones, with its standard error (Hanley and McNeil 1982).
    Nothing where there are none of one of the two.
    """
    n, m = len(right), len(wrong)
    if not n or not m:
        return
    wins = math.fsum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    share = wins / (n * m)
    above, below = share / (2 - share), 2 * share**2 / (1 + share)
    spread = share * (1 - share) + (n - 1) * (above - share**2) + (m - 1) * (below - share**2)
    yield "judge/agreement", share
    yield "judge/agreement_stderr", math.sqrt(max(spread, 0.0) / (n * m))
