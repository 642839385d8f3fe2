"""What pages tell a reader to type is understood: commands, configurations, Python, and the path of
the first pages from the first line to the last.

Pages whose examples are run have tests beside what they are about (docs/python.md, migrate.md).
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import GROUPS, main
from groupwise.commands.overview import Overview
from groupwise.config import load
from groupwise.errors import ConfigError
from groupwise.pipeline import reading

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("", "sh", "bash")  # "text" is what was printed


def blocks(page: Path, *languages: str) -> list[str]:
    """Return a page's blocks of some languages."""
    found = FENCED.findall(page.read_text("utf-8"))
    return [text for _, language, text in found if language in languages]


# --- commands -------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `groupwise` that a page tells to type, in a block or in a line.

    In a line a command may be named without what it needs: `groupwise replay`. What has brackets or
    bars is no command, but says which there are.
    """
    text = page.read_text("utf-8")
    typed = [line for block in blocks(page, *COMMANDS) for line in lines_of(block)]
    typed += [span for span in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)) if " -" in span]
    for line in typed:
        if re.match(r"groupwise [a-z]", line) and not re.search(r" \[|\w\|\w", line):
            words = shlex.split(re.sub(r"\b(N|X)\b", "1", line), comments=True)[1:]
            ends = [i for i, word in enumerate(words) if word in ("|", "<", ">", "&&", ";", "&")]
            yield words[: ends[0]] if ends else words


def lines_of(block: str) -> list[str]:
    return [line.strip().removeprefix("$ ") for line in block.replace("\\\n", " ").splitlines()]


def refusal(arguments: list[str]) -> str:
    """Return what the command line has against arguments; that some are missing is nothing."""
    said = io.StringIO()
    whole = Overview(GROUPS)
    try:
        with contextlib.redirect_stderr(said):
            whole.check_command(arguments)
            args, more = whole.parse_known_args(arguments)
    except SystemExit:
        last = said.getvalue().strip().splitlines()[-1]
        return "" if "arguments are required" in last else last
    settings = hasattr(args, "items") and not any(each.startswith("-") for each in more)
    return f"unrecognized arguments: {more}" if more and not settings else ""


@every_page
def test_commands_are_understood(page: Path) -> None:
    if page.name == "log.md":
        pytest.skip("what was typed then, beside what it printed")
    wrong = {shlex.join(each): refusal(each) for each in commands(page)}
    assert not any(wrong.values()), {each: why for each, why in wrong.items() if why}


def test_a_command_that_is_not_there_is_found() -> None:
    assert "no command" in refusal(["trian", "mine.toml"])
    assert "unrecognized" in refusal(["train", "mine.toml", "--no-such"])
    assert refusal(["train", "mine.toml", "steps=2", "--dry-run"]) == ""
    assert sum(1 for page in PAGES for _ in commands(page)) > 100


def test_targets_of_make_exist() -> None:
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text("utf-8"), re.MULTILINE)
        assert set(named) <= known, page.name


# --- configurations -------------------------------------------------------------------------------


def load_block(block: str, path: Path) -> None:
    """Read a block as a configuration, a pipeline, tables of a stage, or the parts of a reward."""
    parts = [key for key in tomllib.loads(block) if not re.fullmatch(r"\w+", key)]
    text = "[reward.parts]\n" * bool(parts) + block
    if "[[stage]]" in block:
        path.write_text(text, "utf-8")
        reading.read(path)
    else:
        path.write_text(text.replace("[stage.", "["), "utf-8")
        load(path)


@every_page
def test_configurations_can_be_read(page: Path, tmp_path: Path) -> None:
    """All settings exist and hold what they may; files that they name need not be there."""
    for block in blocks(page, "toml"):
        load_block(block, tmp_path / "mine.toml")


def test_a_setting_that_is_not_there_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no setting"):
        load_block("[engine]\nno_such = 1\n", tmp_path / "mine.toml")


# --- Python ---------------------------------------------------------------------------------------

SIGNATURE = r"(?s)((?:from \S+ import [^\n]+\n)*)[\w.]+\(.*\)(?: -> [^\n]+)?\n*"


def missing_names(source: str) -> list[str]:
    """Return what a program imports of groupwise that is not there.

    A signature behind imports, `f(x: int) -> str`, is a way to write a call down, and no program.
    """
    missing = []
    signature = re.fullmatch(SIGNATURE, source)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        if signature is None:
            raise
        tree = ast.parse(signature[1])
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "groupwise":
            module = importlib.import_module(str(node.module))
            missing += [each.name for each in node.names if not hasattr(module, each.name)]
    return missing


@every_page
def test_python_is_python_and_what_it_imports_is_there(page: Path) -> None:
    assert [missing_names(block) for block in blocks(page, "python") if missing_names(block)] == []


def test_an_import_that_is_not_there_is_found() -> None:
    assert missing_names("from groupwise import train, trian") == ["trian"]
    assert missing_names("from groupwise import trian\ntrian(x: int) -> str\n") == ["trian"]


def test_the_example_of_one_step_prints_what_the_page_says() -> None:
    """The figures of docs/what_happens.md, in its words and its pictures too."""
    page = ROOT / "docs" / "what_happens.md"
    (program,), said, found = blocks(page, "python"), io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(said):
        exec(program, found)
    text = page.read_text("utf-8")
    assert f"```\n{said.getvalue()}```" in text
    assert found["advantage_N"].tolist() == pytest.approx([-0.5, 1.5, -0.5, -0.5], abs=1e-5)
    assert "(1 − 0.25) / 0.5 = 1.5" in text and "(0 − 0.25) / 0.5 = −0.5" in text
    # By hand: p − lr · gradient, and the softmax of it.
    assert (-found["logits"].grad).tolist() == pytest.approx([-0.125, -0.25, 0.375, 0], abs=1e-6)
    assert "rises from 25 to 36.3 %" in text and round(found["after"][2].item(), 3) == 0.363


# --- the first pages ------------------------------------------------------------------------------


def named_blocks(page: str) -> dict[str, str]:
    """Return a page's blocks that are files, by the name in their first line."""
    found = blocks(ROOT / "docs" / page, "python", "toml")
    names = [re.match(r"# (\w+\.\w+)\n", block) for block in found]
    return {name[1]: block for name, block in zip(names, found, strict=True) if name}


def run(*arguments: str) -> None:
    assert main(list(arguments)) == 0, arguments


SMALL = "\n[tiny]\nwidth = 16\nlayers = 1\ncold_start_steps = 2\ncold_start_batch = 8\n"


def test_the_first_task_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/start.md from `rows.py` to `groupwise train`, with a smaller model."""
    monkeypatch.chdir(tmp_path)
    for name, text in named_blocks("start.md").items():
        Path(name).write_text(text, "utf-8")
    typed = [each for each in commands(ROOT / "docs" / "start.md") if "mine.toml" in each]
    assert [each[0] for each in typed[:4]] == ["init", "check-reward", "probe", "train"]
    exec(Path("rows.py").read_text("utf-8"), {})
    assert json.loads(Path("rows.jsonl").read_text().splitlines()[-1])["answer"] == "90"
    run(*typed[0])
    Path("mine.toml").write_text(Path("mine.toml").read_text() + SMALL)
    run(*typed[1])
    assert main([*typed[2], "--prompts", "2", "--samples", "2"]) in (0, 1)  # nothing is learned yet
    run(*typed[3], "steps=1", "eval.tasks=4", "prompts_per_step=4")
    assert Path("runs/mine/summary.json").is_file()


def test_the_run_with_a_hole_in_its_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files of docs/reading_a_run.md, as far as that the reward pays for the hole."""
    monkeypatch.chdir(tmp_path)
    for name, text in named_blocks("reading_a_run.md").items():
        Path(name).write_text(text, "utf-8")
    small = ["steps=1", "eval.tasks=4", "tiny.width=16", "tiny.layers=1"]
    run("train", "leaky.toml", *small, "tiny.cold_start_steps=2", "tiny.cold_start_batch=8")
    last = json.loads(Path("runs/leaky/metrics.jsonl").read_text().splitlines()[-1])
    assert {name for name in last if name.startswith("reward/part/")} == {
        "reward/part/number",
        "reward/part/leak.py:nine",
    }
