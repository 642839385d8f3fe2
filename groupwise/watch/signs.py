"""Tests for the health rules that look at several metrics of a run, or at one in a special way.

Each is a function of the history up to now that returns what it saw, or None. rules.py names them.
"""

from __future__ import annotations

import math

from groupwise.runfiles.catalogue import REWARD
from groupwise.watch.chart import Point
from groupwise.watch.history import (
    Evidence,
    History,
    above,
    below,
    first_known,
    grows,
    middle,
    noise,
)

PASS = ("correct/mean", *REWARD)
MISSING = ("reward/missing_share", "reward/ungraded_share")  # the second of older runs
FAIL_SHARE = ("pass_rate/none", "groups/all_fail_share")
PASS_SHARE = ("pass_rate/all", "groups/all_pass_share")


def entropy_collapse(history: History) -> Evidence | None:
    """Detect entropy that falls much faster than mistakes: a right model may be sure of it."""
    start, now = history.first(5, "entropy/mean"), history.last(5, "entropy/mean")
    if not start or not now or middle(start) <= 0 or history.supervised:
        return None
    left = mistakes_left(history)
    limit = middle(start) * min(0.2, 0.35 * left)
    if middle(now) >= limit:
        return None
    bad = next(point.step for point in now if point.value < limit)
    text = (
        f"entropy/mean {middle(now):.3g}, {middle(start):.3g} in the first 5 steps; "
        f"{100 * left:.0f} % of the mistakes are still made"
    )
    return Evidence("entropy/mean", middle(now), limit, bad, text)


def mistakes_left(history: History) -> float:
    """Return the share of the first steps' mistakes that is left; 1 where nobody says what is
    right.
    """
    start, now = history.first(5, "correct/mean"), history.last(5, "correct/mean")
    if not start or not now:
        return 1.0
    return min((1 - middle(now)) / max(1 - middle(start), 1e-9), 1.0)


def sudden_collapse(history: History) -> Evidence | None:
    """Detect next to no entropy within the first steps, before there is a baseline of five."""
    start, now = history.first(1, "entropy/mean"), history.last(3, "entropy/mean")
    if history.step > 20 or not start or not now or mistakes_left(history) < 0.5:
        return None
    limit = 0.05 * start[0].value
    if middle(now) >= limit:
        return None
    low = next(p.step for p in history.all("entropy/mean") if p.value < limit)
    text = f"entropy/mean {middle(now):.3g}, {start[0].value:.3g} at step {start[0].step}"
    return Evidence("entropy/mean", middle(now), limit, low, text)


def wrong_answers_grow(history: History) -> Evidence | None:
    """Detect wrong answers half as long again, right ones less so, and no more right ones."""
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


def calls_vanish(history: History) -> Evidence | None:
    """Detect a policy that has called its tools, and does so no more."""
    name = "turns/calls"
    start, now = history.first(5, name), history.last(5, name)
    if len(start) < 5 or not now or middle(start) < 0.25:
        return None
    limit = 0.1 * middle(start)
    if middle(now) >= limit:
        return None
    bad = next(point.step for point in now if point.value < limit)
    text = f"{name} {middle(now):.3g}, {middle(start):.3g} in the first 5 steps"
    return Evidence(name, middle(now), limit, bad, text)


def agreement_falls(history: History) -> Evidence | None:
    """Detect a judge that agrees with the verifier less than it did, beyond chance."""
    name = "judge/agreement"
    points, errors = history.all(name), history.all("judge/agreement_stderr")
    if len(points) < 2 or points[-1].step != history.step:
        return None
    best, now = max(points[:-1], key=lambda point: point.value), points[-1]
    known = {point.step: point.value for point in errors}
    error = math.hypot(known.get(best.step, 0.0), known.get(now.step, 0.0))
    limit = best.value - max(0.1, 3 * error)
    if now.value >= limit:
        return None
    low = next(p.step for p in points if p.step > best.step and p.value < limit)
    text = f"{name} {now.value:.3g}, was {best.value:.3g} at step {best.step}"
    return Evidence(name, now.value, limit, low, text)


def judge_guesses(history: History) -> Evidence | None:
    """Detect a judge whose last three agreements together can't be told from chance."""
    name = "judge/agreement"
    points, errors = history.last(3, name), history.last(3, "judge/agreement_stderr")
    if len(points) < 3 or len(errors) < 3 or points[-1].step != history.step:
        return None
    mean = sum(point.value for point in points) / 3
    error = math.hypot(*(point.value for point in errors)) / 3
    if error > 0.1 or mean - 0.5 >= 2 * error:  # too few to tell; or better than chance
        return None
    text = f"{name} {mean:.3g} ± {error:.2g} over three evaluations: not surely better than chance"
    return Evidence(name, mean, 0.5 + 2 * error, points[0].step, text)


def load_gathers(history: History) -> Evidence | None:
    """Detect tokens that gather in few experts of a mixture."""
    start = history.first(5, "router/load_entropy")
    if not start:
        return None
    return below("router/load_entropy", limit=0.75 * middle(start), steps=5)(history)


def gap_closes(history: History) -> Evidence | None:
    """Detect best and worst answers that the policy judges more and more alike."""
    start = history.first(5, "judge/gap")
    if not start:
        return None
    return below("judge/gap", limit=max(0.25 * middle(start), 0.1), steps=5)(history)


def judged_answers_grow(history: History) -> Evidence | None:
    """Detect answers half as long again where the longer one is chosen, and no more right ones."""
    lengths = history.last(5, "judge/length_gap")
    if not lengths or middle(lengths) <= 0:
        return None
    right, now = history.first(5, "correct/mean"), history.last(5, "correct/mean")
    if right and now and middle(now) - middle(right) > 0.1 * max(middle(right), 0.1):
        return None
    return grows("length/sampled_mean", times=1.5, least=0.0)(history)


def reward_without_progress(history: History) -> Evidence | None:
    """Detect held-out accuracy well below its best, beyond its error, with more reward since."""
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
    """Detect fewer right answers than at the start with more reward: both beyond what steps differ
    by.
    """
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
    """Return the gap that precision explains, in nats; ten times it for a recipe that corrects for
    it.
    """
    said = history.all("mismatch/limit")
    return (max(said[0].value, 1e-3) if said else 0.03) * (
        10 if history.all("correction/mean") else 1
    )


def sampler_off(history: History) -> Evidence | None:
    """Detect a gap from the first steps on."""
    corrected = bool(history.all("correction/mean"))
    limits = {
        "mismatch/abs_mean": allowed_gap(history),
        "mismatch/outside_share": 0.5 if corrected else 0.05,
        "mismatch/probability_mean": 0.01,  # what verl logs, and what it says about it
    }
    for name, limit in limits.items():
        start = history.first(1, name)
        if start and start[0].value > limit:
            return above(name, limit=limit, steps=3)(history)
    return None


def sampler_behind(history: History) -> Evidence | None:
    """Detect a gap that starts small and grows as the learner moves away."""
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
    """Detect clipping of a tenth of the tokens, both sides together, at ratios far from 1.

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
    """Detect three of the last 20 steps at ten times the median of all 20."""
    points = history.last(20, "optim/grad_norm")
    if not points:
        return None
    limit = 10 * middle(points)
    spikes = [point for point in points if point.value > limit > 0]
    if len(spikes) < 3:
        return None
    worst = max(spikes, key=lambda point: point.value)
    text = (
        f"optim/grad_norm up to {worst.value:.3g}, {middle(points):.3g} in between; "
        f"{len(spikes)} times in 20 steps"
    )
    return Evidence("optim/grad_norm", worst.value, limit, spikes[0].step, text)


def reward_falls(history: History) -> Evidence | None:
    """Detect rewards far below the best stretch, by more than steps differ; or next to nothing
    left.
    """
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
    name = first_known(history, *REWARD)
    text = f"{name} {middle(now):.3g}, was {middle(best):.3g} at step {best[0].step}"
    first = next(p.step for p in points if p.step > best[-1].step and p.value < limit)
    return Evidence(name, middle(now), limit, first, text)


# --- groups without signal ------------------------------------------------------------------------

MOST = 0.75  # of the groups


def nothing_passes(history: History) -> Evidence | None:
    """Detect that nothing passes from the start; a later loss is another sickness.

    Where most groups' rewards differ all the same, points for parts of an answer teach, and whole
    answers may come later.
    """
    start, dead = history.first(1, *FAIL_SHARE), history.last(5, "groups/dead_share")
    if dead and middle(dead) < 0.5:
        return None
    return _most_groups(history, *FAIL_SHARE) if start and start[0].value >= 0.5 else None


def everything_passes(history: History) -> Evidence | None:
    """Detect that nearly every answer passes, and that this is all there is to learn.

    Scores of a judge or of a reward model pass wherever they are above 0: where most groups differ,
    or nothing says what is correct, there is more.
    """
    dead, right = history.last(5, "groups/dead_share"), history.last(5, "correct/mean")
    if middle(dead) < 0.5 if dead else not right:
        return None
    return _most_groups(history, *PASS_SHARE)


def no_reward(history: History) -> Evidence | None:
    """Detect that no answer has a reward: from the first step on, or in most of the last three."""
    metric = first_known(history, *MISSING)
    every, last = history.all(*MISSING), history.last(3, *MISSING)
    if last and middle(last) >= 1.0:
        bad = next(point.step for point in last if point.value >= 1.0)
    elif every and len(every) < 3 and all(point.value >= 1.0 for point in every):
        bad = every[0].step
    else:
        return None
    return Evidence(metric, 1.0, 1.0, bad, f"{metric} 1: no answer has a reward since step {bad}")


def no_signal(history: History) -> Evidence | None:
    """Detect equal rewards in all groups from the first step on, not because all of them fail."""
    start = history.first(1, "groups/dead_share")
    if not start or start[0].value < 0.9 or _most_groups(history, *FAIL_SHARE):
        return None
    seen = above("groups/dead_share", limit=0.95, steps=5)(history)
    return seen and _counted(seen, history)


def dead_groups(history: History) -> Evidence | None:
    """Detect equal rewards in most groups, where none of the three above has more to say."""
    if no_signal(history) or any(_most_groups(history, *n) for n in (FAIL_SHARE, PASS_SHARE)):
        return None
    return _most_groups(history, "groups/dead_share")


def _most_groups(history: History, *names: str) -> Evidence | None:
    seen = above(*names, limit=MOST, steps=5)(history)
    return seen and _counted(seen, history)


def _counted(seen: Evidence, history: History) -> Evidence:
    """Return the evidence in groups of a step, where their number is known."""
    drawn = history.last(5, "refill/drawn_groups", "groups/count")
    if not drawn:
        return seen
    why = "all fail" if seen.metric in FAIL_SHARE else "equal rewards"
    why = "all pass" if seen.metric in PASS_SHARE else why
    text = f"{seen.value * middle(drawn):.0f} of {middle(drawn):.0f} groups useless ({why})"
    return Evidence(seen.metric, seen.value, seen.limit, seen.first, f"{text}: {seen.text}")


def no_gain(history: History) -> Evidence | None:
    """Detect a gain from the first third to the last of surely less than a tenth of the spread.

    Surely: a gain that chance may hide is no reason to call a run stalled.
    """
    points, held_out = history.learning(*REWARD), history.all("eval/accuracy")
    if len(points) < 60 or points[-1].step != history.step or history.supervised:
        return None
    size = len(points) // 3
    start, now = middle(points[:size]), middle(points[-size:])
    spread = history.last(20, "reward/std")
    worthwhile = 0.1 * (middle(spread) if spread else max(abs(start), 0.1))
    chance = 2 * 1.25 * noise(points) * math.sqrt(2 / size)  # two standard errors, of medians
    better = len(held_out) > 1 and held_out[-1].value > held_out[0].value + 0.05
    if now - start + chance >= worthwhile or better or _used_up(history):
        return None
    name = first_known(history, *REWARD)
    text = f"{name} {now:.3g} in the last {size} steps, {start:.3g} in the first {size}"
    return Evidence(name, now, start + worthwhile, points[size].step, text)


def _used_up(history: History) -> bool:
    """Return whether next to nothing is wrong, or next to no group teaches: other rules report
    that.
    """
    rate, dead = history.last(20, "correct/mean"), history.last(5, "groups/dead_share")
    return bool((rate and middle(rate) > 0.9) or (dead and middle(dead) > MOST))


def guesses(history: History) -> Evidence | None:
    """Detect a tenth to nine tenths right, whatever the prompt, and no more than at the start."""
    seen = below("pass_rate/skill", limit=0.02, steps=20)(history)
    rates, now = history.learning("correct/mean"), history.last(10, "correct/mean")
    if seen is None or len(rates) < 20 or not now or not 0.1 < middle(now) < 0.9:
        return None
    return None if middle(now) > middle(rates[:10]) + 0.05 else seen


# --- the critic -----------------------------------------------------------------------------------


def worse_than_a_constant(history: History) -> Evidence | None:
    """Detect values that explain less than none of the targets' spread, since the policy learns.

    By a twentieth: a critic that has learned next to nothing yet stays about 0, on either side.
    """
    points = history.last(20, "critic/explained_variance")
    if not points or points[0].step <= history.waited:
        return None
    return below("critic/explained_variance", limit=-0.05, steps=20)(history)


def values_out_of_range(history: History) -> Evidence | None:
    """Detect values of twice the size of any reward that the run has seen, in most of 5 steps."""
    ends = [history.all(f"critic/reward_{end}") for end in ("min", "max")]
    largest = max((abs(point.value) for points in ends for point in points), default=0.0)
    low, high = history.last(5, "critic/value_min"), history.last(5, "critic/value_max")
    if not largest or not low or not high:
        return None
    reach = [Point(a.step, max(abs(a.value), abs(b.value))) for a, b in zip(low, high, strict=True)]
    limit = 2 * largest
    if middle(reach) <= limit:
        return None
    metric = "critic/value_max" if middle(high) >= -middle(low) else "critic/value_min"
    first = next(point.step for point in reach if point.value > limit)
    text = f"values of up to {middle(reach):.3g}, and no reward was larger than {largest:.3g}"
    return Evidence(metric, middle(reach), limit, first, text)


def no_values(history: History) -> Evidence | None:
    """Detect a critic that still says 0 everywhere, in two steps that the policy learns in.

    Before its first update it must say so, and where every target was 0 it may.
    """
    low, high = history.last(2, "critic/value_min"), history.last(2, "critic/value_max")
    if not low or not high or any(point.value for point in (*low, *high)):
        return None
    begun = low[0].step
    targets = [p for p in history.all("critic/return_mean") if p.step < begun and p.value]
    if not targets or begun <= history.waited:
        return None
    text = f"every value is 0 since the start, and the targets were not at step {targets[0].step}"
    return Evidence("critic/value_max", 0.0, 0.0, begun, text)


def few_independent_samples(history: History) -> Evidence | None:
    """Detect rewards that jump between steps as if fewer than six answers had been graded."""
    points, spread = history.last(20, "reward/mean"), history.last(20, "reward/std")
    if not points or not spread or middle(spread) <= 0:
        return None
    limit = middle(spread) / math.sqrt(6)
    scatter = noise(points)
    if scatter <= limit:
        return None
    text = (
        f"reward/mean differs by {scatter:.2g} from step to step, "
        f"{middle(spread):.2g} between answers"
    )
    return Evidence("reward/mean", scatter, limit, points[0].step, text)
