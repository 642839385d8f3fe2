"""Rollouts with tokens that the policy did not write, as a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from graded_rollouts import interrupted, rollout

from groupwise import recipe
from groupwise.optim import assemble as assembled
from groupwise.records import Grade, Rollout, Turn


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def batch_of(name: str, *rows: Rollout) -> Any:
    longest = max(len(r.completion.token_ids) for r in rows)
    made = assembled.batch_of(recipe(name), [list(rows)], Letters())  # type: ignore[arg-type]
    zeros_NT = torch.zeros(len(rows), longest)
    return assembled.assemble(recipe(name), [list(rows)], made, old_logp_NT=zeros_NT)


def with_steps(row: Rollout, *steps: tuple[int, float]) -> Rollout:
    return replace(row, grade=Grade(1.0, steps=steps))


def others_end(row: Rollout) -> Rollout:
    """The same tokens, of which a tool wrote all but the policy's first turn."""
    done = row.completion
    first, length = done.turns[0].end, len(done.token_ids)
    turns = (Turn("assistant", 0, first), Turn("tool", first, length))
    return replace(row, completion=replace(
        done, mask_T=torch.arange(length) < first, turns=turns))  # fmt: skip


def test_a_reward_of_a_step_is_at_a_token_of_the_policy() -> None:
    """Where a step ends in what others wrote, at the policy's last token before it."""
    row = interrupted("ab", "xyz", "cd", 1.0)
    batch = batch_of(
        "grpo_process",
        with_steps(row, (1, 0.5), (4, 0.25), (6, 2.0)),
        others_end(interrupted("ab", "xyz", "cd", 3.0)),  # no steps: one, with the whole reward
        with_steps(others_end(row), (2, 0.5), (7, 0.25)),
        rollout("abcdefg", 4.0),
    )
    assert batch.step_reward_NT.tolist() == [
        [0.5, 0.25, 0, 0, 0, 2.0, 0],
        [0, 3.0, 0, 0, 0, 0, 0],
        [0, 0.75, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 4.0],
    ]
    assert torch.equal(batch.step_end_NT, batch.step_reward_NT != 0)


def test_a_batch_knows_the_policys_tokens_and_no_others() -> None:
    row = interrupted("ab", "xyz", "cd", 1.0)
    odd = replace(row.completion, logp_T=torch.tensor([-1.0, -2, float("nan"), 9, 9, -3, -4]))
    batch = batch_of("sspo", replace(row, completion=odd), rollout("hi", 0.0))
    assert batch.mask_NT.int().tolist() == [[1, 1, 0, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0]]
    assert batch.length_N.tolist() == [4, 2] and batch.last_N.tolist() == [6, 1]
    assert batch.sampler_logp_NT[0].tolist() == [-1, -2, 0, 0, 0, -3, -4]
    first, second = batch.segment_NT[0, [0, 1]].tolist(), batch.segment_NT[0, [5, 6]].tolist()
    assert first[0] == first[1] != second[0] == second[1]  # a turn is a sentence of its own
