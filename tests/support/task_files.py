"""All tasks of a file at once, where the package reads them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from groupwise.data.tasks import Scan
from groupwise.records import Task


class Read(NamedTuple):
    tasks: list[Task]
    notes: list[str]


def read(name: str | Path, prompt_key: str = "", answer_key: str = "", **settings: Any) -> Read:
    """Settings are those of a scan."""
    scan = Scan(prompt_key, answer_key, **settings)
    return Read(list(scan.of(name)), scan.notes)
