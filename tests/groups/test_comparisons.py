"""Other comparisons than the group's mean: numbers by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from groupwise import Memory, TokenBatch, batch_phase, recipe
from groupwise.errors import BatchError
from groupwise.groups.comparisons import (
    best_minus_second,
    group_zscore_per_part,
    length_weighted_mean,
    role_moving_mean,
    tree_mean,
)
from groupwise.groups.credit import gae
from groupwise.groups.filters import draw_weights
from groupwise.groups.token_baselines import optimal_token_baseline
from groupwise.groups.turns import plus_state_zscore, turn_return_to_go, whiten_turns
from groupwise.sync.checkpoints import memory_from_json, memory_to_json
from groupwise.testing import run_case


def batch(rewards: Any, lengths: Any, groups: Any = None, **streams: Any) -> TokenBatch:
    width = max(lengths)
    mask_NT = torch.arange(width) < torch.tensor(lengths)[:, None]
    found = TokenBatch.build(
        mask_NT=mask_NT,
        group_N=groups or [0] * len(lengths),
        reward_N=torch.tensor(rewards, dtype=torch.float64),
        **streams,
    )
    return replace(found, reward_N=found.task_reward_N, learn_N=~found.task_reward_N.isnan())


def close(found: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(
        found, torch.tensor(wanted, dtype=found.dtype), rtol=0, atol=1e-12, equal_nan=True
    )


def test_a_baseline_by_length_gives_long_answers_more_say() -> None:
    held = batch([1.0, 0.0, 0.0], [4, 1, 1])  # b = 4/6
    close(length_weighted_mean()(held.task_reward_N, held), [1 / 3, -2 / 3, -2 / 3])
    alike = batch([0.3, 0.3], [4, 1])
    close(length_weighted_mean()(alike.task_reward_N, alike), [0.0, 0.0])


def test_only_a_single_best_answer_leads() -> None:
    held = batch([1.0, 0.4, 0.2, 0.5, 0.5, 0.1, 0.7, math.nan], [1] * 8, [0, 0, 0, 1, 1, 1, 2, 2])
    found = best_minus_second()(held.task_reward_N, held)
    close(found, [0.6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, math.nan])


def test_a_part_that_is_missing_leaves_its_own_statistics_alone() -> None:
    part_NK = torch.tensor([[1.0, 5.0], [0.0, math.nan], [0.5, 7.0], [math.nan, math.nan]])
    held = batch([1.0, 0.0, 0.5, 0.0], [1] * 4, reward_part_NK=part_NK)
    found = group_zscore_per_part(ddof=1, eps=0.0)(held.task_reward_N, held)
    r = math.sqrt(0.5)
    close(found, [1.0 - r, -1.0, r, math.nan])


def test_roles_are_compared_with_their_own_past_in_the_order_of_rows() -> None:
    memory = Memory(role_average={1: 0.5})
    held = batch([1.0, 0.0, 1.0], [1] * 3, role_N=torch.tensor([0, 1, 0]), memory=memory)
    close(role_moving_mean(decay=0.5)(held.task_reward_N, held), [1.0, -0.5, 0.5])
    result = batch_phase(recipe("rae", {"advantage.decay": 0.5}), TokenBatch.build(
        mask_NT=torch.ones(3, 1), group_N=[0, 0, 1], reward_N=[1.0, 0.0, 1.0],
        role_N=torch.tensor([0, 1, 0]), memory=memory,
    ))  # fmt: skip
    assert result.memory.role_average == {0: 0.75, 1: 0.25}


def test_spo_counts_several_answers_of_a_prompt_and_fades_once() -> None:
    memory = Memory(prompt_beta={7: (4.0, 4.0)})
    found = batch_phase(recipe("spo"), TokenBatch.build(
        mask_NT=torch.ones(3, 1), group_N=[7, 7, 8], reward_N=[1.0, 0.0, 1.0],
        drift_N=torch.tensor([1.0, 1.0, 0.0]), memory=memory,
    )).memory.prompt_beta  # fmt: skip
    assert found[7] == pytest.approx((4.0 * 0.875 + 1.0, 4.0 * 0.875 + 1.0))
    assert found[8] == pytest.approx((0.5 * 0.96 + 1.0, 0.5 * 0.96))


def test_a_tree_of_one_level_is_the_groups_mean() -> None:
    held = batch([1.0, 0.0, 0.5], [2, 1, 1], branch_NL=torch.zeros(3, 1).long())
    close(tree_mean()(held.task_reward_N, held), [0.5, -0.5, 0.0])


def test_where_one_answer_goes_on_alone_the_token_baseline_is_nothing_or_its_own() -> None:
    ones = torch.full((2, 2), -1.0)
    streams = {"old_logp_NT": ones, "old_square_mass_NT": torch.full((2, 2), 0.5)}
    held = batch([1.0, 0.0], [2, 1], **streams)
    zero = optimal_token_baseline(tail="zero")(held.task_reward_N, held)
    own = optimal_token_baseline(tail="own")(held.task_reward_N, held)
    assert float(zero[0, 1]) == 1.0 and abs(float(own[0, 1])) < 1e-6
    assert float(zero[0, 0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [("pow", [0.25, 1.0, 0.0]), ("max_min", [0.0, 1.0, 1.0]), ("max_random", [0.1, 0.1, 0.4])],
)
def test_rows_are_drawn_by_their_reward(how: Any, wanted: list[float]) -> None:
    rewards = {"pow": [0.5, -1.0, 0.0], "max_min": [0.5, -1.0, 0.9], "max_random": [0.5, 0.0, 0.9]}
    found = draw_weights(torch.tensor(rewards[how]), how, 2.0)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64) + 1e-8)


# --- turns --------------------------------------------------------------------------------------


def turns(paid: list[list[float]], groups: Any = None, **streams: Any) -> TokenBatch:
    """Episodes of one token a turn."""
    width = max(map(len, paid))
    reward_NT = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in paid]).double()
    lengths = [len(row) for row in paid]
    marks = torch.arange(width) < torch.tensor(lengths)[:, None]
    return batch(
        [sum(row) for row in paid], lengths, groups,
        step_reward_NT=reward_NT, step_end_NT=marks, **streams,
    )  # fmt: skip


@pytest.mark.parametrize(("size", "biased"), [(2, -0.0912), (4, -0.11539), (6, -0.11926)])
def test_means_of_turns_are_a_charge_on_going_on(size: int, biased: float) -> None:
    """Stop for 1, or go on (.6) for .5 and then 1 with .3: all groups of that size, exactly."""
    found = run_case({
        "kind": "estimator_expectation", "method": "turn_return_to_go",
        "params": {"G": size, "p_continue": 0.6, "q_win": 0.3},
        "inputs": {"stop_reward": 1.0, "continue_reward": 0.5, "win_reward": 1.0},
    })  # fmt: skip
    assert found["true_gradient"] == pytest.approx(-0.048, abs=1e-12)
    assert found["turn_return_to_go"] == pytest.approx(-0.048, abs=1e-12)
    assert found["left_out"] == pytest.approx(-0.048, abs=1e-12)
    assert found["summed_turn_means"] == pytest.approx(biased, abs=1e-5)


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("hole", [False, True])
def test_a_critic_that_knows_gives_the_true_gradient_over_holes(lam: float, hole: bool) -> None:
    """The same game by enumeration: with the true values, what stands between turns or not."""
    going, winning = 0.6, 0.3
    kinds = [([1.0], 1 - going, -going), ([0.5, 1.0], going * winning, 1 - going),
             ([0.5, 0.0], going * (1 - winning), 1 - going)]  # fmt: skip
    value = (1 - going) * 1.0 + going * (0.5 + winning), winning  # of the first turn, the second
    width, second = (5, 4) if hole else (2, 1)  # what others say is three tokens long
    rows = len(kinds)
    mask_NT = torch.zeros(rows, width, dtype=torch.bool)
    paid_NT, value_NT = torch.zeros(rows, width).double(), torch.full((rows, width), 9.0).double()
    for row, (rewards, _, _) in enumerate(kinds):
        for turn, reward in enumerate(rewards):
            at = (0, second)[turn]
            mask_NT[row, at], paid_NT[row, at], value_NT[row, at] = True, reward, value[turn]
    held = TokenBatch.build(
        mask_NT=mask_NT, group_N=[0] * rows, reward_N=[0.0] * rows, token_reward_NT=paid_NT,
        old_value_NT=value_NT,
    )  # fmt: skip
    found_NT = gae(gamma=1.0, lam=lam)(held.task_reward_N, held)
    gradient = sum(
        chance * slope * float(A_T[0])
        for (_, chance, slope), A_T in zip(kinds, found_NT, strict=True)
    )
    assert gradient == pytest.approx(-0.048, abs=1e-9)
    assert not found_NT[~mask_NT].any()


def test_rows_that_have_ended_count_nothing_or_are_left_out() -> None:
    held = turns([[0.0, 1.0], [1.0]])
    close(turn_return_to_go()(held.task_reward_N, held), [[0.0, 1.0], [0.0, 0.0]])
    three = turns([[0.0, 1.0], [0.0, 0.5], [1.0]])
    left = turn_return_to_go(ended="left_out")(three.task_reward_N, three)
    close(left, [[0.25, 0.5], [-0.5, -0.5], [0.25, 0.0]])


def test_a_turn_counts_once_in_whitening_however_long_it_is() -> None:
    held = batch(
        [1.0, 0.0], [4, 1],
        step_reward_NT=torch.zeros(2, 4), step_end_NT=torch.zeros(2, 4),
    )  # fmt: skip
    x_NT = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    found = whiten_turns(ddof=1, eps=0.0)(x_NT, held)
    r = math.sqrt(0.5)
    torch.testing.assert_close(found[:, 0], torch.tensor([r, -r]), check_dtype=False)


def test_a_state_met_once_adds_nothing() -> None:
    held = turns([[1.0, 1.0], [0.0]], state_NT=torch.tensor([[1, 2], [1, 0]]))
    start = torch.zeros(2, dtype=torch.float64)
    found = plus_state_zscore(gamma=1.0, weight=1.0, scale="none")(start, held)
    close(found, [[1.0, 0.0], [-1.0, 0.0]])


def test_states_are_asked_for_by_name() -> None:
    with pytest.raises(
        BatchError, match=r"state_NT .the number of the state that a turn begins in"
    ):
        batch_phase(recipe("gigpo"), turns([[1.0], [0.0]]))


def test_what_roles_and_prompts_have_earned_comes_back_from_a_checkpoint() -> None:
    memory = Memory(role_average={0: 0.25, 3: -1.0}, prompt_beta={7: (1.5, 0.5)})
    read = json.loads(json.dumps(memory_to_json(memory)))
    assert memory_from_json(read) == memory
    for name in ("role_average", "prompt_beta"):  # a checkpoint from before there were any
        del read[name]
    assert memory_from_json(read) == Memory()
