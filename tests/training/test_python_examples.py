"""The examples of docs/python.md and README.md run as they stand, and do what they say."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SMALL, left_behind, quiet, small
from teaching import before_updates

from groupwise import steps
from groupwise.config import load, text
from groupwise.errors import RunError
from groupwise.training import loop
from groupwise.training.signals import Stopped

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> dict[str, str]:
    """Python blocks of a page, by the file name in their first line."""
    found = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / page).read_text("utf-8"), re.S)
    return dict(found)


EXAMPLES = blocks("docs/python.md")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose configs/tiny.toml is a smaller run."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/tiny.toml").write_text(text(load(SMALL)))
    torch.set_num_threads(1)
    return tmp_path


def run_example(name: str, folder: Path) -> dict[str, Any]:
    (folder / name).write_text(EXAMPLES[name], "utf-8")
    return runpy.run_path(str(folder / name), run_name="__main__")


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_your_own_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES["close.py"].strip().splitlines()) <= 12  # ten, and two that are empty
    found = run_example("close.py", folder)
    assert found["close"]("12<end>", "10") == pytest.approx(1 / 3)
    assert "->" in capsys.readouterr().out
    last = lines_of(folder / "runs" / "close")[-1]
    assert last["step"] == 20
    (part,) = (name for name in last if name.startswith("reward/part/"))
    assert part.endswith("close.py:close") and 0 < last[part] <= 1


def test_every_block_of_the_page_is_a_file_that_a_test_runs() -> None:
    page, own = (ROOT / "docs/python.md").read_text("utf-8"), Path(__file__).read_text("utf-8")
    assert len(EXAMPLES) == page.count("```python") > 6
    for name in EXAMPLES:
        assert f'run_example("{name}", folder)' in own, name


def test_a_reward_that_waits(folder: Path) -> None:
    run_example("judge.py", folder)
    last = lines_of(folder / "runs" / "judge")[-1]
    assert last["step"] == 2 and last["reward/failed_share"] == 0
    assert any(name.endswith("judge.py:judged") for name in last)


def test_a_look_before_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run_example("look.py", folder)["made"]
    assert [found.name for found in made.findings] == ["auto at 0.7", "auto at 1"]
    assert all(found.prompts == 16 and found.sampled == 128 for found in made.findings)
    assert "auto at 0.7" in capsys.readouterr().out


def test_one_step_at_a_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_example("watch.py", folder)
    assert found["rewards"][0] is None and len(found["rewards"]) == 4
    assert [line["step"] for line in lines_of(folder / "runs" / "watch")] == list(range(7))
    shown = capsys.readouterr().out
    assert re.findall(r"^(\d) \d+\.\d", shown, re.M) == ["4", "5", "6"]


def test_your_own_recipe(folder: Path) -> None:
    run_example("tanh.py", folder)
    resolved = (folder / "runs" / "tanh" / "config.toml").read_text()
    assert "tanh_gate(scale=2.0)" in resolved
    assert lines_of(folder / "runs" / "tanh")[-1]["step"] == 5


def test_your_own_engine_agrees_with_the_learner(folder: Path) -> None:
    run_example("naive.py", folder)
    first, *_, last = lines_of(folder / "runs" / "naive")
    assert first["gate/mismatch_max"] < 1e-5 and last["mismatch/abs_max"] < 1e-5
    assert last["step"] == 2 and last["weights/version"] == 2


def test_tokens_of_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_example("turns.py", folder)
    assert capsys.readouterr().out == "(5, 6, 9, 3, 2) 5\n"


def test_an_engine_that_lies_is_refused(folder: Path) -> None:
    lying = EXAMPLES["naive.py"].replace("logps.append(logp[token])", "logps.append(logp[0])")
    (folder / "lying.py").write_text(lying.replace("naive.py:Naive", "lying.py:Naive"))
    with pytest.raises(RunError, match="Sampler and learner disagree"):
        runpy.run_path(str(folder / "lying.py"), run_name="__main__")


def test_before_and_after(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_example("around.py", folder)
    assert found["expected"].fits and found["found"].tasks == 8
    assert (folder / "exported" / "model.safetensors").is_file()


def test_the_examples_of_the_readme(folder: Path) -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    train, algorithm = re.findall(r"```python\n(.*?)```", page, re.S)
    known: dict[str, Any] = {}
    exec(train.replace("steps=20", "steps=2"), known)
    assert known["summary"]["steps"] == 2 and known["found"].tasks == 8
    torch.manual_seed(0)
    logp_NT = torch.randn(16, 5, requires_grad=True)
    known = {
        "torch": torch,
        "mask": torch.ones(16, 5, dtype=torch.bool),
        "prompt_of_row": torch.arange(16) // 4,
        "rewards": torch.randint(2, (16,)).float(),
        "old_logp": logp_NT.detach() - 0.1,
        "truncated": torch.zeros(16, dtype=torch.bool),
        "model": lambda rows: logp_NT[rows],
    }
    exec(algorithm, known)
    assert logp_NT.grad is not None and bool(logp_NT.grad.abs().sum() > 0)


# --- steps ------------------------------------------------------------------------------------


def test_steps_leave_what_train_leaves(tmp_path: Path) -> None:
    """Also when it is taken up again in between."""
    loop.train(small(), tmp_path / "whole", quiet())
    for metrics in steps(small(), tmp_path / "parts", quiet()):
        if metrics["step"] == 1:
            break
    rest = steps(small(), tmp_path / "parts", quiet())
    seen = []
    while True:
        try:
            seen.append(next(rest)["step"])
        except StopIteration as end:
            summary = end.value
            break
    assert seen == [2, 3] and summary["steps"] == 3
    assert left_behind(tmp_path / "parts") == left_behind(tmp_path / "whole")
    assert list(steps(small(), tmp_path / "parts", quiet())) == []  # finished


def test_metrics_are_those_of_the_files(tmp_path: Path) -> None:
    seen = list(steps(small(), tmp_path, quiet()))
    assert [each["step"] for each in seen] == [0, 1, 2, 3]
    for line, each in zip(lines_of(tmp_path), seen, strict=True):
        assert line == pytest.approx(each)


def test_signals_are_held_while_a_step_is_computed_and_not_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    cycle = steps(small(steps=5), tmp_path, quiet())
    next(cycle)
    assert signal.getsignal(signal.SIGINT) is before
    # No KeyboardInterrupt: the step goes on.
    before_updates(monkeypatch, lambda step: os.kill(os.getpid(), signal.SIGINT))
    assert next(cycle)["step"] == 1
    with pytest.raises(Stopped, match="after step 1, saved"):
        next(cycle)
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step_1"
