"""What several commands do alike: read settings, warn, print data."""

from __future__ import annotations

import json
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError, RecipeWarning

if TYPE_CHECKING:
    from groupwise.config import Config

SETTINGS = "a file of settings, and settings that go over it: group_size=8 recipe.gate.high=0.3"


def split_settings(items: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """A file, if one stands first, and the settings that go over it."""
    if items and ("=" not in items[0] or Path(items[0]).is_file()):
        return Path(items[0]), items[1:]
    return None, items


def split_models(path: str, items: Sequence[str]) -> tuple[list[str], Path | None, list[str]]:
    """Models, a configuration (.toml), and settings."""
    models, settings, source = [path], [], None
    for item in items:
        if item.endswith(".toml") and ("=" not in item or Path(item).is_file()):
            if source is not None:
                raise ConfigError(f"{source} and {item} are two configurations. Name one.")
            source = Path(item)
        elif "=" in item and not Path(item).exists():
            settings.append(item)
        else:
            models.append(item)
    return models, source, settings


def config_of(path: Path) -> Path | None:
    """The configuration of the run that a path is, or is a checkpoint of."""
    folder = path.resolve()
    for each in (folder, *folder.parents[:2]):
        if (each / "config.toml").is_file():
            return each / "config.toml"
    return None


def words_of(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def read_config(source: Path | None, overrides: Sequence[str]) -> Config:
    """The configuration; what `load` warns of is printed."""
    from groupwise.config import load

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecipeWarning)
        config = load(source, overrides)
    for warning in caught:
        warn(str(warning.message))
    return config


def read_placed(source: Path | None, overrides: Sequence[str], path: str = "") -> Config:
    """The configuration for a model that is loaded here, its own or that of `path`."""
    from groupwise.placing import passed_over, placed

    asked = read_config(source, overrides)
    config = placed(asked, path=path)
    why = passed_over(replace(config.model, path=path or config.model.path), asked.model)
    if why:
        warn(f"on the CPU: {why}")
    return config


def warn(text: str) -> None:
    print(f"groupwise: warning: {text}", file=sys.stderr)


def say(line: str) -> None:
    """To people, beside the data on standard output."""
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table of texts, its columns side by side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


class Progress:
    """One line that is written over on a terminal; elsewhere a line now and then."""

    def __init__(self, total: int, things: str, title: str = "") -> None:
        self.total, self.things, self.shown = total, things, 0
        self.title = f"{title}: " if title else ""
        self.begun = time.perf_counter()
        self.live = sys.stderr.isatty()

    def __call__(self, done: int, tokens: int) -> None:
        from groupwise.commands.plan import duration

        if not self.live and done < self.total and done - self.shown < self.total / 5:
            return
        self.shown = done
        took = time.perf_counter() - self.begun
        left = duration(took / done * (self.total - done))
        line = (
            f"{self.title}{done} of {self.total} {self.things}, {tokens / took:,.0f} tokens/s, "
            f"{left} left"
        )
        end = "\n" if not self.live or done == self.total else ""
        print(f"\r\033[K{line}" if self.live else line, end=end, file=sys.stderr, flush=True)
