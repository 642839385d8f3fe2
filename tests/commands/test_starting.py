"""Every command that loads PyTorch says so while it does: that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groupwise.cli import main
from groupwise.commands import plan, shared
from groupwise.common import progress
from groupwise.common.progress import Watcher
from groupwise.config import load

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {
    "train": ["train", "configs/tiny.toml"],
    "probe": ["probe", "configs/tiny.toml"],
    "compare": ["compare", "grpo", "dapo", "--budget", "steps=2"],
    "replay": ["replay", "runs/none", "--recipe", "gspo"],
    "verify": ["replay", "runs/none", "--verify"],
    "eval": ["eval", "configs/tiny.toml"],
    "export": ["export", "runs/none", "runs/other"],
    "serve": ["serve", "runs/none"],
    "filter": ["filter", "none.jsonl", "--out", "other.jsonl"],
    "plan": ["plan", "configs/tiny.toml"],
    "check-reward": ["check-reward", "configs/tiny.toml"],
    "grade": ["grade", "--grader", "math"],
}
# PyTorch is not loaded: who asks for it is told to stop, and what is under way is noted.
CODE = """
import contextlib, json, os, sys
from groupwise.common import progress

found = []

class Asked:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            found.append([phase.name for phase in progress._WATCHER.get()._phases])
            raise KeyboardInterrupt

sys.meta_path.insert(0, Asked())
from groupwise.cli import main

told = {}
for name, command in json.loads(sys.argv[1]).items():
    found.clear()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(open(os.devnull, "w")):
        main(command)
    told[name] = list(found)
print(json.dumps(told))
"""


def test_pytorch_is_loaded_within_a_phase() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(COMMANDS)],
        cwd=ROOT, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told == {name: [["starting PyTorch"]] for name in COMMANDS}


def test_a_processor_is_measured_within_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its seconds on a busy machine are those of `plan` and `probe`."""
    shown: list[str] = []
    watcher = Watcher(shown.append, live=False)
    monkeypatch.setattr(plan, "_best", lambda work: shown.append(watcher.doing()) or 1.0)
    with watcher.watching():
        plan.here(load(ROOT / "configs" / "tiny.toml", ["model.dtype=float32"]))
    assert [line.partition(",")[0] for line in shown] == ["measuring the processor"] * 2


def test_ctrl_c_while_python_takes_itself_down_is_no_traceback() -> None:
    """Behind the command's last word, with its status; PyTorch takes seconds to be taken down."""
    code = (
        "import os, signal, sys; from groupwise import cli; cli.main = lambda: 3\n"
        "import atexit; atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.command())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_a_command_ends_without_taking_modules_apart() -> None:
    """What was registered for the end runs, with what it says; then the process is gone."""
    code = (
        "import atexit, sys; from groupwise import cli\n"
        "class Slow:\n"
        "    def __del__(self): print('taken apart')\n"
        "kept = Slow()\n"
        "def work(): atexit.register(print, 'tidied up'); print('said'); return 3\n"
        "cli.main = work\n"
        "sys.exit(cli.command())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (3, "said\ntidied up\n")


def test_a_command_that_raises_is_left_to_python() -> None:
    code = "from groupwise import cli; cli.main = lambda: 1 / 0; cli.command()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1 and "ZeroDivisionError" in ended.stderr


def test_ctrl_c_is_answered_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def impatient(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.commands.report.is_pipeline", impatient)
    assert main(["report", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "stopped\n"


class Watched:
    """A finder that notes which phases are under way when a module is first asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.phases: list[str] = []

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == self.name:
            self.phases += [phase.name for phase in progress._WATCHER.get()._phases]
            raise KeyboardInterrupt


def test_what_compare_loads_behind_pytorch_is_in_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of the processor, three seconds of silence on a busy machine."""
    watched = Watched("groupwise.compare.arms")
    monkeypatch.delitem(sys.modules, watched.name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [watched, *sys.meta_path])
    assert main(["compare", "grpo", "dapo", "--budget", "steps=2"]) == 130
    assert watched.phases == ["checking the arms"]


@pytest.mark.parametrize("command", ["probe", "eval"])
@pytest.mark.parametrize("module", ["prepare.rollouts", "engine.native.engine", "stages.checks"])
def test_what_loads_and_asks_a_model_is_in_a_phase(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    """`probe` was silent for four seconds on a busy machine, behind PyTorch and before its data."""
    watched = Watched(f"groupwise.{module}")
    monkeypatch.delitem(sys.modules, watched.name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [watched, *sys.meta_path])
    assert main([command, str(ROOT / "configs" / "tiny.toml")]) == 130
    assert watched.phases == ["starting PyTorch"]


def test_of_several_ranks_the_first_one_says_what_is_under_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The screen is its own: each line would come as often as there are ranks."""
    monkeypatch.setattr(progress, "FIRST_AFTER", 0.0)
    said = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with shared.progress(), progress.phase("something"):
            time.sleep(3 * progress.LOOK)
        said.append("something" in capsys.readouterr().err)
    assert said == [True, False]
