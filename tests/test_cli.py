"""The command line: what it prints, what it returns, and that it never shows a traceback."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from groupwise.cli import main
from groupwise.composition import RECIPES, Recipe, recipe
from groupwise.slots import REGISTRY, parse
from groupwise.tell.explain import markdown, notes

ROOT = Path(__file__).resolve().parents[1]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = main(argv)
    out, err = capsys.readouterr()
    return status, out, err


class Terminal(io.StringIO):
    """A keyboard with these lines typed."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))


# --- recipes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_table_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = run(capsys, "recipes")
    assert status == 0
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns, max(lines, key=len)
    heads = {line.split()[0]: line for line in lines if line and not line.startswith(" ")}
    assert set(notes()) <= set(heads)
    # One column for papers, one for models: the table is aligned.
    assert {heads[name].index(" policy") for name in notes()} == {
        heads["METHOD"].index("MODELS") - 1
    }
    for word in ("slots", "fixes", "breaks", "reach for", "clip(high=0.28)", "2503.14476"):
        assert word in out


def test_json_reads_back_as_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "recipes", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0 and not err and set(notes()) <= set(rows)
    assert Recipe.from_text("dapo", rows["dapo"]["slots"]) == recipe("dapo")
    assert parse("preference", rows["dpo"]["slots"]["preference"]) == (recipe("dpo").preference,)


@pytest.mark.usefixtures("pipe")
def test_choose_without_a_terminal_takes_defaults_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = run(
        capsys, "recipes", "--choose", "--answer", "moe=yes", "--answer", "length=long"
    )
    assert status == 0
    assert out.index("1. gspo") < out.index("2. ")
    assert "defaults hold" in err and "group=8+" in err and "moe" not in err
    assert "moe=yes," in out and "group=8+ (assumed)" in out


@pytest.mark.usefixtures("pipe")
def test_choose_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys,
        "recipes",
        "--choose",
        "--json",
        "--answer",
        "verifiable=no",
        "--answer",
        "data=pairs",
    )
    data = json.loads(out)
    assert status == 0 and data["assumed"] == []
    assert data["answers"] == {"verifiable": "no", "data": "pairs"}
    assert data["recommendations"][0]["recipe"] == "dpo"


def test_choose_asks_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Enter: verifiable; `perhaps` is asked again; prefixes will do; the rest by end of input.
    monkeypatch.setattr(sys, "stdin", Terminal("\nperhaps\nn\nNo\nlong\ny\n"))
    status, out, err = run(capsys, "recipes", "--choose", "--json")
    data = json.loads(out)  # questions went to stderr
    assert status == 0
    assert err.count("reward per step?") == 2 and "Please answer one of: no, yes." in err
    assert data["answers"]["length"] == "long" and data["answers"]["moe"] == "yes"
    assert data["assumed"] == ["group", "updates", "engine", "goal"]
    assert data["recommendations"][0]["recipe"] == "gspo"


def test_choose_does_not_ask_what_was_answered_or_does_not_apply(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("answers\n"))
    status, out, err = run(capsys, "recipes", "--choose", "--answer", "verifiable=no")
    assert status == 0 and "1. spin" in out
    assert err.count("?") == 1 and "What is there instead?" in err


@pytest.mark.usefixtures("pipe")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["recipes", "--choose", "--answer", "mo=yes"], "Did you mean 'moe'"),
        (["recipes", "--choose", "--answer", "moe=maybe"], "no, yes"),
        (["recipes", "--choose", "--answer", "moe"], "KEY=VALUE"),
        (["recipes", "--choose", "--answer", "moe=no", "--answer", "moe=yes"], "twice"),
        (["recipes", "--answer", "moe=yes"], "--choose"),
        (["explain", "dapoo"], "Did you mean 'dapo'"),
        (["explain", "grpo", "dapoo"], "Did you mean 'dapo'"),
        (["explain", "grpo@ver"], "grpo@verl"),
        (["explain", "grpo", "dapo", "gspo"], "one recipe or two"),
        (["explain", "nowhere.py:mine"], "no file 'nowhere.py'"),
        (["docs", "--file", "no/such/folder/page.md"], "no folder"),
    ],
)
def test_wrong_requests_end_with_2_and_a_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out
    assert err.startswith("groupwise: ") and message in err and "Traceback" not in err


# --- explain ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(notes()))
def test_every_recipe_is_explained_within_the_width(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    status, out, err = run(capsys, "explain", name)
    assert status == 0 and not err
    assert out.startswith(f"{name}: ") and "L = " in out and "pitfalls" in out
    joined = " ".join(out.split())
    for slot in recipe(name).slots():
        assert " ".join(str(slot).split()) in joined
        assert " ".join(slot.equation.split()) in joined
    assert max(map(len, out.splitlines())) <= 100


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "olmo3", "--json")
    data = json.loads(out)
    assert status == 0 and Recipe.from_text("olmo3", data["slots"]) == recipe("olmo3")
    assert data["needs"] == [
        {"name": "sampler_logp_NT", "meaning": "the sampler's log-probabilities"}
    ]


def test_two_names_show_only_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", "grpo", "dapo")
    lines = out.splitlines()
    assert status == 0
    for kind in ("gate", "aggregation", "filter", "penalty", "shaping", "schedule"):
        assert kind in lines
    assert "ratio" not in lines and "advantage" not in lines
    assert "  clip.high: 0.2 → 0.28" in lines
    data = json.loads(run(capsys, "explain", "grpo", "dapo", "--json")[1])
    assert set(data["slots"]) == {"gate", "aggregation", "filter", "penalty", "shaping", "schedule"}


def test_equal_recipes_are_said_to_be_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "explain", "grpo", "grpo")[1] == "grpo and grpo do not differ.\n"


PLUGIN = """
import torch
from groupwise import Recipe, register
from groupwise.composition import About
from groupwise.losses.kl import bounded_exp
from groupwise.slots import Positive, gate


@gate(equation="S = {sharpness}·tanh(r/{sharpness})·A", fixes="smooth above", breaks="untested")
def tanh_gate_of_a_test(log_ratio_NT, advantage_NT, batch, *, sharpness: Positive = 2.0):
    ratio_NT = bounded_exp(log_ratio_NT)
    objective_NT = sharpness * torch.tanh(ratio_NT / sharpness) * advantage_NT
    return objective_NT, torch.zeros_like(batch.mask_NT, dtype=torch.int8)


register(Recipe(
    name="tanh_recipe_of_a_test",
    advantage="group_mean()",
    ratio="sequence_geomean()",
    gate=tanh_gate_of_a_test(sharpness=3.5),
    aggregation="token_mean_batch()",
    schedule="joint()",
    about=About("Tanh", reach_for="a test"),
))
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    """A user's file; what it registers is taken back, so that other tests see the package alone."""
    recipes, gates = dict(RECIPES), dict(REGISTRY["gate"])
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN, "utf-8")
    yield f"{path}:tanh_recipe_of_a_test"
    RECIPES.clear()
    RECIPES.update(recipes)
    REGISTRY["gate"].clear()
    REGISTRY["gate"].update(gates)


def test_a_file_of_ones_own_is_explained_and_compared(
    plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "explain", plugin)
    assert status == 0 and not err, err
    assert "S = 3.5·tanh(r/3.5)·A" in out and "smooth above" in out and "reach for   a test" in out
    # Its doubts are part of the page instead of a warning on the side.
    assert "doubts about this combination" in out and "an answer weighs by its length" in out
    data: dict[str, Any] = json.loads(run(capsys, "explain", "dr_grpo", plugin, "--json")[1])
    assert set(data["slots"]) == {"ratio", "gate", "aggregation"}
    assert data["slots"]["gate"]["b"] == "tanh_gate_of_a_test(sharpness=3.5)"
    status, _, err = run(capsys, "explain", plugin.replace("tanh_recipe", "tan_recipe"))
    assert status == 2 and "Did you mean 'tanh_recipe_of_a_test'" in err
    # The package's page stays the package's, and one of its own recipes without notes is refused.
    assert markdown() == (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    status, _, err = run(capsys, "docs", "--check")
    assert status == 2 and "No notes for tanh_recipe_of_a_test" in err


# --- docs, version, process -------------------------------------------------------------------


def test_docs_are_written_and_checked(tmp_path: Path) -> None:
    # A process of its own: recipes that other tests registered have no notes.
    def command(*argv: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "groupwise.cli", "docs", *argv]
        return subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)

    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "algorithms.md"
    missing = command("--check")
    assert missing.returncode == 1 and "run `make docs`" in missing.stderr
    assert command().returncode == 0
    assert page.read_text("utf-8") == (ROOT / "docs" / "algorithms.md").read_text("utf-8")
    assert command("--check").returncode == 0
    page.write_text(page.read_text("utf-8").replace("1+0.28", "1+0.29", 1), "utf-8")
    stale = command("--check")
    assert stale.returncode == 1 and "run `make docs`" in stale.stderr and not stale.stdout


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.startswith("groupwise 0.")
    status, out, _ = run(capsys)
    assert status == 2 and "explain" in out
    with pytest.raises(SystemExit) as stopped:
        main(["expalin"])
    assert stopped.value.code == 2


def test_a_reader_that_stops_early_is_no_error() -> None:
    line = f"{sys.executable} -m groupwise.cli recipes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and not done.stderr
