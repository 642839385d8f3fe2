"""All tasks of a file at once, where the package reads them one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from groupwise.data.tasks import Scan
from groupwise.errors import DataError
from groupwise.records import Task


class Read(NamedTuple):
    tasks: list[Task]
    notes: list[str]


def read(name: str | Path, prompt_key: str = "", answer_key: str = "", **settings: Any) -> Read:
    """Settings are those of a scan."""
    scan = Scan(prompt_key, answer_key, **settings)
    return Read(list(scan.of(name)), scan.notes)


def refused(name: str | Path, *keys: str, **settings: Any) -> str:
    """Return why the file can't be read."""
    with pytest.raises(DataError) as caught:
        read(name, *keys, **settings)
    return str(caught.value)
