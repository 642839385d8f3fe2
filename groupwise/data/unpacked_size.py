"""Limits on the unpacked size of a packed table: known before it is unpacked, refused if absurd.

A table is unpacked in pieces that its writer chose, whole. A file of some kilobytes can say that
the same long text stands in every row, or pack gigabytes of one letter.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

AT_ONCE = 1024  # rows that are in memory as Python objects, where they are short
BYTES_AT_ONCE = 2**26  # of rows that are not
MOST, RATIO = 2**30, 100  # bytes of a piece; what no text that somebody wrote is packed by
TEXTS = ("STRING", "JSON", "NONE")  # logical types of Parquet


def rows_at_once(batch: pa.RecordBatch) -> int:
    """Return how many rows to turn into objects together.

    All of them have the batch's size at most, unless they name texts by numbers: then each can.
    """
    size = max(1, batch.get_total_buffer_size())
    named = any("dictionary<" in str(kind) for kind in batch.schema.types)
    share = size if named else size // max(1, batch.num_rows)
    return max(1, min(AT_ONCE, BYTES_AT_ONCE // max(1, share)))


def check_parquet(path: Path, file: Any) -> tuple[int, list[str]]:
    """Refuse row groups that unpack to absurdly much.

    Return how many rows to read at once, and which columns to keep as they are stored: a number a
    row and each text once. Written out, a long text of a short list would stand in every row.
    What the file says of single columns is not looked at: where it is damaged, pyarrow ends the
    process.
    """
    packed, rows, largest = path.stat().st_size, AT_ONCE, 0
    for group in map(file.metadata.row_group, range(file.metadata.num_row_groups)):
        _check(path, packed, group.total_byte_size)
        rows = min(rows, BYTES_AT_ONCE * max(1, group.num_rows) // max(1, group.total_byte_size))
        largest = max(largest, group.total_byte_size)
    columns = [file.schema.column(i) for i in range(len(file.schema))]
    texts = [
        each.path
        for each in columns
        if each.physical_type == "BYTE_ARRAY" and each.logical_type.type in TEXTS
    ]
    bomb = largest * AT_ONCE > MOST and _longest_listed(path, texts) * AT_ONCE > MOST
    return max(1, rows), texts if bomb else []


def _longest_listed(path: Path, texts: list[str]) -> int:
    """Return the bytes of the longest text that columns list once and rows name by its number."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    longest = 0
    with pq.ParquetFile(path, read_dictionary=texts, pre_buffer=False) as file:
        for index in range(file.metadata.num_row_groups):
            for batch in file.iter_batches(1, row_groups=[index]):
                longest = max([longest, *map(_longest, batch.columns)])
                break  # a list stands in front of all rows that name its texts
    return longest


def _longest(array: Any) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    kind = array.type
    if pa.types.is_dictionary(kind):
        return pc.max(pc.binary_length(array.dictionary)).as_py() or 0
    if pa.types.is_struct(kind):
        return max((_longest(array.field(i)) for i in range(kind.num_fields)), default=0)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _longest(array.values)
    return 0


def check_arrow(path: Path, source: pa.NativeFile) -> None:
    """Refuse packed batches that unpack to absurdly much; the source stands at the first."""
    import pyarrow as pa

    while True:
        try:
            message = pa.ipc.read_message(source)
        except (EOFError, pa.ArrowInvalid):  # the end, or what the reader itself refuses
            return
        try:
            _check(path, len(message.body or b""), unpacked_bytes(message.metadata, message.body))
        except (struct.error, TypeError) as error:
            raise DataError(
                f"{path} can't be read: a batch is damaged ({error}). Fetch or write it again."
            ) from error


def unpacked_bytes(head: Any, body: Any) -> int:
    """Return the unpacked size that the buffers of a packed batch declare; 0 for any other message.

    The head is a flatbuffer: tables of fields, each field found through a table of offsets. Every
    packed buffer begins with its length when unpacked.
    """
    data = bytes(head)

    def field(table: int, number: int) -> int:
        offsets = table - struct.unpack_from("<i", data, table)[0]
        size = struct.unpack_from("<H", data, offsets)[0]
        at = 4 + 2 * number
        found = struct.unpack_from("<H", data, offsets + at)[0] if at < size else 0
        return table + found if found else 0

    def followed(at: int) -> int:
        return at + struct.unpack_from("<I", data, at)[0]

    message = followed(0)
    kind, header = field(message, 1), field(message, 2)
    if not kind or not header or data[kind] not in (DICTIONARY, BATCH):
        return 0
    batch = followed(header)
    if data[kind] == DICTIONARY:
        inner = field(batch, 1)
        if not inner:
            return 0
        batch = followed(inner)
    listed = field(batch, 2)
    if not listed or not field(batch, 3):  # the second: how it is packed
        return 0
    start = followed(listed)
    total = 0
    for number in range(struct.unpack_from("<I", data, start)[0]):
        offset, length = struct.unpack_from("<qq", data, start + 4 + 16 * number)
        if length >= 8:
            total += max(length, struct.unpack_from("<q", body, offset)[0])
    return total


DICTIONARY, BATCH = 2, 3  # kinds of messages


def _check(path: Path, packed: int, unpacked: int) -> None:
    if unpacked > max(MOST, RATIO * packed):
        raise DataError(
            f"{path} unpacks {packed:,} bytes to {unpacked:,}, more than {RATIO} times as much, as "
            "no text does that somebody wrote: it is damaged, or made to fill the memory. Write "
            "its rows as JSON lines if it is neither."
        )
