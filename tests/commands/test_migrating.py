"""`groupwise migrate` as it is typed, and what `train --dry-run` says of what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from groupwise.cli import main

SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
def short(completions, **rest):
    return [1.0 for each in completions]
args = GRPOConfig(num_generations=4, max_steps=5)
GRPOTrainer(model=MODEL, args=args, reward_funcs=short, train_dataset=ROWS)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)


def test_what_is_written_and_what_comes_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "train.py", "mine.toml"]) == 0
    said = capsys.readouterr().out
    assert "wrote mine.toml" in said and "wrote mine_rewards.py" in said
    assert "fill in model.path" in said and "(MODEL there)" in said
    assert "groupwise train mine.toml --dry-run" in said
    assert "def short" in Path("mine_rewards.py").read_text()
    assert main(["train", "mine.toml", "--dry-run"]) == 0
    heard = capsys.readouterr()
    assert "model.path: FILL_IN_model is not there" in heard.err
    assert "data.train: FILL_IN.jsonl is not there" in heard.err
    assert "mine_rewards.py is not there" not in heard.err
    assert "group_size = 4" in heard.out


def test_nothing_is_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train_rewards.py").write_text("mine = 1\n")
    assert main(["migrate", "train.py"]) == 2
    assert "train_rewards.py exists already" in capsys.readouterr().err
    assert not Path("train.toml").exists()
    assert Path("train_rewards.py").read_text() == "mine = 1\n"


def test_what_training_would_refuse_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.sh").write_text(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.n=1 trainer.total_training_steps=3\n"
    )
    assert main(["migrate", "run.sh"]) == 0
    assert "training would refuse it as it stands" in capsys.readouterr().err


def test_a_file_of_no_tool(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.py").write_text("print(1)\n")
    assert main(["migrate", "other.py"]) == 2
    assert "no configuration that is known here" in capsys.readouterr().err
    assert main(["migrate", "gone.yaml"]) == 2
    assert "can't be read" in capsys.readouterr().err
