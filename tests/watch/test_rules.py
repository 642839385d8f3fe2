"""Health rules on made series: each fires on its sickness, and on nothing healthy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from groupwise.cli import main
from groupwise.config import load
from groupwise.config.values import FIELDS
from groupwise.runfiles.catalogue import find
from groupwise.watch.health import Health
from groupwise.watch.history import History, above, noise
from groupwise.watch.rules import RULES, Rule

STEPS = 120
Lines = list[dict[str, Any]]


def values(chance: np.random.Generator, step: int, rate: float) -> dict[str, float]:
    """A critic as it should be: 0 at first, then it knows more from step to step."""
    known = 0.6 * (1 - np.exp(-step / 15)) + chance.normal(0, 0.1) * (step > 1)
    return {
        "updates/count": 1.0,
        "critic/explained_variance": known if step > 1 else 0.0,
        "critic/clip_share": float(abs(chance.normal(0, 0.05))),
        "critic/value_min": 0.0 if step == 1 else -0.1 + chance.normal(0, 0.05),
        "critic/value_max": 0.0 if step == 1 else rate + 0.3 + chance.normal(0, 0.05),
        "critic/return_mean": rate,
        "critic/reward_min": 0.0,
        "critic/reward_max": 1.0,
    }


def judgements(chance: np.random.Generator, step: int) -> dict[str, float]:
    """A policy that judges itself as it should: some talk, a gap that stays, no love of length."""
    found = {
        "judge/failed_share": float(abs(chance.normal(0, 0.05))),
        "judge/gap": 1.6 + chance.normal(0, 0.2),
        "judge/length_gap": chance.normal(5, 10),
        "length/sampled_mean": 195 + chance.normal(0, 10),
    }
    if step % 20 == 0:
        found |= {"judge/agreement": 0.7 + chance.normal(0, 0.03), "judge/agreement_stderr": 0.04}
    return found


def routes(chance: np.random.Generator) -> dict[str, float]:
    """A router as it should be: some experts change over several updates, and all are visited."""
    return {
        "router/changed_share": float(abs(chance.normal(0.03, 0.02))),
        "router/load_entropy": 0.75 + chance.normal(0, 0.02),
        "router/dead_share": float(abs(chance.normal(0.05, 0.03))),
    }


def talks(chance: np.random.Generator) -> dict[str, float]:
    """A policy that calls its tools as it should: some calls fail, few are made twice."""
    return {
        "turns/mean": 2.4 + chance.normal(0, 0.1),
        "turns/calls": 1.4 + chance.normal(0, 0.1),
        "turns/failed_call_share": float(abs(chance.normal(0.05, 0.03))),
        "turns/repeated_call_share": float(abs(chance.normal(0.03, 0.02))),
        "turns/limit_share": float(abs(chance.normal(0.05, 0.03))),
    }


def healthy(
    seed: int = 0,
    steps: int = STEPS,
    critic: bool = False,
    judge: bool = False,
    router: bool = False,
    turns: bool = False,
    lag: bool = False,
) -> Lines:
    """A run as it should be: noisy, up from 0.35 to 0.9, entropy and mistakes fading together."""
    chance = np.random.default_rng(seed)
    lines: Lines = [{"step": 0, "eval/accuracy": 0.35, "eval/accuracy_stderr": 0.042}]
    for step in range(1, steps + 1):
        rate = 0.35 + 0.55 * (1 - np.exp(-step / 50))
        right = float(np.clip(rate + chance.normal(0, 0.04), 0, 1))
        wave = float(np.exp(chance.normal(0, 0.3)))
        line = {
            "step": step,
            "reward/mean": right,
            "reward/sampled_mean": right,
            "reward/std": 0.45,
            "correct/mean": right,
            "entropy/mean": 0.5 * (0.3 + 0.7 * (1 - rate) / 0.65) * (1 + chance.normal(0, 0.05)),
            "length/wrong_mean": 200 + chance.normal(0, 15),
            "length/right_mean": 190 + chance.normal(0, 15),
            "length/truncated_share": float(abs(chance.normal(0, 0.03))),
            "optim/grad_norm": 3 * wave,
            "optim/skipped": 0.0,
            "clip/high": 0.005 * wave,
            "clip/low": 0.02 * wave,
            "ratio/max": 3.0 * wave,
            "kl/ref": 0.002 * step,
            "mismatch/abs_mean": 0.015 * wave,
            "mismatch/limit": 0.05,
            "mismatch/outside_share": 0.01,
            "reward/failed_share": 0.0,
            "reward/missing_share": 0.0,
            "reward/unequal_share": 0.0,
            "pass_rate/none": 0.2,
            "pass_rate/all": min(rate**3, 0.7),
            "pass_rate/skill": 0.2 + chance.normal(0, 0.06),
            "text/repetition": 0.05,
            "groups/dead_share": 0.4,
        }
        if critic:
            line |= values(chance, step, rate)
        if judge:
            line |= judgements(chance, step)
        if router:
            line |= routes(chance)
        if turns:
            line |= talks(chance)
        if lag:
            line |= {"lag/mean": 1.0, "lag/effective_share": 0.97 - abs(chance.normal(0, 0.05))}
        if step % 20 == 0:
            line["eval/accuracy"] = float(np.clip(rate + chance.normal(0, 0.04), 0, 1))
            line["eval/accuracy_stderr"] = 0.04
        lines.append(line)
    return lines


def names(lines: Lines) -> list[str]:
    return [finding.rule.name for finding in Health().see_all(lines)]


@pytest.mark.parametrize("seed", range(30))
def test_healthy_runs_are_left_alone(seed: int) -> None:
    steps, odd = 300 if seed < 5 else STEPS, bool(seed % 2)
    kinds = {"critic": odd, "judge": not odd, "router": odd, "turns": not odd, "lag": odd}
    assert names(healthy(seed, steps, **kinds)) == []


@pytest.mark.parametrize("seed", range(10))
def test_single_odd_steps_are_left_alone(seed: int) -> None:
    """A spike, a dip, a bad batch: medians do not mind."""
    lines = healthy(seed)
    lines[30] |= {"optim/grad_norm": 90.0, "reward/sampled_mean": 0.0, "correct/mean": 0.0}
    lines[60] |= {"entropy/mean": 4.0, "length/truncated_share": 0.9, "clip/low": 0.7}
    lines[90] |= {"kl/ref": 7.0, "mismatch/abs_mean": 0.9, "length/wrong_mean": 900.0}
    assert names(lines) == []


Change = Callable[[dict[str, Any], int], dict[str, Any]]

SICKNESSES: dict[str, Change] = {
    "grader errors": lambda line, n: {"reward/failed_share": 0.02},
    "uneven ranks": lambda line, n: {"time/rank_imbalance": 1.6},
    "KL off its target": lambda line, n: {"coef/kl_over_target": 4.0 + 0.1 * (n % 3)},
    "no reward": lambda line, n: {"reward/missing_share": 1.0},
    "reward noise": lambda line, n: {"reward/unequal_share": 0.3},
    "sampler behind": lambda line, n: {"mismatch/abs_mean": 0.001 + 0.03 * (n - 1)},
    "mismatch": lambda line, n: {"mismatch/abs_mean": 0.2},
    "gradient": lambda line, n: {"optim/grad_norm": 300.0 if n % 4 == 0 else 3.0},
    "clipping": lambda line, n: {"clip/low": 0.12},
    "entropy collapse": lambda line, n: {"entropy/mean": 0.5 * 0.9**n},
    "sudden collapse": lambda line, n: {"entropy/mean": 0.001 if n > 1 else 0.5},
    "entropy explosion": lambda line, n: {"entropy/mean": 0.5 + 0.05 * n},
    "kl": lambda line, n: {"kl/ref": 0.05 * n},
    "truncation": lambda line, n: {"length/truncated_share": 0.3},
    "length explosion": lambda line, n: {
        "length/wrong_mean": 200 + 10 * n, "correct/mean": 0.36, "reward/sampled_mean": 0.36},
    "repetition": lambda line, n: {"text/repetition": min(0.05 + 0.02 * n, 0.9)},
    "reward falls": lambda line, n: {"reward/sampled_mean": 0.02, "correct/mean": 0.02},
    "all groups fail": lambda line, n: {"pass_rate/none": 0.95, "groups/dead_share": 0.95},
    "all groups pass": lambda line, n: {"pass_rate/all": 0.95, "groups/dead_share": 0.95},
    "dead groups": lambda line, n: {"groups/dead_share": 0.9},
    "no signal": lambda line, n: {"groups/dead_share": 1.0},
    "guessing": lambda line, n: {
        "pass_rate/skill": -0.01, "correct/mean": 0.36, "reward/sampled_mean": 0.36},
    "reward hacking": lambda line, n: (
        {"eval/accuracy": 0.1} if "eval/accuracy" in line else {}),
    "stalled": lambda line, n: {
        "reward/sampled_mean": line["reward/sampled_mean"] * 0 + 0.3 + 0.02 * (n % 3),
        "eval/accuracy": 0.35},
    "noisy batches": lambda line, n: {"reward/mean": 0.5 + 0.4 * (-1) ** (n // 2) * (n % 2)},
    "critic at 0": lambda line, n: {"critic/value_min": 0.0, "critic/value_max": 0.0},
    "critic out of range": lambda line, n: {"critic/value_max": 2.5},
    "critic clipped": lambda line, n: {"critic/clip_share": 0.7},
    "critic knows nothing": lambda line, n: {"critic/explained_variance": -0.3},
    "judge unread": lambda line, n: {"judge/failed_share": 0.7},
    "judge agreement": lambda line, n: (
        {"judge/agreement": 0.7 - 0.004 * n} if "judge/agreement" in line else {}),
    "judge guesses": lambda line, n: (
        {"judge/agreement": 0.5 + 0.02 * (-1) ** n} if "judge/agreement" in line else {}),
    "judge gap": lambda line, n: {"judge/gap": 1.6 * 0.95**n},
    "judge likes length": lambda line, n: {
        "length/sampled_mean": 195 + 5 * n, "judge/length_gap": 40.0, "correct/mean": 0.36},
    "calls fail": lambda line, n: {"turns/failed_call_share": 0.6},
    "calls vanish": lambda line, n: {"turns/calls": 1.4 * 0.8**n, "turns/failed_call_share": 0.0},
    "turns at the limit": lambda line, n: {"turns/limit_share": 0.8},
    "same calls again": lambda line, n: {"turns/repeated_call_share": 0.5},
    "old answers": lambda line, n: {"lag/effective_share": 0.3},
    "routes drift": lambda line, n: {"router/changed_share": min(0.03 + 0.01 * n, 0.8)},
    "router collapse": lambda line, n: {
        "router/load_entropy": 0.75 * 0.98**n, "router/dead_share": min(0.05 + 0.005 * n, 0.8)},
}  # fmt: skip
FROM = {
    "sudden collapse": 1,
    "no signal": 1,
    "mismatch": 1,
    "all groups fail": 1,
    "sampler behind": 1,
    "stalled": 1,
    "guessing": 1,
    "critic at 0": 1,
}


def sick(name: str) -> tuple[Lines, int]:
    start = FROM.get(name, 20)
    change = SICKNESSES[name]
    lines = [
        line | change(line, line["step"] - start + 1) if line["step"] >= start else line
        for line in healthy(
            3,
            critic=name.startswith("critic"),
            judge=name.startswith("judge"),
            router=name.startswith("route"),
            turns="call" in name or name.startswith("turns"),
            lag=name == "old answers",
        )
    ]
    return lines, start


@pytest.mark.parametrize("name", SICKNESSES)
def test_each_sickness_is_named_first(name: str) -> None:
    lines, start = sick(name)
    found = Health().see_all(lines)
    assert found and found[0].rule.name == name
    first = found[0].evidence.first
    assert first >= start or name == "noisy batches"  # which has no first step
    assert first <= found[0].step


def test_every_rule_has_a_sickness_here_and_metrics_that_exist() -> None:
    assert {rule.name for rule in RULES} == set(SICKNESSES)
    foreign = {"clip/fraction", "mismatch/probability_mean"}  # of other tools' logs
    for rule in RULES:
        for metric in {*rule.sees, *rule.instead} - foreign:
            assert find(metric) is not None, metric
        for text in (rule.threshold, rule.origin, rule.means, rule.change, rule.source):
            assert text


def test_the_change_to_try_can_be_made() -> None:
    """Every setting that an advice names exists, and every value that it gives is accepted."""
    plain = {"recipe": "grpo", "prompts_per_step": 4, "group_size": 4, "steps": 1}
    named = 0
    for rule in RULES:
        for key, _, text, figure in re.findall(
            r"\b([a-z]\w*(?:\.\w+)*)=(\"([^\"]*)\"|([\d.]+))", rule.change
        ):
            if key == "votes":  # of a judge, not a setting
                continue
            load(plain | {key: text or (float(figure) if "." in figure else int(figure))})
            named += 1
        for key in re.findall(
            r"\b(?:recipe|optim|engine|data|reward|watch)\.[\w.]*\w", rule.change
        ):
            assert key.split(".")[0] == "recipe" or key in FIELDS, (rule.name, key)
        for command in re.findall(r"`groupwise ([\w-]+)`", rule.change):
            with pytest.raises(SystemExit) as end:
                main([command, "--help"])
            assert end.value.code == 0
    assert named >= 5


def test_useless_groups_are_counted() -> None:
    lines, _ = sick("all groups fail")
    (found,) = Health().see_all([line | {"groups/count": 16.0} for line in lines])
    assert found.evidence.text.startswith("15 of 16 groups useless (all fail)")


def test_points_for_parts_of_an_answer_teach_though_nothing_is_right_yet() -> None:
    few = [line | {"pass_rate/none": 1.0, "groups/dead_share": 0.1} for line in healthy()]
    assert "all groups fail" not in names(few)
    most = [line | {"pass_rate/none": 1.0, "groups/dead_share": 0.6} for line in healthy()]
    assert "all groups fail" in names(most)


def test_a_judge_is_called_a_guess_where_three_evaluations_say_so() -> None:
    """As measured: a judge that was hardly taught. Of two, or with wide errors, nothing is said."""
    measured = [(0, 0.501, 0.093), (5, 0.561, 0.125), (10, 0.364, 0.252), (15, 0.567, 0.110)]

    def told(count: int, factor: float = 1.0, more: float = 0.0) -> list[str]:
        keys = ("step", "judge/agreement", "judge/agreement_stderr")
        known = [(step, value + more, error * factor) for step, value, error in measured[:count]]
        return names([dict(zip(keys, each, strict=True)) for each in known])

    assert told(4, 0.9) == ["judge guesses"] and told(2, 0.9) == []
    assert told(4, 2.0) == [] and told(4, 0.9, more=0.3) == []


def test_scores_above_0_do_not_mean_that_the_data_are_used_up() -> None:
    """A judge's points, or a reward model's: answers of a group differ, and nobody says right."""
    scores = [line | {"pass_rate/all": 1.0, "groups/dead_share": 0.1} for line in healthy()]
    assert "all groups pass" not in names(scores)
    unknown = ("groups/dead_share", "correct/mean")
    pairs = [{k: x for k, x in line.items() if k not in unknown} for line in scores]
    assert "all groups pass" not in names(pairs)
    used_up = [line | {"correct/mean": 1.0} for line in pairs]
    assert "all groups pass" in names(used_up)


def test_equal_rewards_are_said_once_by_the_rule_that_knows_why() -> None:
    """Where all groups fail, or none can differ, dead groups has nothing to add."""
    for name in ("all groups fail", "no signal", "all groups pass"):
        lines, _ = sick(name)
        dead = [line | {"groups/dead_share": 1.0} if "step" in line else line for line in lines]
        said = names([line for line in dead if line["step"] != 0])
        assert "dead groups" not in said and name in said
    later = [line | ({"groups/dead_share": 1.0} if line["step"] > 60 else {}) for line in healthy()]
    assert names(later) == ["dead groups"]  # a note: it may have learned all there is


def test_a_break_is_named_before_what_follows_from_it() -> None:
    """A policy that broke also runs into the limit: raising the limit would mend nothing."""
    broken = {"reward/sampled_mean": 0.0, "correct/mean": 0.0, "length/truncated_share": 0.9}
    lines = [line | (broken if line["step"] > 1 else {}) for line in healthy()]
    assert names(lines)[:2] == ["reward falls", "truncation"]


def test_what_verl_calls_a_precision_issue_is_one() -> None:
    """Its own documentation: below 0.005 as a rule, above 0.01 something is wrong."""

    def run(gap: float) -> list[str]:
        return names([{"step": n, "mismatch/probability_mean": gap} for n in range(1, 10)])

    assert run(0.005) == [] and run(0.012) == ["mismatch"]


@pytest.mark.parametrize("seed", range(20))
def test_a_slow_gain_that_noise_may_hide_is_not_stalled(seed: int) -> None:
    """Ten points in sixty steps that differ by five; found on a healthy run of dapo."""
    chance = np.random.default_rng(seed)
    lines: Lines = [
        {"step": n, "reward/mean": 0.35 + 0.1 * n / 60 + chance.normal(0, 0.05), "reward/std": 0.5}
        for n in range(1, 151)
    ]
    assert "stalled" not in names(lines)


def test_a_solved_task_is_not_stalled() -> None:
    """As far as other tools' logs go: reward at its top, and no group left to learn from."""
    flat = [
        {"step": n, "reward/mean": 0.2 * min(n, 5), "groups/dead_share": 0.2 * min(n, 5)}
        for n in range(1, 100)
    ]
    assert names(flat) == ["dead groups"]
    assert names([line | {"groups/dead_share": 0.2} for line in flat]) == ["stalled"]


def test_rows_that_are_learned_as_they_stand_are_neither_stalled_nor_too_sure() -> None:
    """Their reward is 1 at every step, and entropy falls because they are learned."""
    flat = [{"step": n, "reward/mean": 1.0, "reward/sampled_mean": 1.0} for n in range(1, STEPS)]
    surer = [line | {"entropy/mean": 2 / (1 + line["step"] / 10)} for line in flat]
    assert "stalled" in names(flat) and "entropy collapse" in names(surer)
    assert names([line | {"supervised/nll": 1.0} for line in surer]) == []


def test_a_rule_fires_once_and_after_a_resume_not_again() -> None:
    lines, _ = sick("truncation")
    health = Health()
    found = health.see_all(lines)
    assert [f.rule.name for f in found].count("truncation") == 1
    cut = found[0].step
    resumed = Health()
    before = resumed.see_all(lines[: cut + 1])  # what a resumed run reads from its folder
    after = [f for line in lines[cut + 1 :] for f in resumed.see(line["step"], line)]
    assert [f.rule.name for f in before + after] == [f.rule.name for f in found]


# --- a critic, and steps in which it learns alone ---------------------------------------------


def waiting(alone: int, steps: int = STEPS, seed: int = 0) -> Lines:
    """A run whose policy waits at first: no updates are measured, and nothing gets better."""
    chance = np.random.default_rng(seed)
    of_updates = ("optim/grad_norm", "entropy/mean", "clip/", "ratio/", "kl/", "mismatch/abs_mean")
    better = ("eval/",)  # not as long as nothing is learned
    made: Lines = []
    for line in healthy(seed, alone, critic=True)[1:]:
        kept = {k: x for k, x in line.items() if not k.startswith(of_updates + better)}
        right = float(np.clip(0.35 + chance.normal(0, 0.04), 0, 1))
        same = dict.fromkeys(("reward/mean", "reward/sampled_mean", "correct/mean"), right)
        made.append(kept | same | {"updates/count": 0.0})
    learns = healthy(seed + 1, steps, critic=True)[2:]
    return made + [line | {"step": line["step"] + alone - 1} for line in learns]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("alone", [5, 70])
def test_a_policy_that_waits_for_its_critic_is_not_sick(alone: int, seed: int) -> None:
    """Neither stalled nor guessing: it was not meant to get better."""
    lines = waiting(alone, seed=seed)
    unskilled = [line | {"pass_rate/skill": -0.01} for line in lines[:alone]] + lines[alone:]
    assert names(lines) == names(unskilled) == []


def test_a_policy_that_learns_nothing_behind_the_wait_is_stalled() -> None:
    lines = waiting(20, steps=90)
    flat = [
        {k: x for k, x in line.items() if not k.startswith("eval/")}
        | {"reward/sampled_mean": 0.3 + 0.02 * (n % 3), "reward/mean": 0.3 + 0.02 * (n % 3)}
        for n, line in enumerate(lines)
    ]
    (found,) = Health().see_all(flat)
    assert found.rule.name == "stalled" and found.step == 80  # 60 steps of its own


def test_a_critic_is_judged_when_the_policy_learns() -> None:
    """It may know nothing while it is taught alone: that is what it is taught alone for."""
    lines = [line | {"critic/explained_variance": -0.3} for line in waiting(30)]
    (found,) = Health().see_all(lines)
    assert (found.rule.name, found.step, found.evidence.first) == ("critic knows nothing", 50, 31)


def test_a_critic_may_be_about_as_good_as_a_constant() -> None:
    lines = [line | {"critic/explained_variance": -0.004} for line in healthy(critic=True)]
    assert "critic knows nothing" not in names(lines)


def test_a_critic_may_say_0_where_every_target_is_0() -> None:
    nothing = {"critic/value_min": 0.0, "critic/value_max": 0.0, "critic/return_mean": 0.0}
    lines = [line | nothing for line in healthy(critic=True)]
    assert "critic at 0" not in names(lines)
    lines[5]["critic/return_mean"] = 0.1  # from here on it should have learned something
    assert names(lines[:8])[0] == "critic at 0"


def test_values_are_judged_by_the_rewards_of_the_run() -> None:
    """Rewards of up to 10 allow values of up to 20."""

    def run(largest: float, value: float) -> list[str]:
        changes = {"critic/reward_max": largest, "critic/value_min": -value}
        return names([line | changes for line in healthy(critic=True)])

    assert run(10.0, 19.0) == [] and run(10.0, 21.0) == ["critic out of range"]
    assert run(0.0, 3.0) == []  # nothing is known of what can be had


@pytest.mark.parametrize(
    ("part", "count"), [("critic", 4), ("judge", 5), ("router", 2), ("turns", 4), ("lag", 1)]
)
def test_runs_without_a_part_are_not_asked_for_its_metrics(part: str, count: int) -> None:
    rules = [rule for rule in RULES if rule.of.startswith(f"{part}/")]
    assert len(rules) == count and sum(bool(rule.of) for rule in RULES) == 18
    assert not any(rule.concerns(healthy()[5]) for rule in rules)
    assert all(rule.concerns(healthy(**{part: True})[5]) for rule in rules)


def test_a_correction_may_have_more_of_a_gap() -> None:
    lines, _ = sick("mismatch")
    assert names([line | {"correction/mean": 0.98} for line in lines]) == []


def test_a_model_that_is_right_may_be_sure() -> None:
    """Entropy down to a tenth with a twentieth of the mistakes left is no collapse."""
    lines = healthy()
    for line in lines[60:]:
        line |= {"entropy/mean": 0.05, "correct/mean": 0.975, "reward/sampled_mean": 0.975}
    assert names(lines) == []
    for line in lines[60:]:
        line |= {"correct/mean": 0.8, "reward/sampled_mean": 0.8}
    assert names(lines) == ["entropy collapse"]


def test_missing_metrics_and_values_that_are_no_numbers() -> None:
    lines: Lines = [{"step": n, "entropy/mean": None, "reward/mean": "x"} for n in range(80)]
    assert names(lines) == []
    assert names([{"step": n} for n in range(80)]) == []
    assert names([{"step": n, "optim/grad_norm": float("nan")} for n in range(80)]) == []


def test_noise_ignores_the_trend() -> None:
    history = History()
    chance = np.random.default_rng(0)
    for step in range(400):
        history.add(step, {"x": 3.0 * step + chance.normal(0, 0.5)})
    assert noise(history.all("x")) == pytest.approx(0.5, rel=0.15)


def test_a_rule_of_ones_own_is_five_lines() -> None:
    mine = Rule(
        "tool errors", above("reward/part/tool_error", limit=0.1, steps=5),
        sees=("reward/part/tool_error",), since=5, threshold="a tenth", origin="our own runs",
        sure="likely", means="the tool is down", change="restart it", source="–",
    )  # fmt: skip
    health = Health([*RULES, mine])
    lines = [line | {"reward/part/tool_error": 0.5} for line in healthy()]
    (found,) = health.see_all(lines)
    assert (found.rule.name, found.step, found.evidence.first) == ("tool errors", 5, 1)
