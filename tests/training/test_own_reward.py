"""`train(config, path, reward=function)`: graded by it, gone on with, and its changes noted."""

from __future__ import annotations

from pathlib import Path

from cold_start import configured, events, make, rows
from runs import quiet

import groupwise
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


def test_public_names_are_listed() -> None:
    assert {"train", "steps", "load_config", "recipe"} <= set(dir(groupwise))
