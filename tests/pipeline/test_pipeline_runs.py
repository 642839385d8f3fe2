"""Pipelines run: chained, killed, changed, damaged, redone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from chains import CHAINED, COLD, HEAD, RLHF, THREE, chain, go, remains, sweep, write_rows

from groupwise.errors import ConfigError, RunError
from groupwise.pipeline import running
from groupwise.pipeline.chain import real
from groupwise.pipeline.page import rows_of
from groupwise.runfiles.stages import figures, read_stages, weights_digest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = chain(tmp_path_factory.mktemp("whole"))
    go(made)
    return made


@pytest.fixture
def copied(whole: Any, tmp_path: Path) -> Any:
    """The finished pipeline, moved to a place of its own."""
    made = chain(tmp_path)
    shutil.copytree(whole.path, made.path, symlinks=True)
    return made


def files(path: Path) -> dict[str, bytes]:
    found = [x for x in path.rglob("*") if x.is_file() and x.name != ".lock"]
    return {str(x.relative_to(path)): x.read_bytes() for x in found}


def test_stages_start_from_one_another(whole: Any) -> None:
    record = read_stages(whole.path)
    assert record is not None and record.finished
    assert [x.folder for x in record.stages] == ["1_cold", "2_reason", "3_last"]
    for before, stage in zip(record.stages, record.stages[1:], strict=False):
        manifest = json.loads((whole.path / stage.folder / "manifest.json").read_text())
        latest = whole.path / before.folder / "checkpoints" / "latest"
        step = int(latest.resolve().name.removeprefix("step_"))
        assert manifest["parent"] == {
            "folder": f"../{before.folder}",
            "step": step,
            "weights": weights_digest(latest),
        }
        assert before.weights["latest"] == manifest["parent"]["weights"]
        summary = json.loads((whole.path / stage.folder / "summary.json").read_text())
        ended = json.loads((whole.path / before.folder / "summary.json").read_text())
        assert summary["accuracy_before"] == ended["accuracy_after"]  # the same model, measured


def test_a_finished_stage_keeps_weights_alone(whole: Any) -> None:
    assert not list(whole.path.glob("*/checkpoints/*/resume"))
    assert all(
        (whole.path / x.folder / "checkpoints/latest").exists() for x in whole.pipeline.stages
    )


def test_a_finished_pipeline_says_so_and_changes_nothing(copied: Any) -> None:
    go(copied)  # it takes note of its new place
    before = files(copied.path)
    _, said = go(copied)
    assert "is finished" in said and files(copied.path) == before


def test_killed_in_any_stage_it_ends_with_the_same_bits(whole: Any, tmp_path: Path) -> None:
    expected = remains(whole)
    found = sweep(tmp_path, [2, 25, 60, 95, 130])
    assert len(found) >= 4 and all(each == expected for each in found)


@pytest.mark.slow
def test_killed_at_every_third_write_it_ends_with_the_same_bits(whole: Any, tmp_path: Path) -> None:
    expected = remains(whole)
    found = sweep(tmp_path, range(1, 100_000, 3))
    assert len(found) > 30 and all(each == expected for each in found)


def test_killed_again_and_again(whole: Any, tmp_path: Path) -> None:
    from chains import killed_at

    made = chain(tmp_path)
    times = 0
    while killed_at(made, 40):
        times += 1
        assert times < 40
    go(made)
    assert times > 2 and remains(made) == remains(whole)


def test_a_changed_setting_of_an_earlier_stage_is_refused(copied: Any, tmp_path: Path) -> None:
    other = chain(tmp_path, THREE, "cold.optim.learning_rate=2e-3")
    with pytest.raises(RunError, match=r"'cold' was changed.*learning_rate.*reason, last.*--from"):
        go(other)
    go(chain(tmp_path, THREE, "cold.checkpoint.keep=1"))  # no part in what was learned


@pytest.mark.parametrize("file", ["checkpoints/latest/model.safetensors", "config.toml"])
def test_a_damaged_earlier_stage_is_refused(copied: Any, file: str) -> None:
    path = copied.path / "1_cold" / file
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RunError, match=r"'cold' was changed since it finished.*reason, last"):
        go(copied)


def test_from_does_a_stage_and_those_behind_it_anew(copied: Any, whole: Any) -> None:
    untouched = files(copied.path / "1_cold" / "rollouts")
    marked = copied.path / "2_reason" / "mine.txt"
    marked.write_text("gone")
    go(copied, "reason")
    assert not marked.exists() and files(copied.path / "1_cold" / "rollouts") == untouched
    assert remains(copied) == remains(whole)
    with pytest.raises(ConfigError, match="Did you mean 'reason'"):
        go(copied, "reasn")


def test_a_folder_that_is_being_removed_is_removed_by_the_next_start(
    copied: Any, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(running.shutil, "rmtree", cut_short)
        with pytest.raises(KeyboardInterrupt):
            go(copied, "reason")
    go(copied)
    assert remains(copied) == remains(whole)


def test_a_full_disk_in_the_last_stage_loses_nothing(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chain(tmp_path)
    usage = shutil.disk_usage

    def full(path: Any) -> Any:
        found = usage(path)
        return found._replace(free=0) if "3_last/checkpoints" in str(path) else found

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", full)
        with pytest.raises(RunError, match="stage 'last'"):
            go(made)
    record = read_stages(made.path)
    assert record is not None
    assert [x.state for x in record.stages] == ["finished", "finished", "running"]
    go(made)
    assert remains(made) == remains(whole)


def test_too_small_a_disk_is_told_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = chain(tmp_path)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=10_000))
    with pytest.raises(RunError, match="the stages that are left need"):
        go(made)
    assert not (made.path / "1_cold").exists()


def test_a_second_command_is_refused(copied: Any) -> None:
    from groupwise.runfiles.folder import RunFolder

    program = (
        "import sys; from pathlib import Path\n"
        "from groupwise.runfiles.folder import RunFolder\n"
        "with RunFolder(sys.argv[1]).locked():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(copied.path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        assert RunFolder(copied.path).writer() is not None
        with pytest.raises(RunError, match=f"{holder.pid}"):
            go(copied)
    finally:
        holder.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_ends_with_130(number: int, whole: Any, tmp_path: Path) -> None:
    made = chain(tmp_path, THREE.replace("steps = 3", "steps = 3000"))
    command = [sys.executable, "-m", "groupwise", "train", str(tmp_path / "pipeline.toml")]
    child = subprocess.Popen(
        [*command, "--run", str(made.path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (made.path / "1_cold/checkpoints/latest").exists() and time.monotonic() < end:
        time.sleep(0.05)
    child.send_signal(number)
    assert child.wait(60) == 130
    record = read_stages(made.path)
    assert record is not None and record.stages[0].state == "running"


def test_a_gate_ends_a_stage_at_its_evaluation(tmp_path: Path) -> None:
    text = HEAD + COLD.replace("steps = 3", "steps = 400\nuntil = { accuracy = 0.1 }")
    made = chain(tmp_path, text)
    go(made)
    summary = json.loads((made.path / "1_cold/summary.json").read_text())
    assert summary["until"] == {"accuracy": 0.1} and summary["accuracy_after"] >= 0.1
    assert 0 < summary["steps"] < 400 and summary["steps"] % 2 == 0
    lines = (made.path / "1_cold/metrics.jsonl").read_text().splitlines()
    found = [json.loads(x).get("eval/accuracy") for x in lines]
    assert all(x is None or x < 0.1 for x in found[:-1])
    before = files(made.path)
    go(made)
    assert files(made.path) == before


def test_rounds_start_from_one_another_with_other_prompts(tmp_path: Path) -> None:
    made = chain(tmp_path, HEAD + COLD.replace("steps = 3", "steps = 1\nrepeat = 3"))
    assert [x.folder for x in made.pipeline.stages] == ["1_cold_1", "1_cold_2", "1_cold_3"]
    go(made)
    parents = [
        json.loads((made.path / f"1_cold_{n}/manifest.json").read_text()).get("parent")
        for n in (1, 2, 3)
    ]
    assert parents[0] is None
    assert [x["folder"] for x in parents[1:]] == ["../1_cold_1", "../1_cold_2"]
    assert [real(made, x).config.seed for x in made.pipeline.stages] == [0, 1, 2]


def test_base_is_the_embedded_model_before_its_cold_start(tmp_path: Path) -> None:
    text = HEAD + COLD + '[[stage]]\nname = "again"\nrecipe = "sft"\nmodel = "base"\nsteps = 1\n'
    made = chain(tmp_path, text)
    go(made)
    first, second = (
        json.loads((made.path / x / "manifest.json").read_text()) for x in ("1_cold", "2_again")
    )
    assert first["origin"]["weights"] == second["origin"]["weights"]
    assert not (made.path / "1_cold" / "cold_start").exists()


def test_an_adapter_stage_is_folded_into_its_base_for_the_next(tmp_path: Path) -> None:
    made = chain(tmp_path, THREE, "reason.adapter.rank=4")
    go(made)
    config = real(made, made.pipeline.stages[2]).config
    assert config.model.path.endswith("1_cold/checkpoints/latest")
    assert config.model.adapters[0].endswith("2_reason/checkpoints/latest")
    ended, begun = (
        json.loads((made.path / x / "summary.json").read_text()) for x in ("2_reason", "3_last")
    )
    assert ended["accuracy_after"] == begun["accuracy_before"]
    manifest = json.loads((made.path / "3_last/manifest.json").read_text())
    assert manifest["parent"]["folder"] == "../2_reason"


# --- stages that read stages ------------------------------------------------------------------


def chained(folder: Path, text: str = CHAINED) -> Any:
    write_rows(folder)
    return chain(folder, text)


def test_a_chain_with_rejection_sampling_killed_anywhere_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    made = chained(tmp_path / "whole")
    go(made)
    kept = json.loads((made.path / "3_collect/manifest.json").read_text())["kept_answers"]
    assert kept["other"] == 4 and kept["kept"] == 12
    vocabulary = json.loads((made.path / "base/tokenizer.json").read_text())["model"]["vocab"]
    assert {"i", "t", "s"} <= set(vocabulary)  # of rows that only the third stage mixes in
    expected = remains(made)
    found = sweep(tmp_path, [70, 110, 130, 150], CHAINED)
    assert len(found) == 4 and all(each == expected for each in found)


def test_stages_that_judge_start_a_critic_and_teach(tmp_path: Path) -> None:
    made = chained(tmp_path, RLHF)
    record, said = go(made)
    assert record.finished and "stage 4 of 4: learn (distill)" in said
    config = real(made, made.pipeline.stages[2]).config
    judge = str(made.path / "2_judge/checkpoints/latest")
    assert config.critic.start == judge and config.reward.parts == {f"rm(path='{judge}')": 1.0}
    lines = (made.path / "3_ppo/metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["reward/mean"] != 0


def test_accuracy_in_all_is_of_the_same_tasks(tmp_path: Path) -> None:
    made = chained(tmp_path, RLHF[: RLHF.index('[[stage]]\nname = "ppo"')])
    go(made)
    rows = rows_of(figures(made.path, read_stages(made.path)))  # type: ignore[arg-type]
    assert all(row[-1] for row in rows[:-1])
    assert rows[-1][0] == "in all" and rows[-1][-2:] == ["", ""]  # tasks first, then pairs


@pytest.mark.parametrize("name", ["other.jsonl", "run/2_reason/rollouts/step_2.parquet"])
def test_other_data_of_a_finished_stage_are_refused(name: str, tmp_path: Path) -> None:
    made = chained(tmp_path)
    go(made)
    path = tmp_path / name
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(
        RunError, match=r"'collect' was changed.*other.jsonl.*No longer valid: last"
    ):
        go(made)
    path.unlink()
    with pytest.raises(RunError, match="'collect' was changed"):
        go(made)
