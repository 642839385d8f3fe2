"""What large data costs: seconds and peak memory of a start, in memory and streamed from disk.

    python benchmarks/data.py --rows 300000 [--format jsonl|jsonl.gz|csv|parquet|arrow]

Each way runs in a process of its own, which loads the tasks, makes the cursor and draws 1,000.
The growth is the peak of the resident memory above what the process had before it loaded.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORMATS = ("jsonl", "jsonl.gz", "csv", "parquet", "arrow")


def write(path: Path, rows: int, form: str, characters: int = 400) -> None:
    stream = random.Random(0)
    words = ["".join(stream.choices("abcdefghij", k=7)) for _ in range(1000)]
    made = (
        {"prompt": f"{i}: {' '.join(stream.choices(words, k=characters // 8))}", "answer": str(i)}
        for i in range(rows)
    )
    if form in ("parquet", "arrow"):
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
        with path.open("wb") as file:
            kind = pq.ParquetWriter if form == "parquet" else pa.ipc.new_stream
            with kind(file, schema) as writer:
                while batch := [row for _, row in zip(range(10_000), made, strict=False)]:
                    writer.write_batch(pa.RecordBatch.from_pylist(batch, schema))
        return
    with (gzip.open if form.endswith("gz") else open)(path, "wt") as file:
        if form == "csv":
            file.write("prompt,answer\n")
        for row in made:
            line = f"{row['prompt']},{row['answer']}" if form == "csv" else json.dumps(row)
            file.write(line + "\n")


def peak(*, anew: bool = False) -> float:
    """MiB of resident memory at most, so far or from now on. What getrusage says is a parent's."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x]
    return int(line.split()[1]) / 1024


def start(path: str, streaming: str) -> None:
    """One start; prints a line of JSON. `order` tells whether two ways draw the same tasks."""
    import pyarrow.parquet  # noqa: F401 - libraries are no growth

    from groupwise.config import Data
    from groupwise.data import load
    from groupwise.data.cursor import Cursor

    before, began = peak(anew=True), time.perf_counter()
    data = Data(train=path, streaming=streaming)  # type: ignore[arg-type]
    tasks = load(data, seed=0, held_out=0, require_answers=True).train
    loaded = time.perf_counter()
    cursor = Cursor(tasks, seed=0)
    ready = time.perf_counter()
    drawn = [tasks[draw.task].answer for draw in cursor.take(1000)]
    found = {
        "streaming": streaming,
        "rows": len(tasks),
        "growth_mib": round(peak() - before, 1),
        "load_s": round(loaded - began, 2),
        "cursor_s": round(ready - loaded, 2),
        "draw_us": round((time.perf_counter() - ready) * 1000, 1),
        "order": hashlib.sha256(" ".join(drawn).encode()).hexdigest()[:8],
    }
    print(json.dumps(found))


def measured(path: Path, streaming: str) -> dict[str, float | str]:
    command = [sys.executable, __file__, "--start", str(path), "--streaming", streaming]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float | str] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--format", choices=FORMATS, default="jsonl")
    parser.add_argument("--start")
    parser.add_argument("--streaming", default="always")
    asked = parser.parse_args()
    if asked.start:
        start(asked.start, asked.streaming)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder) / f"rows.{asked.format}"
        write(path, asked.rows, asked.format)
        print(f"{asked.rows:,} rows, {path.stat().st_size / 2**20:.0f} MiB as {asked.format}")
        for streaming in ("never", "always"):
            print(json.dumps(measured(path, streaming)))


if __name__ == "__main__":
    main()
