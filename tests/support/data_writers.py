"""Rows written in every format of data file, as other tools write them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

Rows = Sequence[dict[str, Any]]


def lines(rows: Rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_lines(path: Path, rows: Rows) -> None:
    path.write_bytes(lines(rows))


def write_gzip(path: Path, rows: Rows) -> None:
    path.write_bytes(gzip.compress(lines(rows)))


def write_zstd(path: Path, rows: Rows) -> None:
    packed = [pa.compress(lines([row]), codec="zstd", asbytes=True) for row in rows]
    path.write_bytes(b"".join(packed))  # several frames, as parallel packers write them


def write_list(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(rows, indent=1))


def write_csv(path: Path, rows: Rows, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_tsv(path: Path, rows: Rows) -> None:
    write_csv(path, rows, "\t")


def write_parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)


def write_arrow(path: Path, rows: Rows) -> None:
    table = pa.Table.from_pylist(list(rows))
    with pa.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table, max_chunksize=2)


def write_feather(path: Path, rows: Rows) -> None:
    feather.write_feather(pa.Table.from_pylist(list(rows)), str(path))


def write_saved(folder: Path, rows: Rows) -> None:
    """As `Dataset.save_to_disk` does, in two shards."""
    folder.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    write_arrow(folder / names[0], rows[:1])
    write_arrow(folder / names[1], rows[1:])
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "data.jsonl": write_lines,
    "data.jsonl.gz": write_gzip,
    "data.jsonl.zst": write_zstd,
    "data.json": write_list,
    "data.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "data.csv": write_csv,
    "DATA.TSV": write_tsv,
    "data.parquet": write_parquet,
    "data.arrow": write_arrow,
    "data.feather": write_feather,
    "saved": write_saved,
}
TABLES = ("data.parquet", "data.arrow", "data.feather", "saved")
