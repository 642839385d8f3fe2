"""A costly answer is worth 0: by what it takes of the processor and of memory, not by the clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from groupwise.graders import gym
from groupwise.graders.mathematics import grader as mathematics
from groupwise.graders.mathematics.grader import verdicts
from groupwise.graders.parts import SampleToGrade
from groupwise.graders.pool import Pool
from groupwise.records import Task

SINES = r"\\".join("&".join(rf"\sin({m * n + m})" for n in range(10)) for m in range(10))
# Of each kind one: (gold answer, an answer that takes minutes or more).
COSTLY = [
    (r"\sum_{k=1}^{n} k^2", "(x+1)^{100000}"),
    ("7", "(((10^{10})!)!)!"),
    (r"\sqrt{x}+1", r"\sqrt{x+" * 40 + "x" + "}" * 40),
    ("7", rf"\det\begin{{pmatrix}}{SINES}\end{{pmatrix}}"),
    ("y = x^2", r"x^{2}+y^{2}=(x+y)^{3000}"),
]
COSTLY_GOLD = r"\sum_{k=1}^{10^{7}} k^{k}"


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool("pool_work:work", workers=2, memory=2**30)
    yield made
    made.close()


def test_what_waits_is_not_costly_and_what_works_is(pool: Pool) -> None:
    """On a busy machine all work waits."""
    outcomes = pool.run([("sleep", 0.5), ("burn", 600), ("echo", 3)], 600.0, cost=0.2)
    assert [o.status for o in outcomes] == ["ok", "costly", "ok"]
    assert "more than 0.2 s of the processor" in outcomes[1].reason
    assert [o.status for o in pool.run([("burn", 0.1)] * 6, 600.0, cost=0.2)] == ["ok"] * 6


def test_the_only_worker_counts_for_each_item_alone() -> None:
    pool = Pool("pool_work:work", workers=1)
    outcomes = pool.run([("burn", 0.1)] * 5 + [("burn", 600), ("burn", 0.1)], 600.0, cost=0.3)
    assert [o.status for o in outcomes] == ["ok"] * 5 + ["costly", "ok"]
    pool.close()


def test_what_hangs_is_late_and_not_costly(pool: Pool) -> None:
    outcomes = pool.run([("sleep", 600), ("kill",)], 0.5, cost=0.4)
    assert [o.status for o in outcomes] == ["timeout", "error"]


def test_memory_is_counted_beside_what_is_loaded(pool: Pool) -> None:
    outcomes = pool.run([("memory", 2**29), ("memory", 2**31)], 60.0)
    assert [o.status for o in outcomes] == ["ok", "costly"]


def test_a_costly_answer_is_worth_no_more_than_a_wrong_one() -> None:
    costly = [(rf"\boxed{{{answer}}}", gold) for gold, answer in COSTLY]
    wrong = [(r"\boxed{12345}", gold) for gold, _ in COSTLY]
    found = verdicts([*costly, *wrong], timeout=1.0)
    assert [(v.score, v.status) for v in found] == [(0.0, "ok")] * len(found)
    assert all("of the processor" in v.why for v in found[: len(costly)])


def test_a_costly_gold_answer_is_not_the_answers_fault() -> None:
    found = verdicts([(r"\boxed{12345}", COSTLY_GOLD)], timeout=0.25)
    assert [(v.score, v.status) for v in found] == [(None, "timeout")]
    assert "gold answer alone" in found[0].why


def test_a_gold_answer_that_arithmetic_judges_excuses_nobody() -> None:
    """The engine takes minutes for this one; a plain wrong answer is not asked about, and is 0."""
    gold = "(x+1)^{100000}"
    found = verdicts([(r"\boxed{(((10^{10})!)!)!}", gold), (r"\boxed{0}", gold)], timeout=0.4)
    assert [(v.score, v.status) for v in found] == [(0.0, "ok")] * 2


def test_who_died_or_hung_over_an_answer_gave_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what the answer used counts against it."""
    for digits, status, patience in ((11, "error", 300), (12, "timeout", 1)):
        work = Pool("pool_work:stand_in", workers=1)
        monkeypatch.setattr(mathematics, "engine", lambda work=work: work)
        # What dies may take its time, as on a busy machine; only what hangs is waited out.
        monkeypatch.setattr("groupwise.graders.pool.HANGS", patience)
        (found,) = verdicts([(rf"\boxed{{(((10^{{{digits}}})!)!)!}}", "7")], timeout=0.4)
        assert (found.score, found.status) == (None, status)
        work.close()


def test_a_costly_answer_to_a_gym_task_is_0_unless_the_row_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = Pool("pool_work:scorer", workers=2)
    monkeypatch.setattr(gym, "workers", lambda: work)
    part = gym.GymScorer((), timeout=0.25)

    def sample(text: str, answer: str) -> SampleToGrade:
        task = Task(0, "q", answer, columns={"metadata": {"source_dataset": "x"}})
        return SampleToGrade(task, text, (), "eos")

    for text, status in (("burn", "timeout"), ("sleep", "timeout"), ("exit", "error")):
        # The clock decides over what hangs alone; the answers beside it have to be there by then.
        monkeypatch.setattr("groupwise.graders.pool.HANGS", 16 if text == "sleep" else 400)
        marks = part.grade([sample(text, "a"), sample("a", "a"), sample(text, text)])
        assert [(m.value, m.status) for m in marks] == [(0.0, "ok"), (1.0, "ok"), (None, status)]
    work.close()
