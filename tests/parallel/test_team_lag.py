"""Ranks that learn from prompts that were sampled ahead: by all of them, or beside them by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cold_start
import pytest
import team_runs
from runs import metrics
from teams import Ranks, ranks

# Dynamic sampling, two updates a step: what a step takes of the queue differs from step to step.
LAGGING = {"recipe": "olmo3", "refills": 2, "recipe__schedule__updates": 2, "train__lag": 2}
LAGGING |= {"steps": 5, "eval__every": 4}
COLUMNS = ("prompt_id", "draw", "sample", "token_ids", "reward", "weight_version")


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("start") / "model")


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    cold_start.run_from(model, folder, **LAGGING)
    return folder


def samples(folder: Path) -> list[list[Any]]:
    steps = [cold_start.rows(folder, step) for step in range(1, 6)]
    return [[[row[name] for name in COLUMNS] for row in rows] for rows in steps]


def same_run(folder: Path, alone: Path) -> None:
    """The same samples of the same age, learned from alike."""
    assert samples(folder) == samples(alone)
    assert team_runs.apart(folder, alone) < 1e-5
    ages = [[line.get("lag/mean") for line in metrics(each)] for each in (folder, alone)]
    assert ages[0] == ages[1] and max(ages[0][1:]) > 0


@pytest.mark.parametrize("servers", [0, 1])
def test_ranks_learn_from_the_answers_that_one_process_would(
    servers: int, team: Ranks, model: str, alone: Path, tmp_path: Path
) -> None:
    """Stopped and gone on with: what was admitted and not learned from is admitted again."""
    for steps in (2, 5):
        own = LAGGING | {"steps": steps, "engine__servers": servers}
        team.run(2, team_runs.run, model, str(tmp_path / "run"), own)
    same_run(tmp_path / "run", alone)


def test_a_run_ahead_goes_on_with_another_number_of_ranks(
    team: Ranks, model: str, alone: Path, tmp_path: Path
) -> None:
    cold_start.run_from(model, tmp_path / "run", **LAGGING | {"steps": 2})
    team.run(2, team_runs.run, model, str(tmp_path / "run"), LAGGING)
    same_run(tmp_path / "run", alone)
