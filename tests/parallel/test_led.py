"""What the first rank leads: episodes with an environment, and stages of a pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chains
import cold_start
import pytest
import team_runs
from played import Adder, answering
from runs import metrics
from teams import Failure, Ranks, ranks

from groupwise.envs.environment import Observation
from groupwise.errors import RunError
from groupwise.parallel.world import ALONE, World

PLAYED = {"turns__environment": "played", "turns__max": 4, "engine__max_tokens": 10}
BASELINES = PLAYED | {"recipe": "remax", "group_size": 2, "steps": 3}
ENGINE = """
from groupwise.engine.native.engine import NativeEngine

class Mine(NativeEngine):
    pass
"""
COLUMNS = ("prompt_id", "draw", "sample", "token_ids", "mask", "text", "reward", "reward_steps")


class Soon(Adder):
    """Has heard enough after a few characters."""

    enough = 2


class Marking(Soon):
    """Leaves word of the rank that it was opened on."""

    place = ""

    def reset(self, row: Any) -> Observation:
        with Path(self.place).open("a") as file:
            file.write(os.environ.get("RANK", "0"))
        return super().reset(row)


class Forgetful(Soon):
    """Fails in the midst of an episode, in a way that ends the run."""

    def step(self, text: str) -> Observation:
        raise SystemError("not of this world")


@pytest.fixture(scope="module")
def team() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("start") / "model", **PLAYED)


def playing(
    world: World, model: str, folder: str, changes: dict[str, Any], make: Any, place: str
) -> Any:
    """A run whose policy is answered by an environment in the rank that opens it."""
    Marking.place = place
    with pytest.MonkeyPatch.context() as patch:
        answering(patch, make)
        return team_runs.run(world, model, folder, changes)


def conversations(folder: Path, steps: int) -> list[list[Any]]:
    found = [cold_start.rows(folder, step) for step in range(1, steps + 1)]
    return [[[row[name] for name in COLUMNS] for row in rows] for rows in found]


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    playing(ALONE, model, str(folder), BASELINES, Marking, str(folder.with_name("opened")))
    return folder


@pytest.mark.parametrize("engine", ["native", "mine.py:Mine"])
def test_episodes_are_those_of_one_process_and_the_first_rank_hears_them_all(
    engine: str, team: Ranks, model: str, alone: Path, tmp_path: Path
) -> None:
    """Greedy baselines and evaluations are played too; by an engine of the first rank's, too."""
    (tmp_path / "mine.py").write_text(ENGINE)
    backend = engine if engine == "native" else f"{tmp_path}/{engine}"
    place, folder = tmp_path / "opened", tmp_path / "run"
    given = BASELINES | {"engine__backend": backend}
    team.run(2, playing, model, str(folder), given, Marking, str(place))
    heard = place.read_text()
    assert heard and set(heard) == {"0"}
    assert conversations(folder, 3) == conversations(alone, 3)
    assert any(len(row["turns"]) > 2 for row in cold_start.rows(folder, 3))
    assert team_runs.apart(folder, alone) < 1e-5
    judged = [[line.get("eval/reward") for line in metrics(each)] for each in (folder, alone)]
    assert judged[0] == judged[1] and judged[0][0] is not None


def test_what_fails_while_the_first_rank_leads_ends_all(
    team: Ranks, model: str, tmp_path: Path
) -> None:
    given = [model, str(tmp_path / "run"), PLAYED, Forgetful, str(tmp_path / "x")]
    for each in team.try_to(2, playing, *given):
        assert isinstance(each, Failure) and "not of this world" in each.said


def leading(world: World, fails: str) -> Any:
    """Three rounds of work, or a failure of one side or the other."""
    done = []

    def work(given: int) -> list[int]:
        if fails == f"work {world.rank}":
            raise RunError("in the work")
        done.append(given)
        return world.merge({world.rank: given + world.rank})

    def lead(ask: Any) -> str:
        found = [ask(10 * number) for number in range(3)]
        if fails == "lead":
            raise RunError("in the lead")
        return str(found)

    return world.led(lead, work), done


def test_all_ranks_work_when_the_first_one_asks(team: Ranks) -> None:
    assert leading(ALONE, "") == ("[[0], [10], [20]]", [0, 10, 20])
    for found in team.run(2, leading, ""):
        assert found == ("[[0, 1], [10, 11], [20, 21]]", [0, 10, 20])
    assert [each.said for each in team.try_to(2, leading, "lead")] == ["in the lead"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_work_that_fails_on_one_rank_is_not_waited_for(rank: int) -> None:
    with ranks(2, lasting=False) as own:
        found = own.try_to(2, leading, f"work {rank}")
    assert found[rank].said == "in the work" and isinstance(found[1 - rank], Failure)


# --- pipelines -----------------------------------------------------------------------------------


def chained(world: World, folder: str, text: str) -> Any:
    """A pipeline of all ranks; returns the recorded stages and what was said."""
    record, said = chains.go(chains.chain(Path(folder), text))
    return [(stage.name, stage.state) for stage in record.stages], said


def test_a_pipeline_is_led_by_the_first_rank(team: Ranks, tmp_path: Path) -> None:
    """Its stages are those of one process; finished, it says so and does nothing."""
    chains.go(alone := chains.chain(tmp_path / "one", chains.THREE))
    first, second = team.run(2, chained, str(tmp_path / "two"), chains.THREE)
    assert [state for _, state in first[0]] == ["finished"] * 3 and second[0] == first[0]
    assert "=== stage 2 of 3: reason" in first[1] and second[1] == ""
    made = chains.chain(tmp_path / "two", chains.THREE)
    for stage in made.pipeline.stages:
        assert team_runs.apart(made.folder(stage), alone.folder(stage)) < 1e-5
    again = team.run(2, chained, str(tmp_path / "two"), chains.THREE)
    assert "is finished" in again[0][1] and again[1][1] == ""


def test_a_stage_that_ranks_can_not_do_is_refused_before_the_first(
    team: Ranks, tmp_path: Path
) -> None:
    text = chains.THREE + '[[stage]]\nname = "own"\nrecipe = "spin"\nsteps = 1\n'
    for each in team.try_to(2, chained, str(tmp_path / "run"), text):
        assert isinstance(each, Failure) and "stage 'own'" in each.said
        assert "samples from its reference" in each.said
    assert not (tmp_path / "run" / "run" / "1_cold").exists()
