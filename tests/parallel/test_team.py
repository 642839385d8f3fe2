"""Ranks that learn together do what one process does: every recipe, in two and three parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import team_cases
import torch
from teams import Ranks, ranks

from groupwise import recipe
from groupwise.explain.explain import table
from groupwise.parallel.world import ALONE

# Every kind of learner and role. All other recipes take seconds more, and run with the slow tests.
KINDS = ("sft", "grpo", "dapo", "gspo", "reinforce_pp", "ppo", "vapo", "prime", "lambda_grpo",
         "distill", "gkd", "distill_topk", "dpo", "orpo", "kto", "reward_model")  # fmt: skip
OTHERS = [
    row["name"] for row in table() if row["name"] not in KINDS and not recipe(row["name"]).routed
]


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    torch.set_num_threads(1)
    with ranks(3) as made:
        yield made


@functools.cache
def alone(name: str) -> dict[str, Any]:
    return team_cases.gradient(ALONE, name)


@pytest.fixture(scope="module")
def together(team: Ranks) -> Callable[..., list[dict[str, Any]]]:
    """What all ranks of teams of two and of three found, of many recipes at once."""

    @functools.cache
    def found(*names: str) -> list[dict[str, Any]]:
        return [one for size in (2, 3) for one in team.run(size, team_cases.gradients, names)]

    return found


def same_update(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, whole in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        found.get("trace"), expected.get("trace"), rtol=1e-6, atol=1e-6, equal_nan=True
    )
    for name, value in expected["metrics"].items():
        if name != "optim/micro_batches":
            assert found["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_two_and_three_ranks_are_those_of_one_process(
    name: str, together: Callable[..., list[dict[str, Any]]]
) -> None:
    whole = alone(name)
    assert any(float(x.abs().max()) > 1e-6 for x in whole["gradients"].values())
    for one in together(*KINDS):
        same_update(one[name], whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_every_other_recipe(
    name: str, together: Callable[..., list[dict[str, Any]]]
) -> None:
    for one in together(*OTHERS):
        same_update(one[name], alone(name))
