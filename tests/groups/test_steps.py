"""Steps of answers, their values, and the advantage that is the difference of two."""

from __future__ import annotations

import pytest
import torch

from groupwise.errors import RecipeError
from groupwise.groups.credit import step_difference
from groupwise.groups.steps import (
    Branching,
    branching_of,
    mean_rewards,
    placed_values,
    positions,
    root_value,
    step_ends,
)
from groupwise.recipes import recipe
from groupwise.records import TokenBatch


def texts(line: str) -> list[str]:
    """Tokens of one character; `$` is a newline, `^` an end token, which has no text."""
    return ["\n" if x == "$" else "" if x == "^" else x for x in line]


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("ab$cd$e", [2, 5, 6]),
        ("ab", [1]),  # without a step end all is one step
        ("ab$", [2]),
        ("ab$^", [3]),  # an end token is no step of its own
        ("ab$$ $cd", [5, 7]),  # empty lines and spaces belong to the step before
        ("$$ab$c", [4, 5]),  # nothing before the first word is no step
        ("a", [0]),
        ("^", [0]),
    ],
)
def test_lines_are_steps(line: str, ends: list[int]) -> None:
    assert step_ends(texts(line)) == ends


def test_sentences_are_steps_where_asked_for() -> None:
    assert step_ends(texts("ab.c,d$e"), "sentence") == [2, 4, 6, 7]
    assert step_ends(["One.", " ", "Two", "!"], "sentence") == [1, 3]


def test_a_turn_ends_a_step_and_others_tokens_none() -> None:
    own = [True, True, False, False, True, False, True]
    assert step_ends(texts("ab$$c$d"), "line", own) == [1, 4, 6]
    assert positions([1, 4, 6], 9, own) == (4, 6)  # what the others wrote is known there


def test_a_cap_is_spread_over_the_answer() -> None:
    ends = list(range(0, 100, 10))  # nine inner ends: 0, 10, ..., 80
    assert positions(ends, 9) == tuple(end + 1 for end in ends[:-1])
    assert positions(ends, 3) == (11, 41, 71)
    assert positions(ends, 1) == (41,)
    assert positions([5], 3) == ()


def test_a_position_without_a_grade_is_none() -> None:
    found = mean_rewards({3: [1.0, None, 0.0], 1: [None, None], 7: [0.25]})
    assert found == {3: 0.5, 7: 0.25}


def test_the_root_is_what_the_others_got() -> None:
    assert root_value(1.0, [0.0, None, 1.0, 1.0], {2: 0.1}) == pytest.approx(2 / 3)
    assert root_value(1.0, [None], {0: 0.4, 3: 0.1}) == 0.4  # alone: branches from the prompt
    assert root_value(1.0, [], {3: 0.1, 5: 0.9}) == 0.1  # its neighbour's
    assert root_value(1.0, [], {}) == 1.0  # nothing to compare with, nothing to learn
    assert root_value(None, [], {}) == 0.0


def test_values_stand_where_their_step_ends() -> None:
    own = [True] * 6
    assert placed_values(own, 0.5, {2: 0.7, 4: 0.2}) == [(1, 0.5), (3, 0.7), (5, 0.2)]
    assert placed_values(own, 0.5, {0: 0.5}) == [(5, 0.5)]
    holes = [True, True, False, True, False, True]
    assert placed_values(holes, 0.5, {3: 0.7, 5: 0.2}) == [(1, 0.5), (3, 0.7), (5, 0.2)]


def advantages(mask, reward, value, end) -> list[list[float]]:
    batch = TokenBatch.build(
        mask_NT=torch.tensor(mask, dtype=torch.bool),
        group_N=[0] * len(mask),
        reward_N=reward,
        step_value_NT=torch.tensor(value, dtype=torch.float64),
        step_end_NT=torch.tensor(end),
    )
    found = step_difference()(batch.task_reward_N, batch)
    return [[round(x, 9) for x in row] for row in found.tolist()]


def test_the_difference_by_hand() -> None:
    """Steps of two, one and two tokens that begin at 0.5, 0.8 and 0.25; then one step alone."""
    value = [[9, 0.5, 0.8, 9, 0.25], [9, 9, 0.5, 0, 0]]
    end = [[0, 1, 1, 0, 1], [0, 0, 1, 0, 0]]
    mask = [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert advantages(mask, [1.0, 0.0], value, end) == [
        [0.3, 0.3, -0.55, 0.75, 0.75],
        [-0.5, -0.5, -0.5, 0.0, 0.0],
    ]
    assert advantages(mask, [None, 0.0], value, end)[0][3] == -0.25  # ungraded: no reward comes


def test_the_difference_with_holes_and_padding_on_either_side() -> None:
    """What others wrote between two steps, or within one, is in neither."""
    value = [[0, 9, 7, 0.5, 7, 0.8, 0], [0.1, 0, 0, 0, 0, 0, 0]]
    end = [[0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]  # marks of others count for nothing
    mask = [[0, 1, 0, 1, 0, 1, 0], [1, 0, 0, 0, 0, 0, 0]]
    assert advantages(mask, [1.0, 1.0], value, end) == [
        [0.0, 0.3, 0.0, 0.3, 0.0, 0.2, 0.0],
        [0.9, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    ]


def test_differences_add_up_to_reward_less_root() -> None:
    """Over the steps of an answer, whatever the values between."""
    g = torch.Generator().manual_seed(3)
    value_NT = torch.rand(5, 8, generator=g, dtype=torch.float64)
    end_NT = torch.rand(5, 8, generator=g) < 0.5
    end_NT[:, -1] = True
    reward_N = torch.rand(5, generator=g, dtype=torch.float64)
    batch = TokenBatch.build(
        mask_NT=torch.ones(5, 8, dtype=torch.bool), group_N=[0] * 5, reward_N=reward_N,
        step_value_NT=value_NT, step_end_NT=end_NT,
    )  # fmt: skip
    found_NT = step_difference()(reward_N, batch)
    for row in range(5):
        ends = end_NT[row].nonzero()[:, 0]
        total = found_NT[row, ends].sum()
        assert float(total) == pytest.approx(float(reward_N[row] - value_NT[row, ends[0]]))


def test_the_settings_of_branches_are_those_of_the_slot() -> None:
    assert branching_of(recipe("vineppo")) == Branching(9, 25, "line")
    changed = recipe("vineppo").configure({"advantage.step_difference.branches": 3})
    assert branching_of(changed) == Branching(3, 25, "line")
    assert branching_of(recipe("grpo")) is None and branching_of(recipe("dpo")) is None
    with pytest.raises(RecipeError, match="out of range"):
        step_difference(branches=0)
    with pytest.raises(RecipeError, match="is unknown"):
        step_difference(split="word")


def test_shaping_beside_branches_is_refused() -> None:
    with pytest.raises(RecipeError, match="changes the answer's alone"):
        recipe("vineppo").replace(shaping="signed()")
