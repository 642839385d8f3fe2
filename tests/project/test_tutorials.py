"""Tutorials run as they stand: the page, its script and its notebook say the same, and it is true.

The fast tests run every block of every notebook with small numbers, the slow ones the scripts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "tutorials"
NAMES = ["from_trl", "own_method", "own_task", "stages", "tools"]
every_tutorial = pytest.mark.parametrize("name", NAMES)
# What makes a tutorial small: its cold starts need not teach, nor its runs.
SMALLER = {
    r"^steps = \d+": "steps = 2",
    r"^eval.tasks = \d+": "eval.tasks = 8",
    r"^prompts_per_step = \d+": "prompts_per_step = 4",
    r"^tiny.cold_start_steps = \d+\n": "",
    # But for a chain, whose cold start is a stage:
    r"^tiny.layers = 2(?![\s\S]*\[\[stage\]\])": "tiny.layers = 2\n"
    "tiny.cold_start_steps = 2\ntiny.cold_start_batch = 8",
    r"^(source|from|keep|mix) = .*\n": "",  # two steps leave no right answers to learn from
    r"^until = .*\n": "",
    r"--prompts 16": "--prompts 2",
    r"--seeds 5 --budget tokens=4e4": "--seeds 2 --budget steps=1 --set tiny.cold_start_steps=2 "
    "--set tiny.width=16 --set prompts_per_step=4 --set eval.tasks=8 --jobs 1",
    r"\(1, 30\)": "(1, 2)",
}


def load_builder() -> Any:
    spec = spec_from_file_location("build_tutorials", ROOT / "docs" / "build_tutorials.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


build = load_builder()


def page(name: str) -> list[Any]:
    found: list[Any] = build.parts((FOLDER / f"{name}.md").read_text("utf-8"))
    return found


def cells(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))["cells"]
    return found


def part_of(cell: dict[str, Any]) -> Any:
    """A code cell as the block of the page that it was made from."""
    source = "".join(cell["source"]) + "\n"
    if source.startswith("%%writefile "):
        head, _, text = source.partition("\n")
        return build.Part("python", text, head.removeprefix("%%writefile "))
    if source.startswith("!"):
        return build.Part("bash", source.replace("!groupwise", "groupwise"))
    return build.Part("python", source)


def words(text: str) -> list[str]:
    """What of a text is the same on every machine: not its numbers, bars and signs."""
    return re.findall(r"[A-Za-z_]{2,}", text)


def missing(shown: str, said: str) -> str:
    """The first piece that is shown and was not said in this order; `...` is between pieces."""
    rest = f" {' '.join(words(said))} "
    for piece in shown.split("\n...\n"):
        expected = f" {' '.join(words(piece))} "
        _, found, rest = rest.partition(expected)
        if not found:
            return piece
        rest = f" {rest}"
    return ""


def test_all_tutorials_are_known() -> None:
    assert [path.stem for path in build.pages()] == NAMES


@every_tutorial
def test_script_and_notebook_are_made_of_the_page(name: str) -> None:
    for path, text in build.made(FOLDER / f"{name}.md").items():
        assert path.read_text("utf-8") == text, f"{path.name}: run `make docs`"


@every_tutorial
def test_a_page_is_put_together_again_as_it_was(name: str) -> None:
    assert build.text_of(page(name)) == (FOLDER / f"{name}.md").read_text("utf-8")


@every_tutorial
def test_notebooks_have_the_form_of_version_4_5(name: str) -> None:
    whole = json.loads((FOLDER / f"{name}.ipynb").read_text("utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in whole["cells"]]
    assert len(set(names)) == len(names) and all(re.fullmatch(r"[\w-]{1,64}", n) for n in names)
    for cell in whole["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"id", "metadata", "cell_type", "source"} | code
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        for output in cell.get("outputs", ()):
            assert (output["output_type"], output["name"]) == ("stream", "stdout")


@every_tutorial
def test_pictures_are_there_and_small(name: str) -> None:
    found = build.PICTURE.findall((FOLDER / f"{name}.md").read_text("utf-8"))
    assert found
    for *_, file in found:
        assert 1_000 < (FOLDER / file).stat().st_size < build.LARGEST


@every_tutorial
def test_every_output_is_shown(name: str) -> None:
    pieces = page(name)
    shown = [pieces[output].text for _, output, _ in build.outputs(pieces)]
    assert shown and all(len(text) > 10 for text in shown)
    assert len(shown) == sum(piece.kind == "text" for piece in pieces)


@every_tutorial
def test_notebooks_run_with_small_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And say what the page says, but for numbers, where the words do not depend on the run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(build.WIDTH))
    pieces, session = page(name), build.Session()
    stable = {
        pieces[at].text.strip(): pieces[output].text
        for at, output, shown in build.outputs(pieces)
        if not (shown and shown[3])
    }
    for cell in cells(name):
        if cell["cell_type"] == "markdown":
            continue
        piece = part_of(cell)
        text = piece.text
        for old, new in SMALLER.items():
            text = re.sub(old, new, text, flags=re.MULTILINE)
        said = session.do(build.Part(piece.kind, text, piece.file))
        if piece.text.strip() in stable:
            assert not missing(stable[piece.text.strip()], said), said


@pytest.mark.slow
@every_tutorial
def test_scripts_run_whole_and_learn(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": str(build.WIDTH)}
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pieces = page(name)
    for _, output, shown in build.outputs(pieces):
        if not (shown and shown[3]):
            assert not missing(pieces[output].text, done.stdout)
    # All but the comparison of methods end with what a run, or a chain of them, has brought.
    gains = [
        float(after) - float(before)
        for before, after in re.findall(r"accuracy ([\d.]+) % -> ([\d.]+) %", done.stdout)
    ]
    assert max(gains, default=0) > 15 or name == "own_method", done.stdout
