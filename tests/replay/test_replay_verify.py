"""`groupwise replay --verify`: a run that repeats, and everything that keeps one from it."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from runs import quiet, small
from safetensors.torch import load_file, save_file
from steps import Start

from groupwise.cli import main
from groupwise.errors import RunError
from groupwise.model.formats import checkpoint
from groupwise.replay import verify as module
from groupwise.replay.bits import compare_metrics, same_bits
from groupwise.replay.verify import differences, verify
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read, store, with_lists
from groupwise.training.loop import train

MOODY = """
import random

def moody(completion):
    return random.random()
"""


class Runs:
    """A run of two steps, and copies of it to meddle with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start = folder, Start(folder)
        (folder / "moody.py").write_text(MOODY)
        self.path = self.make("run", recipe="grpo", recipe__schedule__updates=2, steps=2)

    def make(self, name: str, **changes: Any) -> Path:
        torch.set_num_threads(1)
        train(small(**self.start.settings(**changes)), self.folder / name, quiet())
        return self.folder / name

    def copy(self, place: Path) -> RunFolder:
        shutil.copytree(self.path, place / "copy", symlinks=True)
        return RunFolder(place / "copy")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("verify"))


def test_a_run_repeats(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in runs.path.rglob("*") if path.is_file()}
    assert main(["replay", str(runs.path), "--verify", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["same"] and found["steps"] == 2 and found["difference"] is None
    lines = RunFolder(runs.path).read_metrics()
    assert found["weights"] == lines[-1]["weights/fingerprint"]
    assert before == {path: path.read_bytes() for path in runs.path.rglob("*") if path.is_file()}


def test_a_run_that_was_continued_repeats(runs: Runs) -> None:
    path = runs.make("continued", steps=1)
    runs.make("continued", steps=2)
    told: list[str] = []
    found = verify(path, tell=told.append)
    assert found.same and found.steps == 2
    assert told[-1] == "step 2 of 2: the same"
    assert verify(path, 1).steps == 1  # of as many steps as it has: the learning rate's schedule


@pytest.mark.parametrize(
    ("changes", "column"),
    [
        ({"recipe": "ppo", "critic__alone_steps": 1, "steps": 3}, "value"),
        ({"recipe": "ppo", "critic__alone_steps": 1, "steps": 3}, "return"),
        ({"recipe": "prime", "steps": 2}, "process_reward"),
    ],
)
def test_what_a_model_beside_the_policy_said_repeats(
    runs: Runs, tmp_path: Path, changes: dict[str, Any], column: str
) -> None:
    """Also in a step in which a critic learns alone; and where it does not, the token is named."""
    path = runs.folder / f"{changes['recipe']}_beside"
    path = path if path.exists() else runs.make(path.name, **changes)
    found = verify(path)
    assert found.same and found.steps == changes["steps"]
    folder = RunFolder(shutil.copytree(path, tmp_path / "copy", symlinks=True))
    table = read(folder.rollout(changes["steps"]))
    lists = table.column(column).to_pylist()
    lists[2][0] += 0.5
    store(folder.rollout(changes["steps"]), with_lists(table, {column: lists}))
    seen = verify(folder.path).difference
    assert seen is not None and (seen.step, seen.what, seen.token) == (changes["steps"], column, 0)


def test_the_first_token_that_differs_is_named(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy(tmp_path)
    table = read(folder.rollout(2))
    logp = table.column("sampler_logp").to_pylist()
    before = logp[5][1]
    logp[5][1] = float(torch.tensor(before).nextafter(torch.tensor(0.0)))  # the last bit alone
    store(folder.rollout(2), with_lists(table, {"sampler_logp": logp}))
    found = verify(folder.path)
    row = table.slice(5, 1).to_pylist()[0]
    assert found.difference is not None and found.steps == 1
    seen = found.difference
    assert (seen.step, seen.what, seen.token) == (2, "sampler_logp", 1)
    assert (seen.group, seen.sample) == (row["group"], row["sample"])
    assert (seen.recorded, seen.now) == (logp[5][1], before)


def test_other_weights_are_found_by_their_fingerprint(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.copy(tmp_path)
    lines = folder.metrics.read_text().splitlines()
    changed = json.loads(lines[1]) | {"weights/fingerprint": "f" * 64, "advantage/other": 1.0}
    folder.metrics.write_text("\n".join([lines[0], json.dumps(changed), *lines[2:]]) + "\n")
    manifest = folder.read_manifest()
    manifest["versions"]["torch"] = "1.0.0"
    folder.manifest.write_text(json.dumps(manifest))
    assert main(["replay", str(folder.path), "--verify"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "First difference: step 1: weights/fingerprint was ffff" in shown
    assert f"versions torch: 1.0.0 then, {torch.__version__.partition('+')[0]}" in shown


@pytest.mark.parametrize("changes", [{}, {"adapter__rank": 2}])
def test_a_checkpoint_of_other_weights_is_found(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    """Records that repeat say nothing of the files that somebody will serve."""
    path = runs.make(f"kept_{len(changes)}", steps=2, checkpoint__every_steps=1, **changes)
    assert main(["replay", str(path), "--verify"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "as in the files of checkpoints/step_1 and checkpoints/step_2." in shown
    (file,) = (path / "checkpoints/step_2").glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(torch.int32)[-1] ^= 1  # a last bit
    save_file(tensors, file)
    found = verify(path)
    assert found.difference is not None and found.steps == 1
    assert found.checkpoints == ["checkpoints/step_1"]
    assert found.difference.what == f"the weights in checkpoints/step_2 ({name} has other values)"
    file.write_bytes(file.read_bytes()[:-9])
    cut = verify(path).difference
    assert cut is not None and cut.what == "the weights in checkpoints/step_2"


def test_a_snapshot_of_other_weights_is_found(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy(tmp_path)
    shutil.copytree(folder.path / "checkpoints/step_2", folder.path / "snapshots/step_2")
    names = ["checkpoints/step_2", "snapshots/step_2"]
    assert verify(folder.path).checkpoints == names
    (file,) = (folder.path / names[1]).glob("*.safetensors")
    tensors = load_file(file)
    tensors[min(tensors)].view(torch.int32)[-1] ^= 1
    save_file(tensors, file)
    found = verify(folder.path)
    assert found.difference is not None and found.checkpoints == names[:1]
    assert found.difference.what.startswith("the weights in snapshots/step_2")


def test_a_checkpoint_that_is_cleared_away_meanwhile_is_no_difference(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run that goes on: it keeps the last ones."""
    folder, write = runs.copy(tmp_path), checkpoint.new_folder

    def slow(path: Path) -> AbstractContextManager[Path]:
        shutil.rmtree(folder.path / "checkpoints/step_2", ignore_errors=True)
        return write(path)

    monkeypatch.setattr(checkpoint, "new_folder", slow)
    assert verify(folder.path).same
    assert not (folder.path / "checkpoints/step_2").exists()


def test_other_code_is_named_where_it_is_known(runs: Runs) -> None:
    manifest = RunFolder(runs.path).read_manifest()

    def named(**origin: str) -> list[str]:
        now = manifest | {"origin": {"reward": "r", "recipe": "s"}}
        return [x["what"] for x in differences(manifest | {"origin": origin}, manifest, now)]

    assert named(reward="r", recipe="s") == []
    assert named(reward="r", recipe="t") == ["code of the recipe"]
    assert named(reward="q", recipe="s") == ["code of the reward functions"]
    assert named(reward="r") == []  # of an older groupwise: nobody knows


def test_a_reward_that_does_not_repeat(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"{runs.folder / 'moody.py'}:moody": 1.0}
    path = runs.make("moody", reward__parts=parts, steps=1)
    found = verify(path)
    assert found.difference is not None and found.difference.what == "reward"
    # Of a judge, what it said is taken from the record.
    monkeypatch.setattr(module, "_asks_a_judge", lambda config: True)
    assert verify(path).same


def test_threads_are_those_of_the_run(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy(tmp_path)
    assert folder.read_manifest()["threads"] == 1
    settings = folder.config.read_text()
    assert "threads = 1 " in settings
    folder.config.write_text(settings.replace("threads = 1 ", "threads = 0 "))
    torch.set_num_threads(2)
    try:
        found = verify(folder.path, 1)
        assert found.same and not any(x["what"] == "threads" for x in found.environment)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_closed_pipe_does_not_turn_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`groupwise replay RUN --verify | true`: nobody read that it does not repeat."""
    found = module.Verified("run", difference=module.FirstDifference(1, "reward", 1.0, 0.5))
    monkeypatch.setattr(module, "verify", lambda *_: found)
    with (tmp_path / "out").open("w") as out:

        class Closed:
            fileno = out.fileno

            def write(self, text: str) -> int:
                return len(text)  # into the buffer

            def flush(self) -> None:
                raise BrokenPipeError

        monkeypatch.setattr(sys, "stdout", Closed())
        assert main(["replay", "run", "--verify"]) == 1


def test_a_run_that_gave_up_and_was_started_again(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error after a finished step ends the repetition only where it ended the run for good."""
    one_step = module.one_step

    def tired(run: Any, stop: Any) -> None:
        one_step(run, stop)
        if run.progress.step == 1:
            raise RunError("enough")

    monkeypatch.setattr(module, "one_step", tired)
    found = verify(runs.path)
    assert found.same and found.steps == 2 and not found.notes
    alone = verify(runs.path, 1)
    assert alone.steps == 1 and "stopped after step 1: enough" in alone.notes[-1]


# --- refused before a step is run -------------------------------------------------------------


@pytest.fixture
def no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr(module, "begin", stop)


@pytest.mark.usefixtures("no_steps")
def test_other_data_or_weights_are_refused(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy(tmp_path)
    other = tmp_path / "tasks.jsonl"
    rows = Path(runs.start.data).read_text().splitlines()
    other.write_text("\n".join([*rows[1:], rows[0]]) + "\n")
    text = folder.config.read_text()
    assert runs.start.data in text
    folder.config.write_text(text.replace(runs.start.data, str(other)))
    with pytest.raises(RunError, match="The data here are not those"):
        verify(folder.path)

    folder.config.write_text(text.replace(str(runs.start.model), str(tmp_path / "model")))
    shutil.copytree(Path(folder.checkpoints / "latest").resolve(), tmp_path / "model")
    with pytest.raises(RunError, match="The weights here are not those"):
        verify(folder.path)


@pytest.mark.usefixtures("no_steps")
def test_folders_that_say_too_little(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = runs.copy(tmp_path)
    manifest = folder.read_manifest()

    def refused(*more: str) -> str:
        assert main(["replay", str(folder.path), "--verify", *more]) == 2
        return capsys.readouterr().err

    assert "repeats nothing" in refused("--steps", "0")
    folder.manifest.write_text(json.dumps(manifest | {"format": 7}))
    assert "format 7" in refused()
    folder.manifest.unlink()
    assert "no manifest.json" in refused()
    folder.manifest.write_text(json.dumps(manifest))
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text(lines[0] + lines[2])
    assert "no line for step 1" in refused()
    folder.metrics.write_text(lines[0])
    assert "no finished step" in refused()
    Path(runs.start.data).rename(tmp_path / "away")
    try:
        folder.metrics.write_text("".join(lines))
        assert Path(runs.start.data).name in refused()
    finally:
        (tmp_path / "away").rename(runs.start.data)


def test_steps_without_rollouts_are_compared_by_metrics(runs: Runs, tmp_path: Path) -> None:
    folder = runs.copy(tmp_path)
    folder.rollout(1).unlink()
    found = verify(folder.path, 1)
    assert found.same and any("1 step without rollouts" in note for note in found.notes)


# --- bits -------------------------------------------------------------------------------------


def test_same_bits() -> None:
    nan = float("nan")
    assert same_bits(nan, nan) and same_bits([1.0, nan], [1.0, nan])
    assert not same_bits(0.0, -0.0) and not same_bits(1, 1.0) and not same_bits([1], [1, 2])
    assert not same_bits(None, 0.0)


def test_every_column_is_compared_to_the_last_bit(runs: Runs, tmp_path: Path) -> None:
    """But what a grader says of its troubles, in words of its own, and what took how long."""
    path = RunFolder(runs.path).rollout(1)
    table = read(path)
    missed = []
    for at, name in enumerate(table.column_names):
        values, kind = table.column(name).to_pylist(), table.schema.field(name).type
        values[3] = altered(name, values[3], table.column("token_ids")[3].as_py())
        store(tmp_path / "other", table.set_column(at, name, pa.array(values, kind)))
        if module.compare_rollouts(1, path, tmp_path / "other") is None:
            missed.append(name)
    assert missed == ["step", "turn_seconds", "grader_reason"]

    # The sign of a 0, and a NaN that stays one.
    streams = table.column("advantage").to_pylist()
    streams[3] = [0.0, float("nan"), *streams[3][2:]]
    store(tmp_path / "a", with_lists(table, {"advantage": streams}))
    assert module.compare_rollouts(1, tmp_path / "a", tmp_path / "a") is None
    streams[3][0] = -0.0
    store(tmp_path / "b", with_lists(table, {"advantage": streams}))
    seen = module.compare_rollouts(1, tmp_path / "a", tmp_path / "b")
    assert seen is not None and (seen.what, seen.token) == ("advantage", 0)
    assert not same_bits({"reward": 0.0}, {"reward": -0.0})


def altered(name: str, value: Any, tokens: list[int]) -> Any:
    """Something else of the same kind."""
    if name == "reward_steps":
        return [*value, {"end": 1, "reward": 1.0}]
    if name == "reward_parts":
        return [*value, ("other", 1.0)]
    if name == "turns":
        return [{**value[0], "role": "tool"}, *value[1:]]
    if value is None:
        others = {"reward": 0.5, "correct": True, "answer": "x", "branch": {"at": 1, "number": 0}}
        others["episode"] = {"stop": "done", "reward": 1.0, "turns": []}
        others["routes"] = {"layers": 1, "chosen": 1, "experts": [0] * len(tokens)}
        return others.get(name, [0.5] * len(tokens))
    if isinstance(value, list):
        return [altered(name, value[0], tokens), *value[1:]]
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1


def test_what_the_clock_says_is_not_compared() -> None:
    then, now = {"time/step": 1.0, "loss/total": 2.0}, {"time/step": 9.0, "loss/total": 2.0}
    assert compare_metrics(1, then, now) is None
    seen = compare_metrics(1, then, {"loss/total": 2.0, "more": 1.0})
    assert seen is not None and (seen.what, seen.recorded, seen.now) == ("more", None, 1.0)


def test_an_empty_column_is_no_difference(tmp_path: Path, runs: Runs) -> None:
    """Older files lack columns that newer ones have."""
    table = read(RunFolder(runs.path).rollout(1))
    store(tmp_path / "a.parquet", table.drop_columns(["reward_steps"]))
    store(tmp_path / "b.parquet", table)
    assert module.compare_rollouts(1, tmp_path / "a.parquet", tmp_path / "b.parquet") is None
    fewer = table.slice(0, 3)
    store(tmp_path / "c.parquet", fewer)
    seen = module.compare_rollouts(1, tmp_path / "b.parquet", tmp_path / "c.parquet")
    assert seen is not None and seen.what == "the number of samples"
    ids = table.column("token_ids").to_pylist()
    ids[2] = ids[2][:1]
    at = table.schema.get_field_index("token_ids")
    kind = table.schema.field("token_ids").type
    store(tmp_path / "d.parquet", table.set_column(at, "token_ids", pa.array(ids, kind)))
    seen = module.compare_rollouts(1, tmp_path / "b.parquet", tmp_path / "d.parquet")
    assert seen is not None and (seen.what, seen.token, seen.now) == ("token_ids", 1, "nothing")


def test_answers_of_the_data_that_an_older_run_did_not_record_are_no_difference(
    tmp_path: Path, runs: Runs
) -> None:
    sampled = read(RunFolder(runs.path).rollout(1))
    at = sampled.schema.get_field_index("weights")
    given = sampled.set_column(at, "weights", pa.array(["data"] * sampled.num_rows))
    for name, table in {"older": given.slice(0, 0), "given": given, "sampled": sampled}.items():
        store(tmp_path / f"{name}.parquet", table)
    older = tmp_path / "older.parquet"
    assert module.compare_rollouts(1, older, tmp_path / "given.parquet") is None
    seen = module.compare_rollouts(1, older, tmp_path / "sampled.parquet")
    assert seen is not None and seen.what == "the number of samples"
