"""Runs of several ranks: the same samples as in one process, and what becomes of accidents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cold_start
import pytest
import team_runs
import torch
from fake_engine_server import serving
from runs import left_behind
from team_runs import apart, weights
from teams import Failure, Ranks, ranks

PPO = {"recipe": "ppo", "critic__alone_steps": 0, "recipe__schedule__updates": 2}
EXACT = 1e-5  # what six steps of two ranks may be from those of one process
COLUMNS = ("prompt_id", "draw", "sample", "token_ids", "text", "reward")


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with ranks(3) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, all steps."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    cold_start.run_from(model, folder, **PPO, steps=6)
    return folder


@pytest.fixture(scope="module")
def two(team: Ranks, model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, all steps."""
    folder = tmp_path_factory.mktemp("two") / "run"
    team.run(2, team_runs.run, model, str(folder), PPO | {"steps": 6})
    return folder


def samples(folder: Path) -> list[list[Any]]:
    steps = [cold_start.rows(folder, step) for step in range(1, 7)]
    return [[[row[name] for name in COLUMNS] for row in rows] for rows in steps]


def test_two_ranks_draw_the_same_samples_and_end_where_one_process_does(
    alone: Path, two: Path
) -> None:
    assert samples(two) == samples(alone)
    assert 0.0 < apart(two, alone) < EXACT


def test_servers_are_asked_by_the_first_rank_for_all(
    team: Ranks, model: str, tmp_path: Path
) -> None:
    """Their weights are gathered from all ranks at every step."""
    with serving(Path(model)) as server:
        given = {"engine__backend": "vllm", "engine__urls": [server.url], "steps": 3}
        cold_start.run_from(model, tmp_path / "alone", **given)
        asked = len(server.asked("/v1/completions"))
        team.run(2, team_runs.run, model, str(tmp_path / "two"), given)
        assert len(server.asked("/v1/completions")) == 2 * asked
    for step in (1, 2, 3):
        one, both = (cold_start.rows(tmp_path / name, step) for name in ("alone", "two"))
        assert [[row[x] for x in COLUMNS] for row in both] == [
            [row[x] for x in COLUMNS] for row in one
        ]


def test_a_team_that_goes_on_does_what_it_would_have_done(
    team: Ranks, model: str, two: Path, tmp_path: Path
) -> None:
    """Of all that is left behind every byte, shards included."""
    folder = tmp_path / "run"
    for steps in (2, 6):
        team.run(2, team_runs.run, model, str(folder), PPO | {"steps": steps})
    whole, parts = left_behind(two), left_behind(folder)
    whole["summary"].pop("steps"), parts["summary"].pop("steps")
    assert parts.keys() == whole.keys()
    for name in whole:
        assert parts[name] == whole[name], name


def test_a_run_goes_on_with_another_number_of_ranks(
    team: Ranks, model: str, alone: Path, tmp_path: Path
) -> None:
    """Two, one, three: moments and masters of policy and critic are cut anew (traps 8 and 9)."""
    folder = tmp_path / "run"
    team.run(2, team_runs.run, model, str(folder), PPO | {"steps": 2})
    cold_start.run_from(model, folder, **PPO, steps=4)
    team.run(3, team_runs.run, model, str(folder), PPO | {"steps": 6})
    assert samples(folder) == samples(alone)
    assert apart(folder, alone) < EXACT


def test_what_only_one_rank_is_asked_all_do(team: Ranks, model: str, tmp_path: Path) -> None:
    changes = PPO | {"steps": 6}
    said = team.run(2, team_runs.asked_to_stop, model, str(tmp_path / "run"), changes, 1)
    assert said == ["stopped after step 1, saved; the same command goes on"] * 2


def test_memory_that_fails_on_one_rank_ends_all_in_words(
    team: Ranks, model: str, tmp_path: Path
) -> None:
    with ranks(2, lasting=False) as own:
        found = own.try_to(
            2, team_runs.out_of_memory, model, str(tmp_path / "run"), PPO | {"steps": 6}, 1
        )
    for each in found:
        assert isinstance(each, Failure)
        assert "Out of memory on rank 1 of 2" in each.said and "optim.micro_tokens=" in each.said


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        ("update", 1),
        pytest.param("rollout", 1, marks=pytest.mark.slow),
        pytest.param("grade", 1, marks=pytest.mark.slow),
        pytest.param("score", 0, marks=pytest.mark.slow),
        pytest.param("update", 0, marks=pytest.mark.slow),
        pytest.param("checkpoint", 1, marks=pytest.mark.slow),
        pytest.param("checkpoint", 0, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_is_named_and_the_same_command_goes_on(
    phase: str, rank: int, team: Ranks, model: str, two: Path, tmp_path: Path
) -> None:
    folder, changes = tmp_path / "run", PPO | {"steps": 6}
    with ranks(2, lasting=False) as own:
        found = own.try_to(2, team_runs.dying, model, str(folder), changes, rank, phase)
    left = found[1 - rank]
    assert found[rank] is None and isinstance(left, Failure)
    assert f"rank {rank} of 2 is gone, while " in left.said and "the same command" in left.said
    team.run(2, team_runs.run, model, str(folder), changes)
    assert samples(folder) == samples(two)
    ends, whole = weights(folder), weights(two)
    assert all(torch.equal(x, whole[name]) for name, x in ends.items())


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (3, [PPO | {"prompts_per_step": 2}] * 3, "3 ranks and prompts_per_step=2"),
        (2, [PPO, PPO | {"seed": 5}], "Ranks differ in configuration"),
        (2, [{"recipe": "spin"}] * 2, "samples from its reference"),
    ],
)
def test_teams_that_can_not_be_are_refused(
    size: int, changes: list[dict[str, Any]], words: str, team: Ranks, model: str, tmp_path: Path
) -> None:
    found = team.try_to(size, team_runs.differing, model, str(tmp_path / "run"), changes)
    for each in found:
        assert isinstance(each, Failure) and words in each.said
