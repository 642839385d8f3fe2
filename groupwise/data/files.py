"""Rows of files: a small function for each format. Rows are read a few at a time."""

from __future__ import annotations

import csv
import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from groupwise.common.globs import matching_files
from groupwise.data.json_lists import NoList, TooLong, elements
from groupwise.data.unpacked_size import check_arrow, check_parquet, rows_at_once
from groupwise.errors import DataError, nearest
from groupwise.hub import fetch_data

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

MAX_LINE = 64 * 2**20  # bytes of a line: more is no row, but a packed bomb or no text at all
LFS = b"version https://git-lfs"  # what stands in the place of a file that Git LFS has not fetched
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # the last bytes of every whole Arrow stream


class FileRow(NamedTuple):
    place: str  # "line 7" of a text, from 1; "row 7" of a table, from 0
    values: dict[str, Any]  # by column; empty where the row is malformed
    why: str = ""  # what is wrong with it
    text: str = ""  # as it stands in the file
    error: DataError | None = None  # of a row that speaks against the whole file


def files_of(name: str) -> list[Path]:
    """Return the file of that name, the saved data set in that folder, or all files of a pattern.

    What is on a hub is fetched.

    Files of a pattern are sorted by name: the same order on every machine.
    """
    if name.startswith("hub:"):
        name = fetch_data(name).path
    path = Path(name).expanduser()
    if path.is_dir():
        _check_saved(path)
        return [path]
    if path.is_file():
        return [path]
    if glob.has_magic(name):
        files = [Path(each) for each in matching_files(str(path))]
        if not files:
            raise DataError(f"No file fits {name!r}. The working folder is {Path.cwd()}.")
        return files
    if path.is_symlink():
        raise DataError(f"{path} is a link that leads nowhere, or in a circle. Mend it.")
    beside = [f.name for f in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = f" {nearest(path.name, beside)}" if 0 < len(beside) <= 50 else ""
    raise DataError(f"There is no file {path}.{hint}")


def rows(path: Path) -> Iterator[FileRow]:
    """Yield all rows of a file, malformed ones with the reason; raise where it can't be read on."""
    read, place = _reader(path), "its start"
    if path.is_file():
        _check_fetched(path)
    try:
        for row in read(path):
            place = row.place
            yield row
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, behind {place}, is no UTF-8: {error.reason} at byte {error.start}. Convert "
            "its texts to UTF-8."
        ) from error
    except _unreadable() as error:
        said = str(error).strip().rstrip(".")
        raise DataError(
            f"{path} can't be read behind {place}: {said}. Fetch or write it again."
        ) from error


# --- texts ------------------------------------------------------------------------------------


def json_lines(path: Path) -> Iterator[FileRow]:
    for number, raw in _raw_lines(path):
        place = f"line {number}"
        try:
            line = _decoded(path, number, raw).strip()
        except DataError as error:
            if number == 1:  # another encoding, not a row that was damaged
                raise
            yield FileRow(place, {}, "no UTF-8", repr(raw), error)
            continue
        if not line:
            continue
        try:
            yield _object(place, json.loads(line), line)
        except json.JSONDecodeError as error:
            yield FileRow(
                place, {}, f"no JSON, {error.msg.removesuffix(' at')} at column {error.colno}", line
            )
        except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
            yield FileRow(place, {}, f"no JSON ({error})", line)


def json_list(path: Path) -> Iterator[FileRow]:
    number = -1
    try:
        with _opened(path) as file:
            for number, each in enumerate(elements(file, MAX_LINE)):
                yield _object(f"row {number}", each, "")
    except json.JSONDecodeError as error:
        hint = " It looks like JSON lines: name it .jsonl." if error.msg == "Extra data" else ""
        raise DataError(
            f"{path} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}.{hint}"
        ) from error
    except UnicodeDecodeError as error:
        raise _no_utf8(path, error.object, "", error) from error
    except NoList as error:
        raise DataError(
            f"{path} is a JSON {error.found}, not a list of objects. Write "
            '[{"prompt": ..., "answer": ...}, ...].'
        ) from error
    except TooLong as error:
        raise DataError(
            f"{path}, row {number + 1}, is longer than {MAX_LINE // 2**20} MiB, or does not end. "
            "Mend or delete it."
        ) from error
    except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} can't be read as JSON: {error}.") from error


def separated(path: Path, separator: str) -> Iterator[FileRow]:
    """Yield the rows of a CSV or TSV file; cells are texts, and whoever reads one may make a
    number.
    """
    csv.field_size_limit(MAX_LINE)  # the library's own limit is shorter than many solutions
    taken = 0  # letters of the row at hand: in quotes it may go over many lines

    def lines() -> Iterator[str]:
        nonlocal taken
        for number, line in _lines(path):
            taken += len(line)
            if taken > MAX_LINE:
                raise DataError(
                    f"{path}: the row that goes on in line {number} is longer than "
                    f"{MAX_LINE // 2**20} MiB. Close the quote that it begins with."
                )
            yield line

    reader = csv.reader(lines(), delimiter=separator, strict=True)
    header = next(reader, None)
    if header is None:
        return
    _check_names(path, header)
    before = reader.line_num
    taken = 0
    for cells in reader:
        taken = 0
        place, before = f"line {before + 1}", reader.line_num
        if not cells:
            continue
        nul = next((name for name, cell in zip(header, cells, strict=False) if "\0" in cell), None)
        if nul is not None:  # a torn file, or UTF-16
            yield FileRow(place, {}, f"a NUL byte in {nul!r}", separator.join(cells))
        elif len(cells) != len(header):
            why = f"{len(cells)} cell{'s' * (len(cells) != 1)} under {len(header)} columns"
            yield FileRow(place, {}, why, separator.join(cells))
        else:
            yield FileRow(place, dict(zip(header, cells, strict=True)))


def _object(place: str, found: Any, text: str) -> FileRow:
    if isinstance(found, dict):
        return FileRow(place, found, text=text)
    return FileRow(place, {}, f"a JSON {type(found).__name__} instead of an object", text)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, _decoded(path, number, raw)) for number, raw in _raw_lines(path))


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines, numbered from 1. Only line feeds end one: splitlines would cut prompts."""
    with _opened(path) as file:
        for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(raw) > MAX_LINE:
                raise DataError(
                    f"{path}, line {number}, is longer than {MAX_LINE // 2**20} MiB. A row has a "
                    "line of its own: mend or delete it."
                )
            yield number, raw


def _decoded(path: Path, number: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _no_utf8(path, raw, f", line {number},", error) from error


def _no_utf8(path: Path, raw: bytes, place: str, error: UnicodeDecodeError) -> DataError:
    wide = raw.startswith((b"\xff\xfe", b"\xfe\xff"))
    how = "It is UTF-16: convert it" if wide else "Convert the file"
    return DataError(
        f"{path}{place} is no UTF-8: {error.reason} at byte {error.start}. {how} to UTF-8."
    )


def _opened(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        import pyarrow as pa

        if not pa.Codec.is_available("zstd"):
            raise DataError(
                f"This pyarrow can't unpack {path}. Unpack it (zstd -d), or install a pyarrow "
                "with zstd."
            )
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))
    return path.open("rb")


# --- tables -----------------------------------------------------------------------------------


def parquet(path: Path) -> Iterator[FileRow]:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    # Column chunks are read through a buffer, not as a whole: a row group may be all of the file.
    buffered = {"buffer_size": 2**20, "pre_buffer": False}
    with pq.ParquetFile(path, **buffered) as file:
        _check_names(path, file.schema_arrow.names)
        few, listed = check_parquet(path, file)
    with pq.ParquetFile(path, read_dictionary=listed, **buffered) as file:
        yield from _of_batches(file.iter_batches(few))


def arrow(path: Path) -> Iterator[FileRow]:
    """Read Arrow's file format (also Feather's) or its stream format, as the `datasets` library
    has.
    """
    import pyarrow as pa

    with pa.OSFile(str(path)) as source:  # not mapped: a batch at a time is in memory
        head = source.read(6)
        if head[:4] == b"FEA1":
            raise DataError(f"{path} is of Feather's first version. Write it again with pyarrow.")
        if head == b"ARROW1":
            source.seek(8)
            check_arrow(path, source)
            file = pa.ipc.open_file(source)
            _check_names(path, file.schema.names)
            yield from _of_batches(file.get_batch(i) for i in range(file.num_record_batches))
            return
        # A stream that is cut between two batches reads like a shorter one.
        source.seek(max(0, source.size() - len(END_OF_STREAM)))
        if source.read() != END_OF_STREAM:
            raise DataError(f"{path} is cut off, or no Arrow file. Fetch or write it again.")
        source.seek(0)
        check_arrow(path, source)
        source.seek(0)
        stream = pa.ipc.open_stream(source)
        _check_names(path, stream.schema.names)
        yield from _of_batches(stream)


def saved(folder: Path) -> Iterator[FileRow]:
    """Read a folder that the `datasets` library saved: Arrow streams, listed in state.json."""
    number = 0
    for shard in saved_shards(folder):
        for row in arrow(shard):
            yield row._replace(place=f"row {number}")
            number += 1


def saved_shards(folder: Path) -> list[Path]:
    state = folder / "state.json"
    try:
        shards = [
            folder / each["filename"] for each in json.loads(state.read_bytes())["_data_files"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{state} lists no files ({error!r}). Save the data set again.") from error
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"{folder} lacks {shard.name}, which state.json lists. Fetch it again.")
    return shards


def _of_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[FileRow]:
    number = 0
    for batch in batches:
        batch.validate(full=True)  # offsets that lead out of a torn file would crash the process
        few = rows_at_once(batch)
        for start in range(0, batch.num_rows, few):
            for values in batch.slice(start, few).to_pylist():
                yield FileRow(f"row {number}", values)
                number += 1


# --- which ------------------------------------------------------------------------------------

TEXTS: dict[str, Callable[[Path], Iterator[FileRow]]] = {
    ".jsonl": json_lines,
    ".json": json_list,
    ".csv": lambda path: separated(path, ","),
    ".tsv": lambda path: separated(path, "\t"),
}
TABLES: dict[str, Callable[[Path], Iterator[FileRow]]] = {
    ".parquet": parquet,
    ".arrow": arrow,
    ".feather": arrow,
}
PACKED = (".gz", ".zst")  # texts may be
KNOWN = f"{', '.join((*TEXTS, *TABLES))} (texts also {' or '.join(PACKED)})"


def format_of(path: Path) -> str:
    """Return the suffix that tells the format, without that of the compression."""
    name = path.name.lower()
    for packed in PACKED:
        if name.endswith(packed) and Path(name.removesuffix(packed)).suffix in TEXTS:
            name = name.removesuffix(packed)
    return Path(name).suffix


def _reader(path: Path) -> Callable[[Path], Iterator[FileRow]]:
    if path.is_dir():
        return saved
    suffix = format_of(path)
    if suffix not in (*TEXTS, *TABLES):
        raise DataError(
            f"{path} is none of {KNOWN}. Write its rows as JSON lines: one object a line."
        )
    return {**TEXTS, **TABLES}[suffix]


def _check_saved(folder: Path) -> None:
    if (folder / "state.json").is_file():
        return
    splits = folder / "dataset_dict.json"
    if splits.is_file():
        within = sorted(each.parent.name for each in folder.glob("*/state.json"))
        named = " or ".join(f"{folder}/{each}" for each in within)
        raise DataError(f"{folder} is a folder of several data sets. Name one: {named}.")
    suffixes = sorted({format_of(each) for each in folder.iterdir()} & {*TEXTS, *TABLES})
    which = f"such as {folder}/*{suffixes[0]}" if suffixes else f"of one of the kinds {KNOWN}"
    raise DataError(f"{folder} is a folder. Name a file in it, or several by a pattern, {which}.")


def _check_fetched(path: Path) -> None:
    try:
        with path.open("rb") as file:
            head = file.read(len(LFS))
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}.") from error
    if head == LFS:
        raise DataError(f"{path} is a pointer of Git LFS, not the data. Run `git lfs pull` there.")


def _check_names(path: Path, names: Sequence[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise DataError(f"{path} has several columns {twice[0]!r}. Rename all but one of them.")


def _unreadable() -> tuple[type[Exception], ...]:
    """List what the libraries raise for files that are torn, or are not what their name says."""
    import pyarrow as pa

    return (OSError, EOFError, zlib.error, csv.Error, pa.ArrowException)
