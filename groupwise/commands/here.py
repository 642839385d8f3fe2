"""`groupwise` alone: the runs and configurations of this folder, and what to do next with them."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupwise.commands.shared import aligned
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.partial import PartialReader

# A file with two of these is taken for a configuration: `model` alone stands in others, too.
KEYS = {"data", "engine", "eval", "group_size", "model", "optim", "prompts_per_step", "recipe",
        "reward", "stage", "steps"}  # fmt: skip
SHOWN = 3  # runs and configurations that are listed, the newest
Step = tuple[str, str]  # a command, and what for


@dataclass(frozen=True)
class RunHere:
    """A run of this folder."""

    path: Path
    words: str
    finished: bool
    changed: float


def run() -> int:
    """Print what is here and what comes next."""
    runs, configurations = runs_here(), configurations_here()
    unused = fresh(runs, configurations)
    here = [(str(found.path), found.words) for found in runs[:SHOWN]]
    here += [(str(path), "a configuration without a run") for path in unused[:SHOWN]]
    for title, rows in (("Here", here), ("Next", next_steps(runs, configurations, unused))):
        if rows:
            print(f"{title}:", *(f"  {line}" for line in aligned(rows)), "", sep="\n")
    print("`groupwise --help` lists all commands.")
    return 0


def fresh(runs: Sequence[RunHere], configurations: Sequence[Path]) -> list[Path]:
    """Return the configurations of this folder that no run was made of."""
    began = {found.path.name for found in runs}
    return [path for path in configurations if path.stem not in began and len(path.parts) == 1]


def next_steps(
    runs: Sequence[RunHere], configurations: Sequence[Path], unused: Sequence[Path]
) -> list[Step]:
    """Return the commands that come next, from the newest run and configuration."""
    if not runs and not unused:
        return [
            ("groupwise init mine.toml", "five questions, and a configuration of your own"),
            ("groupwise train steps=50", "a small model learns to add, on the CPU, in a minute"),
            ("groupwise doctor", "what this machine has, and what is missing for what"),
        ]
    steps = []
    if runs and not runs[0].finished:
        steps.append((goes_on(runs[0].path, configurations), "go on where it stopped"))
    if unused and not (runs and not runs[0].finished):
        steps += [
            (f"groupwise probe {unused[0]}", "look first: which prompts would teach something"),
            (f"groupwise train {unused[0]}", "train; the same command goes on after a kill"),
        ]
    if runs:
        steps += [
            ("groupwise view", "runs in the browser, live, down to every token"),
            (f"groupwise diagnose {runs[0].path}", "is it well, and what to change if not"),
        ]
    if runs and runs[0].finished:
        steps.append((f"groupwise export {runs[0].path} model", "a plain Hugging Face folder"))
    return steps


def goes_on(path: Path, configurations: Sequence[Path]) -> str:
    """Return the command that continues a run: by its configuration if that is here."""
    own = next((source for source in configurations if source.stem == path.name), None)
    return f"groupwise train {own or path / 'config.toml'} --run {path}"


def runs_here() -> list[RunHere]:
    """Return the runs in runs/, the newest first."""
    folder = Path("runs")
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    made = [_found(path) for path in inside if (path / "config.toml").is_file()]
    return sorted(made, key=lambda found: -found.changed)


def _found(path: Path) -> RunHere:
    folder, seen = RunFolder(path), PartialReader()
    settings = seen.get(folder.read_settings) or {}
    summary = seen.get(folder.read_summary) or {}
    metrics = seen.get(folder.read_metrics) or []
    at = metrics[-1]["step"] if metrics else 0
    finished = bool(metrics) and summary.get("steps") == at
    newest = folder.metrics if folder.metrics.is_file() else folder.config
    words = f"finished after {at:,} steps" if finished else f"step {at:,} of {_total(settings)}"
    damage = ", damaged: groupwise diagnose says where" if seen.damage else ""
    return RunHere(path, words + _accuracy(summary, metrics) + damage, finished, _changed(newest))


def _total(settings: dict[str, Any]) -> str:
    steps = settings.get("steps")
    return f"{steps:,}" if isinstance(steps, int) else "?"


def _accuracy(summary: dict[str, Any], metrics: Sequence[dict[str, Any]]) -> str:
    """Return held-out accuracy from the start to the end, or so far."""
    measured = [line["eval/accuracy"] for line in metrics if "eval/accuracy" in line]
    before = summary.get("accuracy_before", measured[0] if measured else None)
    after = summary.get("accuracy_after", measured[-1] if measured else None)
    if before is None or after is None:
        return ""
    return f", held-out accuracy {100 * before:.1f} -> {100 * after:.1f} %"


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it went away in between
        return 0.0


def configurations_here() -> list[Path]:
    """Return the configurations of this folder, the newest first, and of configs/ behind them."""
    found = filter(is_configuration, [*Path().glob("*.toml"), *Path("configs").glob("*.toml")])
    return sorted(found, key=lambda path: (len(path.parts), -_changed(path), path))


def is_configuration(path: Path) -> bool:
    """Tell whether a TOML file is one of groupwise; one that can't be read is not."""
    try:
        return len(KEYS & tomllib.loads(path.read_text("utf-8")).keys()) > 1
    except (OSError, ValueError, RecursionError):
        return False
