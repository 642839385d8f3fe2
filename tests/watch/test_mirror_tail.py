"""Mirrors whose clients fail in every way, and the reading of a run folder as it grows."""

from __future__ import annotations

import fcntl
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import gone
from runs import left_behind, run, small

from groupwise.cli import main
from groupwise.config.fields import Mirror
from groupwise.errors import ConfigError, RunError
from groupwise.runfiles.files import append_lines, to_line
from groupwise.runfiles.folder import Event, RunFolder
from groupwise.training.loop import train
from groupwise.watch import mirrors
from groupwise.watch.display import Display
from groupwise.watch.mirrors import FOLDER, children, tail
from groupwise.watch.mirrors.settings import HIDDEN, hide, settings_of
from groupwise.watch.mirrors.tracker import Note, TrackedRun

# --- clients that fail ------------------------------------------------------------------------

HANGS = "import time\nwhile True: time.sleep(1)\n"
# A stand-in for wandb whose `log` does something else.
WANDB = """
import atexit, os, signal, subprocess, sys, time
class Run:
    config = {{}}
    def log(self, *args, **more): {log}
    def alert(self, *args, **more): pass
    def finish(self, **more): pass
class Settings(dict): pass
def login(**more): return False
def init(**more): return Run()
"""
DEAF = """
        for deaf in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(deaf, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
        while True: time.sleep(1)
"""
TRACKIO = """
import threading, time
class Run:
    _next_step = 0
    def log(self, *args, **more): pass
    def finish(self): threading.Thread(target=time.sleep, args=[1000]).start()
class AlertLevel: WARN = ERROR = None
def init(**more): return Run()
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The run without mirrors."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder)
    return left_behind(folder)


def install(clients: Mapping[str, str], place: Path, patch: pytest.MonkeyPatch) -> None:
    place.mkdir()
    for name, text in clients.items():
        (place / f"{name}.py").write_text(text)
    (place / "sqlalchemy.py").write_text("")
    patch.syspath_prepend(str(place))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    patch.setenv("PIDS", str(place / "pids"))


def test_no_client_touches_the_run(
    alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {
        "tensorboard": HANGS,
        "wandb": WANDB.format(log=DEAF),
        "trackio": "raise RuntimeError('not today')\n",
        "mlflow": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    }
    install(faults, tmp_path / "clients", monkeypatch)
    monkeypatch.setattr(children, "LAST_WORDS", 6.0)
    torch.set_num_threads(1)
    said, folder = io.StringIO(), tmp_path / "run"
    train(small(watch__mirrors=list(faults)), folder, Display(said, live=False))
    assert left_behind(folder) == alone
    text = " ".join(said.getvalue().split())
    assert "the mirror to tensorboard was ended before it was done" in text
    assert "the mirror to wandb was ended before it was done" in text
    assert "the mirror to trackio has stopped: RuntimeError: not today" in text
    assert "the mirror to mlflow has stopped: it said nothing" in text
    assert f"`groupwise mirror {folder} --to mlflow` sends what is missing" in text
    pids = (tmp_path / "clients" / "pids").read_text().split()
    assert gone([int(pid) for pid in pids]), "a process of a client is left"


def test_every_way_to_give_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {
        "tensorboard": "import os\nos._exit(0)\n",  # as if all were well
        "wandb": WANDB.format(log="raise ValueError('no such run')"),
        "trackio": TRACKIO,  # hangs at exit
        "mlflow": "import os\nos._exit(7)\n",
    }
    install(faults, tmp_path / "clients", monkeypatch)
    monkeypatch.setattr(children, "LAST_WORDS", 4.0)
    said, folder = io.StringIO(), RunFolder(tmp_path)
    group = children.Mirrors(tmp_path, list(faults), Display(said, live=False))
    with group, folder.locked():
        write(folder, 0, 1)
        group.start()
        until(lambda: told_of(group, said) == 3)
    text = " ".join(said.getvalue().split())
    assert "the mirror to wandb has stopped: ValueError: no such run" in text
    assert "the mirror to tensorboard has stopped: it said nothing" in text
    assert "the mirror to mlflow has stopped: it said nothing" in text
    assert "the mirror to trackio was ended before it was done" in text


def told_of(group: children.Mirrors, said: io.StringIO) -> int:
    group.look()
    return said.getvalue().count("the mirror to")


def test_a_mirror_that_ends_well_without_having_sent_all_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"wandb": "import os\nos._exit(0)\n"}, tmp_path / "clients", monkeypatch)
    said, folder = io.StringIO(), RunFolder(tmp_path)
    with children.Mirrors(tmp_path, ["wandb"], Display(said, live=False)) as group:
        write(folder, 0, 1)
        group.start()
    assert "the mirror to wandb has stopped" in said.getvalue()


def test_the_end_waits_for_all_mirrors_together_no_longer_than_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(dict.fromkeys(mirrors.NEEDS, HANGS), tmp_path / "clients", monkeypatch)
    monkeypatch.setattr(children, "LAST_WORDS", 2.0)
    folder = RunFolder(tmp_path)
    folder.metrics.touch()
    given: list[float] = []
    wait = subprocess.Popen.wait

    def watched(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is not None:
            given.append(timeout)
        return wait(child, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", watched)
    group = children.Mirrors(tmp_path, list(mirrors.NEEDS), Display(io.StringIO(), live=False))
    with group:
        group.start()
        begun = time.monotonic()
    assert time.monotonic() - begun >= 2.0
    # All of them have what one has: when the first has used it up, nothing is left to the others.
    assert len(given) == len(mirrors.NEEDS) and sum(given) <= 2.0


def test_impatience_ends_the_mirrors_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"wandb": HANGS}, tmp_path / "clients", monkeypatch)
    RunFolder(tmp_path).metrics.touch()
    group = children.Mirrors(tmp_path, ["wandb"], Display(io.StringIO(), live=False))
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    begun = time.monotonic()
    # Where a shell started the tests in the background, they ignore Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), group:
            group.start()
            timer.start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 20.0  # of the 30 that they have


def test_a_mirror_that_hangs_after_its_run_was_killed_does_not_stay_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to end it but the system."""
    install({"wandb": HANGS}, tmp_path / "clients", monkeypatch)
    RunFolder(tmp_path).metrics.touch()
    program = (
        "import sys; from groupwise.watch.mirrors import tail; tail.PATIENCE = 1; "
        f"from groupwise.cli import main; main(['mirror', {str(tmp_path)!r}, '--to', 'wandb'])"
    )
    done = subprocess.run([sys.executable, "-c", program])
    assert done.returncode == -signal.SIGALRM


def test_files_that_can_not_be_read_do_not_spoil_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install({"wandb": WANDB.format(log="pass")}, tmp_path / "clients", monkeypatch)
    said, folder = io.StringIO(), RunFolder(tmp_path)
    with children.Mirrors(tmp_path, ["wandb"], Display(said, live=False)) as group:
        folder.metrics.write_text('{"step"\n{"step": 1}\n')
        group.start()
    assert "the mirror to wandb has stopped: groupwise: error: Line 1 of" in said.getvalue()


def test_a_mirror_does_not_load_pytorch() -> None:
    """Which would take memory and seconds from the run."""
    program = (
        "import sys, groupwise.cli, groupwise.commands.mirror, groupwise.watch.mirrors.tail\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# --- before anything is made ------------------------------------------------------------------


def test_a_client_that_is_not_installed_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mirrors.NEEDS, "wandb", ("no_such_package", "json", "another_one"))
    with pytest.raises(ConfigError, match=r"no_such_package and another_one.*pip install .*wandb"):
        run(tmp_path / "run", watch__mirrors=["wandb"])
    assert not (tmp_path / "run").exists()


def test_a_folder_that_a_client_left_behind_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "left_behind_by_wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(mirrors.NEEDS, "wandb", ("left_behind_by_wandb",))
    with pytest.raises(ConfigError, match=r"pip install .*wandb"):
        mirrors.check(["wandb"])


def test_unknown_trackers_are_refused_with_those_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"'tensorbord' is unknown.*'tensorboard', 'wandb'"):
        small(watch__mirrors=["tensorbord"])
    assert main(["mirror", str(tmp_path), "--to", "tensorbord"]) == 2
    assert "Did you mean 'tensorboard'?" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mirrors.NEEDS, "wandb", ("json",))
    assert main(["mirror", str(tmp_path / "none"), "--to", "wandb"]) == 2
    assert "There is no run in" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_extras_and_page_know_every_tracker() -> None:
    root = Path(__file__).parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    page = (root / "docs" / "mirrors.md").read_text()
    for name, packages in mirrors.NEEDS.items():
        wanted = " ".join(extras["optional-dependencies"][name])
        assert all(package in wanted for package in packages)
        assert f"| `{name}` |" in page
    assert f"all mirrors together get {children.LAST_WORDS:.0f} seconds" in page
    assert typing.get_args(Mirror) == tuple(mirrors.NEEDS)


# --- the folder as it grows -------------------------------------------------------------------


class Listener:
    """A tracker that remembers what it was told. One that takes back starts over when told so."""

    def __init__(self, takes_back: bool = False, reached: int | None = None) -> None:
        self.takes_back, self._reached = takes_back, reached
        self.told: list[Any] = []
        self.finished: bool | None = None
        self.about: TrackedRun | None = None

    def reached(self) -> int | None:
        return self._reached

    def take_back(self) -> None:
        assert self.takes_back
        self.told.clear()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self.told.append((step, dict(numbers)))

    def note(self, note: Note) -> None:
        self.told.append(note)

    def flush(self) -> None:
        pass

    def close(self, finished: bool) -> None:
        self.finished = finished

    @property
    def steps(self) -> list[int]:
        return [each[0] for each in self.told if not isinstance(each, Note)]


Listen = Callable[[Listener], Listener]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.check_writable()
    made.write_config("steps = 3\n")
    return made


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listen]:
    """Be the tracker of the next mirrors."""
    monkeypatch.setattr(tail, "POLL", 0.01)

    def put(listener: Listener) -> Listener:
        def opened(name: str, about: TrackedRun) -> Listener:
            listener.about = about
            return listener

        monkeypatch.setattr(tail, "open_tracker", opened)
        return listener

    yield put


def write(folder: RunFolder, *steps: int, **metrics: Any) -> None:
    append_lines(
        folder.metrics, [to_line({"step": step, "a": step / 7, **metrics}) for step in steps]
    )


def test_numbers_are_told_to_the_bit_and_nothing_else_is(folder: RunFolder, listen: Listen) -> None:
    write(folder, 1, name="text", nan=float("nan"), infinite=-float("inf"), none=None, whole=3)
    with open(folder.metrics, "a") as file:
        file.write('{"step": 2, "a": NaN, "b": Infinity, "c": 0.1}\n')  # not of ours
    heard = listen(Listener())
    assert tail.mirror(folder, "wandb") == 2
    assert heard.told == [(1, {"a": 1 / 7, "whole": 3}), (2, {"c": 0.1})]


def test_a_half_written_last_line_waits_until_it_is_whole(
    folder: RunFolder, listen: Listen
) -> None:
    write(folder, 1)
    with open(folder.metrics, "ab") as file:
        file.write(b'{"step": 2, "a": 0.')
    heard = listen(Listener())
    assert tail.mirror(folder, "wandb") == 1
    with open(folder.metrics, "ab") as file:
        file.write(b"25}\n")
    assert tail.mirror(folder, "wandb") == 2
    assert heard.told == [(1, {"a": 1 / 7}), (2, {"a": 0.25})]


def test_it_goes_on_as_long_as_the_run_is_written(folder: RunFolder, listen: Listen) -> None:
    heard = listen(Listener())
    thread = threading.Thread(target=tail.mirror, args=(folder, "wandb"))
    with folder.locked():
        thread.start()
        for step in range(5):
            write(folder, step)
            until(lambda step=step: heard.steps == list(range(step + 1)))
        assert thread.is_alive() and heard.finished is None
        write(folder, 5)
        folder.summary.write_text('{"steps": 5}')
    thread.join(60)
    assert not thread.is_alive()
    assert heard.steps == list(range(6)) and heard.finished


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_does_not_go_on_for_the_next_writer(folder: RunFolder, listen: Listen) -> None:
    """Which has a mirror of its own, that waits for this one to end."""
    heard = listen(Listener())
    thread = threading.Thread(target=tail.mirror, args=(folder, "wandb"))
    with folder.locked():
        write(folder, 1)
        thread.start()
        until(lambda: heard.steps == [1])
        (folder.path / ".lock").write_text('{"pid": 1, "host": "another"}')
        thread.join(60)
        assert not thread.is_alive() and heard.finished is False


def test_asking_for_the_writer_never_keeps_one_out(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.writer() is None  # nobody has ever written
    with folder.locked():
        assert folder.writer() == f"Process {os.getpid()}"
    assert folder.writer() is None
    asking = os.open(folder.path / ".lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    pauses = iter([None, None, asking])  # a long time to ask
    monkeypatch.setattr(
        time, "sleep", lambda _: None if (done := next(pauses)) is None else os.close(done)
    )
    with folder.locked():
        assert folder.writer() == f"Process {os.getpid()}"


def test_a_long_run_is_sent_in_parts_each_with_its_own_patience(
    folder: RunFolder, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "AT_ONCE", 2)
    heard = listen(Listener())
    clocks: list[tuple[int, int]] = []  # seconds that were set, and steps sent by then
    monkeypatch.setattr(
        tail.signal, "alarm", lambda seconds: clocks.append((seconds, len(heard.steps)))
    )
    write(folder, *range(11))
    assert tail.mirror(folder, "wandb") == 10
    assert heard.steps == list(range(11))
    # Set for every part and taken off behind it, and no part has more than two steps.
    begun, done = clocks[::2], clocks[1::2]
    assert {seconds for seconds, _ in begun} == {tail.PATIENCE}
    assert {seconds for seconds, _ in done} == {0}
    sent = [after - before for (_, before), (_, after) in zip(begun, done, strict=True)]
    assert max(sent) == 2 and sum(sent) == 11


def test_a_tracker_that_keeps_everything_gets_each_step_once(
    folder: RunFolder, listen: Listen
) -> None:
    write(folder, 0, 1, 2, 3)
    first = listen(Listener())
    tail.mirror(folder, "wandb")
    folder.rewind(1)  # resumed from a checkpoint
    write(folder, 2, 3, 4, again=True)
    second = listen(Listener())
    assert tail.mirror(folder, "wandb") == 4
    assert (first.steps, second.steps) == ([0, 1, 2, 3], [4])
    assert first.about and second.about and first.about.id == second.about.id


def test_a_tracker_that_takes_back_has_what_the_folder_has(
    folder: RunFolder, listen: Listen
) -> None:
    write(folder, 0, 1, 2, 3)
    folder.add_events([Event(1, "health", "early"), Event(3, "health", "late")])
    heard = listen(Listener(takes_back=True))
    thread = threading.Thread(target=tail.mirror, args=(folder, "tensorboard"))
    with folder.locked():
        thread.start()
        until(lambda: heard.steps == [0, 1, 2, 3])
        folder.rewind(1)
        write(folder, 2, again=1)
        until(lambda: heard.steps == [0, 1, 2])
    thread.join(60)
    numbers = [each for each in heard.told if not isinstance(each, Note)]
    assert numbers[-1] == (2, {"a": 2 / 7, "again": 1})
    assert [note.text for note in heard.told if isinstance(note, Note)] == ["early"]


def test_an_event_that_a_rewind_drops_after_its_metrics_is_not_told(
    folder: RunFolder, listen: Listen
) -> None:
    """A rewind drops metrics first; a look may come in between."""
    write(folder, 0, 1)
    folder.add_events([Event(1, "health", "early"), Event(3, "health", "late")])
    heard = listen(Listener())
    with folder.locked():
        thread = threading.Thread(target=tail.mirror, args=(folder, "wandb"))
        thread.start()
        until(lambda: heard.steps == [0, 1])
        folder.rewind(1)
        time.sleep(0.1)  # some looks
    thread.join(60)
    assert [note.text for note in heard.told if isinstance(note, Note)] == ["early"]


def test_what_the_store_has_counts_more_than_what_was_sent(
    folder: RunFolder, listen: Listen
) -> None:
    """A client that writes behind one's back, and was killed before it had."""
    write(folder, 0, 1, 2, 3)
    listen(Listener())
    tail.mirror(folder, "trackio")
    write(folder, 4)
    heard = listen(Listener(reached=1))
    tail.mirror(folder, "trackio")
    assert heard.steps == [2, 3, 4]


def test_events_stand_before_the_numbers_of_their_step_and_are_told_once(
    folder: RunFolder, listen: Listen
) -> None:
    write(folder, 1, 2)
    folder.add_events(
        [
            Event(1, "memory", "smaller micro-batches"),
            Event(2, "health", "entropy falls", {"rule": "entropy_collapse", "grave": True}),
            Event(3, "health", "of a step that was never finished", {"rule": "grader_errors"}),
        ]
    )
    heard = listen(Listener())
    tail.mirror(folder, "wandb")
    write(folder, 3)
    again = listen(Listener())
    tail.mirror(folder, "wandb")
    assert [each.title if isinstance(each, Note) else each[0] for each in heard.told] == [
        "memory", 1, "entropy_collapse", 2, "grader_errors",
    ]  # fmt: skip
    assert [note.grave for note in heard.told if isinstance(note, Note)] == [False, True, False]
    assert again.steps == [3]


def test_a_run_that_stopped_is_not_finished(folder: RunFolder, listen: Listen) -> None:
    folder.summary.write_text('{"steps": 2}')  # which it once was
    write(folder, 1, 2)
    heard = listen(Listener())
    tail.mirror(folder, "wandb")
    assert heard.finished is True
    write(folder, 3)
    tail.mirror(folder, "wandb")
    assert heard.finished is False


def test_a_run_that_starts_over_is_another_one(folder: RunFolder, listen: Listen) -> None:
    write(folder, 0, 1)
    first = listen(Listener())
    tail.mirror(folder, "wandb")
    mirrors.forget(folder.path)
    second = listen(Listener())
    tail.mirror(folder, "wandb")
    assert second.steps == [0, 1]
    assert first.about and second.about and first.about.id != second.about.id


def test_runs_of_a_comparison_are_told_apart(tmp_path: Path, listen: Listen) -> None:
    """Its folders are all called seed_0; a run that was begun under that name keeps it."""
    place = tmp_path / "compare" / "rates"
    names = []
    for arm in ("dapo", "grpo"):
        made = RunFolder(place / "runs" / arm / "seed_0")
        made.check_writable()
        (place / "plan.json").write_text("{}")
        write(made, 1)
        heard = listen(Listener())
        tail.mirror(made, "wandb")
        names += [heard.about and heard.about.name]
        memory = made.path / FOLDER / "wandb.json"
        memory.write_text(re.sub('"name": "[^"]*", ', "", memory.read_text()))  # of before
        tail.mirror(made, "wandb")
        assert heard.about and heard.about.name == "seed_0"
    assert names == ["rates.dapo.seed_0", "rates.grpo.seed_0"]


def test_a_damaged_line_ends_the_mirror_in_words(folder: RunFolder, listen: Listen) -> None:
    write(folder, 1)
    append_lines(folder.metrics, ["?", '{"step": 2}'])
    listen(Listener())
    with pytest.raises(RunError, match="Line 2 of"):
        tail.mirror(folder, "wandb")


def test_one_mirror_at_a_time(
    folder: RunFolder, listen: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "TAKEOVER", 0.2)
    heard = listen(Listener())
    thread = threading.Thread(target=tail.mirror, args=(folder, "wandb"))
    with folder.locked():
        write(folder, 1)
        thread.start()
        until(lambda: heard.steps == [1])
        with pytest.raises(RunError, match="Another process mirrors this run to wandb"):
            tail.mirror(folder, "wandb")
        listen(Listener())
        tail_of_another = threading.Thread(target=tail.mirror, args=(folder, "mlflow"))
        tail_of_another.start()
        until(lambda: (folder.path / FOLDER / "mlflow.json").exists())
    thread.join(60)
    tail_of_another.join(10)


def test_a_damaged_memory_says_what_to_do(folder: RunFolder, listen: Listen) -> None:
    write(folder, 1)
    listen(Listener())
    tail.mirror(folder, "wandb")
    (folder.path / FOLDER / "wandb.json").write_text("{}")
    with pytest.raises(RunError, match="Remove it"):
        tail.mirror(folder, "wandb")


# --- settings ---------------------------------------------------------------------------------


def test_settings_are_flat_and_secrets_stay_at_home(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "abcdef0123456789")
    monkeypatch.setenv("HOME_TOKEN", "short")
    folder.write_config(
        """
steps = 3
engine.max_tokens = 64
engine.stop = ["a", "b"]
optim.learning_rate = 1e-6
data.answer_key = "answer"
data.train = "hub:org/name"
data.options = { digits = 2, api_key = "one-secret", token = "two-secret", password = "" }
model.path = "https://me:three-secret@example.org/model"
data.system = "the key is abcdef0123456789, in short"
data.instruction = "sk-aaaaaaaaaaaaaaaaaaaaaaaa {prompt}"
reward.parts."judge(url='https://x/v1', token='four-secret', max_tokens=5)" = 1.0
"""
    )
    found = settings_of(folder)
    assert "secret" not in repr(found) and "abcdef" not in repr(found)
    assert found["data.options.api_key"] == found["data.options.token"] == HIDDEN
    assert found["data.options.password"] == ""
    assert found["data.system"] == f"the key is {HIDDEN}, in short"
    assert found["data.instruction"] == f"{HIDDEN} {{prompt}}"
    assert found["model.path"] == f"https://{HIDDEN}@example.org/model"
    assert found[f"reward.parts.judge(url='https://x/v1', token={HIDDEN}, max_tokens=5)"] == 1.0
    kept = ("steps", "engine.max_tokens", "engine.stop", "optim.learning_rate", "data.answer_key")
    assert [found[name] for name in kept] == [3, 64, '["a", "b"]', 1e-6, "answer"]
    assert found["data.train"] == "hub:org/name"


def test_no_setting_of_a_configuration_is_taken_for_a_secret(folder: RunFolder) -> None:
    from groupwise.config import text

    folder.write_config(text(small()))
    assert HIDDEN not in repr(settings_of(folder))
    assert not re.search(re.escape(HIDDEN), hide(text(small(recipe="dapo"))))
