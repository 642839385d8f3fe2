"""A run with a damaged file: every reader says which, and shows the rest."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq
import pytest
from damages import CONFIGS, DAMAGES, HARMLESS, LINES, PLACES, STEP, UNREAD_BY_REPORTS
from viewing import get, make_run, viewing

from groupwise.commands import diagnose
from groupwise.commands.shared import config_of
from groupwise.config import load
from groupwise.errors import GroupwiseError, RunError
from groupwise.graders.recorded_verdicts import recorded
from groupwise.runfiles import files, rollouts
from groupwise.runfiles.files import GrowingFile, append_lines
from groupwise.runfiles.folder import RunFolder
from groupwise.view.runs import Runs, runs_in
from groupwise.view.server import Viewer
from groupwise.watch.report import report_page

SECRET = "of somebody else"
NOT_IN_THE_LIST = (STEP,)  # the list of runs does not read it
PAGES = ("", "/trends.json?name=reward/mean", "/step/1", "/step/1?search=4&sort=mean",
         "/step/1/group/0", "/step/1/group/0/sample/0", "/step/1/group/0/sample/0/text",
         "/step/1/group/0/sample/0/tokens", "/prompt/100")  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("whole") / "one", 3)


def copy(whole: RunFolder, place: Path) -> RunFolder:
    return RunFolder(shutil.copytree(whole.path, place, symlinks=True))


def viewer_of(run: RunFolder) -> Viewer:
    return Viewer(Runs([run.path]), ("127.0.0.1", 0))


def pages_of(run: RunFolder, paths: Sequence[str]) -> dict[str, str]:
    """Pages of a run; those that can't be made, with the reason."""
    found = {}
    with viewer_of(run) as viewer:
        for path in paths:
            try:
                found[path] = viewer.answer(f"/runs/{run.path.name}{path}").body.decode()
            except RunError as error:
                found[path] = str(error)
    return found


def judged(run: RunFolder, json: bool = False) -> int:
    """`groupwise diagnose`, without the time that the parser of all commands takes."""
    try:
        return diagnose.run(Namespace(path=str(run.path), json=json))
    except RunError as error:
        print(error)
        return 2


def test_one_damaged_run_is_one_row_with_its_reason(whole: RunFolder, tmp_path: Path) -> None:
    copy(whole, tmp_path / "sound")
    for number, (_, damage) in enumerate(DAMAGES.values()):
        damage(copy(whole, tmp_path / f"bad{number}x"))
    for number, damage in enumerate(HARMLESS.values()):
        damage(copy(whole, tmp_path / f"odd{number}x"))
    with viewing(tmp_path) as port:
        status, page, _ = get(port, "/")
    assert status == 200 and SECRET not in page
    rows = re.finditer(r'<tr data-run="(\w+)".*?</tr>', page, re.S)
    by_name = {row[1]: row[0] for row in rows}
    assert len(by_name) == 1 + len(DAMAGES) + len(HARMLESS)
    for number, (kind, (file, _)) in enumerate(DAMAGES.items()):
        row = by_name.pop(f"bad{number}x")
        said = 'class="damaged"' in row and f"bad{number}x/{file}" in row
        assert said == (file not in NOT_IN_THE_LIST), kind
    assert not [name for name, row in by_name.items() if 'class="damaged"' in row]


# The same lines in files that are read alike: the list of runs above has them all.
ALIKE = {f"{file}: {kind}" for file in ("events.jsonl", "starts.jsonl") for kind in LINES
         if kind not in ("a list", "deep", "no step")}  # fmt: skip
ALIKE |= {f"{file}: {kind}" for file in ("events.jsonl", "starts.jsonl", "manifest.json")
          for kind in PLACES if kind != "a link out"}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=pytest.mark.slow) if x in ALIKE else x for x in DAMAGES]
)
def test_the_pages_of_a_damaged_run(
    kind: str, whole: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, damage = DAMAGES[kind]
    run = copy(whole, tmp_path / "bad")
    damage(run)
    pages = pages_of(run, PAGES if file == STEP else PAGES[:2])
    front = pages[""]
    assert not any(SECRET in page for page in pages.values())
    if file == STEP:
        assert "step_1.parquet" in "".join(pages.values())
        assert "/step/3" in pages["/prompt/100"]  # in the steps that are whole
    elif file != "manifest.json":
        assert f"bad/{file}" in front and 'id="damage"' in front
    assert "Training reward" in front or run.path / file == run.metrics
    assert "steps = 10" in front or run.path / file == run.config

    report = report_page(run)
    unread = kind in UNREAD_BY_REPORTS
    assert ("Damaged files" in report) == (f"bad/{file}" in report) == (not unread)
    assert SECRET not in report
    assert judged(run) == (2 if file == "metrics.jsonl" else 0)
    said = "".join(capsys.readouterr())
    read = ("metrics.jsonl", "events.jsonl", "starts.jsonl")
    assert (f"bad/{file}" in said) == (file in read) and SECRET not in said


LIKELY = ("group", "sample", "token_ids", "reward", "prompt_text")


@pytest.mark.parametrize("kind", [
    pytest.param(x, marks=pytest.mark.slow)
    if x.endswith("is null") and not x.startswith(tuple(f"rollouts: {y} is" for y in LIKELY))
    else x for x in HARMLESS
])  # fmt: skip
def test_what_is_odd_and_no_damage(
    kind: str, whole: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(whole, tmp_path / "odd")
    HARMLESS[kind](run)
    pages = pages_of(run, PAGES if kind.startswith("rollouts") else PAGES[:2])
    assert 'id="damage"' not in pages[""] and "<script>alert" not in pages[""]
    report = report_page(run)
    assert "Damaged files" not in report and "<script>alert" not in report
    assert judged(run, json=True) in (0, 1, 2)
    "".join(capsys.readouterr()).encode()  # no half of a character


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl"])
def test_what_is_sound_of_a_damaged_file_is_shown(
    file: str, whole: RunFolder, tmp_path: Path
) -> None:
    """The lines behind a broken one too, also those that a live run adds later."""
    run = copy(whole, tmp_path / "bad")
    append_lines(run.path / file, ["nothing", '{"step": 4, "kind": "x", "reward/mean": 9}'])
    with viewer_of(run) as viewer:
        address = "/runs/bad/trends.json?name=reward/mean"
        first = json.loads(viewer.answer(address).body)
        append_lines(run.path / file, ['{"step": 5, "kind": "y", "reward/mean": 8}'])
        second = json.loads(viewer.answer(address).body)
        page = viewer.answer("/runs/bad").body.decode()
    if file == "metrics.jsonl":
        steps = [data["curves"]["reward/mean"]["step"] for data in (first, second)]
        assert steps == [[1, 2, 3, 4], [1, 2, 3, 4, 5]]
        assert f"Line 4 of {run.metrics}" in page
    else:
        assert [event["kind"] for event in second["events"]] == ["x", "y"]
        assert f"Line 1 of {run.events}" in page


def test_numbers_of_lines_are_those_of_the_file(tmp_path: Path) -> None:
    growing = GrowingFile(tmp_path / "x.jsonl")
    append_lines(growing.path, ['{"step": 1}', '{"step": 2}'])
    assert growing.news() == (False, [{"step": 1}, {"step": 2}]) and not growing.damage
    append_lines(growing.path, ["?", '{"step": 4}', "?", "[]"])
    assert growing.news() == (False, [{"step": 4}])
    assert "Line 3 of" in growing.damage and "2 other lines" in growing.damage
    growing.path.write_text('{"step": 1}\n')
    assert growing.news() == (True, [{"step": 1}]) and not growing.damage


def test_files_that_vanish_while_they_are_read(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is there when it is looked for, and gone when it is opened."""
    run = copy(whole, tmp_path / "bad")
    there = files.file_status

    def vanishing(path: Path) -> os.stat_result | None:
        found = there(path)
        if path.is_file():
            path.unlink()
        return found

    monkeypatch.setattr(files, "file_status", vanishing)
    monkeypatch.setattr(rollouts, "file_status", vanishing)
    pages = pages_of(run, PAGES)
    assert "No step written yet" in pages[""] and "There are no rollouts" in pages["/step/1"]


def test_a_folder_that_may_not_be_read_hides_no_other(
    whole: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests may run as root, who may read all: what others are told is put in."""
    copy(whole, tmp_path / "a")
    closed, last = copy(whole, tmp_path / "closed").path, copy(whole, tmp_path / "z").path
    refuse_in(closed, monkeypatch)
    assert list(runs_in(tmp_path)) == [tmp_path / "a", closed, last]
    with viewing(tmp_path) as port:
        status, page, _ = get(port, "/")
        assert status == 200 and page.count("Step 3") == 2 and "Permission denied" in page
        status, page, _ = get(port, "/runs/closed")
        assert status == 200 and "closed/metrics.jsonl can" in page


def refuse_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system answer as it does to a user who may not look into the folder."""

    def refusing(name: str) -> None:
        asked = getattr(os, name)

        def answer(path: object, *args: object, **options: object) -> object:
            given = os.fspath(path) if isinstance(path, str | Path) else ""
            inside = given.startswith(f"{folder}/") or (name != "stat" and given == str(folder))
            if inside:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), given)
            return asked(path, *args, **options)

        monkeypatch.setattr(os, name, answer)

    for name in ("stat", "lstat", "listdir", "scandir"):
        refusing(name)


ODD = (
    "<b>&amp;",
    "a%2Fb",
    "a?b#c",
    "line\nbreak",
    "\x1b[31mred",
    "\udcff\udcfe",
    "日本",
    "a b",
)


def test_odd_names(whole: RunFolder, tmp_path: Path) -> None:
    runs = {name: copy(whole, tmp_path / name) for name in ODD}
    with viewing(tmp_path) as port:
        status, page, _ = get(port, "/")
        assert status == 200 and "<b>" not in page
        for name, run in runs.items():
            address = f"/runs/{quote(name, safe='', errors='surrogateescape')}"
            assert f'href="{address}"' in page
            for path in PAGES:
                assert get(port, address + path)[0] == 200, (name, path)
            assert "<b>" not in report_page(run)


def test_links_in_a_circle_and_runs_behind_links(whole: RunFolder, tmp_path: Path) -> None:
    copy(whole, tmp_path / "elsewhere" / "one")
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "up").symlink_to(runs)
    (runs / "itself").symlink_to("itself")
    (runs / "linked").symlink_to(tmp_path / "elsewhere" / "one")
    with viewing(runs) as port:
        status, page, _ = get(port, "/")
        assert status == 200 and page.count("Step 3") == 1
        assert "steps = 10" in get(port, "/runs/linked")[1]


def test_two_runs_of_which_one_is_damaged(whole: RunFolder, tmp_path: Path) -> None:
    copy(whole, tmp_path / "a")
    for kind in ("config.toml: deep", "config.toml: binary", "metrics.jsonl: a list"):
        run = copy(whole, tmp_path / "b")
        file, damage = DAMAGES[kind]
        damage(run)
        with viewing(tmp_path) as port:
            status, page, _ = get(port, "/compare?run=a&run=b")
        assert status == 200 and f"b/{file}" in page
        shutil.rmtree(run.path)


@pytest.mark.parametrize("kind", [*CONFIGS, "a folder", "a pipe", "a link to itself"])
def test_commands_that_take_a_runs_settings_say_what_is_wrong(
    kind: str, whole: RunFolder, tmp_path: Path
) -> None:
    run = copy(whole, tmp_path / "bad")
    DAMAGES[f"config.toml: {kind}"][1](run)
    with pytest.raises(GroupwiseError, match=r"bad/config\.toml"):
        load(config_of(run.path))


@pytest.mark.parametrize("name", ["prompt_id", "group", "sample", "token_ids", "sampler_logp"])
def test_a_replay_needs_whole_rows(name: str, whole: RunFolder, tmp_path: Path) -> None:
    """What pages show without, nothing can be computed from."""
    run = copy(whole, tmp_path / "bad")
    HARMLESS[f"rollouts: {name} is null"](run)
    with pytest.raises(RunError, match=f"rows without {name}"):
        rollouts.read(run.rollout(1))
    HARMLESS["rollouts: only other columns"](run)
    with pytest.raises(RunError, match="rows without"):
        rollouts.read(run.rollout(1))


@pytest.mark.parametrize("name", ["text", "correct", "reward", "reward_parts", "grader_status"])
def test_verdicts_are_not_taken_from_a_file_that_lost_a_column(
    name: str, whole: RunFolder, tmp_path: Path
) -> None:
    run = copy(whole, tmp_path / "bad")
    path = run.rollout(1)
    pq.write_table(pq.read_table(path).drop_columns([name]), path)
    with pytest.raises(RunError, match=f"rows without {name}"):
        recorded([path])
    told: list[str] = []
    assert recorded([path], told.append) == {}
    assert "asked for again" in told[0]
