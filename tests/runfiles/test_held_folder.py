"""A run folder that is moved, deleted or taken over under its run; what a kill leaves is tidied."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import left_behind, metrics, quiet, run, small

from groupwise.errors import RunError
from groupwise.prepare.placing import placed
from groupwise.prepare.setup import set_up
from groupwise.runfiles import files
from groupwise.runfiles.files import write_atomic
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.training.loop import steps, train
from groupwise.training.opening import open_run
from groupwise.watch.display import Display

# --- moved, deleted, replaced -----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("held") / "whole"
    run(folder, steps=4)
    return folder


def disturbed(folder: Path, disturb: Callable[[], object]) -> str:
    """A run that is disturbed after its second step; how it ended."""
    going = steps(small(steps=4), folder, quiet())
    for _ in range(3):
        next(going)
    disturb()
    with pytest.raises(RunError) as stopped:
        for _ in going:
            pass
    return str(stopped.value)


def test_a_folder_that_is_moved_stops_its_run_which_goes_on_there(
    tmp_path: Path, whole: Path
) -> None:
    folder, there = tmp_path / "run", tmp_path / "elsewhere" / "moved"
    there.parent.mkdir()
    said = disturbed(folder, lambda: folder.rename(there))
    assert f"The run folder {folder} was moved to {there} while" in said
    assert f"--run {there}" in said
    assert not folder.exists()
    run(there, steps=4)
    assert left_behind(there) == left_behind(whole)


def test_a_folder_that_is_deleted_is_not_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    said = disturbed(folder, lambda: shutil.rmtree(folder.rename(tmp_path / "going")))
    assert f"The run folder {folder} was deleted while" in said
    assert list(tmp_path.iterdir()) == []


def test_another_folder_at_the_same_path_is_left_alone(tmp_path: Path) -> None:
    """Moved away, and a new run begun under the old name: two runs must not mix."""
    folder, moved = tmp_path / "run", tmp_path / "moved"
    before: dict[Path, bytes] = {}

    def replaced() -> None:
        folder.rename(moved)
        run(folder, steps=1)
        before.update({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})

    assert f"was moved to {moved}" in disturbed(folder, replaced)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("what", ["config", "events", "metrics", "summary"])
def test_every_writer_asks_where_the_folder_is(what: str, tmp_path: Path) -> None:
    held = RunFolder(tmp_path / "run")
    write: dict[str, Callable[[], object]] = {
        "config": lambda: held.write_config("steps = 1\n"),
        "events": lambda: held.add_events([Event(1, "note", "x")]),
        "metrics": lambda: held.add_metrics('{"step": 1}'),
        "summary": lambda: held.write_cost(seconds=1.0, tokens=1),
    }
    with held.locked():
        write[what]()
        held.path.rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", held.path)  # by name all is there
        before = sorted((p, p.read_bytes()) for p in held.path.iterdir())
        with pytest.raises(RunError, match="was moved to"):
            write[what]()
        assert sorted((p, p.read_bytes()) for p in held.path.iterdir()) == before


def test_a_lock_file_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    held = RunFolder(tmp_path / "run")
    with held.locked():
        for _ in range(2):
            (held.path / ".lock").unlink()
            held.write_config("steps = 1\n")
            assert json.loads((held.path / ".lock").read_text())["pid"] == os.getpid()
            refused = pytest.raises(RunError, match=f"Process {os.getpid()} is writing")
            with refused, RunFolder(held.path).locked():
                pass
    with RunFolder(held.path).locked():  # the last one was given back too
        pass


def test_who_lost_the_lock_to_another_stops(tmp_path: Path) -> None:
    held, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with held.locked():
        (held.path / ".lock").unlink()
        with second.locked():
            second.write_config("steps = 2\n")
        with pytest.raises(RunError, match=r"\.lock was deleted .* and another one was made"):
            held.write_config("steps = 1\n")
        assert held.read_config() == "steps = 2\n"


def test_checkpoints_that_are_deleted_under_the_run_are_written_anew(
    tmp_path: Path, whole: Path
) -> None:
    folder = tmp_path / "run"
    going = steps(small(steps=4, eval__every=0), folder, quiet())
    for _ in range(3):
        next(going)
    shutil.rmtree((folder / "checkpoints").rename(tmp_path / "going"))
    for _ in going:
        pass
    assert (folder / "checkpoints" / "latest").resolve().name == "step_4"
    (told,) = [e for e in RunFolder(folder).read_events() if e["kind"] == "checkpoints"]
    assert "was removed while the run went on" in told["text"]
    assert metrics(folder)[-1]["weights/fingerprint"] == metrics(whole)[-1]["weights/fingerprint"]


# --- what a kill leaves -----------------------------------------------------------------------

LEFT = (
    ".probe_4711",
    "rollouts/..probe_4711.0a1b2c3d.partial",
    "checkpoints/.probe_4711",
    ".config.toml.partial",
    ".summary.json.0a1b2c3d.partial",
    "rollouts/.step_9.parquet.0a1b2c3d.partial",
    "checkpoints/.step_9.writing/model.safetensors",
    "checkpoints/.step_9.going/model.safetensors",
    "checkpoints/.latest",
    "snapshots/.step_1.partial/model.safetensors",
    ".cold_start.partial/model.safetensors",
)


def leave(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"half")


def hidden(folder: Path) -> set[str]:
    return {str(x.relative_to(folder)) for x in folder.rglob(".*") if x.name != ".lock"}


def test_what_a_killed_process_left_is_gone_after_the_next_start(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=1)
    leave(folder, *LEFT)
    run(folder, steps=2)
    assert hidden(folder) == set()


def test_a_finished_run_is_tidied_too(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, steps=1)
    leave(folder, *(name for name in LEFT if not name.startswith("checkpoints/.")))
    run(folder, steps=1)
    assert hidden(folder) == set()


def test_what_a_living_process_writes_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`groupwise report` holds no lock of the run, and must not lose its half to a start."""
    folder = RunFolder(tmp_path / "run")
    folder.check_writable()
    reached, go, real = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread() and not reached.is_set():
            reached.set()
            go.wait()
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", slow)
    other = threading.Thread(target=write_atomic, args=(folder.report, "of the other"))
    other.start()
    reached.wait()
    with folder.locked():
        folder.tidy()
        write_atomic(folder.report, "of this one")  # under a name of its own
        assert folder.report.read_text() == "of this one"
    go.set()
    other.join()
    assert folder.report.read_text() == "of the other"
    assert hidden(folder.path) == set()


def test_the_probe_is_made_by_the_one_that_holds_the_lock(tmp_path: Path) -> None:
    """So that whoever tidies can't take another's away."""
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        refused = pytest.raises(RunError, match="is writing to")
        with refused, pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "check_writable", lambda self: pytest.fail("not its turn"))
            run(folder.path, steps=1)


def test_a_run_that_was_killed_behind_its_summary_gets_its_report(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", io.StringIO()
    first = run(folder, steps=1)
    (folder / "report.html").unlink()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert train(small(steps=1), folder, Display(said, live=False)) == first
    assert "the end of the run was cut short; wrote" in " ".join(said.getvalue().split())
    after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}
    assert after.pop(folder / "report.html").startswith(b"<!doctype html>")
    assert after == before


def test_a_longer_run_that_is_killed_behind_its_summary_has_no_report_of_the_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    run(folder, steps=1)

    class Killed(BaseException):
        pass

    def killed(path: Path) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("groupwise.training.loop.write_report", killed)
        run(folder, steps=2)
    assert not (folder / "report.html").exists()
    cost = RunFolder(folder).read_manifest()["cost"]
    assert cost["seconds"] == RunFolder(folder).read_summary()["seconds"]
    assert run(folder, steps=2)["steps"] == 2
    assert "2 steps" in (folder / "report.html").read_text("utf-8")


def test_a_finished_run_that_can_not_be_written_is_still_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, steps=1)
    (folder / "report.html").unlink()
    with RunFolder(folder).locked():
        assert run(folder, steps=1) == first
    assert not (folder / "report.html").exists()


def test_the_clock_of_a_run_starts_before_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = []

    def loaded(*args: Any, **kwargs: Any) -> Any:
        loading.append(time.monotonic())
        return set_up(*args, **kwargs)

    monkeypatch.setattr("groupwise.training.opening.set_up", loaded)
    with open_run(placed(small(steps=1)), tmp_path / "run", quiet()) as going:
        assert going.progress.opened <= loading[0]
