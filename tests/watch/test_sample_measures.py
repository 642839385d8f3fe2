"""Measures of samples, waste, cost, clips and gradients: against numbers computed by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from graded_rollouts import interrupted, rollout
from torch import nn

from groupwise import batch_phase, recipe, token_phase
from groupwise.losses.measures import quantile
from groupwise.optim.adamw import AdamW
from groupwise.records import Rollout, TokenBatch
from groupwise.watch import samples
from groupwise.watch.costs import costs


def test_lengths_of_right_and_wrong_answers_stand_apart() -> None:
    rows = [
        rollout("ab", 1.0, True),
        rollout("abcd", 1.0, True),
        rollout("abcdefgh", 0.0, False, finish="length"),
        rollout("a", None),  # nobody knows
    ]
    found = samples.lengths(rows)
    assert found["length/right_mean"] == 3
    assert found["length/wrong_mean"] == found["length/wrong_p95"] == 8
    assert found["length/ended_mean"] == pytest.approx(7 / 3)
    assert found["length/p95"] == pytest.approx(np.percentile([2, 4, 8, 1], 95))


def test_wrong_answers_are_measured_against_right_ones_to_the_same_prompt() -> None:
    """Long answers to a prompt that nobody solves, or whose verdict is unknown, say nothing."""
    groups = [
        [rollout("ab", 1.0, True), rollout("abcd", 1.0, True), rollout("abcdef", 0.0, False)],
        [rollout("abc", 1.0, True), rollout("abcd", 0.0, False), rollout("ab", 0.0, False)],
        [rollout("a" * 90, 0.0, False)] * 3,
        [rollout("a" * 70, 1.0, True), rollout("a", None)],
    ]
    found = samples.length_bias(groups)
    assert found == {"length/wrong_over_right": (6 + 3) / (3 + 3)}
    assert samples.length_bias(groups[2:]) == {}


def test_without_a_verdict_a_reward_passes() -> None:
    assert samples.passed(rollout("a", 0.5)) is True
    assert samples.passed(rollout("a", 0.0)) is False
    assert samples.passed(rollout("a", 0.5, False)) is False
    assert samples.passed(rollout("a", None)) is None


def test_what_tools_say_is_in_no_measure_of_the_policy() -> None:
    """Lengths, repetition, variety and words are those of what it wrote itself."""
    loud = "wait, the answer is \\boxed{7} " + "abcd" * 30
    group = [
        interrupted("ab", loud, "cd", 1.0, True),
        interrupted("ab", "short", "cd", 1.0, True),
        interrupted("abcde", loud, "f", 0.0, False),
    ]
    found = samples.sample_measures([group], 0)
    assert found["length/right_mean"] == 4 and found["length/wrong_mean"] == 6
    assert found["length/wrong_over_right"] == 1.5
    assert found["text/repetition"] == found["text/reflection_share"] == 0
    assert found["text/answer_share"] == 0
    assert found["groups/distinct_share"] == pytest.approx(2 / 3)
    # The tool answered otherwise: another reward for the same words is no contradiction.
    again = interrupted("ab", "other", "cd", 0.0, False)
    assert "reward/unequal_share" not in samples.rewards([[*group, again]])
    own = [interrupted("wait", "x", "it is \\boxed{7}", 1.0)]
    assert samples.sample_measures([own], 0)["text/answer_share"] == 1


def groups_with(*passes: int, size: int = 8) -> list[list[Rollout]]:
    return [[rollout(f"{n}", float(n < right), n < right) for n in range(size)] for right in passes]


def test_pass_rates_fall_into_bands() -> None:
    found = samples.pass_rates(groups_with(0, 1, 2, 3, 4, 6, 7, 8))
    bands = [found[f"pass_rate/{band}"] * 8 for band in samples.BANDS]
    assert bands == [1, 2, 2, 1, 1, 1]


def test_skill_is_the_intraclass_correlation() -> None:
    """Prompts that always pass or never: 1. Chance: 0, on average over all outcomes, exactly."""
    assert samples.pass_rates(groups_with(0, 8, 8, 0))["pass_rate/skill"] == 1
    # by hand: rates 1/2 and 1/2, nothing between: (0 − w)/(0 + w) over (n − 1)
    assert samples.pass_rates(groups_with(4, 4))["pass_rate/skill"] == pytest.approx(-1 / 7)
    generator = np.random.default_rng(0)
    guessed = [
        samples.pass_rates(groups_with(*generator.binomial(8, 0.4, 32)))["pass_rate/skill"]
        for _ in range(200)
    ]
    assert abs(np.mean(guessed)) < 0.01


def test_equal_answers_with_unequal_rewards_are_seen() -> None:
    group = [rollout("ab", 1.0), rollout("ab", 0.0), rollout("ab", 1.0), rollout("c", 0.0)]
    found = samples.rewards([group])
    assert found["reward/unequal_share"] == 1 / 2  # of two repeats
    assert found["reward/std"] == 0.5
    other = [rollout("ab", 0.0)]  # the same answer to another prompt is another matter
    assert "reward/unequal_share" not in samples.rewards([[rollout("ab", 1.0)], other])
    assert samples.distinct_share([group]) == 2 / 4


def test_repetition_counts_runs_of_four_within_an_answer() -> None:
    def by_hand(rows: list[list[int]]) -> float:
        runs = [Counter(tuple(row[i : i + 4]) for i in range(len(row) - 3)) for row in rows]
        total = sum(sum(counts.values()) for counts in runs)
        return 1 - sum(len(counts) for counts in runs) / total

    generator = np.random.default_rng(1)
    rows = [generator.integers(0, 3, generator.integers(0, 40)).tolist() for _ in range(50)]
    assert samples.repetition(rows) == pytest.approx(by_hand(rows))
    assert samples.repetition([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0  # in two answers
    assert samples.repetition([[1], []]) == 0


@pytest.mark.parametrize(
    ("text", "reflects", "marked"),
    [
        ("Wait, let me check.", True, False),
        ("The waiter waited. The answer is 4", False, True),
        (r"so \boxed{4}", False, True),
        ("<answer>4</answer>", False, True),
        ("4", False, False),
    ],
)
def test_words(text: str, reflects: bool, marked: bool) -> None:
    assert bool(samples.REFLECTION.search(text)) is reflects
    assert samples.is_marked(text) is marked


def test_staleness_is_counted_in_updates() -> None:
    found = samples.sample_measures([[rollout("a", 1.0, version=3), rollout("b", 0.0)]], 4)
    assert (found["staleness/mean"], found["staleness/max"]) == (2.5, 4)


def batch_of(rewards: list[float | None], lengths: list[int], recipe_name: str = "grpo"):
    mask_NT = torch.arange(4) < torch.tensor(lengths)[:, None]
    made = TokenBatch.build(
        mask_NT=mask_NT,
        group_N=[n // 2 for n in range(len(rewards))],
        reward_N=rewards,
        old_logp_NT=torch.zeros(mask_NT.shape),
        truncated_N=torch.tensor([n == 3 for n in range(len(rewards))]),
    )
    own = recipe(recipe_name, {"penalty": ""}) if recipe_name == "grpo" else recipe(recipe_name)
    return batch_phase(own, made).batch


def test_waste_by_cause() -> None:
    """Groups: one useful, one dead, one half ungraded (its other row has nothing to compare)."""
    batch = batch_of([1.0, 0.0, 1.0, 1.0, None, 1.0], [1, 2, 3, 4, 2, 1])
    found = samples.wasted(batch, dropped=7, sampled=20)
    assert found == pytest.approx(
        {
            "cost/wasted/dropped": 7 / 20,
            "cost/wasted/ungraded": 2 / 20,
            "cost/wasted/masked": 0.0,
            "cost/wasted/dead": (3 + 4 + 1) / 20,
            "cost/wasted_share": 17 / 20,
        }
    )
    assert samples.wasted(batch, dropped=0, sampled=0) == {}  # answers of the data
    unread = samples.wasted(batch, dropped=7, sampled=20, rewarded=False)
    assert unread["cost/wasted/dead"] == 0.0 < found["cost/wasted/dead"]


def test_costs_per_point() -> None:
    found = costs(flops=5.0, seconds=7200, price=3.0, before=0.25, after=0.35)
    assert found == pytest.approx(
        {
            "cost/flops": 5.0,
            "time/device_hours": 2.0,
            "time/money": 6.0,
            "time/device_hours_per_point": 0.2,
            "time/money_per_point": 0.6,
        }
    )
    without = costs(flops=0.0, seconds=1.0, price=0.0, before=0.5, after=0.4)
    assert set(without) == {"cost/flops", "time/device_hours"}


def test_clipped_tokens_have_a_side_and_a_probability() -> None:
    """Ratios 1.5, 1.5, 0.5, 1 on a good answer and a bad one: clipped by hand at 0.2."""
    old_NT = torch.tensor([[0.1, 0.6, 0.5, 0.5], [0.4, 0.4, 0.8, 0.5]]).log()
    ratio_NT = torch.tensor([[1.5, 1.5, 0.5, 1.0], [1.5, 1.0, 0.5, 1.0]])
    method = recipe("grpo", {"penalty": ""})
    made = TokenBatch.build(
        mask_NT=torch.ones(2, 4, dtype=torch.bool),
        group_N=[0, 0],
        reward_N=[1.0, 0.0],
        old_logp_NT=old_NT,
    )
    batch = batch_phase(method, made).batch
    logp_NT = (old_NT + ratio_NT.log()).requires_grad_()
    found = token_phase(method, batch, logp_NT=logp_NT).tally.read()
    # The good answer is clipped above (probabilities 0.1, 0.6), the bad one below (0.8).
    assert found["clip/high"] == 2 / 8
    assert found["clip/low"] == 1 / 8
    assert found["clip/high_probability"] == pytest.approx(0.35)
    assert found["clip/high_rare_share"] == 0.5
    assert found["clip/low_probability"] == pytest.approx(0.8)
    assert found["tokens/rare_share"] == 1 / 8
    assert found["clip/rare"] == 1
    assert found["clip/high_rarity"] == pytest.approx(4)  # 1 of 2 against 1 of 8
    assert found["clip/low_rarity"] == 0
    assert found["ratio/off"] == pytest.approx(float((ratio_NT - 1).square().mean().sqrt()))
    by_row_N = ratio_NT.log().mean(1).exp()
    assert found["ratio/sequence_mean"] == pytest.approx(float(by_row_N.mean()))
    assert found["ratio/sequence_max"] == pytest.approx(float(by_row_N.max()))


@pytest.mark.parametrize(
    ("advantage", "hard", "even"),
    [("group_mean", 2 * 0.75, 4 * 0.5), ("group_zscore(eps=0.0)", 3.0, 4 * 0.75**0.5)],
)
def test_weight_of_groups_near_all_or_nothing(advantage: str, hard: float, even: float) -> None:
    """One right of four is at the edge, two are not; all right weighs nothing. Σ|A| by hand.

    A z-score has 3 of 3 + 2√3 there, a centred reward 1.5 of 1.5 + 2: less, as is said of it.
    """
    made = TokenBatch.build(
        mask_NT=torch.ones(12, 2, dtype=torch.bool),
        group_N=[0] * 4 + [1] * 4 + [2] * 4,
        reward_N=[1.0, 0, 0, 0] + [1.0, 1, 0, 0] + [1.0] * 4,
        old_logp_NT=torch.zeros(12, 2),
    )
    found = batch_phase(recipe("grpo", {"penalty": "", "advantage": advantage}), made).metrics
    assert found["advantage/edge_share"] == pytest.approx(hard / (hard + even))


def test_no_weight_of_groups_where_nothing_is_learned() -> None:
    made = TokenBatch.build(
        mask_NT=torch.ones(2, 1, dtype=torch.bool),
        group_N=[0, 0],
        reward_N=[1.0, 1.0],
        old_logp_NT=torch.zeros(2, 1),
    )
    assert "advantage/edge_share" not in batch_phase(recipe("grpo", {"penalty": ""}), made).metrics


def test_quantile_is_that_of_numpy() -> None:
    x = torch.randperm(1000).float()
    assert float(quantile(x, 0.99)) == np.quantile(x.numpy(), 0.99, method="inverted_cdf")
    assert float(quantile(torch.tensor([3.0]), 0.99)) == 3


@pytest.mark.parametrize("snr", [0.0, 0.1, 1.0])
def test_signal_to_noise_of_known_gradients(snr: float) -> None:
    """Gradients with a mean and a variance of our choice: the estimate is unbiased over time."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(40, 500))
    optimizer = AdamW(
        [("w", parameter)], learning_rate=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0
    )
    found = []
    for step in range(40):
        parameter.grad = snr**0.5 + torch.randn(parameter.shape)
        optimizer.step()
        estimate = optimizer.signal_to_noise()
        assert (estimate is None) == (step < 4)
        found += [] if estimate is None else [estimate]
    assert np.mean(found) == pytest.approx(snr, abs=0.01 + 0.03 * snr)


def test_bands_cover_every_rate() -> None:
    for size, right in itertools.product((2, 3, 5, 8), range(9)):
        if right <= size:
            found = samples.pass_rates(groups_with(right, size=size))
            assert sum(found[f"pass_rate/{band}"] for band in samples.BANDS) == 1
            assert found["pass_rate/none"] == (right == 0)
            assert found["pass_rate/all"] == (right == size)


def test_of_a_large_step_some_answers_are_read_from_all_over_it() -> None:
    """Reading all 1,024 took a tenth of a step on a GPU."""
    right = [[rollout(f"answer {at} {n}", 1.0, True) for n in range(16)] for at in range(64)]
    rows = [row for group in right for row in group]
    read = samples.spread(rows, samples.MOST_READ)
    assert len(read) == samples.MOST_READ == len({row.text for row in read})
    assert len({row.text.split()[1] for row in read}) == 64  # one of each group
    assert samples.spread(rows[:10], samples.MOST_READ) == rows[:10]
