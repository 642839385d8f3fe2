"""One prompt across the steps: when it was drawn, and the results of its samples each time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from groupwise.errors import RunError
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import read_answers, read_older
from groupwise.view.runs import ViewedRun
from groupwise.view.steps import OF_GROUPS, PromptGroup, groups_of

SHOWN = 200  # draws of a prompt on one page, the latest

Stamp = tuple[int, int]  # of a file: a resumed run writes a step anew


class PromptIndex:
    """An index from prompts to steps: a few numbers a step, read once and again when it changes."""

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._of_step: dict[int, tuple[Stamp, Any]] = {}

    def steps(self, prompt_id: int) -> list[int]:
        folder = self._run.folder
        with self._lock, ThreadPoolExecutor(4) as readers:
            present = folder.rollout_steps()
            stamps = {step: _stamp(folder.rollout(step)) for step in present}
            stale = [s for s in present if self._of_step.get(s, (None,))[0] != stamps[s]]
            for step, ids in zip(
                stale, readers.map(_ids, [folder.rollout(s) for s in stale]), strict=True
            ):
                self._of_step[step] = (stamps[step], ids)
            return [step for step in present if prompt_id in self._of_step[step][1]]

    def draws(self, prompt_id: int, seen: PartialReader) -> list[tuple[int, PromptGroup, str]]:
        """Return step, group and the text of its first sample, the latest step first."""
        found = []
        for step in reversed(self.steps(prompt_id)[-SHOWN:]):
            path = self._run.folder.rollout(step)
            drawn = seen.get(_draws, path, prompt_id) or ()
            found += [(step, group, text) for group, text in drawn]
        return found


def _draws(path: Path, prompt_id: int) -> list[tuple[PromptGroup, str]]:
    """Return a prompt's groups in one step, each with the text of its first sample."""
    table, _ = read_answers(path, (*OF_GROUPS, "text"))
    rows = table.filter(pc.equal(table.column("prompt_id"), prompt_id))
    texts = rows.select(["group", "text"]).to_pylist()
    found = []
    for group in groups_of(rows.drop_columns(["text"])):
        first = next(row["text"] for row in texts if (row["group"] or 0) == group.number)
        found.append((group, first or ""))
    return found


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:  # the run was rewound just now, or the file is a link to itself
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _ids(path: Path) -> Any:
    """Return the prompt ids of a step; none if unreadable, as the step's own page explains."""
    try:
        column = read_older(path, ("prompt_id",))[0].column("prompt_id")
    except RunError:
        return np.zeros(0, np.int64)
    return np.zeros(0, np.int64) if pa.types.is_null(column.type) else np.unique(column.to_numpy())
