"""What environments do that they should not: each costs its own episode, and is said."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import descendants, gone

from groupwise.envs.opening import WorldSetup, check_worlds, open_worlds
from groupwise.envs.trial import shared_state
from groupwise.envs.workers import ProcessWorlds
from groupwise.envs.worlds import Answered, Fault, Worlds
from groupwise.errors import WorldError

TOYS = Path(__file__).resolve().parents[1] / "support" / "toy_worlds.py"
READ = f"{TOYS}:read"
WAIT = 120.0  # seconds that no machine takes; nothing is measured by it


def opened(name: str, **settings: Any) -> ProcessWorlds:
    worlds = open_worlds(WorldSetup(f"{TOYS}:{name}", **settings))
    assert isinstance(worlds, ProcessWorlds)
    return worlds


@pytest.fixture(scope="module")
def bad() -> Iterator[ProcessWorlds]:
    worlds = opened("Bad", timeout=2.0, workers=2)
    yield worlds
    worlds.close()


NUMBERS = iter(range(10**6))


def begun(worlds: Worlds, **row: Any) -> int:
    number = next(NUMBERS)
    worlds.begin(number, row)
    assert isinstance(one(worlds, number), Answered)
    return number


def one(worlds: Worlds, number: int) -> Answered | Fault:
    ((who, answer),) = worlds.answers(WAIT)
    assert who == number
    return answer


def step(worlds: Worlds, number: int, text: str) -> Answered | Fault:
    worlds.step(number, text)
    return one(worlds, number)


def said(answer: Answered | Fault) -> str:
    assert isinstance(answer, Answered)
    return "".join(message["content"] for message in answer.observation.messages)


def finished(worlds: Worlds, number: int) -> float | None:
    worlds.finish(number)
    answer = one(worlds, number)
    assert isinstance(answer, Answered)
    return answer.outcome


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("hang", "timeout", "longer than 2 s and was stopped"),
        ("raise", "error", r"ValueError: no \(toy_worlds.py:"),
        ("die", "error", "ended by itself"),
        ("memory", "error", "MemoryError"),
        ("odd", "error", "returned float: '3.5'"),
        ("nan", "error", "no finite number"),
    ],
)
def test_a_fault_costs_its_own_episode(
    bad: ProcessWorlds, text: str, kind: str, words: str
) -> None:

    before, struck, after = (begun(bad) for _ in range(3))
    answer = step(bad, struck, text)
    assert isinstance(answer, Fault) and answer.kind == kind and re.search(words, answer.reason)
    for number in (before, after):
        assert said(step(bad, number, "x")) == "heard x"
        assert finished(bad, number) == 0.25
    assert not bad.of and not bad.places


def test_a_flood_is_cut_and_said(bad: ProcessWorlds) -> None:
    number = begun(bad)
    text = said(step(bad, number, "flood"))
    assert len(text) < 101_000 and text.startswith("aaa") and text.endswith("zzz")
    assert "[1900000 characters left out]" in text
    bad.drop(number)


def test_a_forked_child_answers_nothing(bad: ProcessWorlds) -> None:
    number = begun(bad)
    assert said(step(bad, number, "fork")) == "parent"
    assert said(step(bad, number, "again")) == "heard again"
    assert finished(bad, number) == 0.25


def test_what_an_episode_started_ends_with_it(bad: ProcessWorlds) -> None:
    """In a session of its own, too."""
    number = begun(bad)
    pid = int(said(step(bad, number, "daemon")))
    assert not gone([pid], 0.2)
    assert finished(bad, number) == 0.25
    assert gone([pid])


def test_an_episode_that_is_dropped_is_not_heard_of(bad: ProcessWorlds) -> None:
    idle, hanging, waiting = begun(bad), begun(bad), begun(bad)
    bad.step(hanging, "hang")
    bad.answers(0.0)
    bad.step(waiting, "hang")
    for number in (idle, hanging, waiting):
        bad.drop(number)
    other = begun(bad)
    assert said(step(bad, other, "x")) == "heard x"
    bad.drop(other)
    with pytest.raises(WorldError, match="has not begun, or is over"):
        bad.step(other, "x")


def test_more_calls_than_workers_wait_for_their_turn(bad: ProcessWorlds) -> None:
    """Their clocks wait with them: two workers, six calls, none is late."""
    numbers = [begun(bad) for _ in range(6)]
    for number in numbers:
        bad.step(number, f"{number}")
    heard: dict[int, str] = {}
    while len(heard) < 6:
        heard |= {who: said(answer) for who, answer in bad.answers(WAIT)}
    assert heard == {number: f"heard {number}" for number in numbers}
    for number in numbers:
        bad.drop(number)


def test_randomness_is_the_rows(bad: ProcessWorlds) -> None:
    """Samples of a row draw the same numbers, those of another row others."""
    numbers = [begun(bad, seed=1), begun(bad, seed=1), begun(bad, seed=2)]
    drawn = [said(step(bad, number, "random")) for number in numbers]
    assert drawn[0] == drawn[1] != drawn[2]
    for number in numbers:
        bad.drop(number)


def test_nothing_is_left_behind() -> None:
    before = set(descendants(os.getpid()))
    worlds = opened("Bad", timeout=1.0)
    number = begun(worlds)
    pid = int(said(step(worlds, number, "daemon")))
    begun(worlds)
    own = set(descendants(os.getpid())) - before
    assert len(own) >= 4
    worlds.close()
    assert gone([pid, *own])


def test_a_loaded_module_is_as_new_in_every_episode() -> None:
    """What one blocking episode leaves in a global is not there in the next."""
    setup = WorldSetup("", (f"{TOYS}:note",), reader=READ)
    assert shared_state(setup, {}, ['call note {"word": "a"}', 'call note {"word": "b"}']) == ""


def test_coroutines_that_share_a_list_are_found_out() -> None:
    found = shared_state(WorldSetup(f"{TOYS}:Shared", workers=1), {}, ["a", "b"])
    assert "to an episode alone" in found and "Keep what belongs to an episode" in found
    assert shared_state(WorldSetup(f"{TOYS}:AsyncHouse"), {"secret": 7}, ["3", "9"]) == ""


@pytest.fixture(scope="module")
def tools() -> Iterator[ProcessWorlds]:
    """Tools of which some block: an episode has a process of its own."""
    names = ("add", "hang", "hang_async", "broken", "leaves", "flood", "fork")
    setup = WorldSetup("", tuple(f"{TOYS}:{each}" for each in names), reader=READ, timeout=1.0)
    worlds = open_worlds(setup)
    assert isinstance(worlds, ProcessWorlds) and not worlds.described.concurrent
    yield worlds
    worlds.close()


@pytest.mark.parametrize(
    ("name", "status", "words"),
    [
        ("hang", "timeout", "Error: hang took longer than 1 s"),
        ("hang_async", "timeout", "Error: hang_async took longer than 1 s"),
        ("broken", "failed", "Error: KeyError: 'no such thing'"),
        ("leaves", "failed", "Error: SystemExit: 3"),
        ("fork", "ok", "parent"),
    ],
)
def test_a_tool_that_fails_is_said_to_the_policy(
    tools: ProcessWorlds, name: str, status: str, words: str
) -> None:
    number = begun(tools)
    answer = step(tools, number, f"call {name} {{}}")
    assert said(answer) == words
    assert isinstance(answer, Answered)
    assert [call.status for call in answer.observation.calls] == [status]
    assert said(step(tools, number, 'call add {"a": 4}')) == "7"  # the episode goes on
    assert finished(tools, number) is None


def test_waiting_tools_wait_together_and_a_late_one_costs_only_its_call() -> None:
    """Sixteen naps and a hanging one, in one process: all naps are over before the late one."""
    names = tuple(f"{TOYS}:{each}" for each in ("nap", "hang_async"))
    worlds = open_worlds(WorldSetup("", names, reader=READ, timeout=5.0, workers=1))
    assert isinstance(worlds, ProcessWorlds) and worlds.described.concurrent
    numbers = [next(NUMBERS) for _ in range(17)]
    for number in numbers:
        worlds.begin(number, {})
    waiting = set(numbers)
    while waiting:
        waiting -= {who for who, _ in worlds.answers(WAIT)}
    worlds.step(numbers[0], "call hang_async {}")
    for number in numbers[1:]:
        worlds.step(number, 'call nap {"seconds": 0.5}')
    order: list[tuple[int, str]] = []
    while len(order) < 17:
        order += [(who, said(answer)) for who, answer in worlds.answers(WAIT)]
    assert len(worlds.places) == 1
    assert order[-1] == (numbers[0], "Error: hang_async took longer than 5 s")
    assert {text for _, text in order[:-1]} == {"awake"}
    worlds.close()


def test_a_coroutine_that_blocks_is_found_out() -> None:
    """It takes its process with it: those beside it are told, the next ones begin anew."""
    names = tuple(f"{TOYS}:{each}" for each in ("nap", "block"))
    worlds = open_worlds(WorldSetup("", names, reader=READ, timeout=5.0, workers=1))
    assert isinstance(worlds, ProcessWorlds)
    blocks, beside = begun(worlds), begun(worlds)
    pid = next(iter(worlds.places)).worker.pid
    os.kill(pid, signal.SIGSTOP)  # as good as blocked, and at once
    answer = step(worlds, blocks, "call block {}")
    assert isinstance(answer, Fault) and answer.kind == "timeout"
    assert "the event loop that coroutines share stood still" in answer.reason
    lost = step(worlds, beside, 'call nap {"seconds": 0}')
    assert isinstance(lost, Fault) and lost.kind == "error" and "stood still" in lost.reason
    assert said(step(worlds, begun(worlds), 'call nap {"seconds": 0}')) == "awake"
    worlds.close()


def test_a_setup_is_made_once_before_a_run() -> None:
    """With the words of whoever refuses it, from the process that loads it."""
    schemas = check_worlds(WorldSetup("", (f"{TOYS}:add",), reader=READ))
    assert [each["function"]["name"] for each in schemas] == ["add"]
    with pytest.raises(WorldError, match=r"^NoShape has no shape of an environment that is known"):
        check_worlds(WorldSetup(f"{TOYS}:NoShape"))


def test_a_file_that_raises_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import math\nmath.sqrt(-1)\n")
    with pytest.raises(WorldError, match=r"Can't load .*mine.py: ValueError: .*\(mine.py:2\)"):
        check_worlds(WorldSetup(f"{tmp_path / 'mine.py'}:Env"))


def test_processes_of_environments_come_up_without_the_trainer() -> None:
    """A process an episode is cheap because little is loaded where they are forked from."""
    code = "import sys, groupwise.envs.serving; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
