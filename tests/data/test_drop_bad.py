"""`data.drop_bad`: malformed rows are left out, counted and told; else the file is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cold_start
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from runs import left_behind

from groupwise.config import Data, load
from groupwise.data import load as load_data
from groupwise.data.sources import LoadedTasks
from groupwise.errors import DataError, RewardError
from groupwise.prepare.setup import check_data
from groupwise.runfiles.folder import RunFolder

GOOD: list[dict[str, Any]] = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(1, 6) for b in range(1, 6)
]


def jsonl(path: Path, *lines: Any) -> str:
    raw = [x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return str(path)


def loaded(train: str, **changes: Any) -> LoadedTasks:
    return load_data(Data(train=train, **changes), seed=0, held_out=0, require_answers=True)


BAD = [b"{nonsense", b'{"answer": "3"}', b'{"prompt": "", "answer": "1"}', b'"text"',
       b'{"prompt": "1+2=", "answer": "\xff"}', b'{"prompt": "1+2=", "answer": null}']  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("streaming", ["never", "always"])
def test_a_bad_row_of_json_lines(bad: bytes, streaming: str, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *GOOD[:3], bad, *GOOD[3:])
    with pytest.raises(DataError):
        loaded(path, streaming=streaming)
    found = loaded(path, streaming=streaming, drop_bad=True)
    assert [task.prompt for task in found.train] == [row["prompt"] for row in GOOD]
    # A row keeps its number, whatever is left out before it.
    assert [task.id for task in found.train] == [n for n in range(26) if n != 3]
    assert found.dropped == {path: 1}
    (note,) = [note for note in found.notes if "drop_bad" in note]
    assert "1 of 26 rows" in note and "line 4: " in note


def test_the_refusal_names_the_setting(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *GOOD, *BAD[:3])
    with pytest.raises(DataError, match=r"or leave them out: data.drop_bad=true"):
        loaded(path)
    (note,) = [n for n in loaded(path, drop_bad=True).notes if "drop_bad" in n]
    assert "line 26: no JSON" in note and "line 28: 'prompt' is empty" in note
    many = jsonl(tmp_path / "many.jsonl", *GOOD, *[b"{"] * 40)
    (note,) = [n for n in loaded(many, drop_bad=True).notes if "drop_bad" in n]
    assert "40 of 65 rows" in note and "and 35 more" in note


def test_a_bad_first_row_does_not_decide_how_the_others_are_read(tmp_path: Path) -> None:
    rows = [{"question": row["prompt"], "answer": row["answer"]} for row in GOOD]
    path = jsonl(tmp_path / "rows.jsonl", {"answer": "3"}, *rows)
    assert len(loaded(path, drop_bad=True).train) == 25


def test_rows_that_are_all_bad_are_a_mistake_elsewhere(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", *({"promt": "1+2=", "answer": "3"} for _ in range(3)))
    with pytest.raises(
        DataError, match=r"No row of .* has a column 'prompt'.*Did you mean 'promt'"
    ):
        loaded(path, drop_bad=True)
    path = jsonl(tmp_path / "none.jsonl", *[b"{"] * 3)
    with pytest.raises(DataError, match="3 malformed of 3 rows") as refused:
        loaded(path, drop_bad=True)
    assert "drop_bad" not in str(refused.value)


def test_tables(tmp_path: Path) -> None:
    lines = ["prompt,answer", *(f"{x['prompt']},{x['answer']}" for x in GOOD), "1+1=", ",2"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    table = pa.Table.from_pylist([*GOOD, {"prompt": None, "answer": "1"}])
    pq.write_table(table, tmp_path / "rows.parquet")
    for name, bad in (("rows.csv", 2), ("rows.parquet", 1)):
        with pytest.raises(DataError, match="malformed"):
            loaded(str(tmp_path / name))
        found = loaded(str(tmp_path / name), drop_bad=True)
        assert len(found.train) == 25 and found.dropped == {str(tmp_path / name): bad}


def test_numbers_do_not_move_between_files_of_a_pattern(tmp_path: Path) -> None:
    jsonl(tmp_path / "a.jsonl", *GOOD[:3], b"{")
    jsonl(tmp_path / "b.jsonl", *GOOD[3:6])
    found = loaded(str(tmp_path / "*.jsonl"), drop_bad=True)
    assert [task.id for task in found.train] == [0, 1, 2, 4, 5, 6]


def settings(train: str, held: str = "", **changes: Any) -> dict[str, Any]:
    return {"data.train": train, "data.eval": held, "reward.parts": {"number": 1.0}, **changes}


def test_rows_that_the_reward_can_not_grade(tmp_path: Path) -> None:
    odd = {"prompt": "many?", "answer": "several"}
    train = jsonl(tmp_path / "train.jsonl", *GOOD[:20], odd)
    held = jsonl(tmp_path / "held.jsonl", odd, *GOOD[20:])
    with pytest.raises(RewardError, match=r"leave them out with data.drop_bad=true"):
        check_data(load(settings(train, held)))
    found = check_data(load(settings(train, held, **{"data.drop_bad": True})))
    assert (len(found.train), len(found.held_out)) == (20, 5)
    assert found.dropped == {"data.train": 1, "data.eval": 1}
    assert any("row 20: the answer 'several' holds no number" in note for note in found.notes)
    words = jsonl(tmp_path / "words.jsonl", odd, odd)
    with pytest.raises(RewardError, match="can't grade 2 of 2 tasks"):
        check_data(load(settings(words, **{"data.drop_bad": True})))


def test_a_run_says_records_and_repeats_what_it_left_out(tmp_path: Path) -> None:
    model = cold_start.make(tmp_path / "cold")
    train = jsonl(tmp_path / "train.jsonl", b"{", *GOOD[:20])
    held = jsonl(tmp_path / "held.jsonl", *GOOD[20:], b"{")
    own = {"data__train": train, "data__eval": held, "data__drop_bad": True, "eval__tasks": 4}
    whole, twice = tmp_path / "whole", tmp_path / "twice"
    cold_start.run_from(model, whole, **own, steps=4)
    assert RunFolder(whole).read_manifest()["dropped_rows"] == {train: 1, held: 1}
    for steps in (2, 4):
        cold_start.run_from(model, twice, **own, steps=steps)
    assert left_behind(twice) == left_behind(whole)
