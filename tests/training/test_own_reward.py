"""`train(config, path, reward=function)`: graded by it, gone on with, and its changes noted."""

from __future__ import annotations

from pathlib import Path

import pytest
from cold_start import configured, events, make, rows
from runs import quiet

import groupwise
from groupwise.errors import GroupwiseError
from groupwise.training.loop import steps, train


def test_a_function_grades_and_the_run_goes_on_with_it(tmp_path: Path) -> None:
    model, run = make(tmp_path / "start"), tmp_path / "run"
    letter = "1"

    def reward(completion: str) -> float:
        return 7.0 * completion.count(letter)

    train(configured(model, steps=1), run, quiet(), reward=reward)
    rewards = {row["reward"] for row in rows(run, 1)}
    assert max(rewards) >= 7 and all(reward % 7 == 0 for reward in rewards)
    written = (run / "reward.py").stat().st_mtime_ns
    assert [m["step"] for m in steps(configured(model, steps=2), run, quiet(), reward=reward)] == [
        2
    ]
    assert (run / "reward.py").stat().st_mtime_ns == written
    assert not events(run, "changed")


def test_a_refused_start_leaves_no_folder_and_nobody_elses_file_goes(tmp_path: Path) -> None:
    factor = 1.0

    def silent(completion: str) -> None:
        factor * len(completion)

    model, run = make(tmp_path / "start"), tmp_path / "runs" / "mine"
    with pytest.raises(GroupwiseError, match="None"):
        train(configured(model), run, quiet(), reward=silent)
    assert not run.parent.exists()
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    with pytest.raises(GroupwiseError, match="None"):
        list(steps(configured(model), run, quiet(), reward=silent))
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_public_names_are_listed() -> None:
    assert {"train", "steps", "load_config", "recipe"} <= set(dir(groupwise))
