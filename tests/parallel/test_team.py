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
         "distill", "gkd", "distill_topk", "dpo", "orpo", "aot", "kto", "reward_model")  # fmt: skip
# By how rows are cut: passes, and prompts that are read again.
CUT = ("optim/micro_batches", "router/replayed_share", "router/missing_share")
EVERY = {row["name"]: recipe(row["name"]) for row in table()}
OTHERS = [name for name, made in EVERY.items() if name not in KINDS and not made.routed]
# What reads routes, and what does not: live ones, those of the learner, those of the sampler.
MIXTURES = ["grpo", *(name for name, made in EVERY.items() if made.routed)]


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


def learns(found: dict[str, Any]) -> bool:
    """Tell whether there is a gradient to be the same as."""
    return any(float(x.abs().max()) > 1e-6 for x in found["gradients"].values())


def same_update(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-12) -> None:
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, whole in expected["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], whole, rtol=limit, atol=limit)
    torch.testing.assert_close(
        found.get("trace"), expected.get("trace"), rtol=1e-6, atol=1e-6, equal_nan=True
    )
    for name, value in expected["metrics"].items():
        if name not in CUT:
            assert found["metrics"][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_two_and_three_ranks_are_those_of_one_process(
    name: str, together: Callable[..., list[dict[str, Any]]]
) -> None:
    whole = alone(name)
    assert learns(whole)
    for one in together(*KINDS):
        same_update(one[name], whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_are_those_of_every_other_recipe(
    name: str, together: Callable[..., list[dict[str, Any]]]
) -> None:
    assert learns(alone(name))
    for one in together(*OTHERS):
        same_update(one[name], alone(name))


def test_mixtures_learn_as_in_one_process_wherever_their_routes_were_recorded(team: Ranks) -> None:
    for name in MIXTURES:
        whole = team_cases.mixture(ALONE, name)
        router = whole["gradients"]["policy/policy/exp_avg/model.layers.0.mlp.gate.weight"]
        assert float(router.abs().max()) > 1e-6
        for size in (2, 3):
            for one in team.run(size, team_cases.mixture, name):
                same_update(one, whole)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_adapters_are_sharded_and_quantised_bases_are_held_once(kind: str, team: Ranks) -> None:
    """Shards of bits could not be multiplied by; a second copy would cost what bits save."""
    whole = team_cases.beside_bits(ALONE, kind)
    assert len(whole["gradients"]) == 2 * 7 * 2  # A and B of seven matrices in two layers
    for one in team.run(3, team_cases.beside_bits, kind):
        same_update(one, whole, 1e-12 if kind == "int8" else 1e-5)
        assert len(one["shared"]) == 2 * 7 * 2 and {
            name.rpartition(".")[2] for name in one["shared"]
        } == {"bits", "scale"}
