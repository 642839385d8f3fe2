"""When a run is sick: one table. The same rules judge a run while it goes on and afterwards.

A rule of your own is an entry of five lines:

    from groupwise.watch.rules import RULES, Rule, above
    RULES.append(Rule("tool errors", above("reward/part/tool_error", limit=0.1, steps=5),
        sees=("reward/part/tool_error",), since=5, threshold="a tenth", origin="our own runs",
        sure="likely", means="the tool is down", change="restart it", source="–"))
"""

# ruff: noqa: E501 - a text of the table is one line

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from groupwise.watch.chart import Point
from groupwise.watch.history import (
    Evidence,
    History,
    Test,
    above,
    all_of,
    any_of,
    below,
    grows,
    known_as,
    middle,
    noise,
)

REWARD = ("reward/sampled_mean", "reward/mean")  # all that was sampled first: the fairer curve
PASS = ("correct/mean", *REWARD)


@dataclass(frozen=True)
class Rule:
    """One sickness: how it shows, how sure that is, what it means, and one thing to change."""

    name: str
    test: Test
    sees: tuple[str, ...]  # metrics, the one to plot first
    since: int  # the first step that it judges
    threshold: str
    origin: str  # where the threshold comes from
    sure: Literal["certain", "likely", "possible"]
    means: str
    change: str  # one, in terms of slots and settings
    source: str
    grave: bool = True  # False: worth knowing, and no sickness


# --- tests that look at several metrics ---------------------------------------------------------


def entropy_collapse(history: History) -> Evidence | None:
    """Entropy gone much faster than the mistakes: a model that is right may be sure of it."""
    start, now = history.first(5, "entropy/mean"), history.last(5, "entropy/mean")
    rate_start, rate_now = history.first(5, "correct/mean"), history.last(5, "correct/mean")
    if not start or not now or middle(start) <= 0:
        return None
    left = 1.0  # of the mistakes of the start
    if rate_start and rate_now:
        left = min((1 - middle(rate_now)) / max(1 - middle(rate_start), 1e-9), 1.0)
    limit = middle(start) * min(0.2, 0.35 * left)
    if middle(now) >= limit:
        return None
    bad = next(point.step for point in now if point.value < limit)
    text = (
        f"entropy/mean {middle(now):.3g}, {middle(start):.3g} in the first 5 steps; "
        f"{100 * left:.0f} % of the mistakes are still made"
    )
    return Evidence("entropy/mean", middle(now), limit, bad, text)


def wrong_answers_grow(history: History) -> Evidence | None:
    """Wrong answers half as long again, right ones less so, and no more right than before."""
    names = ("length/wrong_mean", "length/mean")
    seen = grows(*names, times=1.5, least=0.0)(history)
    start, now = history.first(5, *PASS), history.last(5, *PASS)
    if seen is None or not start or not now:
        return None
    right, right_now = history.first(5, "length/right_mean"), history.last(5, "length/right_mean")
    wrong = history.first(5, *names)
    growth = seen.value / max(middle(wrong), 1e-9)
    with_right = right and right_now and middle(right_now) / max(middle(right), 1e-9) > 0.8 * growth
    gained = middle(now) - middle(start) > 0.1 * max(abs(middle(start)), 0.1)
    return None if with_right or gained else seen


def reward_without_progress(history: History) -> Evidence | None:
    """Held-out accuracy well below its best, beyond its error, while the reward is up since."""
    held_out, errors = history.all("eval/accuracy"), history.all("eval/accuracy_stderr")
    rewards = history.all("reward/shaped_mean", *REWARD)
    if len(held_out) < 2 or held_out[-1].step != history.step or len(rewards) < 10:
        return None
    best, now = max(held_out[:-1], key=lambda point: point.value), held_out[-1]
    known = {point.step: point.value for point in errors}
    typical = 0.5 / math.sqrt(128)  # of 128 tasks, where none is said
    error = math.hypot(known.get(best.step, typical), known.get(now.step, typical))
    limit = best.value - max(3 * error, 0.03)
    then = [point for point in rewards if point.step <= best.step][-5:] or rewards[:1]
    rise = middle(rewards[-5:]) - middle(then)
    if now.value >= limit or rise <= 2 * noise(rewards[-20:]) / math.sqrt(5):
        return None
    text = (
        f"eval/accuracy {now.value:.3g}, was {best.value:.3g} at step {best.step}; the reward rose "
        f"by {rise:.3g} since"
    )
    low = next(p.step for p in held_out if p.step > best.step and p.value < limit)
    return Evidence("eval/accuracy", now.value, limit, low, text)


def paid_for_wrong(history: History) -> Evidence | None:
    """Fewer answers right than at the start, and more reward: both beyond what steps differ by."""
    right, rewards = history.all("correct/mean"), history.all(*REWARD)
    if len(right) < 15 or len(rewards) != len(right) or right[-1].step != history.step:
        return None
    least = 4 * math.sqrt(2 / 5)  # standard errors of a difference of two medians of five
    lost = middle(right[:5]) - middle(right[-5:])
    won = middle(rewards[-5:]) - middle(rewards[:5])
    if lost <= max(least * noise(right[-50:]), 0.05) or won <= least * noise(rewards[-50:]):
        return None
    text = f"correct/mean down by {lost:.3g} since the start, the reward up by {won:.3g}"
    limit = middle(right[:5]) - max(least * noise(right[-50:]), 0.05)
    low = next(p.step for p in right[-5:] if p.value < limit)
    return Evidence("correct/mean", middle(right[-5:]), limit, low, text)


def allowed_gap(history: History) -> float:
    """What precision explains, in nats; a recipe that corrects for a gap may have ten times it."""
    said = history.all("mismatch/limit")
    return (max(said[0].value, 1e-3) if said else 0.03) * (
        10 if history.all("correction/mean") else 1
    )


def sampler_off(history: History) -> Evidence | None:
    """The gap is there from the first steps on."""
    corrected = bool(history.all("correction/mean"))
    limits = {
        "mismatch/abs_mean": allowed_gap(history),
        "mismatch/outside_share": 0.5 if corrected else 0.05,
        "mismatch/probability_mean": 0.03,  # what verl logs
    }
    for name, limit in limits.items():
        start = history.first(1, name)
        if start and start[0].value > limit:
            return above(name, limit=limit, steps=3)(history)
    return None


def sampler_behind(history: History) -> Evidence | None:
    """The gap starts small and grows as the learner moves away."""
    start = history.first(1, "mismatch/abs_mean")
    if not start or start[0].value > 0.3 * allowed_gap(history):
        return None
    limit = max(10 * start[0].value, allowed_gap(history))
    seen = above("mismatch/abs_mean", limit=limit, steps=3)(history)
    return seen and Evidence(
        seen.metric, seen.value, limit, seen.first,
        f"mismatch/abs_mean {seen.value:.3g}, {start[0].value:.3g} at the first step",
    )  # fmt: skip


def clipped(history: History) -> Evidence | None:
    """A tenth of the tokens, both sides together, at ratios far from 1.

    A ratio of whole answers clips more, and close to 1: that is how it is meant. Where ratios are
    not known, a fifth.
    """
    high, low = history.last(5, "clip/high"), history.last(5, "clip/low")
    both = history.last(5, "clip/fraction")  # of tools that do not tell the sides apart
    if high and low:
        both = [Point(h.step, h.value + w.value) for h, w in zip(high, low, strict=True)]
    ratios = history.last(5, "ratio/max")
    limit = 0.1 if ratios else 0.2
    if not both or middle(both) <= limit or (ratios and middle(ratios) <= 2.0):
        return None
    name = "clip/fraction"
    if high and low:
        name = "clip/high" if middle(high) >= middle(low) else "clip/low"
    text = f"{100 * middle(both):.0f} % of the tokens are clipped, most by {name}"
    probable = history.last(1, f"{name}_probability")
    if probable:
        text += f", at a mean probability of {probable[0].value:.2g}"
    first = next(point.step for point in both if point.value > limit)
    return Evidence(name, middle(both), limit, first, text)


def gradient_spikes(history: History) -> Evidence | None:
    """Three of the last 20 steps ten times the median of all 20."""
    points = history.last(20, "optim/grad_norm")
    if not points:
        return None
    limit = 10 * middle(points)
    spikes = [point for point in points if point.value > limit > 0]
    if len(spikes) < 3:
        return None
    worst = max(spikes, key=lambda point: point.value)
    text = f"optim/grad_norm up to {worst.value:.3g}, {middle(points):.3g} in between; {len(spikes)} times in 20 steps"
    return Evidence("optim/grad_norm", worst.value, limit, spikes[0].step, text)


def reward_falls(history: History) -> Evidence | None:
    """Far below the best stretch of steps, by more than steps differ; or next to nothing left."""
    points = history.all(*REWARD)
    if len(points) < 4 or points[-1].step != history.step:
        return None
    size = 3 if len(points) < 20 else 5
    now, before = points[-size:], points[:-size]
    best, limit = points[:1], 0.3 * points[0].value
    if len(before) >= 5:
        stretches = [before[at : at + size] for at in range(0, len(before) - size + 1, size)]
        highest = max(stretches, key=middle)
        fall = max(4 * noise(before[-50:]), 0.5 * abs(middle(highest)))
        if middle(highest) - fall > limit:
            best, limit = highest, middle(highest) - fall
    if middle(now) >= limit:
        return None
    name = known_as(history, *REWARD)
    text = f"{name} {middle(now):.3g}, was {middle(best):.3g} at step {best[0].step}"
    first = next(p.step for p in points if p.step > best[-1].step and p.value < limit)
    return Evidence(name, middle(now), limit, first, text)


def nothing_passes(history: History) -> Evidence | None:
    """From the start: a run that could and no longer can has another sickness."""
    names = ("pass_rate/none", "groups/all_fail_share")
    start = history.first(1, *names)
    if not start or start[0].value < 0.5:
        return None
    return above(*names, limit=0.75, steps=5)(history)


def no_gain(history: History) -> Evidence | None:
    """No more reward in the last twenty steps than in the first, beyond what chance gives."""
    points, held_out = history.all(*REWARD), history.all("eval/accuracy")
    rate = history.last(20, "correct/mean")
    if len(points) < 60 or points[-1].step != history.step:
        return None
    start, now = points[:20], points[-20:]
    limit = middle(start) + 2 * noise(points[-60:]) * math.sqrt(2 / 20) * 1.25  # of two medians
    better = len(held_out) > 1 and held_out[-1].value > held_out[0].value + 0.05
    if middle(now) > limit or better or (rate and middle(rate) > 0.9):
        return None
    name = known_as(history, *REWARD)
    text = f"{name} {middle(now):.3g} in the last 20 steps, {middle(start):.3g} in the first 20"
    return Evidence(name, middle(now), limit, points[20].step, text)


def guesses(history: History) -> Evidence | None:
    """Right in a tenth to nine tenths, whatever the prompt, and no more often than at the start."""
    seen = below("pass_rate/skill", limit=0.02, steps=20)(history)
    start, now = history.first(10, "correct/mean"), history.last(10, "correct/mean")
    if seen is None or not start or not now or not 0.1 < middle(now) < 0.9:
        return None
    return None if middle(now) > middle(start) + 0.05 else seen


def few_independent_samples(history: History) -> Evidence | None:
    """The reward jumps from step to step as if fewer than six answers had been graded."""
    points, spread = history.last(20, "reward/mean"), history.last(20, "reward/std")
    if not points or not spread or middle(spread) <= 0:
        return None
    limit = middle(spread) / math.sqrt(6)
    scatter = noise(points)
    if scatter <= limit:
        return None
    text = f"reward/mean differs by {scatter:.2g} from step to step, {middle(spread):.2g} between answers"
    return Evidence("reward/mean", scatter, limit, points[0].step, text)


# --- the table: causes before what follows from them ----------------------------------------------

_DAPO = "Yu et al. 2025, DAPO (2503.14476)"
_TIS = "Yao et al. 2025, on rollouts that training does not agree with (TIS)"
_CATALOGUE = "range of docs/metrics.md"

RULES: list[Rule] = [
    Rule(
        "grader errors",
        any_of(above("reward/failed_share", limit=0.05, steps=1), above("reward/failed_share", limit=0.01, steps=3)),
        sees=("reward/failed_share",), since=1,
        threshold="5 % in a step, or 1 % in most of three", origin="reward.max_failed_share; sound graders have 0",
        sure="certain",
        means="the reward function raises or runs out of time; what is learned from is what it can grade",
        change="fix what grader_reason in the rollouts says, after `groupwise check-reward`",
        source="pains of users: exceptions that become 0 (trl#4939, verl#5635)",
    ),
    Rule(
        "reward noise",
        above("reward/unequal_share", limit=0.02, steps=3),
        sees=("reward/unequal_share", "reward/mean"), since=3,
        threshold="2 % of repeated answers", origin="a function of the answer has 0",
        sure="certain",
        means="the same answer to the same prompt gets different rewards: a random or stateful grader, or a judge that wavers",
        change="make the grader a function of the answer (a judge: temperature 0, votes=3)",
        source=f"{_DAPO}: reward noise",
    ),
    Rule(
        "sampler behind",
        sampler_behind,
        sees=("mismatch/abs_mean", "mismatch/abs_max", "staleness/mean"), since=3,
        threshold="as for mismatch, and ten times the first step's", origin="what precision explains is there from the first step on",
        sure="likely",
        means="new weights do not reach the sampler: rollouts are of an older policy, more so with every update",
        change="mend the engine's sync (engine.weights=\"shared\" has nothing to deliver)",
        source="verl#7495, trl#5312: weights that never arrived",
    ),
    Rule(
        "mismatch",
        sampler_off,
        sees=("mismatch/abs_mean", "mismatch/outside_share", "mismatch/abs_max"), since=3,
        threshold="mismatch/limit on average (0.03 nats where it is not known), or 5 % of tokens off by more than a tenth; ten times that with a correction", origin="guard.mismatch; float32 has 1e-6, bfloat16 0.02",
        sure="likely",
        means="sampler and learner compute different probabilities for the same weights: another precision, temperature or template",
        change="weigh by learner/sampler: recipe.correction=\"truncated(cap=2.0)\" (recipe tis)",
        source=_TIS,
    ),
    Rule(
        "gradient",
        any_of(above("optim/skipped", limit=0.0, steps=1), gradient_spikes),
        sees=("optim/grad_norm", "optim/skipped"), since=1,
        threshold="an update that is not finite, or three spikes of ten times the median in 20 steps", origin=_CATALOGUE,
        sure="likely",
        means="single batches move the weights far: rate too high, or a row that should not be there",
        change="halve optim.learning_rate",
        source="users: NaN without a precursor (verl#2505, unsloth#3006)",
    ),
    Rule(
        "clipping",
        clipped,
        sees=("clip/high", "clip/low", "clip/high_probability", "clip/fraction"), since=5,
        threshold="a tenth of the learned tokens, and ratios above 2 (a fifth where ratios are not known)", origin="range of docs/metrics.md, three times what healthy runs here have; GSPO clips 0.15 and more, at ratios near 1",
        sure="likely",
        means="the policy has left its anchor: most of what later updates learn is thrown away, rare tokens first",
        change="fewer updates on a batch: halve recipe.schedule.updates",
        source=f"{_DAPO}: clip-higher; Zheng et al. 2025, GSPO (2507.18071)",
    ),
    Rule(
        "entropy collapse",
        entropy_collapse,
        sees=("entropy/mean", "groups/distinct_share", "correct/mean"), since=10,
        threshold="below a fifth of its start, and gone three times as fast as the mistakes", origin="healthy runs here lose entropy more slowly than mistakes",
        sure="likely",
        means="the policy is sure before it is right and explores no more: groups become copies",
        change="raise the upper clip: recipe.gate.high=0.28",
        source=_DAPO,
    ),
    Rule(
        "entropy explosion",
        grows("entropy/mean", times=2.0, least=0.5),
        sees=("entropy/mean",), since=10,
        threshold="twice its start, and half a nat", origin="healthy runs stay below their start, clip-higher within 1.5 times",
        sure="likely",
        means="the policy dissolves into noise: a rate too high, or long bad answers that hardly count",
        change="halve optim.learning_rate",
        source=f"{_DAPO}: an unhealthy increase of entropy and length",
    ),
    Rule(
        "kl",
        above("kl/ref", limit=1.0, steps=5),
        sees=("kl/ref",), since=5,
        threshold="1 nat a token", origin=_CATALOGUE,
        sure="likely",
        means="the policy is far from where it started: what the model knew is being overwritten",
        change="halve optim.learning_rate",
        source="Shao et al. 2024, GRPO (2402.03300)",
    ),
    Rule(
        "truncation",
        above("length/truncated_share", limit=0.1, steps=5),
        sees=("length/truncated_share", "length/p95", "length/mean"), since=5,
        threshold="a tenth of the answers", origin=_CATALOGUE,
        sure="certain",
        means="answers are cut off and graded as wrong, however good they were: noise in the reward",
        change="raise engine.max_tokens (or overlong=\"mask\" where there is no room)",
        source=f"{_DAPO}: overlong filtering, its largest single gain",
    ),
    Rule(
        "length explosion",
        wrong_answers_grow,
        sees=("length/wrong_mean", "length/right_mean", "length/mean"), since=10,
        threshold="wrong answers 1.5 times as long, right ones not, no gain", origin="Dr. GRPO: GRPO's wrong answers grow after the reward stands still",
        sure="likely",
        means="the loss divides by each answer's own length, so long wrong answers cost little",
        change="recipe.aggregation=\"token_mean_batch()\" (as dapo has it)",
        source="Liu et al. 2025, Dr. GRPO (2503.20783)",
    ),
    Rule(
        "repetition",
        all_of(above("text/repetition", limit=0.3, steps=5), grows("text/repetition", times=2.0, least=0.3)),
        sees=("text/repetition", "length/mean"), since=10,
        threshold="0.3 of all runs of four tokens, and twice the start", origin="ordinary prose has below 0.1",
        sure="likely",
        means="answers turn in circles",
        change="halve optim.learning_rate",
        source="users: gibberish (verl#5953, Search-R1#162)",
    ),
    Rule(
        "reward falls",
        reward_falls,
        sees=(*REWARD, "correct/mean"), since=5,
        threshold="half of its best lost and four times what steps differ by, or seven tenths of the first step's", origin="healthy runs here fall by a third of their best stretch at most",
        sure="likely",
        means="the policy has broken: a step too large, or a signal that points the wrong way",
        change="halve optim.learning_rate, from the checkpoint before",
        source="users: collapse (verl#2738, OpenRLHF#931)",
    ),
    Rule(
        "all groups fail",
        nothing_passes,
        sees=("pass_rate/none", "groups/all_fail_share", "groups/dead_share"), since=5,
        threshold="three quarters of the groups", origin="at G samples a pass rate below 0.25^(1/G) of failing",
        sure="certain",
        means="no answer of most groups is right: the data is too hard, or the grader calls nothing right",
        change="easier data (`groupwise probe` says which), after a look at the grader with `groupwise check-reward`",
        source=f"{_DAPO}: dynamic sampling; trl#3857",
    ),
    Rule(
        "all groups pass",
        above("pass_rate/all", "groups/all_pass_share", limit=0.75, steps=5),
        sees=("pass_rate/all", "groups/all_pass_share", "groups/dead_share"), since=5,
        threshold="three quarters of the groups", origin="as for all groups fail",
        sure="certain", grave=False,
        means="the data is used up: nearly everything is right, and nothing is left to learn from",
        change="harder data, or end the run",
        source=f"{_DAPO}: dynamic sampling",
    ),
    Rule(
        "dead groups",
        above("groups/dead_share", limit=0.75, steps=5),
        sees=("groups/dead_share",), since=5,
        threshold="three quarters of the groups", origin="as for all groups fail",
        sure="certain", grave=False,
        means="most groups have equal rewards, and teach nothing",
        change="double group_size",
        source="trl#3857, jsboige/CoursIA#10603",
    ),
    Rule(
        "guessing",
        guesses,
        sees=("pass_rate/skill", "correct/mean"), since=30,
        threshold="the intraclass correlation of pass rates below 0.02 in most of 20 steps, and no gain", origin="0 where every prompt is passed as often as any other",
        sure="possible",
        means="which prompt it is makes no difference to being right: answers are guessed, or rewarded at random",
        change="tasks with an open answer in place of choices (data.train)",
        source=f"{_DAPO}: answers turned into whole numbers, so that guessing does not pay",
    ),
    Rule(
        "reward hacking",
        any_of(reward_without_progress, paid_for_wrong),
        sees=("eval/accuracy", "reward/mean", "correct/mean"), since=10,
        threshold="held-out accuracy three standard errors (and 3 points) below its best, or training accuracy four below its start, while the reward rose", origin="statistics of the held-out tasks",
        sure="likely",
        means="the reward is had without doing the task, or training answers are memorised",
        change="change the part of reward.parts that still rises, after reading the samples below",
        source="Visual-RFT#176, #79; articles on reward hacking",
    ),
    Rule(
        "stalled",
        no_gain,
        sees=(*REWARD, "eval/accuracy", "optim/grad_snr"), since=60,
        threshold="no gain beyond chance from the first 20 steps to the last", origin="two standard errors of the two medians",
        sure="likely",
        means="nothing is learned: a rate too low, too few useful groups, or a reward that answers can't move",
        change="three times optim.learning_rate",
        source="trl#2703, trl#2872: lr 5e-7 with LoRA",
    ),
    Rule(
        "noisy batches",
        few_independent_samples,
        sees=("reward/mean", "reward/std"), since=20,
        threshold="as noisy as six independent answers", origin="σ/√n",
        sure="possible", grave=False,
        means="a step sees so few prompts that chance decides which way it goes",
        change="double prompts_per_step",
        source="articles: tiny batches, the commonest mistake",
    ),
]  # fmt: skip


INTRO = """# Health rules

<!-- Generated by `make docs` from groupwise/watch/rules.py. Do not edit. -->

What [health.md](health.md) is about, rule by rule, in the order in which they are judged: causes
before what follows from them. A rule judges from the step `since` on. Rules marked *note* are worth
knowing and no sickness.
"""


def rules_page() -> str:
    """docs/rules.md."""
    lines = [INTRO]
    for rule in RULES:
        metrics = ", ".join(f"`{name}`" for name in rule.sees)
        grade = rule.sure if rule.grave else f"{rule.sure}; note"
        lines += [
            f"## {rule.name}\n",
            f"- sees: {metrics}",
            f"- fires: {rule.threshold}; since step {rule.since}",
            f"- threshold from: {rule.origin}",
            f"- how sure: {grade}",
            f"- usually means: {rule.means}",
            f"- try: {rule.change}",
            f"- source: {rule.source}\n",
        ]
    return "\n".join(lines)
