"""Tasks in a temporary file: the same tasks in the same order as from memory, in little memory."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_tokenizer import tokenizer
from data_writers import WRITERS
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import left_behind, run

from groupwise.config import Data
from groupwise.data import LoadedTasks, load, on_disk
from groupwise.data.cursor import Cursor, _randoms, cursor_of, fingerprint
from groupwise.data.on_disk import DiskTasks, store_tasks
from groupwise.data.prompts import prepare
from groupwise.errors import DataError
from groupwise.records import Task

ROWS = [
    {"prompt": f"question {i % 90}\n{'é' * (i % 90 % 7)}", "answer": str(i % 3), "level": str(i)}
    for i in range(120)
]


def loaded(train: Any, streaming: str, **changes: Any) -> LoadedTasks:
    data = Data(train=train, streaming=streaming, **changes)  # type: ignore[arg-type]
    return load(data, seed=0, held_out=0, require_answers=True)


def said(notes: list[str]) -> list[str]:
    return [note for note in notes if not note.startswith("streaming")]


def same(train: Any, **changes: Any) -> tuple[LoadedTasks, LoadedTasks]:
    """In memory and streamed: equal in everything but where the tasks are."""
    found = loaded(train, "never", **changes), loaded(train, "always", **changes)
    memory, streamed = found
    assert isinstance(memory.train, list) and isinstance(streamed.train, DiskTasks)
    assert memory.train == list(streamed.train) and list(memory.eval) == list(streamed.eval)
    assert memory.notes == said(streamed.notes) and memory.weights == streamed.weights
    assert fingerprint(memory.train) == fingerprint(streamed.train)
    return found


@pytest.mark.parametrize("name", list(WRITERS))
def test_every_format_streams_the_same_tasks(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    memory, streamed = same(f"{tmp_path}/{name}", holdout_share=0.2, duplicates="drop")
    orders = [Cursor(found.train, seed=3).take(200) for found in (memory, streamed)]
    assert orders[0] == orders[1]
    assert any(note.startswith("streaming: ") for note in streamed.notes)


def mixture(folder: Path) -> dict[str, float]:
    for name, writer in (("a.jsonl", "data.jsonl"), ("b.parquet", "data.parquet")):
        WRITERS[writer](folder / name, [{**row, "prompt": name + row["prompt"]} for row in ROWS])
    return {f"{folder}/a.jsonl": 3.0, f"{folder}/b.parquet": 1.0}


def test_mixtures_and_evaluation(tmp_path: Path) -> None:
    mixed = mixture(tmp_path)
    WRITERS["data.csv"](tmp_path / "c.csv", ROWS[:20])
    WRITERS["data.csv"](tmp_path / "d.csv", [{**ROWS[0], "prompt": "other"}])
    held = (f"{tmp_path}/c.csv", f"{tmp_path}/d.csv")
    for found in same(mixed, eval=held, duplicates="drop"):
        assert [task.prompt for task in found.eval[:2]] == [ROWS[0]["prompt"], "other"]
        assert len(found.train) == 180 and {t.source for t in found.train} == {"a", "b"}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 150), st.integers(1, 60))
def test_a_position_goes_on_in_either_place(
    tmp_path_factory: pytest.TempPathFactory, before: int, after: int
) -> None:
    """A state is the same wherever tasks are, and goes on there with no row lost or seen twice."""
    folder = tmp_path_factory.mktemp("mixed")
    found = same(mixture(folder))
    cursors = [cursor_of(x.train, x.weights, 5, True) for x in (*found, *found)]
    drawn = [cursor.take(before) for cursor in cursors]
    assert all(each == drawn[0] for each in drawn)
    states = [json.loads(json.dumps(cursor.state())) for cursor in cursors]
    assert all(state == states[0] for state in states)
    fresh = [cursor_of(x.train, x.weights, 5, True) for x in found]
    fresh[0].restore(states[1])  # saved when streamed, continued in memory
    fresh[1].restore(states[0])
    following = cursors[0].take(after)
    assert fresh[0].take(after) == fresh[1].take(after) == following


def test_token_ids_and_odd_values_come_back(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "answer": decimal.Decimal("1.50"),
            "when": datetime.date(2025, 1, i + 1),
            "raw": b"\x00\xff",
            "deep": {"a": [1, None]},
        }
        for i in range(5)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    memory, streamed = same(f"{tmp_path}/x.parquet")
    ready = [prepare(x.train, tokenizer(), room=100) for x in (memory, streamed)]
    assert isinstance(ready[1].tasks, DiskTasks) and ready[0].tasks == list(ready[1].tasks)
    assert ready[1].tasks[-1] == ready[0].tasks[4] and len(ready[1].tasks[1].token_ids) > 5
    assert list(ready[1].tasks[1:4:2]) == ready[0].tasks[1:4:2]
    with pytest.raises(IndexError):
        ready[1].tasks[5]


def test_a_run_streams_to_the_same_bits(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "solution": str(a + b)}
        for a in range(9)
        for b in range(9)
    ]
    WRITERS["data.jsonl.gz"](tmp_path / "plus.jsonl.gz", rows)
    asked: dict[str, Any] = {
        "data__train": f"{tmp_path}/plus.jsonl.gz",
        "data__options": {},
        "data__holdout_share": 0.2,
    }
    run(tmp_path / "memory", steps=3, data__streaming="never", **asked)
    run(tmp_path / "mixed", steps=1, data__streaming="always", **asked)
    run(tmp_path / "mixed", steps=2, data__streaming="never", **asked)
    run(tmp_path / "mixed", steps=3, data__streaming="always", **asked)
    memory, mixed = left_behind(tmp_path / "memory"), left_behind(tmp_path / "mixed")
    assert memory["metrics"][-1] == mixed["metrics"][-1] and memory["values"] == mixed["values"]
    for name in (name for name in memory if name.endswith((".parquet", ".safetensors"))):
        assert memory[name] == mixed[name]


def test_auto_goes_by_size_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    WRITERS["data.jsonl"](tmp_path / "x.jsonl", ROWS)
    assert isinstance(loaded(f"{tmp_path}/x.jsonl", "auto").train, list)
    monkeypatch.setattr(on_disk, "IN_MEMORY", 5_000)
    found = loaded(f"{tmp_path}/x.jsonl", "auto").train
    assert isinstance(found, DiskTasks) and [t.columns["level"] for t in found] == [
        row["level"] for row in ROWS
    ]
    assert list(scratch.iterdir()) == []  # it has no name: nothing to clean up, even when killed


def test_rows_are_let_go_of_as_they_are_written() -> None:
    """No more than a few tasks are alive while thousands pass."""
    alive: list[int] = []

    class Counted(str):
        def __init__(self, text: str) -> None:
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    def tasks() -> Iterator[Task]:
        for number in range(3_000):
            assert len(alive) < 10
            yield Task(number, "q", source="s", columns={}, answer=number, grader=Counted("x"))

    made = DiskTasks(Task(t.id, t.prompt, t.answer) for t in tasks())
    assert len(made) == 3_000 and made[2_999].answer == 2_999


def test_a_malformed_row_far_behind_is_found_before_training(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        for number in range(1, 90_003):
            bad = number == 90_000
            file.write('{"prompt": "q' if bad else f'{{"prompt": "q{number}", "answer": "1"}}')
            file.write("\n")
    with pytest.raises(DataError, match=r"(?s)1 malformed of 90002 rows.*line 90000: no JSON, .*"):
        loaded(f"{tmp_path}/x.jsonl.gz", "always")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    WRITERS["data.jsonl"](tmp_path / "x.jsonl", ROWS)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(on_disk, "SPARE", 2**70)  # more than there is
    with pytest.raises(DataError, match=rf"does not fit into {tmp_path}.*Set TMPDIR"):
        loaded(f"{tmp_path}/x.jsonl", "always")
    monkeypatch.setattr(on_disk, "SPARE", 0)
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/none")
    with pytest.raises(DataError, match=r"none can't be written to .*TMPDIR"):
        loaded(f"{tmp_path}/x.jsonl", "always")


@pytest.mark.parametrize("seed", ["order/0/0", "order/1/maths/7"])
def test_orders_are_those_of_the_standard_library(seed: str) -> None:
    stream = random.Random(seed)
    assert _randoms(seed, 1000).tolist() == [stream.random() for _ in range(1000)]
    assert len(np.unique(_randoms(seed, 1000))) == 1000


def test_nothing_and_one() -> None:
    assert list(store_tasks([], "always")) == [] and store_tasks([], "auto") == []
    (one,) = store_tasks([Task(0, "q", token_ids=(1, 2**31))], "always")
    assert one.token_ids == (1, 2**31)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Peak of resident memory above a bare start, each in a process of its own."""
    script = Path(__file__).parents[2] / "benchmarks" / "data.py"
    sys.path.insert(0, str(script.parent))
    try:
        from data import write  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    write(tmp_path / "x.jsonl", 30_000, "jsonl", characters=1_600)
    found = {}
    for streaming in ("never", "always"):
        done = subprocess.run(
            [sys.executable, script, "--start", tmp_path / "x.jsonl", "--streaming", streaming],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(script.parents[1])},
            check=True,
        )
        found[streaming] = json.loads(done.stdout)
    assert found["never"]["order"] == found["always"]["order"]
    size = (tmp_path / "x.jsonl").stat().st_size / 2**20
    assert size > 45 and found["never"]["growth_mib"] > size
    assert found["always"]["growth_mib"] < 25
