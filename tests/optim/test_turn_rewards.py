"""Rewards of turns, as the streams that recipes read; and a game whose gradient is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from graded_rollouts import interrupted, rollout

from groupwise import recipe
from groupwise.groups.phase import batch_phase
from groupwise.optim.assemble import assemble, batch_of
from groupwise.prepare.rollouts import with_turn_rewards
from groupwise.records import Episode, Grade, Rollout, TurnFacts


class Letters:
    """A tokenizer whose ids are characters; every second one is written with two."""

    def decode(self, ids: Any) -> str:
        return "".join(chr(i) * (1 + i % 2) for i in ids)


LETTERS: Any = Letters()


def played(row: Rollout, *rewards: float | None, weight: float = 1.0) -> Rollout:
    """The rollout as an episode whose turns had these rewards; the grade's is that of all."""
    episode = Episode("done", tuple(TurnFacts(reward=x) for x in rewards))
    done = replace(row.completion, episode=episode)
    grade = with_turn_rewards(row.grade, done, episode, LETTERS, weight)
    return replace(row, completion=done, grade=grade, text=LETTERS.decode(done.token_ids))


def streams(*rows: Rollout) -> Any:
    return batch_of(recipe("grpo_process"), [list(rows)], LETTERS)


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_every_turn_ends_a_step_and_steps_add_up_to_the_reward(weight: float) -> None:
    """Also turns that nothing is said of; what is left (the whole, other parts) is the last's."""
    batch = streams(
        played(interrupted("abc", "xyz", "de", 3.0), 0.5, 0.25, weight=weight),
        played(interrupted("abc", "xyz", "de", 3.0), None, 0.25, weight=weight),
        played(rollout("abcdefgh", 2.0), 2.0),
    )
    first = 0.5 * weight
    assert batch.step_reward_NT.tolist() == [
        [0, 0, first, 0, 0, 0, 0, 3.0 - first],
        [0, 0, 0, 0, 0, 0, 0, 3.0],
        [0, 0, 0, 0, 0, 0, 0, 2.0],
    ]
    assert batch.step_end_NT[:2].nonzero().tolist() == [[0, 2], [0, 7], [1, 2], [1, 7]]


def test_steps_of_a_grader_stand_beside_those_of_turns() -> None:
    row = interrupted("abc", "xyz", "de", 3.0)
    end = len(LETTERS.decode(row.completion.token_ids[:7]))  # behind the d
    row = replace(row, grade=Grade(3.0, steps=((end, 0.5),)))
    assert streams(played(row, 1.0, None)).step_reward_NT.tolist() == [[0, 0, 1, 0, 0, 0, 0.5, 1.5]]


def test_who_has_no_reward_has_no_steps() -> None:
    assert played(interrupted("abc", "xyz", "de", None), 0.5, 0.5).grade.steps == ()


# --- stop or go on --------------------------------------------------------------------------------

GO, WIN = 0.6, 0.3  # probabilities: of going on, and then of winning
TRUE = GO * (1 - GO) * (WIN - 0.5)  # of 1 + p (q - 0.5) in the logit of going on: -0.048
STOPS = (1 - GO, False, played(rollout("s", 1.0), 1.0))
WINS = (GO * WIN, True, played(interrupted("g", "?", "w", 1.5), 0.5, 1.0))
LOSES = (GO * (1 - WIN), True, played(interrupted("g", "?", "l", 0.5), 0.5, 0.0))


def expected(baseline: str, size: int) -> float:
    """The mean gradient of the first choice, over all groups that can come."""
    method = recipe("dr_grpo").configure({"advantage": baseline})
    total = 0.0
    for group in product((STOPS, WINS, LOSES), repeat=size):
        chance = 1.0
        for probability, _, _ in group:
            chance *= probability
        rows = [[row for _, _, row in group]]
        made = batch_of(method, rows, LETTERS)
        batch = batch_phase(method, assemble(method, rows, made)).batch
        assert batch.advantage_NT is not None
        slopes = torch.tensor([(1 - GO) if went else -GO for _, went, _ in group])
        total += chance * float((batch.advantage_NT[:, 0] * slopes).mean())
    return total


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_reward_of_the_whole_gives_the_true_gradient(size: int) -> None:
    """Whether the policy goes on changes how many turns there are, and nothing else."""
    assert pytest.approx(-0.048) == TRUE
    assert expected("leave_one_out()", size) == pytest.approx(TRUE, abs=1e-6)
    # A mean with the sample itself in it: the same, smaller by what it subtracts of itself.
    assert expected("group_mean()", size) == pytest.approx(TRUE * (size - 1) / size, abs=1e-6)
