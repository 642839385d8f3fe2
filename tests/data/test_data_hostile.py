"""Files that are torn, mislabelled or made to hurt: refused in words, with the place, at once."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from data_writers import TABLES, WRITERS
from task_files import read, refused

from groupwise import load_config
from groupwise.config import Data
from groupwise.data import files, json_lists, load, unpacked_size
from groupwise.data.files import files_of
from groupwise.errors import DataError

TEXTS = tuple(name for name in WRITERS if name not in TABLES)
LINES = ("data.jsonl", "data.jsonl.gz", "data.jsonl.zst")
ROWS = [{"prompt": f"q{i}", "answer": str(i)} for i in range(4)]


def pack(name: str, raw: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(raw)
    return pa.compress(raw, codec="zstd", asbytes=True) if name.endswith(".zst") else raw


def written(path: Path, raw: bytes) -> Path:
    path.write_bytes(pack(path.name, raw))
    return path


@pytest.mark.parametrize("name", list(WRITERS))
def test_nothing_in_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "saved":
        path.mkdir()
        assert f"{path} is a folder. Name a file in it" in refused(path)
        (path / "state.json").write_text('{"_data_files": []}')
        assert f"{path} has no rows" in refused(path)
        return
    path.write_bytes(b"")
    message = refused(path)  # a list of JSON and tables are torn then, texts are empty
    assert str(path) in message
    if name in (*LINES, "data.csv"):
        assert "has no rows" in message


@pytest.mark.parametrize("name", list(WRITERS))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path: Path, name: str, share: float) -> None:
    path = tmp_path / name
    stream = random.Random(0)  # rows that no compression makes small
    rows = [{"prompt": stream.randbytes(40).hex(), "answer": str(i)} for i in range(500)]
    WRITERS[name](path, rows)
    torn = path / "data-00001-of-00002.arrow" if name == "saved" else path
    raw = torn.read_bytes()
    cut = int(len(raw) * share)
    if name in ("data.jsonl", "data.csv", "DATA.TSV"):  # inside a row, not between two
        cut = raw.rindex(b"\n", 0, cut) + 20
    torn.write_bytes(raw[:cut])
    assert str(path) in refused(path, require_answers=True)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_another_encoding_is_named_with_line_and_byte(
    tmp_path: Path, name: str, encoding: str
) -> None:
    comma = "\t" if "TSV" in name else ","
    if ".json" in name and ".jsonl" not in name:
        text = '[{"prompt": "ok"},\n{"prompt": "é"}]'
    elif "jsonl" in name:
        text = '{"prompt": "ok"}\n{"prompt": "é"}\n'
    else:
        text = f"prompt{comma}answer\nok{comma}1\né{comma}2\n"
    message = refused(written(tmp_path / name, text.encode(encoding)))
    assert "is no UTF-8" in message and "at byte" in message
    assert ("It is UTF-16: convert it" in message) == (encoding == "utf-16")
    if encoding == "latin-1" and "[" not in text:
        assert f"line {3 if 'prompt' + comma in text else 2}" in message


@pytest.mark.parametrize("name", ["data.csv", "DATA.TSV"])
def test_a_nul_byte_in_a_cell_is_named_with_line_and_column(tmp_path: Path, name: str) -> None:
    comma = "," if name == "data.csv" else "\t"
    raw = f"prompt{comma}answer\nok{comma}1\nq\0{comma}2\n".encode()
    assert "line 3: a NUL byte in 'prompt'" in refused(written(tmp_path / name, raw))


@pytest.mark.parametrize("name", LINES)
def test_nul_bytes_among_json_are_named_with_line_and_column(tmp_path: Path, name: str) -> None:
    raw = b'{"prompt": "ok"}\n{"prompt": "a\0b"}\n\0\0\0\n'
    message = refused(written(tmp_path / name, raw))
    assert "line 2: no JSON, Invalid control character at column 14" in message
    assert "line 3: no JSON, Expecting value at column 1" in message
    assert "\0" not in message and r"a\x00b" in message  # shown, not sent to the terminal


@pytest.mark.parametrize("name", [*LINES, "data.csv"])
def test_a_line_without_end_is_not_read_to_its_end(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packed file of a few kB can hold a line of many GB: reading stops at the limit."""
    monkeypatch.setattr(files, "MAX_LINE", 100_000)
    head = b"prompt,answer\nq,1\n" if name == "data.csv" else b'{"prompt": "q"}\n'
    line = 3 if name == "data.csv" else 2
    path = written(tmp_path / name, head + b" " * 5_000_000)
    taken = 0
    opened = files._opened

    def counted(path: Path) -> Any:
        nonlocal taken
        file = opened(path)
        readline = file.readline

        class Counted(io.BytesIO):
            def readline(self, size: int | None = -1) -> bytes:
                nonlocal taken
                found = readline(-1 if size is None else size)
                taken += len(found)
                return found

        return Counted()

    monkeypatch.setattr(files, "_opened", counted)
    assert f"line {line}, is longer than" in refused(path)
    assert taken < 110_000


def test_the_limit_of_a_line_is_far_above_a_row(tmp_path: Path) -> None:
    assert files.MAX_LINE == 64 * 2**20
    path = written(tmp_path / "x.jsonl", json.dumps({"prompt": "x" * 5_000_000}).encode())
    assert len(read(path).tasks[0].prompt) == 5_000_000


def test_a_row_of_a_packed_list_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list itself has none: it is never in memory as a whole."""
    monkeypatch.setattr(files, "MAX_LINE", 2**20)
    path = written(tmp_path / "x.json.gz", b'[{"prompt": "q"}, [' + b"[]," * 2**20)
    assert path.stat().st_size < 2**16
    assert "row 1, is longer than 1 MiB, or does not end" in refused(path)
    spaces = written(tmp_path / "y.json.gz", b"[" + b" " * 2**22 + b'{"prompt": "q"}]')
    assert read(spaces).tasks[0].prompt == "q"


def test_a_list_is_read_row_by_row(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"é{i}\n" * (i % 50), "answer": i, "n": [1.5e3, -2, None]} for i in range(9000)
    ]
    path = written(tmp_path / "x.json", json.dumps(rows, ensure_ascii=False, indent=1).encode())
    assert path.stat().st_size > json_lists.CHUNK
    assert [row.values for row in files.rows(path)] == rows
    assert next(files.rows(path)).place == "row 0"
    broken = written(
        tmp_path / "y.json", path.read_bytes().replace(b'"answer": 8000', b'"answer" 8')
    )
    line = broken.read_bytes()[: broken.read_bytes().index(b'"answer" 8')].count(b"\n") + 1
    with pytest.raises(DataError, match=rf"Expecting ':' delimiter at line {line}, column 12"):
        list(files.rows(broken))
    for text in ("[1, 2", "[1 2]", "[1],", "[", "", "[,]", "[1,]"):
        with pytest.raises(DataError, match="is no JSON"):
            list(files.rows(written(tmp_path / "z.json", text.encode())))


def test_a_quote_that_is_never_closed_is_not_read_to_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 10_000)
    path = written(tmp_path / "x.csv", b'prompt,answer\nq,1\n"q' + b"xxxxxxxx\n" * 100_000)
    assert "goes on in line 1113 is longer than" in refused(path)


@pytest.mark.parametrize("nested", [False, True])
def test_a_long_text_in_every_row_is_in_memory_once(
    tmp_path: Path, nested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 rows of 4 MiB in a file of kilobytes: a few at a time become objects."""
    long = pa.DictionaryArray.from_arrays(pa.array([0] * 2000, pa.int32()), ["x" * 2**22])
    column = pa.ListArray.from_arrays(pa.array(range(2001), pa.int32()), long) if nested else long
    path = tmp_path / "x.parquet"
    table = pa.table({"prompt": column})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 20_000
    before = pa.total_allocated_bytes()
    for number, row in enumerate(files.rows(path)):
        assert len(row.values["prompt"][0] if nested else row.values["prompt"]) == 2**22 or nested
        assert pa.total_allocated_bytes() - before < 2**27
        if number == 40:
            break


def test_batches_that_unpack_to_absurdly_much_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked_size, "MOST", 2**20)
    table = pa.table({"prompt": ["x" * 2**16] * 100})
    for name in ("x.feather", "x.parquet", "x.arrow"):
        path = tmp_path / name
        if name == "x.feather":
            feather.write_feather(table, str(path), compression="zstd")
        elif name == "x.parquet":
            pq.write_table(table, path, compression="zstd", use_dictionary=False)
        else:
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.ipc.new_stream(str(path), table.schema, options=options) as stream:
                stream.write_table(table)
        assert "more than 100 times as much" in refused(path)


@pytest.mark.parametrize("name", [*LINES, "data.json"])
@pytest.mark.parametrize(
    "bomb", ["[" * 200_000, '{"a":' * 200_000, f'{{"prompt": {"9" * 5_000}}}', '{"a": [' * 999]
)
def test_nested_and_endless_values(tmp_path: Path, name: str, bomb: str) -> None:
    began = time.process_time()
    message = refused(written(tmp_path / name, bomb.encode()))
    assert str(tmp_path / name) in message and len(message) < 2_000
    assert time.process_time() - began < 5
    if name in LINES:
        assert "line 1: no JSON" in message


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_mixed_types_in_a_column_are_named(tmp_path: Path, name: str) -> None:
    rows: list[Any] = [*ROWS, {"prompt": 7}, {"prompt": {"a": 1}}, {"prompt": [1]}, {"prompt": ""}]
    WRITERS[name](tmp_path / name, rows)
    message = refused(tmp_path / name)
    first = "line 5" if name == "data.jsonl" else "row 4"
    assert "4 malformed of 8 rows" in message
    assert f"{first}: 'prompt' is of type int, not a string or a list of messages" in message
    assert "'prompt' is of type dict" in message and "'prompt' is empty" in message
    assert "a message in 'prompt' that is no object with a role" in message


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow", "data.csv", "data.jsonl"])
def test_a_null_in_row_90000_is_found_and_named(tmp_path: Path, name: str) -> None:
    count, at = 90_010, 90_000
    rows: list[Any] = [{"prompt": f"q{i}", "answer": "1"} for i in range(count)]
    rows[at]["answer"] = None
    if name == "data.parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
    elif name == "data.arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(tmp_path / name), table.schema) as stream:
            stream.write_table(table, max_chunksize=7_000)
    else:
        WRITERS[name](tmp_path / name, rows)
    place = {"data.csv": f"line {at + 2}", "data.jsonl": f"line {at + 1}"}.get(name, f"row {at}")
    message = refused(tmp_path / name, require_answers=True)
    assert f"1 malformed of {count} rows" in message and f"{place}: 'answer' is empty" in message


def test_columns_of_one_name(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("prompt,answer,prompt\na,1,b\n")
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pa.ipc.new_stream(str(tmp_path / "x.arrow"), table.schema) as stream:
        stream.write_table(table)
    pq.write_table(table, tmp_path / "x.parquet")
    for name in ("x.csv", "x.arrow", "x.parquet"):
        assert f"{name} has several columns 'prompt'. Rename" in refused(tmp_path / name)


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_column_that_is_not_there(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, [{"instruction": "q", "output": "1"}] * 3)
    message = refused(tmp_path / name, "instructon")
    assert "has a column 'instructon'. Set data.prompt_key" in message
    assert "Did you mean 'instruction'" in message


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_a_table_that_is_not_apart_by_commas(tmp_path: Path, sign: str) -> None:
    written(tmp_path / "x.csv", f"question{sign}answer\n1+1?{sign}2\n".encode())
    assert f"its columns seem to be apart by {sign!r}. Save it with" in refused(tmp_path / "x.csv")


def test_folders_links_and_patterns(tmp_path: Path) -> None:
    WRITERS["data.jsonl"](tmp_path / "x.jsonl", ROWS)
    assert "is a folder. Name a file in it, or several by a pattern" in refused(tmp_path)
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    assert "loop.jsonl is a link that leads nowhere, or in a circle" in refused(loop)
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "none")
    assert "leads nowhere" in refused(tmp_path / "gone.jsonl")
    assert "No file fits" in refused(tmp_path / "*.parquet")
    assert "There is no file" in refused(tmp_path / "y.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")  # reading it would wait for ever
    assert "There is no file" in refused(tmp_path / "pipe.jsonl")
    assert files_of(f"{tmp_path}/*.jsonl") == [tmp_path / "x.jsonl"]


def test_links_in_circles_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two links doubles the paths at every step: there would be 2^40 of them."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / ".hidden").mkdir()
    for folder in (tmp_path, tmp_path / "a", inner, tmp_path / ".hidden"):
        WRITERS["data.jsonl"](folder / "x.jsonl", ROWS)
    for name in ("one", "two"):
        (inner / name).symlink_to(tmp_path)
    (tmp_path / "again.jsonl").symlink_to(tmp_path / "x.jsonl")  # the same file: read once
    began = time.process_time()
    found = [tmp_path / name for name in ("a/b/x.jsonl", "a/x.jsonl", "again.jsonl")]
    assert files_of(f"{tmp_path}/**/*.jsonl") == found
    assert files_of(f"{tmp_path}/**/b/*.jsonl") == found[:1]
    (tmp_path / "c.toml").write_text('data.train = "**/*.jsonl"')
    data = load_config(tmp_path / "c.toml").data
    assert len(load(data, seed=0, held_out=0).train) == 12
    assert time.process_time() - began < 5
    monkeypatch.chdir(tmp_path / "a")
    assert files_of("**/*.jsonl") == [Path("b/x.jsonl"), Path("x.jsonl")]
    assert files_of("../*/x.jsonl") == [Path("../a/x.jsonl")]


def test_bombs_end_at_the_edge_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many short lines in a small file: they go to the disk, and stop before it is full."""
    from groupwise.data import on_disk

    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "q", "answer": "1"}\n' * 200_000))
    assert path.stat().st_size < 50_000
    read_rows = 0

    def rows(path: Path) -> Iterator[files.FileRow]:
        nonlocal read_rows
        for row in files.json_lines(path):
            read_rows += 1
            yield row

    monkeypatch.setitem(files.TEXTS, ".jsonl", rows)
    monkeypatch.setattr(on_disk, "IN_MEMORY", 2**18)
    monkeypatch.setattr(on_disk, "LOOK", 2**18)
    free = iter([2**40, 2**40, 0])
    usage = type("Usage", (), {"free": property(lambda self: next(free))})
    monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda folder: usage())
    with pytest.raises(DataError, match="does not fit"):
        load(Data(train=str(path)), seed=0, held_out=0)
    assert read_rows < 30_000
