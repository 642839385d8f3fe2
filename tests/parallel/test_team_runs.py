"""Runs of several ranks: the same samples as in one process, and what becomes of accidents."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cold_start
import pytest
import team_runs
import torch
from fake_engine_server import serving
from runs import left_behind
from safetensors.torch import load_file, save_file
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


def samples(folder: Path, last: int = 6) -> list[list[Any]]:
    steps = [cold_start.rows(folder, step) for step in range(1, last + 1)]
    return [[[row[name] for name in COLUMNS] for row in rows] for rows in steps]


def test_two_ranks_draw_the_same_samples_and_end_where_one_process_does(
    alone: Path, two: Path
) -> None:
    assert samples(two) == samples(alone)
    assert 0.0 < apart(two, alone) < EXACT
    lines = [json.loads(x) for x in (two / "metrics.jsonl").read_text().splitlines()[1:]]
    for line in lines:  # who waited, how evenly rows lay, how long weights took to come together
        assert min(line[f"time/rank_wait_{rank}"] for rank in (0, 1)) > 0
        assert 1.0 <= line["time/rank_imbalance"] < 2.0 and line["time/rank_gather"] > 0


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


@pytest.mark.slow
def test_shards_on_the_host_end_at_the_same_bits(
    team: Ranks, model: str, two: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    for steps, offload in ((2, True), (4, False), (6, True)):
        own = PPO | {"steps": steps, "optim__offload": offload}
        team.run(2, team_runs.run, model, str(folder), own)
    assert samples(folder) == samples(two)
    ends, whole = weights(folder), weights(two)
    assert all(torch.equal(x, whole[name]) for name, x in ends.items())


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
    assert "while after" not in left.said
    team.run(2, team_runs.run, model, str(folder), changes)
    assert samples(folder) == samples(two)
    ends, whole = weights(folder), weights(two)
    assert all(torch.equal(x, whole[name]) for name, x in ends.items())


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_so_long_and_named(model: str, tmp_path: Path) -> None:
    """It lives, and gives signs of it: what every rank is at tells who holds the others up."""
    with ranks(2, lasting=False) as own:
        changes = PPO | {"steps": 6}
        folder = str(tmp_path / "run")
        found = own.try_to(2, team_runs.hanging, model, folder, changes, 1, "update", limit=20.0)
    assert all(isinstance(each, Failure) for each in found)
    assert "the ranks did not come together" in found[0].said
    assert "rank 0 was at: " in found[0].said and "rank 1 was at: " in found[0].said


@pytest.mark.slow
def test_no_prompt_is_lost_or_repeated_over_fifty_kills(
    team: Ranks, model: str, tmp_path: Path
) -> None:
    """Of one rank or the other, anywhere: what is left is what an undisturbed run leaves."""
    folder, drawn = tmp_path / "run", random.Random(7)
    for _ in range(50):
        rank, event = drawn.randrange(2), drawn.randint(1, 16)
        with ranks(2, lasting=False) as own:
            found = own.try_to(
                2, team_runs.dying_at, model, str(folder), PPO | {"steps": 10**4}, rank, event
            )
        assert found[rank] is None and isinstance(found[1 - rank], Failure)
        assert f"rank {rank} of 2 is gone, while " in found[1 - rank].said
    reached = int(cold_start.latest(folder).partition("_")[2])
    assert reached > 5
    ends = PPO | {"steps": reached + 1}
    team.run(2, team_runs.run, model, str(folder), ends)
    team.run(2, team_runs.run, model, str(tmp_path / "whole"), ends)
    assert samples(folder, reached + 1) == samples(tmp_path / "whole", reached + 1)
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(x, whole[name]) for name, x in weights(folder).items())


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_said_and_the_same_command_goes_on(
    team: Ranks, model: str, two: Path, tmp_path: Path
) -> None:
    folder, changes = tmp_path / "run", PPO | {"steps": 6}
    with ranks(2, lasting=False) as own:
        found = own.try_to(2, team_runs.full_disk, model, str(folder), changes, 1)
    for each in found:
        assert isinstance(each, Failure)
        assert "rank 1 could not write its part" in each.said and "No space left" in each.said
    team.run(2, team_runs.run, model, str(folder), changes)
    assert samples(folder) == samples(two)


@pytest.mark.slow
def test_a_rank_that_fails_by_itself_in_a_save_ends_all(model: str, tmp_path: Path) -> None:
    """Its next word would be taken for another: it leaves, and the others notice."""
    with ranks(2, lasting=False) as own:
        changes = PPO | {"steps": 6}
        found = own.try_to(2, team_runs.lost_in_a_save, model, str(tmp_path / "run"), changes, 1)
    assert all(isinstance(each, Failure) for each in found)
    assert "no memory for a plan" in found[1].said


ENGINE = """
import os
from pathlib import Path
from groupwise.engine.native.engine import NativeEngine


class Mine(NativeEngine):
    @classmethod
    def made(cls, setup):
        with Path(__file__).with_suffix(".made").open("a") as file:
            file.write(os.environ["RANK"])
        return super().made(setup)

    def close(self):
        with Path(__file__).with_suffix(".closed").open("a") as file:
            file.write(os.environ["RANK"])
"""


def test_an_engine_of_ones_own_is_the_first_ranks_alone(
    team: Ranks, model: str, alone: Path, tmp_path: Path
) -> None:
    """It has the weights of all after every update, and the others hear what it answered."""
    (tmp_path / "mine.py").write_text(ENGINE)
    own = PPO | {"steps": 6, "engine__backend": f"{tmp_path / 'mine.py'}:Mine"}
    team.run(2, team_runs.run, model, str(tmp_path / "run"), own)
    assert (tmp_path / "mine.made").read_text() == "0"
    assert (tmp_path / "mine.closed").read_text() == "0"
    assert samples(tmp_path / "run") == samples(alone)
    assert 0.0 < apart(tmp_path / "run", alone) < EXACT


def test_an_engine_that_can_not_be_made_ends_all_ranks(
    team: Ranks, model: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ENGINE.replace("return super().made(setup)", "1 / 0"))
    own = PPO | {"engine__backend": f"{tmp_path / 'mine.py'}:Mine"}
    found = team.try_to(2, team_runs.run, model, str(tmp_path / "run"), own)
    assert ["division by zero" in each.said for each in found] == [True, True]


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (3, [PPO | {"prompts_per_step": 2}] * 3, "3 ranks and prompts_per_step=2"),
        (2, [PPO, PPO | {"seed": 5}], "Ranks differ in seed: rank 1 has 5, rank 0 has 0."),
        (3, [PPO, PPO, PPO | {"eval__tasks": 9}], "rank 2 has 9, rank 0 has 8"),
        (
            2,
            [PPO, PPO | {"reward__parts": {"exact": 1.0, "length(target=1)": 0.1}}],
            "reward.parts.length(target=1): rank 1 has 0.1, rank 0 has nothing.",
        ),
        (2, [{"recipe": "spin"}] * 2, "samples from its reference"),
    ],
)
def test_teams_that_can_not_be_are_refused(
    size: int, changes: list[dict[str, Any]], words: str, team: Ranks, model: str, tmp_path: Path
) -> None:
    found = team.try_to(size, team_runs.differing, model, str(tmp_path / "run"), changes)
    for each in found:
        assert isinstance(each, Failure) and words in each.said
    assert [each.told for each in found] == [
        rank > 0 for rank in range(size)
    ]  # people read it once


def other_data(disk: Path) -> None:
    file = disk / "rows.jsonl"
    file.write_text(file.read_text().replace('"3"', '"4"'))


def other_words(disk: Path) -> None:
    """As a tokenizer of another version would be written: the same tokens, another file."""
    file = disk / "model" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")


def other_weights(disk: Path, model: str = "model") -> None:
    file = disk / model / "model.safetensors"
    save_file({name: x + 1 for name, x in load_file(file).items()}, file, {"format": "pt"})


def other_teacher(disk: Path) -> None:
    other_weights(disk, "teacher")


def other_grader(disk: Path) -> None:
    (disk / "mine.py").write_text("def right(completion, answer):\n    return 1.0\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_data, "Ranks differ in data: rank 1 has "),
        (other_words, "Ranks differ in the model's tokenizer.json: rank 1 has "),
        (other_weights, "Ranks differ in weights: rank 1 has "),
        (other_teacher, "Ranks differ in the weights of a model: rank 1 has "),
        (other_grader, "Ranks differ in reward: rank 1 has "),
    ],
)
def test_ranks_with_other_files_are_refused(
    change: Callable[[Path], None], words: str, team: Ranks, model: str, tmp_path: Path
) -> None:
    """The same settings, whose files are others on the second rank's disk."""
    for rank in (0, 1):
        disk = tmp_path / f"disk_{rank}"
        for name in ("model", "teacher"):
            shutil.copytree(model, disk / name)
        rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
        (disk / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        (disk / "mine.py").write_text(
            "def right(completion, answer):\n    return float(completion == answer)\n"
        )
    change(tmp_path / "disk_1")
    own = {"recipe": "opd", "teacher__path": "teacher", "data__train": "rows.jsonl"}
    own |= {"reward__parts": {"mine.py:right": 1.0}, "steps": 1}
    for each in team.try_to(2, team_runs.elsewhere, str(tmp_path), own):
        assert isinstance(each, Failure) and words in each.said
