"""Every format of data file: what is in it comes out, and what is wrong with it is named."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_writers import TABLES, WRITERS, lines, write_lines, write_saved
from task_files import read, refused

from groupwise.data.files import files_of, rows
from groupwise.errors import DataError

# Texts that separators, quotes, line ends and careless decoding would spoil.
ROWS = [
    {"prompt": 'a,"b"\nc\td', "answer": "007", "level": "1"},
    {"prompt": "é\u2028\u0085 ;", "answer": "true", "level": "2"},
    {"prompt": "x" * 200_000, "answer": "NA", "level": ""},
]


@pytest.mark.parametrize("name", list(WRITERS))
def test_every_format_gives_the_same_tasks(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    tasks = read(str(tmp_path / name), require_answers=True).tasks
    found = [{"prompt": t.prompt, "answer": t.answer, **t.columns} for t in tasks]
    assert found == ROWS and [task.id for task in tasks] == [0, 1, 2]


@pytest.mark.parametrize("name", TABLES)
def test_a_null_deep_in_a_table_is_named_with_its_row(tmp_path: Path, name: str) -> None:
    many = [{"prompt": f"q{i}", "answer": "1"} for i in range(5_000)]
    many[4_321]["answer"] = None  # type: ignore[assignment]
    WRITERS[name](tmp_path / name, many)
    message = refused(tmp_path / name, require_answers=True)
    assert "1 malformed of 5000 rows" in message
    assert "row 4321: 'answer' is empty (null)" in message and '"q4321"' in message
    many[4_321] |= {"answer": "1", "prompt": None}  # type: ignore[dict-item]
    other = tmp_path / f"other_{name}"
    WRITERS[name](other, many)
    assert "row 4321: 'prompt' is null, not a string" in refused(other)


@pytest.mark.parametrize(
    "name", [n for n in WRITERS if n not in ("data.jsonl", "data.csv", "DATA.TSV")]
)
def test_a_torn_file_is_no_shorter_file(tmp_path: Path, name: str) -> None:
    letters = random.Random(0)
    noise = [
        {"prompt": "".join(letters.choices("abcdefgh", k=40)), "answer": "1"} for _ in range(400)
    ]
    path = tmp_path / name
    WRITERS[name](path, noise)
    torn = path / "data-00001-of-00002.arrow" if path.is_dir() else path
    whole = torn.read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 8):
        torn.write_bytes(whole[:size])
        message = refused(path)
        assert str(path) in message
        assert any(words in message for words in ("again", "is no JSON", "no rows"))


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow", "data.feather"])
def test_flipped_bits_are_refused_or_harmless(tmp_path: Path, name: str) -> None:
    """Whatever a hostile file holds, the process lives and says which file it was."""
    stream, path = random.Random(1), tmp_path / name
    WRITERS[name](path, [{"prompt": f"q{i}", "answer": str(i)} for i in range(50)])
    whole = path.read_bytes()
    for _ in range(60):
        raw = bytearray(whole)
        for _ in range(3):
            raw[stream.randrange(len(raw))] ^= 1 << stream.randrange(8)
        path.write_bytes(raw)
        try:
            read(path)
        except DataError as error:
            assert str(path) in str(error)


def test_a_file_that_is_not_what_its_name_says(tmp_path: Path) -> None:
    for name in ("x.parquet", "x.arrow", "x.feather", "x.jsonl.gz", "x.jsonl.zst"):
        (tmp_path / name).write_bytes(b"prompt,answer\n1+1,2\n" * 50)
        assert "again" in refused(tmp_path / name)
    for name in ("y.parquet", "y.jsonl"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
        assert "git lfs pull" in refused(tmp_path / name)
    (tmp_path / "z.feather").write_bytes(b"FEA1" + bytes(100))
    assert "first version" in refused(tmp_path / "z.feather")


def test_malformed_json_names_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b",}\n')
    assert "line 3: no JSON, " in refused(path) and "at column 16" in refused(path)
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "a"},\n {"prompt" "b"}]')
    assert "at line 2, column 12" in refused(path)
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert "name it .jsonl" in refused(path)
    path.write_text('{"data": []}')
    assert "not a list of objects" in refused(path)
    path.write_text('[{"prompt": "a"}, 3]')
    assert "row 1: a JSON int instead of an object" in refused(path)
    path.write_text("[]")
    assert "no rows" in refused(path)
    (tmp_path / "deep.jsonl").write_text('{"prompt": ' + "[" * 100_000)
    assert "line 1: no JSON" in refused(tmp_path / "deep.jsonl")


def test_malformed_csv_names_the_line_where_a_row_starts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,answer\n"two\nlines",1\n\nb\nc,2,3\n')
    message = refused(path)
    assert "2 malformed of 3 rows" in message
    assert "line 5: 1 cell under 2 columns: b" in message and "line 6: 3 cells" in message
    path.write_text('prompt,answer\na,1\n"never closed,2\n')
    assert "behind line 2: unexpected end of data" in refused(path)
    path.write_text("prompt,prompt\na,b\n")
    assert "several columns 'prompt'" in refused(path)
    path.write_text("prompt;answer\na;b\n")
    assert "'prompt;answer'" in refused(path)  # shown as the nearest column
    path.write_bytes(b"prompt,answer\na,1\n\xe9,2\n")
    assert "line 3, is no UTF-8" in refused(path)


def test_broken_text_in_a_table_is_named(tmp_path: Path) -> None:
    broken = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"prompt": broken}), tmp_path / "x.parquet")
    message = refused(tmp_path / "x.parquet")
    assert "x.parquet can't be read behind its start" in message and "UTF8" in message
    two = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    with pa.ipc.new_stream(str(tmp_path / "two.arrow"), two.schema) as stream:
        stream.write_table(two)
    assert "several columns 'prompt'" in refused(tmp_path / "two.arrow")


@pytest.mark.parametrize("name", ["data.csv", "data.parquet", "data.jsonl"])
def test_a_missing_column_names_the_nearest(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, [{"promt": "a", "info": "x", "anser": "1"}] * 2)
    message = refused(tmp_path / name)
    assert "Set data.prompt_key" in message and "'promt'" in message
    message = refused(tmp_path / name, "promt", require_answers=True)
    assert "Set data.answer_key" in message and "'anser'" in message


def test_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, prompts in (("b.jsonl", "cd"), ("a.jsonl", "ab"), ("deep/c.jsonl", "e")):
        write_lines(tmp_path / name, [{"prompt": prompt} for prompt in prompts])
    tasks = read(f"{tmp_path}/*.jsonl").tasks
    assert [(task.id, task.prompt) for task in tasks] == list(enumerate("abcd"))
    assert [task.prompt for task in read(f"{tmp_path}/**/*.jsonl").tasks] == list("abcde")
    assert "No file fits" in refused(f"{tmp_path}/*.parquet")
    write_lines(tmp_path / "[odd].jsonl", [{"prompt": "z"}])  # a name, whatever it looks like
    assert [task.prompt for task in read(tmp_path / "[odd].jsonl").tasks] == ["z"]
    (tmp_path / "b.jsonl").write_text('{"prompt": "c"}\n{"promt": "d"}\n')
    message = refused(f"{tmp_path}/*.jsonl")  # the file among them is named
    assert "b.jsonl has 1 malformed of 2 rows" in message and "line 2" in message


def test_folders(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])
    assert f"such as {tmp_path}/*.jsonl" in refused(tmp_path)
    both = tmp_path / "both"
    both.mkdir()
    (both / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for split in ("train", "test"):
        write_saved(both / split, ROWS)
    assert f"Name one: {both}/test or {both}/train" in refused(both)
    assert len(read(str(both / "test")).tasks) == 3
    (both / "test" / "data-00001-of-00002.arrow").unlink()
    assert "lacks data-00001-of-00002.arrow" in refused(both / "test")
    (both / "test" / "state.json").write_text("{}")
    assert "lists no files" in refused(both / "test")


def test_tables_are_not_read_as_a_whole(tmp_path: Path) -> None:
    """The first rows come without the last ones being touched."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(ROWS) + b"\xff\n")
    found = rows(path)
    assert [next(found).place for _ in range(3)] == ["line 1", "line 2", "line 3"]
    assert "line 4, is no UTF-8" in str(next(found).error)


def test_answers_of_several_kinds_are_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    answers = ["1", "2", ["3"], None, 4]
    write_lines(path, [{"prompt": "q", "answer": answer} for answer in answers])
    (note,) = read(path).notes
    assert "text (line 1), list (line 3), number (line 5)" in note


def test_a_folder_of_files_is_found_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}])
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in files_of("*.jsonl")] == ["a.jsonl"]
