"""The overview of all commands, what an empty line is answered with, settings and completion."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from argparse import Namespace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cold_start import make, run_from

from groupwise.cli import GROUPS, main
from groupwise.commands.here import is_configuration
from groupwise.commands.overview import Overview
from groupwise.config.schema import schema
from groupwise.config.values import FIELDS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(name for names in Overview(GROUPS).listed().values() for name in names)


def asked(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    try:
        status = main(argv)
    except SystemExit as stopped:  # argparse's own answer
        status = int(stopped.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


# --- the overview -----------------------------------------------------------------------------


def test_every_command_stands_in_the_overview_once(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = asked(capsys, "--help")
    listed = re.findall(r"^  ([a-z][a-z-]+)  ", out, re.MULTILINE)
    assert status == 0 and sorted(listed) == COMMANDS
    modules = {path.stem for path in (ROOT / "groupwise" / "commands").glob("*.py")}
    with_parsers = {
        name
        for name in modules
        if "\ndef add_parser(" in (ROOT / f"groupwise/commands/{name}.py").read_text("utf-8")
    }
    assert with_parsers == {
        module.__name__.rpartition(".")[2] for group in GROUPS.values() for module in group
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_that_the_command_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = asked(capsys, name, "--help")
    example = " ".join(out.partition("example: ")[2].split())
    words = shlex.split(re.split(r" [<|>] ", example)[-1 if "| groupwise" in example else 0])
    assert status == 0 and words[:2] == ["groupwise", name]
    taken, more = Overview(GROUPS).parse_known_args(words[1:])
    assert isinstance(taken, Namespace) and taken.command == name
    assert not [word for word in more if word.startswith("-")]


@pytest.mark.parametrize(
    ("typed", "meant"), [("trian", "train"), ("expalin", "explain"), ("compere", "compare")]
)
def test_a_typo_is_answered_with_the_nearest_command(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = asked(capsys, typed, "configs/tiny.toml")
    assert status == 2 and f"Did you mean {meant}" in err


def test_a_word_like_no_command_gets_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = asked(capsys, "qqqq")
    assert status == 2 and "there is no command 'qqqq'" in err and "Did you mean" not in err


# --- `groupwise` alone ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def next_commands(out: str) -> list[str]:
    return re.findall(r"^  (groupwise .*?)  ", out.partition("Next:")[2], re.MULTILINE)


def test_an_empty_folder_is_told_how_to_begin(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = asked(capsys)
    assert status == 0 and "Here:" not in out
    assert next_commands(out)[0] == "groupwise init mine.toml"


def test_a_configuration_without_a_run_is_to_be_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "configs/tiny.toml", folder / "mine.toml")
    (folder / "pyproject.toml").write_text('[project]\nname = "other"\n')
    (folder / "torn.toml").write_text("[model\n")
    _, out, _ = asked(capsys)
    assert "mine.toml" in out and "pyproject" not in out and "torn" not in out
    assert "groupwise train mine.toml" in next_commands(out)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    kept = made / "mine"
    run_from(make(made / "start"), kept, steps=2)
    return kept


def test_a_finished_run_is_to_be_seen_and_exported(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(two_steps, folder / "runs" / "mine", symlinks=True)
    _, out, _ = asked(capsys)
    assert "runs/mine" in out and "finished after 2 steps" in out
    assert "groupwise export runs/mine model" in next_commands(out)


def test_a_stopped_run_is_to_be_gone_on_with_by_its_own_configuration(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = folder / "runs" / "mine"
    shutil.copytree(two_steps, stopped, symlinks=True)
    (stopped / "summary.json").unlink()
    _, out, _ = asked(capsys)
    assert "step 2 of 2" in out
    assert next_commands(out)[0] == "groupwise train runs/mine/config.toml --run runs/mine"
    shutil.copy(ROOT / "configs/tiny.toml", folder / "mine.toml")
    _, out, _ = asked(capsys)
    assert next_commands(out)[0] == "groupwise train mine.toml --run runs/mine"


def test_a_damaged_run_is_said_to_be_one(
    folder: Path, two_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = folder / "runs" / "mine"
    shutil.copytree(two_steps, damaged, symlinks=True)
    (damaged / "summary.json").write_text("{")
    status, out, _ = asked(capsys)
    assert status == 0 and "damaged" in out


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_shipped_configuration_is_known_as_one(path: Path) -> None:
    assert is_configuration(path)


# --- settings ---------------------------------------------------------------------------------


def test_settings_are_found_by_words_names_first(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = asked(capsys, "settings", "Learning", "rate", "--json")
    names = [each["name"] for each in json.loads(out)]
    assert status == 0 and "optim.learning_rate" not in names[1:] and names[0].endswith("rate")
    assert {"optim.learning_rate", "critic.learning_rate", "optim.schedule"} <= set(names)
    named = [all(word in name for word in ("learning", "rate")) for name in names]
    assert named == sorted(named, reverse=True)


def test_all_settings_are_printed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = asked(capsys, "settings", "--json")
    found = {each["name"]: each["default"] for each in json.loads(out)}
    assert set(found) == {key for key in FIELDS if not key.startswith("recipe")} | (
        {"recipe"} & set(found)
    )
    assert found["group_size"] == "8"


def test_a_word_that_no_setting_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = asked(capsys, "settings", "xyzzy")
    assert status == 2 and "'xyzzy'" in err and "`groupwise settings` prints all" in err


# --- the schema for editors -------------------------------------------------------------------


def found_wrong(configuration: dict[str, Any]) -> list[str]:
    checked = jsonschema.Draft202012Validator(schema())
    return [error.json_path for error in checked.iter_errors(configuration)]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem
)
def test_the_schema_takes_every_shipped_configuration(path: Path) -> None:
    assert found_wrong(tomllib.loads(path.read_text("utf-8"))) == []


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("group_size = -1", "$.group_size"),
        ("group_size = 'eight'", "$.group_size"),
        ("optim.learning_rate = 'fast'", "$.optim.learning_rate"),
        ("optim.learning_rat = 1e-6", "$.optim"),
        ("train.sync = 'sometimes'", "$.train.sync"),
        ("[[stage]]\nname = 'a'\ngroup_size = 'x'", "$.stage[0].group_size"),
    ],
)
def test_the_schema_finds_what_load_would_refuse(text: str, where: str) -> None:
    assert found_wrong(tomllib.loads(text)) == [where]


# --- completion -------------------------------------------------------------------------------


def test_completion_knows_commands_and_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, script, _ = asked(capsys, "completion", "bash")
    file = tmp_path / "groupwise"
    file.write_text(script)
    assert status == 0
    for typed, last, offered in (("tra", 1, "train"), ("train --dr", 2, "--dry-run")):
        words = ["groupwise", *typed.split()]
        code = (
            f"source {file}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={last}; "
            "_shtab_groupwise groupwise x y; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        shell = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60)
        assert offered in shell.stdout.split(), shell.stderr
