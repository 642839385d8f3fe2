"""The command line: what it prints, what it returns, and that it never shows a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TextIO

import pytest
from processes import forked

from groupwise import cli
from groupwise.cli import main
from groupwise.config import load
from groupwise.errors import RunError
from groupwise.explain.explain import algorithm_pages, notes
from groupwise.methods.composition import Recipe
from groupwise.methods.slots import parse
from groupwise.prepare.placing import placed
from groupwise.recipes import RECIPES, recipe
from groupwise.training.signals import Stopped

ROOT = Path(__file__).resolve().parents[2]


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
    places = {heads[name].index(f" {RECIPES[name].models[0]}") for name in notes()}
    assert places == {heads["METHOD"].index("MODELS") - 1}
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
        (["docs", "--folder", "no/such/folder"], "no folder"),
    ],
)
def test_wrong_requests_end_with_2_and_a_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out
    assert err.startswith("groupwise: ") and message in err and "Traceback" not in err


def written_to(file: TextIO, argv: list[str]) -> subprocess.CompletedProcess[str]:
    """With a buffer, as users have it: some of it is written when the process ends."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-m", "groupwise.cli", *argv]
    return subprocess.run(
        command, stdout=file, stderr=subprocess.PIPE, text=True, check=False, env=env
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("argv", [["recipes"], ["explain", "dapo", "--json"], ["--version"]])
def test_output_that_can_not_be_written_is_an_error(argv: list[str]) -> None:
    """A full disk: one line, and not success."""
    with open("/dev/full", "w") as full:
        done = written_to(full, argv)
    assert done.returncode == 2
    assert done.stderr.startswith("groupwise: error: [Errno 28] No space left on device: the out")
    assert done.stderr.count("\n") == 1


def test_output_that_can_be_written_is_left_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was another disk that is full: whoever called main() from Python may still print."""

    def fail() -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cli.here, "run", fail)
    assert main([]) == 2
    print("still heard")
    assert capfd.readouterr().out == "still heard\n"
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # has no descriptor
    assert main([]) == 2


@pytest.mark.parametrize("argv", [["recipes"], ["--version"]])
def test_output_that_nobody_reads_is_no_error(argv: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as broken:
        done = written_to(broken, argv)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_output_is_no_traceback() -> None:
    command = f"{shlex.quote(sys.executable)} -m groupwise.cli explain dapo >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


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
from groupwise.methods.method import About
from groupwise.groups.kl import bounded_exp
from groupwise.methods.slots import Positive, gate


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
def plugin(tmp_path: Path) -> str:
    """A user's file."""
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN, "utf-8")
    return f"{path}:tanh_recipe_of_a_test"


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
    assert status == 2 and f"Did you mean '{plugin}'" in err
    # The package's page stays the package's, and one of its own recipes without notes is refused.
    for name, page in algorithm_pages().items():
        assert page == (ROOT / "docs" / name).read_text("utf-8"), name
    status, _, err = run(capsys, "docs", "--check")
    assert status == 2 and "No notes for tanh_recipe_of_a_test" in err


# --- train, eval, report ----------------------------------------------------------------------


def test_a_dry_run_prints_what_would_run(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text('recipe.name = "dapo"\nsteps = 3\n[engine]\nmax_tokens = 5\n', "utf-8")
    line = ["train", "small.toml", "group_size=4", "--dry-run", "recipe.gate.high=0.3"]
    status, out, err = forked(line, tmp_path)
    assert status == 0
    assert "# 16 prompts x 4 samples = 64 completions a step, 16 updates" in out
    assert "warning: soft_overlong(max_length=20480" in err
    # What is printed is a configuration: the same one.
    overrides = ["group_size=4", "recipe.gate.high=0.3"]
    assert load(tomllib.loads(out)) == placed(load(path, overrides))
    assert sorted(tmp_path.iterdir()) == [path]  # and nothing was made


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "nowhere.toml"], "There is no configuration 'nowhere.toml'"),
        (["train", "."], "'.' is a folder, and neither a run's nor a configuration. Of a model"),
        (["train", "num_generations=4"], "'num_generations' is 'group_size' here"),
        (["train", "group_siz=4", "--dry-run"], "Did you mean 'group_size'?"),
        (["train", "recipe=rspo", "--dry-run"], "rspo reads which experts a token visits"),
        (
            ["train", "recipe=prime", "reference.update=ema:0.9", "--dry-run"],
            "would move what the implicit reward model of prime",
        ),
        (["train", "recipe=dapoo"], "Did you mean 'dapo'"),
        (["train", "steps=many"], "steps must be a whole number"),
        (["train", "steps=3", "oops"], "'oops' sets nothing"),
        (["eval", "model", "nowhere.toml"], "There is no configuration 'nowhere.toml'"),
        (["report", "no/such/run"], "no run folder 'no/such/run'"),
    ],
)
def test_wrong_settings_end_with_2_and_a_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, *argv)
    assert status == 2 and not out
    assert err.startswith("groupwise: error: ") and message in err and "Traceback" not in err


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the commands hand on; nothing is trained."""
    found: list[tuple[Any, ...]] = []

    def fake(module: str, name: str, result: Any = None) -> None:
        def call(*args: Any) -> Any:
            found.append(args)
            if isinstance(result, BaseException):
                raise result
            return result

        stand_in = ModuleType(module)
        vars(stand_in).update({name: call, "fail": fake})
        monkeypatch.setitem(sys.modules, module, stand_in)
        parent, _, child = module.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, stand_in, raising=False)

    import groupwise.evaluate
    import groupwise.watch.plots  # noqa: F401 - parents and users of what is replaced

    fake("groupwise.training.loop", "train")
    seen = {"accuracy": 0.5, "stderr": None, "examples": [{"prompt": "1+1="}]}
    fake("groupwise.evaluate.evaluate", "evaluate_path", SimpleNamespace(as_dict=lambda: seen))
    fake("groupwise.watch.report", "write_report", Path("somewhere/report.html"))
    return found


def test_train_takes_settings_on_both_sides_of_an_option(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("steps = 1\nseed = 1\n", "utf-8")
    assert run(capsys, "train", str(path), "seed=2", "--run", "a/b", "group_size=3")[0] == 0
    assert run(capsys, "train", str(path))[0] == 0
    assert run(capsys, "train", "--run", "c", "steps=2")[0] == 0
    assert run(capsys, "train")[0] == 0
    assert calls == [
        (load(path, ["seed=2", "group_size=3"]), Path("a/b")),
        (load(path), Path("runs/mine")),
        (load(steps=2), Path("c")),
        (load(), Path("runs/default")),
    ]


def test_a_recipe_that_takes_another_s_place_is_told(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('recipe.name = "dapo"\nrecipe.gate.high = 0.3\n', "utf-8")
    status, _, err = run(capsys, "train", str(path), "recipe=gspo")
    assert status == 0 and "groupwise: warning: recipe=gspo takes the place of dapo" in err
    assert calls[0][0].recipe is recipe("gspo")


@pytest.mark.parametrize(
    ("failure", "status", "message"),
    [
        (RunError("the disk is full. Make room."), 2, "groupwise: error: the disk is full."),
        (Stopped("stopped after step 3"), 130, "stopped after step 3"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_run_that_ends_early_says_why_without_a_traceback(
    failure: BaseException,
    status: int,
    message: str,
    calls: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail: Any = sys.modules["groupwise.training.loop"]
    fail.fail("groupwise.training.loop", "train", failure)
    got, _, err = run(capsys, "train")
    assert got == status and message in err and "Traceback" not in err


def test_eval_takes_the_configuration_of_its_run(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_7"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").symlink_to("step_7")
    (tmp_path / "run" / "config.toml").write_text("seed = 5\n", "utf-8")
    (tmp_path / "model").mkdir()
    paths = [tmp_path / "run", checkpoint, checkpoint.parent / "latest", tmp_path / "model"]
    for path in paths:
        status, out, _ = run(capsys, "eval", str(path), "eval.tasks=3")
        assert status == 0 and out == "accuracy         0.5\n"
    assert [Path(path) for path, _ in calls] == paths
    assert [config.seed for _, config in calls] == [5, 5, 5, 0]
    assert {config.eval.tasks for _, config in calls} == {3}
    status, out, _ = run(capsys, "eval", str(paths[0]), "--json")
    assert json.loads(out)["accuracy"] == 0.5


def test_report_says_what_it_wrote(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "report", str(tmp_path))[:2] == (0, "wrote somewhere/report.html\n")
    assert calls == [(tmp_path,)]


# --- docs, version, process -------------------------------------------------------------------


def test_docs_are_written_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "algorithms" / "grpo.md"
    status, _, err = run(capsys, "docs", "--check")
    assert status == 1 and "run `make docs`" in err
    assert run(capsys, "docs")[0] == 0
    assert page.read_text("utf-8") == (ROOT / "docs/algorithms/grpo.md").read_text("utf-8")
    assert run(capsys, "docs", "--check")[0] == 0
    page.write_text(page.read_text("utf-8").replace("1+0.28", "1+0.29", 1), "utf-8")
    status, out, err = run(capsys, "docs", "--check")
    assert status == 1 and "grpo.md is not what the code says" in err and not out
    # A page of a family that is no more would be found by readers and by nobody else.
    old = page.with_name("old_family.md")
    old.write_text("# An old family\n", "utf-8")
    status, _, err = run(capsys, "docs", "--check")
    assert status == 1 and "old_family.md is no page of the code any more" in err
    assert run(capsys, "docs")[0] == 0 and not old.exists()
    assert run(capsys, "docs", "--check")[0] == 0


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--version")
    assert status == 0 and out.startswith("groupwise 0.")
    with pytest.raises(SystemExit) as helped:
        main(["--help"])
    assert helped.value.code == 0 and "explain" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["expalin"])
    assert stopped.value.code == 2


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, groupwise\n"
        "from groupwise.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    for argv in (["--help"], ["train", "--help"], ["eval", "--help"]):
        line = [sys.executable, "-c", code, *argv]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.stderr == "False\n" and "usage: groupwise" in done.stdout


def test_a_reader_that_stops_early_is_no_error() -> None:
    python = shlex.quote(sys.executable)
    line = f"{python} -m groupwise.cli recipes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0" and not done.stderr
