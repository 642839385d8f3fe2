"""Words in the samples of all steps of a run: steps are read one after the other, none is kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import read_older
from groupwise.view.runs import ViewedRun
from groupwise.view.steps import SEARCHED, mark

MOST_FOUND = 100  # samples on one page
PATIENCE = 4.0  # seconds that a page takes to look
SHOWN = ("group", "sample", "reward", "correct", *SEARCHED)


@dataclass(frozen=True)
class Hits:
    """Samples that were found, and how far was looked."""

    rows: list[dict[str, Any]]
    steps: int  # that were looked through
    first: int | None  # of them
    before: int | None  # where to go on; None if nothing is left


class TextSearch:
    """A search of one run."""

    def __init__(self, run: ViewedRun, patience: float = PATIENCE) -> None:
        self._run, self._patience = run, patience

    def look(self, words: str, before: int | None, seen: PartialReader) -> Hits:
        """Look through steps before one, the latest first, until there are many or time is up."""
        folder, end = self._run.folder, time.monotonic() + self._patience
        steps = [s for s in reversed(folder.rollout_steps()) if before is None or s < before]
        found: list[dict[str, Any]] = []
        done = 0
        for step in steps:
            rows = seen.get(_with_words, folder.rollout(step), words) or []
            found += [{**row, "step": step} for row in rows]
            done += 1
            if len(found) >= MOST_FOUND or time.monotonic() > end:
                break
        first = steps[done - 1] if done else None
        return Hits(found, done, first, first if done < len(steps) else None)


def _with_words(path: Path, words: str) -> list[dict[str, Any]]:
    columns = tuple(dict.fromkeys((*SHOWN, *SEARCHED)))
    table, _ = read_older(path, columns)
    hits = pa.chunked_array([pa.array([False] * table.num_rows, pa.bool_())])
    for name in SEARCHED:
        column = table.column(name).cast(pa.string())
        seen = pc.match_substring(column, words, ignore_case=True)
        hits = pc.or_(hits, pc.fill_null(seen, False))
    rows = table.filter(hits).select(SHOWN).to_pylist()
    return [{**row, "mark": mark(row["correct"], row["reward"])}
            for row in rows if None not in (row["group"], row["sample"])][:MOST_FOUND]  # fmt: skip
