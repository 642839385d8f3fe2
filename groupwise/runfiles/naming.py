"""Names of runs: by their folder, and by the folder above where that tells them apart."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SEEDS = "runs"  # a comparison has its runs in runs/ARM/seed_N beside plan.json


def distinct_names(wholes: Sequence[Sequence[str]]) -> list[str]:
    """Return the last part of each path, after the folder above it where others end alike."""
    found = []
    for whole in wholes:
        length = 1
        while length < len(whole) and any(
            other[-length:] == whole[-length:] for other in wholes if other != whole
        ):
            length += 1
        found.append("/".join(whole[-length:]))
    return found


def comparison_of(path: Path) -> Path | None:
    """Return the folder of the comparison that a run belongs to, if any."""
    parents = path.parents
    if len(parents) > 2 and parents[1].name == SEEDS and (parents[2] / "plan.json").is_file():
        return parents[2]
    return None


def run_name(path: str | os.PathLike[str]) -> str:
    """Return the name of a run: its folder's; in a comparison, with those of comparison and arm."""
    whole = Path(path).resolve()
    within = comparison_of(whole)
    return whole.name if within is None else f"{within.name}/{whole.parent.name}/{whole.name}"
