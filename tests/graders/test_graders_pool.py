"""Worker processes: killed on time-out, whoever calls, and none left behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import descendants, gone

from groupwise.errors import RewardError
from groupwise.graders.mathematics.grader import engine, verdicts
from groupwise.graders.pool import Pool
from groupwise.graders.rubric import Grader
from groupwise.records import Task

HOSTILE = r"\boxed{(((10^{10})!)!)!}"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool("pool_work:work", workers=2, memory=2 * 2**30)
    yield made
    made.close()


def test_results_come_in_order_whatever_the_timing(pool: Pool) -> None:
    items = [("sleep", 0.2 if n == 0 else 0.0) for n in range(20)]
    outcomes = pool.run(items, 5.0)
    assert [outcome.value for outcome in outcomes] == [0.2, *[0.0] * 19]
    assert outcomes[0].seconds >= 0.2 and all(o.status == "ok" for o in outcomes)
    assert pool.run([], 1.0) == []


def test_what_is_too_slow_is_stopped_and_the_rest_is_not(pool: Pool) -> None:
    workers = [o.value for o in pool.run([("pid",)] * 8, 30.0)]
    outcomes = pool.run([("power", 9), ("echo", 1), ("sleep", 600), ("echo", 2)], 2.0)
    assert [o.status for o in outcomes] == ["timeout", "ok", "timeout", "ok"]
    assert [o.value for o in outcomes] == [None, 1, None, 2]
    assert "longer than 2 s" in outcomes[0].reason
    assert all(outcomes[n].seconds >= 2.0 for n in (0, 2))
    after = [o.value for o in pool.run([("pid",)] * 8, 30.0)]
    assert gone(list(set(workers) - set(after))) and set(workers) - set(after)  # killed, not left
    assert [o.value for o in pool.run([("echo", 3)] * 5, 5.0)] == [3] * 5  # alive after it


def test_a_worker_that_dies_fails_one_item_alone(pool: Pool) -> None:
    items = [("echo", 1), ("exit", 0), ("echo", 2), ("kill",), ("raise", "why"), ("echo", 3)]
    outcomes = pool.run(items, 10.0)
    assert [o.status for o in outcomes] == ["ok", "error", "ok", "error", "error", "ok"]
    assert "died" in outcomes[1].reason and "died" in outcomes[3].reason
    assert outcomes[4].reason == "ValueError: why"
    (outcome,) = pool.run([("memory", 8 * 2**30)], 10.0)
    assert outcome.status == "costly" and "memory" in outcome.reason


def test_a_worker_that_dies_or_hangs_while_it_answers(pool: Pool) -> None:
    """Half an answer is none, and waiting for the other half ends with the time."""
    pool.run([("echo", 1)] * 4, 30.0)
    outcomes = pool.run([("half", 0), ("echo", 1), ("half", 600), ("echo", 2)], 3.0)
    assert [o.status for o in outcomes] == ["error", "ok", "timeout", "ok"]
    assert "died" in outcomes[0].reason
    (large,) = pool.run([("large", 40 * 2**20)], 60.0)  # comes in many pieces
    assert large.value == "x" * (40 * 2**20)


@pytest.mark.parametrize(
    "message",
    [
        struct.pack("!i", 5) + b"abcde",
        struct.pack("!i", -7) + b"abc",
        struct.pack("!i", 2) + pickle.dumps(("ok", 1.0)),
        struct.pack("!i", len(pickle.dumps(1.0))) + pickle.dumps(1.0),
    ],
    ids=["no pickle", "no length", "too long", "no answer"],
)
def test_what_is_no_answer_fails_one_item_alone(pool: Pool, message: bytes) -> None:
    outcomes = pool.run([("echo", 1), ("junk", message), ("echo", 2)], 30.0)
    assert [o.status for o in outcomes] == ["ok", "error", "ok"]
    assert "is broken" in outcomes[1].reason
    assert pool.run([("echo", 3)], 30.0)[0].value == 3


def test_what_a_worker_started_is_killed_with_it(pool: Pool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    (outcome,) = pool.run([("child", str(note))], 3.0)
    assert outcome.status == "timeout" and gone([int(note.read_text())])


def test_what_can_not_be_sent_is_an_error(pool: Pool) -> None:
    outcomes = pool.run([("echo", lambda: 1), ("echo", 2)], 5.0)
    assert [o.status for o in outcomes] == ["error", "ok"]
    assert "another process" in outcomes[0].reason


def test_a_pool_without_its_forkserver_gets_another(pool: Pool) -> None:
    pool.run([("echo", 1)] * 4, 5.0)
    assert pool.forkserver is not None
    os.kill(pool.forkserver.pid, signal.SIGKILL)
    pool.forkserver.wait()
    for _ in range(3):  # items that a dying worker took are errors, not hangs
        outcomes = pool.run([("echo", 1)] * 4, 5.0)
    assert [o.value for o in outcomes] == [1] * 4


def test_a_target_that_can_not_be_loaded_says_so() -> None:
    with pytest.raises(RewardError, match="No module named 'no_such'"):
        Pool("no_such:work").run([("echo", 1)], 5.0)


def test_closing_leaves_no_process(pool: Pool) -> None:
    before = set(descendants(os.getpid()))
    pids = [o.value for o in pool.run([("pid",), ("pid",)], 5.0)]
    assert pool.forkserver is not None
    forkserver = pool.forkserver.pid
    pool.close()
    assert gone([*pids, forkserver])
    assert set(descendants(os.getpid())) <= before
    assert pool.run([("echo", 1)], 5.0)[0].value == 1  # and it can be used again


def test_threads_share_a_pool(pool: Pool) -> None:
    with ThreadPoolExecutor(6) as threads:
        found = threads.map(
            lambda n: [o.value for o in pool.run([("echo", (n, k)) for k in range(20)], 20.0)],
            range(6),
        )
        assert list(found) == [[(n, k) for k in range(20)] for n in range(6)]
    assert pool.started <= 2


def in_another_process(results: Any) -> None:
    pool = Pool("pool_work:work", workers=1)
    outcomes = [*pool.run([("echo", 4)], 60.0), *pool.run([("power", 9)], 1.0)]
    verdict = [
        *verdicts([(r"\boxed{\sin 3x}", r"\sin 3 x")], timeout=60.0),
        *verdicts([(HOSTILE, "7")], timeout=1.0),
    ]
    told = [*(v.status for v in verdict), *(v.score for v in verdict)]
    results.put([*(o.status for o in outcomes), *told])


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_either_kind_can_call(method: str) -> None:
    verdicts([(r"\boxed{\sin 3x}", r"\sin 3 x")])  # a pool here, which a forked child must not use
    context = multiprocessing.get_context(method)
    results = context.Queue()
    child = context.Process(target=in_another_process, args=(results,), daemon=True)
    child.start()
    assert results.get(timeout=240) == ["ok", "timeout", "ok", "ok", 1.0, 0.0]
    child.join(120)
    assert child.exitcode == 0


PARENT = """
import sys, time
from groupwise.graders.pool import Pool
pool = Pool("pool_work:work", workers=2)
pids = [o.value for o in pool.run([("pid",), ("pid",)], 20.0)]
print(pool.forkserver.pid, *pids, flush=True)
pool.run([("power", 9), ("sleep", 600)], 600.0)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_no_orphans_when_the_parent_dies(how: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    time.sleep(0.3)  # busy in C, where no signal is heard
    children = descendants(parent.pid)
    assert set(pids) <= set(children)
    parent.send_signal(how)
    parent.wait()
    assert gone(children)


# ---------------------------------------------------------------- the graders on top of it


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_bug_43_time_outs_hold_off_the_main_thread() -> None:
    """There, a time-out by signal raises at once, and every answer scored 0.

    The engine is asked about the first and the last, within seconds of the processor: only the
    hostile one can be over it, and it is not to be worth more than any wrong answer.
    """
    task = Task(0, "?", r"\int_{0}^{1} 7 \, dx")
    worked_out = r"\boxed{\int_0^{1} 14x \, dx}"
    texts = [HOSTILE, r"\boxed{7}", r"\boxed{\int_{0}^{7} 1 \, dx}"]
    samples = [(task, text, (), "eos") for text in texts]
    asked = [(task, worked_out, (), "eos")]
    patient, grader = Grader({"math(timeout=60)": 1.0}), Grader({"math(timeout=1)": 1.0})
    for call in (in_a_thread, lambda function: function()):
        assert [g.reward for g in call(lambda: patient.grade(asked))] == [1.0]
        workers = set(descendants(os.getpid()))
        grades = call(lambda: grader.grade(samples))
        assert [g.status for g in grades] == ["ok", "ok", "ok"]
        assert [g.reward for g in grades] == [0.0, 1.0, 1.0]
        assert "more than 1 s of the processor" in grades[0].reason
        assert workers - set(descendants(os.getpid()))  # it was killed, not left behind
        assert [g.reward for g in call(lambda: patient.grade(asked))] == [1.0]  # and others work


FUNCTIONS = """
import os, signal, time

def slow(completion):
    if completion == "hang":
        while True: pass
    return 1.0
def slow_batch(completions):
    if "hang" in completions: time.sleep(60)
    return [1.0] * len(completions)
async def slow_async(completion):
    import asyncio
    await asyncio.sleep(60 if completion == "hang" else 0)
    return 1.0
def dies(completion):
    if completion == "hang": os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0
calls = []
def counts(completion):
    calls.append(completion)
    return float(len(calls))
print("loading")
def where(completion): return os.getpid()
"""


@pytest.mark.parametrize(
    ("name", "statuses", "words"),
    [
        ("slow", ["ok", "timeout", "ok"], "took longer than 3 s"),
        ("slow_batch", ["timeout"] * 3, "took longer than 3 s"),
        ("slow_async", ["ok", "timeout", "ok"], "took longer than 3 s"),
        ("dies", ["ok", "error", "ok"], "died"),
    ],
)
def test_a_users_function_is_stopped(
    name: str, statuses: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text(FUNCTIONS)
    grader = Grader({f"{tmp_path}/r.py:{name}": 1.0}, timeout=3.0)
    samples = [(Task(0, "q"), text, (), "eos") for text in ("a", "hang", "b")]
    grades = in_a_thread(lambda: grader.grade(samples))
    assert [g.status for g in grades] == statuses
    assert [g.reward for g in grades] == [1.0 if s == "ok" else None for s in statuses]
    assert all(words in g.reason for g in grades if g.status != "ok")
    assert grader.grade(samples[:1])[0].reward == 1.0  # the next worker loads the file itself


def test_a_users_file_is_loaded_once_and_again_when_it_changes(tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "r.py"
    file.write_text(FUNCTIONS)
    sample = (Task(0, "q"), "a", (), "eos")
    grader = Grader({f"{file}:counts": 1.0, f"{file}:where": 1.0})
    first, second = (grader.grade([sample])[0].parts for _ in range(2))
    assert [first[f"{file}:counts"], second[f"{file}:counts"]] == [1.0, 2.0]
    assert first[f"{file}:where"] == second[f"{file}:where"] != os.getpid()
    printed = capfd.readouterr()
    assert printed.out == ""  # standard output is the command's own
    file.write_text(FUNCTIONS.replace("float(len(calls))", "50.0"))
    os.utime(file, ns=(1, 1))
    assert grader.grade([sample])[0].parts[f"{file}:counts"] == 50.0


def test_the_engine_is_one_for_a_process() -> None:
    assert engine() is engine()
