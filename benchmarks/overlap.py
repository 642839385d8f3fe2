"""How well copies of evaluation items are found: `python benchmarks/overlap.py DATA`.

DATA has gsm8k/, math/, countdown/ (train and test), and sets whose column `overlap` lists, by the
rule of somebody else, which evaluation sets hold a row: dapo17k/, deepmath5k/. Prints a line each.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from pathlib import Path

from groupwise.config.fields import Data
from groupwise.probing.row_filter import FilterRequest, filter_rows

SETS = (
    ("gsm8k", "gsm8k:", "gsm8k"),
    ("math", "math:", "math"),
    ("countdown", "countdown:", "countdown"),
    ("dapo17k", "dapo17k:", "math"),
    ("deepmath5k", "", "math"),
)


def labels(file: Path, kind: str) -> set[int]:
    """Rows that are said to be in MATH: "exact" or "near"."""
    with gzip.open(file) as lines:
        named = [json.loads(line).get("overlap") or [] for line in lines]
    return {row for row, own in enumerate(named) if f"math_test:{kind}" in own}


def main(folder: Path) -> None:
    for name, prefix, suite in SETS:
        file = folder / name / "train.jsonl.gz"
        begun = time.perf_counter()
        found = filter_rows(
            Data(train=f"{prefix}{file}"), FilterRequest(against=(suite,), folder=folder)
        )
        took = time.perf_counter() - begun
        gone = set(found.removed)
        told = f"{name}: {len(gone)} of {found.total} rows, {found.variants} with other numbers"
        for kind in ("exact", "near"):
            own = labels(file, kind)
            told += f", {kind} {len(own & gone)} of {len(own)}" if own else ""
            gone -= own
        print(f"{told}, not labelled {len(gone)}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
