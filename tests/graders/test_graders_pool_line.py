"""The only worker of a pool has items ahead: each still has its own time, fate and verdict."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from groupwise.graders import pool as pools
from groupwise.graders.pool import Pool


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool("pool_work:work", workers=1, memory=2 * 2**30)
    made.run([("echo", 0)], 60.0)  # started
    yield made
    made.close()


def test_one_that_hangs_takes_nobody_with_it(pool: Pool) -> None:
    items = [("sleep", 600) if n in (0, 5) else ("echo", n) for n in range(10)]
    outcomes = pool.run(items, 3.0)
    assert [o.status for o in outcomes] == ["timeout" if n in (0, 5) else "ok" for n in range(10)]
    assert [o.value for o in outcomes if o.status == "ok"] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_one_that_dies_is_found_out_and_not_tried_again(pool: Pool) -> None:
    items = [("exit", 0) if n in (0, 3, 9) else ("echo", n) for n in range(10)]
    outcomes = pool.run(items, 60.0)
    assert [n for n, o in enumerate(outcomes) if o.status == "error"] == [0, 3, 9]
    assert all("died" in outcomes[n].reason for n in (0, 3, 9))


def test_the_time_that_others_take_is_not_counted(pool: Pool) -> None:
    """Eight of 1 s with 6 s each: together they are over it."""
    outcomes = pool.run([("sleep", 1.0)] * 8, 6.0)
    assert [o.status for o in outcomes] == ["ok"] * 8
    assert all(o.seconds < 6.0 for o in outcomes)


def test_large_items_do_not_fill_the_pipe_of_one_that_hangs(pool: Pool) -> None:
    """More than a pipe holds, behind a worker that reads nothing: the caller would hang as well."""
    large = "x" * 400_000
    outcomes = pool.run([("sleep", 600), *[("echo", large)] * 4], 3.0)
    assert [o.status for o in outcomes] == ["timeout", "ok", "ok", "ok", "ok"]
    assert all(o.value == large for o in outcomes[1:])


def test_many_small_items_do_not_fill_the_pipe_of_one_that_hangs(pool: Pool) -> None:
    """Each takes far more of a pipe than its own bytes; the caller hung before the clock ran."""
    statuses: list[str] = []
    items = [("sleep", 600), *[("echo", n) for n in range(1_000)]]
    caller = threading.Thread(
        target=lambda: statuses.extend(o.status for o in pool.run(items, 3.0)), daemon=True
    )
    caller.start()
    caller.join(60.0)
    assert statuses == ["timeout", *["ok"] * 1_000]


def test_what_is_ahead_is_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[int] = []
    collect = Pool._collect

    def looked(self: Pool, busy: list[pools.Worker], *rest: object) -> None:
        lines.append(max(len(worker.line) for worker in busy))
        collect(self, busy, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Pool, "_collect", looked)
    pool.run([("echo", "x" * 10_000)] * 40, 60.0)
    assert 2 <= max(lines) <= pools.AHEAD_BYTES // 10_000
    lines.clear()
    pool.run([("echo", "x" * 100_000)] * 3, 60.0)
    assert max(lines) == 1
