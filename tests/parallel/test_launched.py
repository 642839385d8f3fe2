"""Runs that were launched for real: by torchrun, by SLURM's daemons, on a Ray cluster."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster

ROOT = Path(__file__).resolve().parents[2]
RAY = ROOT / ".ray" / "bin" / "python"  # `make ray`
QUICK = ("configs/tiny.toml", "tiny.cold_start_steps=20", "eval.tasks=8", "model.device=cpu")
ENOUGH = 400.0  # seconds, for whatever the machine has to do beside


def launch(*words: str, more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(more or {})}
    command = [sys.executable, "-m", "groupwise", "launch", *words]
    return subprocess.run(
        command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=ENOUGH
    )


def steps(folder: Path) -> list[int]:
    return [json.loads(x)["step"] for x in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_ranks_of_this_machine_train_and_the_same_command_goes_on(tmp_path: Path) -> None:
    for count in (1, 2):
        done = launch(*QUICK, f"steps={count}", "--ranks", "2", "--run", str(tmp_path / "run"))
        assert done.returncode == 0, done.stderr
        assert "--standalone --nproc-per-node 2 -m groupwise train" in done.stderr
    assert steps(tmp_path / "run") == [0, 1, 2]


@pytest.mark.slow
def test_a_rank_that_can_not_go_on_is_the_launchers_status(tmp_path: Path) -> None:
    words = (*QUICK, "steps=1", "reward.parts=['nowhere.py:f']")
    done = launch(*words, "--ranks", "2", "--run", str(tmp_path / "run"))
    assert done.returncode != 0 and "nowhere.py" in done.stderr


# --- SLURM ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if slurm_cluster.why_not():
        pytest.skip(slurm_cluster.why_not())
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as own:
        yield own


def submitted(own: dict[str, str], words: Sequence[str]) -> str:
    done = launch(*words, "--on", "slurm", "--submit", more=own)
    assert done.returncode == 0, done.stderr
    found = re.search(r"submitted as job (\d+)", done.stdout)
    assert found is not None, done.stdout
    return found[1]


@pytest.mark.slow
def test_slurm_runs_a_rank_on_each_of_two_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    words = (*QUICK, "steps=2", "--ranks", "1", "--nodes", "2", "--run", str(tmp_path / "run"))
    number = submitted(slurm, words)
    slurm_cluster.wait_for(number, slurm)
    log = (tmp_path / f"run.{number}.log").read_text()
    assert steps(tmp_path / "run") == [0, 1, 2], log
    assert {"time/rank_wait_0", "time/rank_wait_1"} <= set(
        json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    )


@pytest.mark.slow
def test_a_job_that_slurm_ends_is_saved_and_goes_on(slurm: dict[str, str], tmp_path: Path) -> None:
    """As at its time limit: SLURM sends SIGTERM to the steps before it kills them."""
    folder = tmp_path / "run"
    words = (*QUICK, "--ranks", "1", "--nodes", "2", "--run", str(folder))
    number = submitted(slurm, (*words, "steps=100000"))
    while not (folder / "metrics.jsonl").exists() or len(steps(folder)) < 3:
        alive = subprocess.run(["squeue", "-h", "-j", number], env={**os.environ, **slurm},
                               capture_output=True, text=True)  # fmt: skip
        assert alive.stdout.strip(), (tmp_path / f"run.{number}.log").read_text()
    subprocess.run(["scancel", "--signal=TERM", number], env={**os.environ, **slurm}, check=True)
    slurm_cluster.wait_for(number, slurm)
    reached = steps(folder)[-1]
    assert f"stopped after step {reached}, saved" in (tmp_path / f"run.{number}.log").read_text()
    again = submitted(slurm, (*words, f"steps={reached + 1}"))
    slurm_cluster.wait_for(again, slurm)
    assert steps(folder) == list(range(reached + 2))
    assert (folder / "summary.json").exists()


# --- Ray -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    python = sys.executable if importlib.util.find_spec("ray") else str(RAY)
    if not Path(python).exists():
        pytest.skip("Ray is not installed: make ray")
    folder = tmp_path_factory.mktemp("ray")
    done = subprocess.run(
        [python, str(ROOT / "tests" / "support" / "ray_cluster.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=ENOUGH,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_ray_places_a_rank_on_each_node_and_the_run_is_whole(
    on_ray: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = on_ray
    assert found["train"] == 0 and steps(folder / "run") == [0, 1, 2]


@pytest.mark.slow
def test_ray_starts_servers_first_and_ranks_are_told_of_them(
    on_ray: tuple[Path, dict[str, Any]],
) -> None:
    folder, found = on_ray
    assert found["served"] == 0
    for rank in (0, 1):
        said = json.loads((folder / f"rank{rank}").read_text())
        assert said["size"] == "2" and said["found"] == [200, 200]
    assert "ended with status 4 before it answered" in found["mute"]


@pytest.mark.slow
def test_on_ray_a_failure_ends_all_and_leaves_nothing(on_ray: tuple[Path, dict[str, Any]]) -> None:
    assert on_ray[1]["failing"] not in (0, None)
    assert on_ray[1]["freed"] and on_ray[1]["ended"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("many nodes", "2 machines with room for 1 CPU, and 3 are asked for"),
        ("many cores", "0 machines with room for 3 CPU"),
        ("many servers", "need 9 CPU, and the Ray cluster has 4 in all"),
        ("gpus", "0 machines with room for 1 CPU and 1 GPU"),
    ],
)
def test_what_ray_has_no_room_for_is_said_at_once(
    job: str, words: str, on_ray: tuple[Path, dict[str, Any]]
) -> None:
    """Ray itself would wait for it without a word."""
    assert words in on_ray[1][job]
