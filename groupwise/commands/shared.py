"""What several commands do alike: read settings, warn, print data."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import RecipeWarning

if TYPE_CHECKING:
    from groupwise.config import Config

SETTINGS = "a file of settings, and settings that go over it: group_size=8 recipe.gate.high=0.3"


def split_settings(items: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """A file, if one stands first, and the settings that go over it."""
    if items and ("=" not in items[0] or Path(items[0]).is_file()):
        return Path(items[0]), items[1:]
    return None, items


def read_config(source: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration; what `load` warns of is printed."""
    from groupwise.config import load

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecipeWarning)
        config = load(source, overrides)
    for warning in caught:
        warn(str(warning.message))
    return config


def warn(text: str) -> None:
    print(f"groupwise: warning: {text}", file=sys.stderr)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of texts, its columns side by side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)
