"""`groupwise collect`: every prompt once, killed or not, in a folder that a run can learn from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from runs import quiet, small
from steps import TASKS, Start

from groupwise.cli import main
from groupwise.config import Config
from groupwise.errors import ConfigError, RunError
from groupwise.evaluate.request import Candidate, candidates
from groupwise.probing import collecting
from groupwise.probing.collecting import collect, config_for
from groupwise.training.loop import train


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def asked(start: Start, **changes: Any) -> tuple[Config, Candidate]:
    [candidate] = candidates([str(start.model)])
    config = small(**start.settings(**{"recipe": "grpo"} | changes))
    return config_for(config, candidate, "", 2), candidate


def files(folder: Path) -> dict[str, bytes]:
    return {x.name: x.read_bytes() for x in sorted((folder / "rollouts").iterdir())}


def silent(line: str) -> None:
    pass


def test_every_prompt_is_answered_once(start: Start, tmp_path: Path) -> None:
    config, candidate = asked(start)
    found = collect(config, candidate, tmp_path / "out", silent)
    rows = [
        r for x in (tmp_path / "out" / "rollouts").iterdir() for r in pq.read_table(x).to_pylist()
    ]
    assert (found.prompts, found.answers) == (len(TASKS), 2 * len(TASKS)) == (80, len(rows))
    assert sorted((r["prompt_id"], r["sample"]) for r in rows) == [
        (task, sample) for task in range(80) for sample in range(2)
    ]
    assert found.correct == sum(bool(r["correct"]) for r in rows) > 0
    assert found.tokens == sum(len(r["token_ids"]) for r in rows)
    assert len(files(tmp_path / "out")) == 10  # 16 slots hold 8 prompts with 2 answers each


class Killed(BaseException):
    pass


@pytest.mark.parametrize("when", ["before the rollouts", "before the metrics"])
def test_a_killed_collection_goes_on_to_the_same_bits(
    when: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, candidate = asked(start)
    collect(config, candidate, tmp_path / "whole", silent)
    left = 3

    def dies(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return before(*args)

    name = "write" if when == "before the rollouts" else "_measures"
    before = getattr(collecting, name)
    with monkeypatch.context() as patch:
        patch.setattr(collecting, name, dies)
        with pytest.raises(Killed):
            collect(config, candidate, tmp_path / "cut", silent)
    assert len(files(tmp_path / "cut")) == (3 if name == "write" else 4)
    told: list[str] = []
    found = collect(config, candidate, tmp_path / "cut", told.append)
    assert "3 steps already" in "".join(told)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert found.prompts == 80
    again = files(tmp_path / "cut")
    assert collect(config, candidate, tmp_path / "cut", silent) == found  # nothing is left to do
    assert files(tmp_path / "cut") == again


def test_a_process_that_is_killed_loses_and_repeats_nothing(start: Start, tmp_path: Path) -> None:
    settings = [
        "engine.max_tokens=8", "engine.slots=2", "model.device=cpu", "model.dtype=float32",
        "model.threads=1", "reward.parts.number=1.0", "reward.parts.row=0",
    ]  # fmt: skip
    model = str(shutil.copytree(start.model, tmp_path / "model"))
    words = ["collect", model, "--data", start.data, "--samples", "2", *settings, "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    cut = tmp_path / "cut"
    command = [sys.executable, "-m", "groupwise", *words, str(cut)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while running.poll() is None and not (cut / "rollouts" / "step_3.parquet").is_file():
            time.sleep(0.002)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == -9 and 3 <= len(files(cut)) < 80
    assert main([*words, str(cut)]) == 0
    assert len(files(cut)) == 80 and files(cut) == files(tmp_path / "whole")


def test_its_cost_and_a_damaged_step(start: Start, tmp_path: Path) -> None:
    config, candidate = asked(start)
    found = collect(config, candidate, tmp_path, silent)
    cost = json.loads((tmp_path / "manifest.json").read_text())["cost"]
    assert cost["tokens"] == found.tokens > 0 and cost["seconds"] > 0
    collect(config, candidate, tmp_path, silent)  # nothing is left to do, and nothing is forgotten
    assert json.loads((tmp_path / "manifest.json").read_text())["cost"] == cost
    step = tmp_path / "rollouts" / "step_4.parquet"
    step.write_bytes(step.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"step_4.parquet is not a Parquet file"):
        collect(config, candidate, tmp_path, silent)


def test_other_settings_or_another_model_are_refused(start: Start, tmp_path: Path) -> None:
    config, candidate = asked(start)
    collect(config, candidate, tmp_path, silent)
    other, _ = asked(start, engine__temperature=0.5)
    with pytest.raises(RunError, match="temperature"):
        collect(other, candidate, tmp_path, silent)
    greedy, _ = asked(start, engine__temperature=0.0)
    with pytest.raises(ConfigError, match="temperature 0"):
        collect(greedy, candidate, tmp_path / "new", silent)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        collect(config, candidate, tmp_path / "mine", silent)


def test_a_run_learns_from_it(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command line; a data set that is not there is told before a model is loaded."""
    out = tmp_path / "out"
    words = ["collect", str(start.model), "--samples", "4", "--out", str(out), "--json"]
    own = [
        f"reward.parts={{ '{start.folder / 'rewards.py'}:odd' = 1.0 }}",
        "engine.max_tokens=8", "engine.slots=64", "model.device=cpu", "model.dtype=float32",
    ]  # fmt: skip
    assert main([*words, "--data", start.data, *own]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answers"] == 320
    given = start.settings(
        recipe="sft", recipe__source="run", group_size=8, data__runs=[str(out)], steps=2
    )
    train(small(**given | {"data__train": "arithmetic"}), tmp_path / "run", quiet())
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["kept_answers"]["answers"] == 320
    # Away from its run, whose settings would name data.
    words[1] = str(shutil.copytree(start.model, tmp_path / "model"))
    assert main([*words[:-3], "--out", str(tmp_path / "no"), "--data", "nowhere.jsonl"]) != 0
    assert main([*words[:-3], "--out", str(tmp_path / "no")]) != 0
    assert "No prompts are named" in capsys.readouterr().err
