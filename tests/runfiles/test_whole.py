"""Files and folders that appear whole, also where two processes write the same."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import exit_code

from groupwise.cli import main
from groupwise.errors import RunError
from groupwise.runfiles.whole import only_writer, remove_unfinished, whole_file, whole_folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_of_two_who_write_a_file_each_writes_its_own(tmp_path: Path) -> None:
    """The one that ends last stands there, whole; with one shared name their bytes would mix."""
    out = tmp_path / "out"
    with whole_file(out) as one, ExitStack() as inner:
        one.write(b"one, ")
        other = inner.enter_context(whole_file(out))
        other.write(b"other")
        one.write(b"and more")
        inner.close()
        assert out.read_bytes() == b"other"
    assert out.read_bytes() == b"one, and more" and names(tmp_path) == {"out"}


def test_of_two_who_write_a_folder_the_first_has_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(OSError, match="not empty"), whole_folder(out) as one:
        (one / "a").write_text("one")
        with whole_folder(out) as other:
            (other / "a").write_text("other")
            (one / "b").write_text("one")
    assert names(out) == {"a"} and (out / "a").read_text() == "other"
    assert names(tmp_path) == {"out"}


def test_a_folder_that_can_not_be_put_in_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls, rename = tmp_path / "out", list[Path](), Path.rename
    out.mkdir()
    (out / "old").touch()

    def second_fails(path: Path, target: Path) -> Path:
        calls.append(path)
        if len(calls) == 2:
            raise OSError("faulty disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second_fails)
    with pytest.raises(OSError, match="faulty"), whole_folder(out, replace=True) as made:
        (made / "new").touch()
    assert names(tmp_path) == {"out"} and names(out) == {"old"}


def test_what_a_living_process_writes_is_left_and_what_a_dead_one_left_goes(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / ".other.0a1b2c3d.partial"
    other.touch()
    child = os.fork()
    if child == 0:
        with whole_folder(out) as half:
            (half / "a").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2
    with whole_folder(out) as half:
        (half / "b").touch()
        remove_unfinished(tmp_path, "out")
        assert names(tmp_path) == {half.name, other.name}
    assert names(out) == {"b"}


def test_a_name_is_held_by_one_process_and_free_when_that_is_dead(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with only_writer(out):
        with pytest.raises(RunError, match=r"making .*rows\.jsonl"), only_writer(out):
            raise AssertionError("two at once")
        with only_writer(tmp_path / "others.jsonl"), whole_file(out) as file:
            file.write(b"rows")
    assert names(tmp_path) == {"rows.jsonl"}
    child = os.fork()
    if child == 0:
        with only_writer(out):
            os.kill(os.getpid(), signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    with only_writer(out):
        pass
    assert names(tmp_path) == {"rows.jsonl"}


@pytest.mark.parametrize(
    "words",
    [
        ["filter", "rows.jsonl", "--dedup"],
        ["label-pairs", "no.toml"],
        ["label-steps", "no.toml"],
    ],
)
def test_commands_that_take_long_refuse_an_output_in_the_making(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before they do anything: the second would spend its hours for nothing."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    with only_writer(Path("out.jsonl")):
        assert main([*words, "--out", "out.jsonl"]) == 2
    assert "Another process is making out.jsonl" in capsys.readouterr().err
    assert names(tmp_path) == {"rows.jsonl"}
