"""`Ranks` in a real process group: two processes, rows spread unequally, groups split.

The sum of the ranks' gradients must be the gradient of one process that holds all rows.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from batches import Sample, loss_and_gradients, random_sample

from groupwise import Ranks, batch_phase, recipe
from groupwise.errors import GroupwiseError
from groupwise.records import TokenBatch

RECIPES = ("grpo", "dapo", "reinforce_pp", "lite_ppo", "lambda_grpo", "prime", "gpg", "dcpo")
RANKS = ([4, 0, 9, 11, 5], [10, 1, 2, 3, 6, 7, 8])
EXPONENT = 0.3  # of the table learner's λ, which both phases of λ-GRPO read


def the_sample() -> Sample:
    return random_sample(1, groups=(4, 5, 3))


def build(name: str, sample: Sample, **extra: Any) -> TokenBatch:
    if name == "lambda_grpo":
        extra["length_exponent"] = torch.tensor(EXPONENT, dtype=torch.float64)
    return sample.build(**extra)


def one_rank(rank: int, folder: str) -> None:
    """What a process of the group does; it leaves its results in a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(Path(folder) / "meeting"), 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    mine, found = the_sample().take(RANKS[rank]), {}
    for name in RECIPES:
        world = Ranks(mine.rows)
        batch = build(name, mine, world=world)
        loss, gradients = loss_and_gradients(recipe(name), mine, batch=batch)
        done = batch_phase(recipe(name), build(name, mine, world=world))
        found[name] = (loss, gradients, done.metrics, done.refill, sorted(done.memory.visits))
    flags_M = world.gather(torch.arange(mine.rows) < 2)
    found["flags"] = (flags_M.tolist(), world.own(flags_M).tolist())
    try:
        batch_phase(recipe("dr_grpo"), mine.build(world=world).select(torch.tensor([0])))
        found["fewer rows"] = "went through"
    except GroupwiseError as error:
        found["fewer rows"] = str(error)
    except RuntimeError as error:
        found["fewer rows"] = f"not in words: {error}"
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(one_rank, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in (0, 1)]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_of_two_processes_add_up_to_those_of_one(
    name: str, ranks: list[dict[str, Any]]
) -> None:
    sample = the_sample()
    loss, expected = loss_and_gradients(recipe(name), sample, batch=build(name, sample))
    assert expected[0].abs().max() > 1e-6
    same(sum(one[name][0] for one in ranks), loss)
    same(sum(one[name][1][3] for one in ranks), expected[3])  # λ is everybody's parameter
    for rows, one in zip(RANKS, ranks, strict=True):
        for mine, whole in zip(one[name][1][:3], expected[:3], strict=True):
            same(mine, whole[torch.tensor(rows)])


@pytest.mark.parametrize("name", RECIPES)
def test_both_processes_see_the_same_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    done = batch_phase(recipe(name), build(name, the_sample()))
    for one in ranks:
        _, _, metrics, refill, visited = one[name]
        same(metrics, done.metrics)
        assert refill == done.refill
        assert visited == sorted(done.memory.visits)


def test_rows_are_gathered_in_rank_order_without_the_fill(ranks: list[dict[str, Any]]) -> None:
    whole = [True, True, False, False, False] + [True, True] + [False] * 5
    assert [one["flags"][0] for one in ranks] == [whole, whole]
    assert [one["flags"][1] for one in ranks] == [whole[:5], whole[5:]]


def test_a_batch_with_other_rows_than_its_world_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Rows dropped after the ranks had told each other how many they hold."""
    for one in ranks:
        assert "rows" in one["fewer rows"] and "not in words" not in one["fewer rows"]
