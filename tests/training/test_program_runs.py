"""Whole runs whose episodes are led by programs, of the run's own or from outside."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cold_start
import led
import pytest
import runs
from cold_start import rows

from groupwise.cli import main
from groupwise.config import text
from groupwise.replay.bits import compare_rollouts

LED = str(Path(led.__file__).resolve())
PLAYED = {"turns__max": 4, "engine__max_tokens": 40, "turns__timeout": 20.0, "turns__workers": 2}
AS = {"turns__environment": f"{LED}:Counts"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("cold") / "model", **PLAYED, **AS)


@pytest.fixture(scope="module")
def counted(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with the task as an environment."""
    folder = tmp_path_factory.mktemp("counted") / "run"
    cold_start.run_from(model, folder, steps=2, **PLAYED, **AS)
    return folder


def check_same(folder: Path, counted: Path) -> None:
    """Tokens, masks, probabilities, versions and rewards are those of the environment's run."""
    for step in (1, 2):
        ours, theirs = (each / "rollouts" / f"step_{step}.parquet" for each in (folder, counted))
        assert compare_rollouts(step, theirs, ours) is None
    row = next(row for row in rows(folder, 2) if len(row["episode"]["turns"]) > 1)
    assert {turn["version"] for turn in row["episode"]["turns"]} == {1}
    assert sum(row["mask"]) < len(row["token_ids"]) == len(row["sampler_logp"])


@pytest.mark.parametrize("name", ["leads", "late"])
def test_a_program_gives_the_rows_of_the_environment_at_any_speed(
    name: str, model: str, counted: Path, tmp_path: Path
) -> None:
    asked = {"turns__environment": f"{LED}:{name}"}
    cold_start.run_from(model, tmp_path / "run", steps=2, **PLAYED, **asked)
    check_same(tmp_path / "run", counted)


def test_histories_that_branch_are_left_out_and_counted(model: str, tmp_path: Path) -> None:
    asked = {"turns__environment": f"{LED}:branches", "reward__max_failed_share": 1.0}
    cold_start.run_from(model, tmp_path / "run", steps=1, **PLAYED, **asked)
    found = rows(tmp_path / "run", 1)
    odd = [row for row in found if row["episode"]["stop"] == "branched"]
    assert 0 < len(odd) < len(found)
    for row in odd:
        assert row["episode"]["left_out"] and "does not go on" in row["episode"]["reason"]
        assert row["reward"] is None and row["grader_status"] == "abstained"
        assert not any(row["advantage"])
    line = runs.metrics(tmp_path / "run")[-1]
    assert line["turns/stop/branched"] == pytest.approx(len(odd) / len(found))
    assert line["turns/failed_share"] == 0.0


def claims(port: int, over: threading.Event, led_so_far: list[int]) -> None:
    """Lead episodes as a program of another process would, until there are none."""
    while not over.is_set():
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/episodes", b"")
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                found = SimpleNamespace(**json.load(answer))
        except (urllib.error.URLError, ConnectionError):
            over.wait(0.05)  # the run has not begun yet, or is over
            continue
        try:
            reward: float | None = led.leads(found, found.row["prompt"])
        except urllib.error.HTTPError:  # a limit of the run has ended it
            reward = None
        body = json.dumps({"reward": reward}).encode()
        told = urllib.request.Request(f"{found.base_url}/reward", body)
        with contextlib.suppress(urllib.error.HTTPError):  # it was given up meanwhile
            urllib.request.urlopen(told, timeout=60).close()
        led_so_far.append(1)


def test_serve_trains_on_what_programs_outside_do(
    model: str, counted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of them share the episodes, in any order; the rows are those of the environment."""
    config = cold_start.configured(model, steps=2, **PLAYED, **AS, turns__options={"size": 3})
    (tmp_path / "mine.toml").write_text(text(config))  # its environment is not asked
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    over, led_so_far = threading.Event(), list[int]()
    workers = [
        threading.Thread(target=claims, args=(port, over, led_so_far), daemon=True)
        for _ in range(3)
    ]
    for each in workers:
        each.start()
    try:
        asked = ["serve", str(tmp_path / "mine.toml"), "--run", str(tmp_path / "run")]
        assert main([*asked, "--port", str(port)]) == 0
    finally:
        over.set()
    assert f"episodes at http://127.0.0.1:{port}/v1/episodes" in capsys.readouterr().err
    assert len(led_so_far) >= len(rows(tmp_path / "run", 1)) * 2
    check_same(tmp_path / "run", counted)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["turns.environment=guess"], "programs outside are the environment"),
        (["--host", "0.0.0.0"], "programs of this machine alone"),
        (["--port", "70000"], "can't be listened at"),
    ],
)
def test_what_serve_can_not_do_in_training_is_refused(
    arguments: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text("steps = 1\n")
    assert main(["serve", str(tmp_path / "mine.toml"), *arguments]) == 2
    assert why in capsys.readouterr().err


def test_settings_are_for_a_training_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["serve", str(tmp_path), "steps=3"]) == 2
    assert "steps=3 is for a training run" in capsys.readouterr().err
