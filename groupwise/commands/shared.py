"""Functions that several commands share: read settings, warn, print data."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.common.progress import Watcher, heard, phase
from groupwise.errors import ConfigError, RecipeWarning
from groupwise.parallel.started import leads_here
from groupwise.runfiles.files import file_status
from groupwise.runfiles.whole import only_writer

if TYPE_CHECKING:
    from groupwise.config import Config

SETTINGS = "a file of settings, and settings that go over it: group_size=8 recipe.gate.high=0.3"


def split_settings(items: Sequence[str]) -> tuple[Path | None, Sequence[str]]:
    """Split arguments into a file, if one is first, and the settings that override it."""
    if items and ("=" not in items[0] or Path(items[0]).is_file()):
        return Path(items[0]), items[1:]
    return None, items


def split_models(path: str, items: Sequence[str]) -> tuple[list[str], Path | None, list[str]]:
    """Split arguments into models, a configuration (.toml), and settings."""
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
    """Return the configuration of the run that a path is, or is a checkpoint of."""
    folder = path.resolve()
    for each in (folder, *folder.parents[:2]):
        if (each / "checkpoints").is_dir():
            file_status(each / "config.toml")  # of a run: what is there must be readable
        if (each / "config.toml").is_file():
            return each / "config.toml"
    return None


@contextmanager
def new_rows_file(text: str) -> Iterator[Path]:
    """Hold the file that --out names; refuse one that is there, in the making, or impossible."""
    out = Path(text)
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: rows are written as .jsonl. Name a file that ends so.")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}. Make it first.")
    with only_writer(out):
        if out.exists():
            raise ConfigError(
                f"--out {out} exists already, and nothing is overwritten. Name another file."
            )
        yield out


def config_or_run(items: Sequence[str]) -> tuple[Config, Path | None]:
    """Return the settings of a configuration, or of a run with its latest checkpoint."""
    source, overrides = split_settings(items)
    if source is None or not (source / "config.toml").is_file():
        return read_placed(source, overrides), None
    from groupwise.sync.export import checkpoint_in

    config = read_placed(source / "config.toml", overrides)
    return config, Path(checkpoint_in(source, "latest"))


def words_of(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def read_config(source: Path | None, overrides: Sequence[str]) -> Config:
    """Read the configuration; what `load` warns of is printed."""
    with phase("starting PyTorch"):
        from groupwise.config import load
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecipeWarning)
        config = load(source, overrides)
    for warning in caught:
        warn(str(warning.message))
    return config


def start_pytorch() -> None:
    """Import what takes seconds, as a phase that is shown; the imports behind it are quick."""
    with phase("starting PyTorch"):
        import torch  # noqa: F401


def read_placed(source: Path | None, overrides: Sequence[str], path: str = "") -> Config:
    """Read the configuration for a model that is loaded here, its own or that of `path`."""
    asked = read_config(source, overrides)
    with phase("starting PyTorch"):  # and all that loads and asks a model: seconds where it is busy
        import groupwise.engine.native.engine
        import groupwise.prepare.rollouts
        import groupwise.prepare.setup
        import groupwise.stages.checks  # noqa: F401
        from groupwise.prepare.placing import passed_over, placed

    config = placed(asked, path=path)
    why = passed_over(replace(config.model, path=path or config.model.path), asked.model)
    if why:
        warn(f"on the CPU: {why}")
    return config


def check_one_turn(config: Config, command: str) -> None:
    """Refuse an environment where answers of one turn are sampled: it would not be asked."""
    if config.turns.used:
        named = "turns.environment" if config.turns.environment else "turns.tools"
        raise ConfigError(
            f"`groupwise {command}` samples answers of one turn, and {named} is set: nobody would "
            f"answer the policy. Write {named}= for answers without it, with reward.parts of their "
            "own; `groupwise eval RUN` and `groupwise probe` lead episodes."
        )


def warn(text: str) -> None:
    heard()
    print(f"groupwise: warning: {text}", file=sys.stderr)


def say(line: str) -> None:
    """Print to standard error: standard output is for the data."""
    heard()
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table of texts with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in lines]


def terminal_width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


@contextmanager
def progress() -> Iterator[None]:
    """Show on standard error what is under way: on a terminal as a line that is written over,
    elsewhere as a line now and then. Of several ranks the first one shows it.
    """
    if not leads_here():
        yield
        return
    live = sys.stderr.isatty()

    def show(line: str) -> None:
        if live:
            line = line[: shutil.get_terminal_size().columns - 1]
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    with Watcher(show, live=live) as watcher, watcher.watching():
        yield
