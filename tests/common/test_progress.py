"""What is shown of what is under way, by a clock that the tests turn."""

from __future__ import annotations

import io
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import quiet, run, small

from groupwise.cli import main
from groupwise.common import progress
from groupwise.common.progress import Watcher, counted, duration, phase
from groupwise.prepare.setup import sampling_of
from groupwise.stages.groups import GroupStage
from groupwise.training import loop
from groupwise.training.loop import train
from groupwise.training.signals import Stopped
from groupwise.watch.display import STOPPING, Display


class Time:
    """Goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Shown:
    """A watcher that looks when the test says so."""

    def __init__(self, live: bool) -> None:
        self.time, self.lines = Time(), list[str]()
        self.watcher = Watcher(self.lines.append, live=live, now=self.time)
        self.watcher._thread = threading.current_thread()  # no other one looks

    def after(self, seconds: float) -> list[str]:
        """What a look shows so much later."""
        self.time.now += seconds
        self.lines.clear()
        self.watcher.look()
        return list(self.lines)


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of the tests."""
    monkeypatch.setattr(progress, "LIVE_AFTER", 1.0)
    monkeypatch.setattr(progress, "FIRST_AFTER", 2.0)


def watched(live: bool) -> Iterator[Shown]:
    shown = Shown(live)
    shown.watcher.heard()
    with shown.watcher.watching():
        yield shown


@pytest.fixture
def log(waiting: None) -> Iterator[Shown]:
    yield from watched(live=False)


@pytest.fixture
def terminal(waiting: None) -> Iterator[Shown]:
    yield from watched(live=True)


# --- a log --------------------------------------------------------------------------------------


def test_a_log_has_a_line_after_two_seconds_and_then_one_in_ten(log: Shown) -> None:
    with phase("loading models/x"):
        assert log.after(1.9) == []
        assert log.after(0.1) == ["loading models/x, 0:02"]
        assert log.after(9.9) == []
        assert log.after(0.1) == ["loading models/x, 0:12"]
    assert log.after(60) == []  # nothing is under way


def test_what_is_said_otherwise_breaks_the_silence(log: Shown) -> None:
    with phase("saving"):
        log.time.now += 1.5
        log.watcher.heard()
        assert log.after(1.5) == []
        assert log.after(0.5) == ["saving, 0:04"]


def test_counts_rate_and_time_left_are_those_of_the_work(log: Shown) -> None:
    with phase("sampling", 64, "completions") as told:
        told(0, 20)
        assert log.after(2) == ["sampling 0 of 64 completions, 10 tokens/s, 0:02"]
        told(6, 600)  # too few to tell the rest from
        assert log.after(10) == ["sampling 6 of 64 completions, 50 tokens/s, 0:12"]
        told(16, 4400)
        assert log.after(10) == ["sampling 16 of 64 completions, 200 tokens/s, 0:22, 1:06 left"]


def test_a_phase_within_another_is_named_behind_it(log: Shown) -> None:
    with phase("evaluating", 1200, "tasks"):
        log.time.now += 5
        with phase("grading", 1200, "answers"):
            line = ["evaluating 1,200 tasks, 0:08: grading 1,200 answers, 0:03"]
            assert log.after(3) == line
    with phase("cold start", things="steps") as told:
        told(70)
        assert log.after(10) == ["cold start 70 steps, 0:10"]


def test_items_are_counted_as_they_are_taken(log: Shown) -> None:
    seen = []
    for item in counted("updating", ["a", "b", "c"], "micro-batches"):
        seen.append((item, log.after(10)))
    assert [item for item, _ in seen] == ["a", "b", "c"]
    assert seen[2][1] == ["updating 2 of 3 micro-batches, 0:30, 0:15 left"]
    assert log.after(10) == []


def test_a_phase_ends_with_an_error(log: Shown) -> None:
    with pytest.raises(ValueError, match="broken"), phase("saving"):
        raise ValueError("broken")
    assert log.after(10) == []


def test_a_loop_that_an_error_ends_ends_its_phase(log: Shown) -> None:
    def broken() -> None:
        for _ in counted("updating", [1, 2], "micro-batches"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken()
    assert log.after(10) == []


def test_nobody_watches_and_nothing_is_kept() -> None:
    with phase("saving") as told:
        told(3)
    assert told.done == 3


def test_a_phase_is_shown_by_whoever_watched_last(log: Shown) -> None:
    inner = Shown(live=False)
    inner.watcher.heard()
    with inner.watcher.watching(), phase("saving"):
        assert inner.after(2) == ["saving, 0:02"]
        assert log.after(2) == []
    with phase("reading"):
        assert log.after(2) == ["reading, 0:02"]


# --- a terminal ---------------------------------------------------------------------------------


def test_a_terminal_has_one_line_that_is_kept_up_to_date_and_goes(terminal: Shown) -> None:
    with phase("saving"):
        assert terminal.after(0.9) == []
        assert terminal.after(0.1) == ["saving, 0:01"]
        assert terminal.after(0.25) == ["saving, 0:01"]
        assert terminal.after(1) == ["saving, 0:02"]
        terminal.lines.clear()
    assert terminal.lines == [""]
    assert terminal.after(5) == []


def test_the_line_makes_room_for_what_is_said(terminal: Shown) -> None:
    with phase("saving"):
        terminal.after(2)
        terminal.lines.clear()
        progress.heard()
        assert terminal.lines == [""]
        assert terminal.after(0.5) == []
        assert terminal.after(0.5) == ["saving, 0:03"]


# --- of a run -----------------------------------------------------------------------------------


class Looking(Watcher):
    """Looks whenever a phase begins or ends and whenever it is told a count: no clock is needed."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._patience = 0.0
        self._thread = threading.current_thread()

    def begin(self, phase: progress.Phase) -> None:
        super().begin(phase)
        self._patience = 0.0
        self.look()

    def end(self, phase: progress.Phase) -> None:
        self._patience = 0.0
        self.look()
        super().end(phase)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def words(out: str) -> str:
    """Without times, which differ."""
    return re.sub(r", [\d,]+ tokens/s|, \d+:\d\d( left)?", "", out)


def test_every_phase_of_a_run_is_shown_in_plain_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.watch.display.Watcher", Looking)
    out = io.StringIO()
    # A seed of its own: no other test has made this start, so it is taught here.
    config = small(steps=2, seed=4242, recipe="grpo", **{"recipe__schedule.updates": 2})
    train(config, tmp_path / "run", Display(out, live=False))
    said = words(out.getvalue())
    for line in (
        "reading data",
        "preparing prompts",
        "step 1/2: comparing sampler and learner: sampling 16 of 16 completions",
        "step 1/2: evaluating 8 tasks: sampling 8 of 8 completions",
        "step 1/2: evaluating 8 tasks: grading 8 answers",
        "step 2/2: sampling 16 of 16 completions",
        "step 2/2: grading 4 of 4 groups",
        "step 2/2: updating 0 of 1 micro-batches",
        "step 2/2: saving",
        "step 2/2: writing the report",
    ):
        assert f"{line}\n" in said, line
    assert re.search(r"(?:^|: )cold start [\d,]+(?: of [\d,]+)? steps?$", said, re.MULTILINE), said
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", said)


def test_phases_of_a_run_stand_below_the_panel_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.watch.display.Watcher", Looking)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    train(small(steps=1), tmp_path / "run", Display(out))
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    assert "evaluating 8 tasks" in shown and "╭─ step 1/1" in shown
    assert shown.rindex("╰") > shown.rindex("writing the report")  # the last panel stays


def test_the_sampler_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    with loop.open_run(small(), tmp_path / "run", quiet()) as opened:
        tasks = [(task, 0) for task in opened.parts.tasks[:3]]
        requests = [loop_request(task.token_ids, task.id) for task, _ in tasks]
        made = opened.parts.engine.generate(
            requests,
            sampling_of(opened.config),
            wrote=lambda done, tokens: told.append((done, tokens)),
        )
    lengths = [len(each.token_ids) for group in made for each in group]
    assert told[-1] == (len(lengths), sum(lengths))
    assert told == sorted(told) and len(told) == max(lengths)


def loop_request(prompt: Sequence[int], number: int) -> Any:
    from groupwise.engine.protocol import Request

    return Request(tuple(prompt), 2, prompt_id=number, draw=0)


def test_probe_shows_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("groupwise.commands.shared.Watcher", Looking)
    run(tmp_path / "run", steps=1)
    assert main(["probe", str(tmp_path / "run"), "--prompts", "3"]) == 0
    said = words(capsys.readouterr().err)
    assert "probing 2 of 3 prompts: sampling 8 of 8 completions\n" in said
    assert "\r" not in said and "\x1b" not in said


# --- asked to stop ------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_is_answered_before_the_step_is_over(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("groupwise.watch.display.Watcher", Looking)
    out = io.StringIO()
    teach = GroupStage.teach

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), number)
        found = teach(*args)
        assert f"{STOPPING}\n" in out.getvalue()  # while the update is still under way
        return found

    monkeypatch.setattr(GroupStage, "teach", interrupted)
    with pytest.raises(Stopped, match="stopped after step 1, saved"):
        train(small(), tmp_path / "run", Display(out, live=False))
    assert out.getvalue().count(STOPPING) == 1


def test_a_request_to_stop_while_a_run_opens_begins_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated: list[int] = []
    taught: list[int] = []
    load = torch.Tensor.backward  # of the cold start
    monkeypatch.setattr(loop, "begin", lambda run: evaluated.append(1))

    def interrupted(*args: Any, **named: Any) -> Any:
        if not taught:
            os.kill(os.getpid(), signal.SIGINT)
        taught.append(1)
        return load(*args, **named)

    monkeypatch.setattr(torch.Tensor, "backward", interrupted)
    from groupwise.training import cold_start

    monkeypatch.setattr(cold_start, "teach", cold_start.teach.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(Stopped, match="stopped before step 1; the same command begins with it"):
        train(small(), tmp_path / "run", quiet())
    assert not evaluated and len(taught) == 1  # the course ends with the step that it was in
    assert not (tmp_path / "run" / cold_start.COLD_START).exists()
    monkeypatch.undo()
    assert train(small(steps=1), tmp_path / "run", quiet())["steps"] == 1


def test_a_phase_with_a_limit_says_how_long_it_may_still_be(log: Shown) -> None:
    with phase("trying the reward r.py:f", limit=60.0, setting="reward.timeout"):
        assert log.after(5) == [
            "trying the reward r.py:f, 0:05, at most 0:55 more (reward.timeout = 60)"
        ]
        assert "at most 0:00 more" in log.after(90)[0]
    with phase("loading reward functions", limit=100.0):
        assert log.after(10) == ["loading reward functions, 0:10, at most 1:30 more"]


def test_times_in_words_have_two_units_at_most() -> None:
    found = [duration(x) for x in (0, 0.384, 9.4, 22, 60, 250, 7500, 7200, 273_700, 7206)]
    assert found == ["0 s", "0.38 s", "9.4 s", "22 s", "1 min", "4 min 10 s", "2 h 5 min", "2 h",
                     "3 d 4 h", "2 h"]  # fmt: skip
