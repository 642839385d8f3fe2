"""Every command that loads PyTorch says so while it does: that takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.cli import main

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
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def impatient(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("groupwise.cli._report", impatient)
    assert main(["report", "runs/any"]) == 130
    assert capsys.readouterr().err == "stopped\n"
