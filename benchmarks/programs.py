"""Programs in isolation: do reference solutions pass, how many a second, how late is the clock.

    python benchmarks/programs.py FOLDER [--isolation bubblewrap|namespaces|landlock] [--workers 2]

FOLDER has humaneval/ and mbpp/ with their rows as .jsonl or .jsonl.gz.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from groupwise.data.files import rows as read_rows
from groupwise.data.named_sets import SETS
from groupwise.graders.code import examine, extract
from groupwise.graders.program_tests import read_tests
from groupwise.graders.sandbox.limits import Limits
from groupwise.graders.sandbox.pool import SandboxPool, report
from groupwise.records import Task

HOSTILE = {
    "loop": "while True: pass",
    "sleep": "import time\nwhile True: time.sleep(9)",
    "memory": "x = []\nwhile True: x.append(bytearray(2**20))",
    "recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "power": "print(9 ** 9 ** 9)",
    "regex": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "output": "while True: print('x' * 10**6)",
}


def tasks(folder: Path) -> list[Task]:
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    rows = [SETS[folder.name](row.values) for file in files for row in read_rows(file)]
    return [
        Task(number, row["prompt"], row["answer"], {**row, "prompt": None, "answer": None})
        for number, row in enumerate(rows)
    ]


def references(pool: SandboxPool, folder: Path, limits: Limits) -> None:
    found = tasks(folder)
    begun = time.perf_counter()
    marks = pool.map(
        lambda worker, task: examine(worker, read_tests(task, extract(task.answer)), limits, False),
        found,
        failed=lambda error: error,
    )
    seconds = time.perf_counter() - begun
    failed = [
        (task, mark)
        for task, mark in zip(found, marks, strict=True)
        if isinstance(mark, Exception) or mark.passed != mark.total
    ]
    print(
        f"{folder.name}: {len(found) - len(failed)} of {len(found)} reference solutions pass, "
        f"{len(found) / seconds:.1f} runs/s"
    )
    for task, mark in failed:
        why = mark if isinstance(mark, Exception) else mark.why
        print(f"  {task.columns.get('task_id')}: {why}")


def trivial(pool: SandboxPool, count: int) -> None:
    """What isolation itself costs: a program and its tests, both empty."""
    task = Task(0, "", None, {"tests": ["assert f(1) == 2"]})
    test = read_tests(task, "def f(x): return x + 1")
    begun = time.perf_counter()
    pool.map(
        lambda worker, _: examine(worker, test, Limits(), False), range(count), lambda error: error
    )
    print(f"one-line programs: {count / (time.perf_counter() - begun):.1f} runs/s")


def lateness(pool: SandboxPool, limits: Limits, repeats: int) -> None:
    """How long after its time limit a hostile program is over."""
    late = []
    for code in [*HOSTILE.values()] * repeats:
        begun = time.perf_counter()
        pool.run(lambda worker, program: worker.script(program, "", limits), code)
        late.append(time.perf_counter() - begun - limits.seconds)
    late.sort()
    print(
        f"hostile programs, time limit {limits.seconds:g} s: over {statistics.median(late):+.3f} s "
        f"after it in the median, {late[int(0.99 * (len(late) - 1))]:+.3f} s in the 99th percentile"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--isolation", default="")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    for wall, why in report().items():
        print(f"{wall}: {why or 'withstands every attack of the self-test'}")
    pool = SandboxPool(given.isolation, size=given.workers)
    load = os.getloadavg()[0]
    print(f"measured: {pool.wall}, {given.workers} sandboxes, load {load:.1f} before")
    trivial(pool, 200)
    for name in ("humaneval", "mbpp"):
        references(pool, given.folder / name, Limits(seconds=30))
    lateness(pool, Limits(seconds=1.0), given.repeats)
    pool.close()


if __name__ == "__main__":
    main()
