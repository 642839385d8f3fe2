"""Advice from a probe: verdicts, a group size, a limit of tokens, and one change to make.

Every suggestion is written as it would be set, with its reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from groupwise.evaluate.estimates import MODEL
from groupwise.probing.findings import GROUPS, SettingFigures
from groupwise.probing.probe import Probe

MOST = 0.75  # of the prompts: from here on the data is at fault, not chance
ENOUGH, LITTLE = 0.7, 0.3  # of the groups
GAIN = 0.25  # of the useful groups that there are: what twice as many samples must add
SMALLEST_GROUP = 4  # the mean of fewer is mostly noise as a baseline
TRUNCATED, HARDLY, STEP = 0.1, 0.01, 16


@dataclass(frozen=True)
class Suggestion:
    setting: str  # as it would be written
    reason: str


@dataclass(frozen=True)
class Case:
    """The subject of a verdict: the setting that would be trained, among all that were tried."""

    made: Probe
    found: SettingFigures
    tokens: Suggestion
    size: Suggestion


@dataclass(frozen=True)
class ProbeVerdict:
    text: str
    change: str = ""  # what to do about it


@dataclass(frozen=True)
class Advice:
    verdicts: list[ProbeVerdict]
    group_size: Suggestion
    max_tokens: Suggestion

    @property
    def first(self) -> str:
        """Return the one change to make before all others; "" where nothing has to be changed."""
        return next((verdict.change for verdict in self.verdicts if verdict.change), "")


def advise(made: Probe) -> Advice:
    """Advise on what would be trained, the first setting; on others only where they are better."""
    found = made.findings[0]
    tokens, size = max_tokens(made, found), group_size(found, made.config.group_size)
    case = Case(made, found, tokens, size)
    rules = (failures, hard, easy, cut_off, few_useful, better_setting, sound)
    verdicts: list[ProbeVerdict] = []
    for rule in rules:
        verdicts += rule(case, verdicts)
    return Advice(verdicts, size, tokens)


# --- suggestions ------------------------------------------------------------------------------


def group_size(found: SettingFigures, current: int) -> Suggestion:
    """Return the smallest size with enough useful groups; else where larger ones hardly help."""
    by_group = {size: found.useful_by_group[size].value for size in GROUPS}
    sizes = [size for size in GROUPS if size >= SMALLEST_GROUP]
    size = next((size for size in sizes if by_group[size] >= ENOUGH), None)
    if size is not None:
        smaller = size // 2
        reason = f"about {by_group[size]:.0%} of the groups would have passes and failures"
        if size > SMALLEST_GROUP:
            reason += f", of groups of {smaller} {by_group[smaller]:.0%}"
    else:
        size = next(
            (a for a, b in pairwise(sizes) if by_group[b] <= (1 + GAIN) * by_group[a]), sizes[-1]
        )
        reason = (
            f"no size up to {sizes[-1]} makes {ENOUGH:.0%} of the groups useful; this one makes "
            f"{by_group[size]:.0%}"
        )
        if size < sizes[-1]:
            reason += f", and twice as many samples add less than {GAIN:.0%} to that"
    if found.useful_by_group[size].how == MODEL:
        reason += f" (by the {MODEL}: larger than what was sampled)"
    if size == current:
        reason += "; as it is"
    return Suggestion(f"group_size={size}", reason)


def max_tokens(made: Probe, found: SettingFigures) -> Suggestion:
    now, share, long = made.config.engine.max_tokens, found.truncated_share, found.lengths["p99"]
    wanted = now
    if share > TRUNCATED:
        wanted = max(now, min(2 * now, made.most_tokens))
        reason = f"{share:.0%} of the answers are cut off at {now}"
        if wanted == now:
            reason += ", and the model holds no more behind these prompts: ask for shorter answers"
        else:
            reason += "; how long they would be is not known, so look again with more"
    elif share <= HARDLY and 2.5 * long <= now:
        wanted = -(-5 * long // (4 * STEP)) * STEP
        reason = f"99% of the answers have {long} tokens or fewer; training makes them longer"
    else:
        reason = f"{share:.0%} of the answers are cut off; as it is"
    return Suggestion(f"engine.max_tokens={wanted}", reason)


# --- verdicts ---------------------------------------------------------------------------------
# Each rule sees what those before it found.


def failures(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    found = case.found
    if found.failed:
        yield ProbeVerdict(
            f"{found.failed} of {found.sampled} rewards failed, most often: {found.reason}. They "
            "are left out here and are no zeros.",
            "mend the reward: a function must return a number, or None, for whatever is written",
        )
    elif found.abstained:
        yield ProbeVerdict(
            f"{found.abstained} of {found.sampled} answers got no reward at all "
            f"({found.reason or 'no reason given'}); they are left out here."
        )


def hard(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    if found.never < MOST * found.prompts:
        return
    text = (
        f"{found.never} of {found.prompts} prompts never pass in {made.samples} samples: the data "
        "is too hard or the reward is broken"
    )
    other = _better(made, found)
    if not found.binary and found.spread.value >= LITTLE:
        text += (
            f". Rewards still differ in {found.spread.value:.0%} of groups of "
            f"{found.spread_group}: there is something to learn, if it is what you want"
        )
    if other is not None:
        yield ProbeVerdict(text + ".", _setting(other))
    elif found.truncated_share > 0.5:
        yield ProbeVerdict(
            f"{text}; and {found.truncated_share:.0%} of the answers are cut off before they end.",
            case.tokens.setting,
        )
    elif found.format_share is not None and found.format_share < 0.5:
        yield ProbeVerdict(
            f"{text}; and only {found.format_share:.0%} of the answers are in the format that is "
            "asked for.",
            "show the format in data.instruction or data.system, or take another data.template",
        )
    elif found.passing.value == 0:
        yield ProbeVerdict(
            f"{text}. Not one of {found.sampled} samples passed: read some of them (--out FOLDER) "
            "and see whether a right answer would have passed.",
            "easier prompts, or a model that was tuned on such tasks; if right answers are among "
            "the samples, the reward",
        )
    else:
        yield ProbeVerdict(text + ".", "easier prompts, and these later; or a stronger model")


def easy(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    if found.always >= MOST * found.prompts:
        yield ProbeVerdict(
            f"{found.always} of {found.prompts} prompts always pass in {made.samples} samples: "
            "there is nothing left to learn from them.",
            "harder prompts",
        )


def cut_off(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    if found.truncated_share > TRUNCATED and not any(
        v.change == case.tokens.setting for v in before
    ):
        grows = case.tokens.setting != f"engine.max_tokens={made.config.engine.max_tokens}"
        yield ProbeVerdict(
            f"{found.truncated_share:.0%} of the answers are cut off at "
            f"{made.config.engine.max_tokens} tokens and can hardly pass.",
            case.tokens.setting if grows else "ask for shorter answers in data.instruction",
        )


def few_useful(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    told = any("never pass" in v.text or "always pass" in v.text for v in before)
    if found.signal.value >= ENOUGH or told:
        return
    current = made.config.group_size
    text = (
        f"{found.signal.value:.0%} of groups of {current} would teach something "
        f"({found.never} of {found.prompts} prompts never pass, {found.always} always)."
    )
    larger = int(case.size.setting.partition("=")[2]) > current
    yield ProbeVerdict(text, case.size.setting if larger else "")


def better_setting(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    if len(made.findings) == 1:
        return
    other = _better(made, found)
    if other is None:
        yield ProbeVerdict(
            f"no setting is clearly better than {found.name}: their intervals overlap. More "
            "--prompts tell more."
        )
    else:
        yield ProbeVerdict(
            f"{other.name} is better: {other.signal.value:.0%} of the groups would teach something "
            f"instead of {found.signal.value:.0%}.",
            _setting(other),
        )


def sound(case: Case, before: list[ProbeVerdict]) -> Iterator[ProbeVerdict]:
    made, found = case.made, case.found
    share, prompts = found.signal.value, made.config.prompts_per_step
    yield ProbeVerdict(
        f"of {prompts} groups in a step about {share * prompts:.0f} would teach something"
        + ("." if any(v.change for v in before) else ": ready to train.")
    )


def _better(made: Probe, found: SettingFigures) -> SettingFigures | None:
    """Return another setting whose groups are useful more often, beyond chance."""
    best = max(made.findings, key=lambda each: each.signal.value)
    return best if best.signal.low > found.signal.high else None


def _setting(found: SettingFigures) -> str:
    return f"data.template={found.template} engine.temperature={found.temperature:g}"
