"""Reward code that forks, closes, prints, starts processes: every sample keeps its own reward."""

from __future__ import annotations

import os
import pickle
import struct
import time
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from groupwise.graders.forkserver import NUMBER
from groupwise.graders.pool import Pool
from groupwise.graders.rubric import Grader
from groupwise.records import Task

FORKS = """
import os, sys

def child(how):
    if how == "exit": sys.exit(3)
    if how == "raise": raise ValueError("a child")
    return 77.0  # how == "return"

def forks(completion):
    how, number = completion.split()
    pid = os.fork()
    if pid == 0:
        return child(how)
    left = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert left == {"exit": 3, "raise": 1, "return": 0}[how], left
    return float(number)

def forks_unawaited(completion):
    how, number = completion.split()
    if os.fork() == 0:
        return child(how)
    return float(number)

def forks_batch(completions):
    if os.fork() == 0:
        return [child(each.split()[0]) for each in completions]
    return [float(each.split()[1]) for each in completions]

async def forks_async(completion):
    with open(__file__ + ".calls", "a") as calls:
        calls.write("x")
    return forks(completion)

def in_thread(completion):
    import threading
    thread = threading.Thread(target=forks_unawaited, args=(completion,))
    thread.start()
    thread.join()
    return float(completion.split()[1])

def multiprocess(completion):
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(float, completion.split()[1:])[0]

def prints(completion):
    print("x" * 100_000)
    os.write(1, b"{}" * 1000)
    return float(completion.split()[1])

def closes_output(completion):
    sys.stdout.close()
    return float(completion.split()[1])
"""
TWENTY = [f"{how} {10 * number}" for number, how in enumerate(["exit", "raise", "return"] * 7)]


def graded(tmp_path: Path, name: str, texts: list[str]) -> list[tuple[str, float | None]]:
    (tmp_path / "r.py").write_text(FORKS)
    grader = Grader({f"{tmp_path}/r.py:{name}": 1.0})
    grades = grader.grade([(Task(0, "q"), text, (), "eos") for text in texts])
    return [(grade.status, grade.reward) for grade in grades]


@pytest.mark.parametrize(
    "name",
    ["forks", "forks_unawaited", "forks_batch", "in_thread", "prints"],
)
def test_every_sample_keeps_its_own_reward(name: str, tmp_path: Path) -> None:
    """A child that came back out of the function was a second worker on the same pipe: it took
    items, and answered for others."""
    expected = [("ok", float(text.split()[1])) for text in TWENTY]
    for _ in range(3):
        assert graded(tmp_path, name, TWENTY) == expected


def test_a_child_does_not_go_on_in_the_event_loop(tmp_path: Path) -> None:
    """There it would make the other calls as well, each of which forks: few, for the machine."""
    texts = ["exit 0", "raise 10", "return 20"]
    assert graded(tmp_path, "forks_async", texts) == [("ok", 0.0), ("ok", 10.0), ("ok", 20.0)]
    assert (tmp_path / "r.py.calls").read_text() == "xxx"


def test_processes_of_multiprocessing_and_a_closed_output_do_no_harm(tmp_path: Path) -> None:
    for name in ("multiprocess", "closes_output"):
        assert graded(tmp_path, name, ["return 4", "return 5"]) == [("ok", 4.0), ("ok", 5.0)]


@pytest.mark.parametrize("how", ["exit", "raise", "return"])
def test_a_child_of_a_function_in_this_process_does_not_go_on(how: str, tmp_path: Path) -> None:
    """It would train as well, in the same folder."""
    scope: dict[str, Any] = {}
    exec(FORKS, scope)
    grader = Grader({"mine": 1.0}, functions={"mine": scope["forks"]})
    own = os.getpid()
    grades = grader.grade([(Task(0, "q"), f"{how} 2", (), "eos")])
    if os.getpid() != own:  # without the fix: end the second process here, and say so
        (tmp_path / "second").touch()
        os._exit(0)
    time.sleep(0.1)
    assert [grade.reward for grade in grades] == [2.0]
    assert not (tmp_path / "second").exists()


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool("pool_work:work", workers=1)
    yield made
    made.close()


@pytest.mark.parametrize("number", [0, 2, 77])
def test_an_answer_to_another_request_is_none(pool: Pool, number: int) -> None:
    """The second request has the number 1."""
    said = NUMBER.pack(number) + pickle.dumps(("ok", 99.0, 0.0))
    junk = struct.pack("!i", len(said)) + said
    outcomes = pool.run([("echo", 1), ("junk", junk), ("echo", 2)], 60.0)
    assert [(o.status, o.value) for o in outcomes] == [("ok", 1), ("error", None), ("ok", 2)]
    assert "not asked" in outcomes[1].reason


def test_an_answer_given_twice_is_nobody_elses(pool: Pool) -> None:
    """The second is there when all were answered, or when the next request is."""
    pool.run([("echo", 1)], 60.0)
    said = NUMBER.pack(1) + pickle.dumps(("ok", 99.0, 0.0))
    pool.run([("answer_twice", struct.pack("!i", len(said)) + said)], 60.0)
    outcomes = [pool.run([("echo", 5)], 60.0)[0] for _ in range(3)]
    assert all((o.status, o.value) in (("ok", 5), ("error", None)) for o in outcomes)
    assert outcomes[-1].value == 5


def test_a_worker_that_closes_its_descriptors_fails_one_item_alone(pool: Pool) -> None:
    outcomes = pool.run([("echo", 1), ("close",), ("echo", 2)], 60.0)
    assert [o.status for o in outcomes] == ["ok", "error", "ok"]


@pytest.mark.parametrize("how", ["hangs", "dies", "is closed"])
def test_a_process_in_a_session_of_its_own_ends_with_its_worker(
    how: str, pool: Pool, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    if how == "is closed":
        pool.run([("daemon", (str(note), "returns"))], 60.0)
        pool.close()
    else:
        pool.run([("daemon", (str(note), how))], 5.0)
    pid, end = int(note.read_text()), time.monotonic() + 30.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_in_a_session_of_its_own_lives_as_long_as_its_worker(
    pool: Pool, tmp_path: Path
) -> None:
    """A server that a reward starts is there for the next call."""
    note = tmp_path / "pid"
    pool.run([("daemon", (str(note), "returns"))], 60.0)
    time.sleep(1.2)  # the forkserver has looked
    assert Path(f"/proc/{note.read_text()}").exists()


# ---------------------------------------------------------------- odd results


HUGE = 10**400
ODD: dict[str, Any] = {
    "10**400": HUGE,
    "10**5000": 10**5000,
    "-10**400": -HUGE,
    "fraction": Fraction(HUGE, 3),
    "decimal": Decimal("1e999"),
    "no decimal": Decimal("sNaN"),
    "nan": float("nan"),
    "complex": np.complex128(1j),
    "date": np.datetime64("2020-01-01", "ns"),
    "span": np.timedelta64(5, "ns"),
    "wide": np.longdouble("1e4000"),
    "text": "1" * 10**6,
    "numpy text": np.str_("1" * 10**6),
    "bytes": b"1",
    "record": np.zeros(1, [("a", "f8")])[0],
    "dict": {"reward": HUGE},
    "steps": {"reward": 1.0, "steps": [(HUGE, 1.0)]},
    "step": {"reward": 1.0, "steps": [(1, HUGE)]},
    "object": np.array(HUGE, dtype=object),
}
FINE: dict[str, Any] = {
    "decimal": Decimal("0.5"),
    "fraction": Fraction(1, 2),
    "half": np.float16(0.5),
    "wide": np.longdouble("0.5"),
    "array": np.array(0.5, dtype=object),
}


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("name", ODD)
def test_an_odd_result_is_a_failed_grade(name: str, batch: bool) -> None:
    functions = {
        "one": lambda completion: ODD[name],
        "many": lambda completions: [ODD[name]] * len(completions),
    }
    chosen = "many" if batch else "one"
    (grade,) = Grader({chosen: 1.0}, functions={chosen: functions[chosen]}).grade(
        [(Task(0, "q"), "abc", (), "eos")]
    )
    assert (grade.status, grade.reward) == ("error", None)
    assert grade.reason.startswith(f"{chosen} returned") and len(grade.reason) < 300


@pytest.mark.parametrize("name", FINE)
def test_a_number_of_another_kind_is_a_reward(name: str) -> None:
    grader = Grader({"mine": 1.0}, functions={"mine": lambda completion: FINE[name]})
    assert grader.grade([(Task(0, "q"), "abc", (), "eos")])[0].reward == 0.5


def test_rewards_whose_sum_is_no_number_fail() -> None:
    functions = {"one": lambda completion: 1e308, "two": lambda completion: 1e308}
    grader = Grader({"one": 5.0, "two": 1.0}, functions=functions)
    (grade,) = grader.grade([(Task(0, "q"), "abc", (), "eos")])
    assert (grade.status, grade.reward) == ("error", None) and "too large" in grade.reason


RETURNS = """
def deep(completion):
    found = 1.0
    for _ in range(900): found = [found]
    return found
def large(completion):
    return 10**5000
def words(completion):
    raise ValueError("x" * 10**7)
"""


@pytest.mark.parametrize("name", ["deep", "large", "words"])
def test_an_odd_result_of_a_file_is_a_failed_grade(name: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(RETURNS)
    grader = Grader({f"{tmp_path}/r.py:{name}": 1.0})
    grades = grader.grade([(Task(0, "q"), "abc", (), "eos")] * 2)
    assert [(g.status, g.reward) for g in grades] == [("error", None)] * 2
    assert all(len(g.reason) < 1000 for g in grades)


def test_a_result_of_too_many_bytes_fails_one_item_alone(pool: Pool) -> None:
    outcomes = pool.run([("large", 2**28 + 1), ("echo", 2)], 60.0)
    assert [o.status for o in outcomes] == ["error", "ok"] and "bytes" in outcomes[0].reason
