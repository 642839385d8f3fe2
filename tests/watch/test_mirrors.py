"""Mirrors to the real clients: what they hold is metrics.jsonl, resumed or not, offline."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import tracker_stores as stores
from processes import exit_code
from runs import left_behind, quiet, run, small

from groupwise.common.extras import install
from groupwise.runfiles.files import append_lines, to_line
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.training.loop import steps, train
from groupwise.watch.mirrors import FOLDER, NEEDS, children

INSTALLED = [name for name, packages in NEEDS.items() if all(map(find_spec, packages))]
SETTINGS = {"checkpoint__every_steps": 4, "eval__every": 2, "watch__mirrors": INSTALLED}
KILLED_AFTER, LAST = 5, 7  # the run goes on from step 4: step 5 is done again
# Every address that a Python client looks up or connects to, this machine's apart.
SPY = """
import os, sys
def spy(event, args):
    if event in ("socket.connect", "socket.getaddrinfo"):
        where = args[1] if event == "socket.connect" else args[0]
        host = where[0] if isinstance(where, tuple) else where
        here = ("127.0.0.1", "::1", "localhost", "0.0.0.0", "", None)
        if host not in here and not str(host).startswith("/"):
            open(os.environ["SPY"], "a").write(f"{event} {where}\\n")
sys.addaudithook(spy)
"""


def needs(name: str) -> pytest.MarkDecorator:
    lacking = name not in INSTALLED
    return pytest.mark.skipif(lacking, reason=f"no client of {name}: {install(name)}")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No login, no server: whatever the person who runs the tests has. Returns what was called."""
    home = tmp_path_factory.mktemp("home")
    (home / "sitecustomize.py").write_text(SPY)
    with pytest.MonkeyPatch.context() as patch:
        for name in [x for x in os.environ if x.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("NETRC", str(home / "none"))
        patch.setenv("HF_TOKEN", "hf_nobody")  # trackio asks the hub whose it is, if it may
        patch.setenv("SPY", str(home / "called"))
        paths = [str(home), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setattr(children, "LAST_WORDS", 300.0)  # machines that test are busy
        yield home / "called"


def known(folder: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / FOLDER / f"{name}.json").read_text())
    except FileNotFoundError:
        return {"step": -1}
    return found


@pytest.fixture(scope="module")
def resumed(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed when its trackers had more than its checkpoint, and went on."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        for line in steps(small(steps=500, **SETTINGS), folder, quiet()):
            if line["step"] == KILLED_AFTER:
                time.sleep(1000)  # until it is killed
        os._exit(1)
    deadline = time.monotonic() + 300
    while any(known(folder, name)["step"] < KILLED_AFTER for name in INSTALLED):
        assert time.monotonic() < deadline, "the mirrors do not arrive"
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    before = {name: known(folder, name)["id"] for name in INSTALLED}
    torch.set_num_threads(1)
    train(small(steps=LAST, **SETTINGS), folder, quiet())
    assert {name: known(folder, name)["id"] for name in INSTALLED} == before
    return folder


def written(folder: Path, *, again: bool) -> stores.Curves:
    """The numbers of metrics.jsonl; `again`: with the clock of the step that was done again."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {
            name: value
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step" and counts(line, name, again)
        }
        for line in lines
    }


def counts(line: dict[str, Any], name: str, again: bool) -> bool:
    return again or line["step"] != KILLED_AFTER or not name.startswith(("time/", "memory/"))


def clocks_apart(found: stores.Curves) -> stores.Curves:
    return {
        step: {name: x for name, x in row.items() if counts({"step": step}, name, False)}
        for step, row in found.items()
    }


@needs("tensorboard")
def test_tensorboard_has_the_run_and_what_was_done_again(resumed: Path) -> None:
    found, texts = stores.tensorboard(resumed / FOLDER / "tensorboard")
    as_float32 = {
        step: {name: struct.unpack("f", struct.pack("f", x))[0] for name, x in row.items()}
        for step, row in written(resumed, again=True).items()
    }
    assert found == as_float32
    assert "| `optim.learning_rate` | `0.001` |" in texts["config"]


@needs("wandb")
def test_wandb_has_one_run_in_two_offline_folders(resumed: Path) -> None:
    place = resumed / FOLDER / "wandb"
    assert len(list(place.glob("offline-run-*"))) == 2
    assert not list(place.glob("run-*"))
    found, _, ids, settings = stores.wandb(place)
    assert ids == {known(resumed, "wandb")["id"]}
    assert clocks_apart(found) == written(resumed, again=False)
    assert (settings["optim.learning_rate"], settings["steps"]) == (1e-3, LAST)


@needs("trackio")
def test_trackio_has_one_run_without_doubles(resumed: Path) -> None:
    found, settings, _ = stores.trackio(resumed / FOLDER / "trackio")
    assert clocks_apart(found) == written(resumed, again=False)
    assert settings["optim.learning_rate"] == 1e-3


@needs("mlflow")
def test_mlflow_has_one_run_without_doubles(resumed: Path) -> None:
    found, run = stores.mlflow(resumed / FOLDER / "mlflow")
    assert clocks_apart(found) == written(resumed, again=False)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "killed")
    # A parameter can't change there: what the resumed run changed stands beside it.
    assert (run.data.params["steps"], run.data.tags["changed.steps"]) == ("500", str(LAST))
    assert run.data.params["optim.learning_rate"] == "0.001"


def test_nothing_leaves_the_machine(resumed: Path, clean: Path) -> None:
    assert not clean.exists(), clean.read_text()


def test_the_run_is_the_same_with_and_without_mirrors(resumed: Path, tmp_path: Path) -> None:
    run(tmp_path / "alone", steps=LAST, checkpoint__every_steps=4, eval__every=2)
    assert left_behind(resumed) == left_behind(tmp_path / "alone")


# --- the command, on a folder with all that a folder may hold -----------------------------------

ODD = {
    "reward/part/format(pattern='<a>.*</a>', flags=[\"s\"])": 0.5,
    "reward/part/mine.py:short": 1 / 3,
    "a//b/../c": 1.0,
    "../up": 2.0,
    "länge/日本": 3.0,
    "x" * 300: 4.0,
}


@pytest.fixture(scope="module")
def sent(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By `groupwise mirror`, to all trackers."""
    folder = RunFolder(tmp_path_factory.mktemp("made") / "odd")
    folder.check_writable()
    text = "\n".join(f'"odd({n})" = "{"y" * 7000}"' for n in range(120))
    folder.write_config(f'steps = 2\nmodel.path = "a|b"\n[data.options]\n{text}\n')
    many = {f"many/{n}": n / 7 for n in range(1200)}
    append_lines(folder.metrics, [to_line({"step": n, **ODD, **many}) for n in (1, 2)])
    seen = {"rule": "entropy_collapse", "grave": True}
    folder.add_events([Event(2, "health", "it falls | <b>fast</b>", seen)])
    command = [sys.executable, "-m", "groupwise.cli", "mirror", str(folder.path), "--to"]
    sending = [subprocess.Popen([*command, name]) for name in INSTALLED]
    assert [each.wait(300) for each in sending] == [0] * len(INSTALLED)
    return folder.path


def odd_and_many(row: dict[str, float]) -> list[float]:
    return [row.get(name, row.get(f"many/{name}", -1.0)) for name in (*ODD, 0, 1199)]


VALUES = [*ODD.values(), 0.0, 1199 / 7]


@needs("tensorboard")
def test_tensorboard_takes_all_names_and_events(sent: Path) -> None:
    found, texts = stores.tensorboard(sent / FOLDER / "tensorboard")
    assert odd_and_many(found[2]) == pytest.approx(VALUES, rel=1e-6)
    assert texts["events/entropy_collapse"] == "it falls | <b>fast</b>"


@needs("wandb")
def test_wandb_takes_all_names_and_events(sent: Path) -> None:
    found, alerts, _, _ = stores.wandb(sent / FOLDER / "wandb")
    assert odd_and_many(found[2]) == VALUES
    assert alerts == ["entropy_collapse"]


@needs("trackio")
def test_trackio_takes_all_names_and_events(sent: Path) -> None:
    found, settings, alerts = stores.trackio(sent / FOLDER / "trackio")
    assert odd_and_many(found[2]) == VALUES
    assert alerts == ["entropy_collapse"] and settings["model.path"] == "a|b"


@needs("mlflow")
def test_mlflow_takes_all_names_and_events(sent: Path) -> None:
    found, run = stores.mlflow(sent / FOLDER / "mlflow")
    assert found.keys() == {1, 2} and len(found[2]) == len(ODD) + 1200
    assert found[2]["reward/part/mine.py:short"] == 1 / 3
    assert sorted(found[2].values()) == sorted([*ODD.values(), *(n / 7 for n in range(1200))])
    assert run.data.tags["event.entropy_collapse"] == "step 2: it falls | <b>fast</b>"
    assert len(run.data.params) == 122 and run.info.status == "KILLED"
