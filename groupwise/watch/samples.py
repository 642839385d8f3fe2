"""Measures of a step's samples: lengths, pass rates, variety, repetition, words, waste.

Pure functions of rollouts, vectorised where a step has many tokens: watching must not cost
noticeable time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from groupwise.graders.mathematics.extract import find
from groupwise.records import Rollout, TokenBatch
from groupwise.watch.episodes import turn_measures

Groups = Sequence[Sequence[Rollout]]

# Pass rates of groups: none, up to a quarter, ..., all.
BANDS = ("none", "to_25", "to_50", "to_75", "below_100", "all")
NGRAM = 4  # tokens: shorter ones repeat in any text
MOST_READ = 64  # answers of a step whose words are looked at; thousands would take their time
REFLECTION = re.compile(
    r"\b(?:wait|hmm+|alternatively|let me (?:re)?(?:check|think|verify|consider)|re-?check|"
    r"double[- ]check|on second thought|actually|let's verify|i made a mistake)\b",
    re.IGNORECASE,
)


def sample_measures(groups: Groups, version: int) -> dict[str, float]:
    """Measure all that was sampled for a step; `version` is the learner's before its updates."""
    rows = [rollout for group in groups for rollout in group]
    if not rows:
        return {}
    age = [version - row.completion.version for row in rows]
    read = spread(rows, MOST_READ)
    reflecting = sum(bool(REFLECTION.search(row.said)) for row in read)
    return {
        **lengths(rows),
        **length_bias(groups),
        **pass_rates(groups),
        **rewards(groups),
        **turn_measures(groups),
        "groups/distinct_share": distinct_share(groups),
        "text/repetition": repetition([row.completion.own_ids for row in read]),
        "text/reflection_share": reflecting / len(read),
        "text/answer_share": sum(is_marked(row.said) for row in read) / len(read),
        "staleness/mean": sum(age) / len(age),
        "staleness/max": float(max(age)),
    }


def spread(rows: Sequence[Rollout], most: int) -> list[Rollout]:
    """Return at most so many, spread over the step: the same places in every step."""
    count = min(len(rows), most)
    return [rows[number * len(rows) // count] for number in range(count)]


def passed(rollout: Rollout) -> bool | None:
    """Return whether an answer is right; where nothing says so, whether it was rewarded."""
    grade = rollout.grade
    if grade.correct is not None or grade.reward is None:
        return grade.correct
    return grade.reward > 0


# --- lengths ----------------------------------------------------------------------------------


def lengths(rows: Sequence[Rollout]) -> dict[str, float]:
    """Return mean and 95th percentile of right and wrong answers apart, and of those that ended."""
    length_N = np.array([row.completion.own_length for row in rows])
    right_N = np.array([passed(row) for row in rows], dtype=object)
    ended_N = ~np.array([row.completion.truncated for row in rows])
    found = {"length/p95": float(np.quantile(length_N, 0.95))}
    for name, own_N in (("right", right_N == True), ("wrong", right_N == False)):  # noqa: E712
        if own_N.any():
            found[f"length/{name}_mean"] = float(length_N[own_N].mean())
            found[f"length/{name}_p95"] = float(np.quantile(length_N[own_N], 0.95))
    if ended_N.any():
        found["length/ended_mean"] = float(length_N[ended_N].mean())
    return found


def length_bias(groups: Groups) -> dict[str, float]:
    """Return how much longer wrong answers are than right ones to the same prompts.

    Hard prompts have long answers and wrong ones, which is no bias: only mixed groups tell.
    """
    right, wrong = 0.0, 0.0
    for group in groups:
        own: dict[bool, list[int]] = {True: [], False: []}
        for row in group:
            verdict = passed(row)
            if verdict is not None:
                own[verdict].append(row.completion.own_length)
        if own[True] and own[False]:
            right += sum(own[True]) / len(own[True])
            wrong += sum(own[False]) / len(own[False])
    return {"length/wrong_over_right": wrong / right} if right else {}


# --- groups -----------------------------------------------------------------------------------


def pass_rates(groups: Groups) -> dict[str, float]:
    """Return the spread of pass rates over groups, and how much of it is the prompts' own.

    skill: (variance of pass rates between prompts − what chance alone gives) as a share of all
    variance, the intraclass correlation. 0: every prompt is passed as often as any other, as when
    answers are guessed. 1: each prompt is always passed or never.
    """
    marks = [[mark for row in group if (mark := passed(row)) is not None] for group in groups]
    marks = [group for group in marks if len(group) > 1]
    if not marks:
        return {}
    right_P = np.array([sum(group) for group in marks], dtype=float)
    size_P = np.array([len(group) for group in marks], dtype=float)
    rate_P = right_P / size_P
    # none 0, then quarters, all 5
    band_P = np.where(rate_P >= 1, 5, np.minimum(np.ceil(rate_P * 4), 4)).astype(int)
    count = np.bincount(band_P, minlength=len(BANDS)) / len(marks)
    found = {f"pass_rate/{name}": float(x) for name, x in zip(BANDS, count, strict=True)}
    rate = right_P.sum() / size_P.sum()
    if len(marks) > 1 and 0 < rate < 1:
        # Analysis of variance with groups of unequal size.
        rows, number = size_P.sum(), len(marks)
        between = (size_P * (rate_P - rate) ** 2).sum() / (number - 1)
        within = (right_P * (1 - rate_P)).sum() / (rows - number)
        typical = (rows - (size_P**2).sum() / rows) / (number - 1)
        found["pass_rate/skill"] = float((between - within) / (between + (typical - 1) * within))
    return found


def rewards(groups: Groups) -> dict[str, float]:
    """Return the spread of rewards, and the share of copies of an answer with another reward."""
    known = [row.grade.reward for group in groups for row in group if row.grade.reward is not None]
    if not known:
        return {}
    repeats = unequal = 0
    for group in groups:
        first: dict[tuple[int, ...], float] = {}
        for row in group:
            if row.grade.reward is None:
                continue
            # All tokens: where a tool answered otherwise, another reward is no contradiction.
            key = tuple(row.completion.token_ids)
            if key in first:
                repeats += 1
                unequal += first[key] != row.grade.reward
            else:
                first[key] = row.grade.reward
    found = {"reward/std": float(np.std(known))}
    if repeats:
        found["reward/unequal_share"] = unequal / repeats
    return found


def distinct_share(groups: Groups) -> float:
    """Return the share of different answers within a group: 1 where none is a copy.

    By the policy's own tokens: what tools answered is no variety of its.
    """
    distinct = sum(len({row.completion.own_ids for row in group}) for group in groups)
    return distinct / max(sum(len(group) for group in groups), 1)


# --- text -------------------------------------------------------------------------------------


def repetition(tokens: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Return the share of runs of n tokens that came before in the same answer."""
    lengths_N = np.array([len(row) for row in tokens])
    if not (lengths_N >= n).any():
        return 0.0
    flat = np.fromiter(chain.from_iterable(tokens), np.uint64, lengths_N.sum())
    row_of = np.repeat(np.arange(len(tokens), dtype=np.uint64), lengths_N)
    whole = row_of[: len(flat) - n + 1] == row_of[n - 1 :]
    key = row_of[: len(whole)].copy()
    for at in range(n):  # a hash that wraps around: collisions are one in 2^64
        key = (key ^ (key >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15)
        key = key + flat[at : at + len(whole)]
    key = np.sort(key[whole])  # np.unique takes ten times as long
    return float((key[1:] == key[:-1]).sum()) / len(key)


def is_marked(text: str) -> bool:
    """Return whether the answer is in a tag or a box, or follows a phrase that announces it."""
    return find(text).how in ("tag", "boxed", "marked")


# --- waste ------------------------------------------------------------------------------------


def wasted(
    batch: TokenBatch | None, dropped: int, sampled: int, *, rewarded: bool = True
) -> dict[str, float]:
    """Return sampled tokens that taught nothing, by cause, as shares of all that were sampled.

    dropped: dynamic sampling sent the group away; ungraded: no reward; masked: a filter took the
    answer out of the loss; dead: no advantage, as where all rewards of a group are equal. Where
    nothing is sampled nothing is wasted; without rewards (`rewarded`) an advantage of 0 is no loss.
    """
    if not sampled:
        return {}
    lost = {"dropped": float(dropped)}
    if batch is not None and batch.learn_N is not None and batch.advantage_NT is not None:
        length_N = batch.length_N.double()
        ungraded_N = batch.task_reward_N.isnan() & ~batch.learn_N
        masked_N = ~batch.learn_N & ~ungraded_N
        dead_N = batch.learn_N & (batch.advantage_NT == 0).all(1) & rewarded
        causes = {"ungraded": ungraded_N, "masked": masked_N, "dead": dead_N}
        totals = torch.stack([(length_N * own_N).sum() for own_N in causes.values()]).tolist()
        lost |= dict(zip(causes, totals, strict=True))
    shares = {f"cost/wasted/{name}": tokens / sampled for name, tokens in lost.items()}
    return shares | {"cost/wasted_share": sum(shares.values())}
