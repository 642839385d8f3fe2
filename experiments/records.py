"""What is kept of every run of a claim, so that it can be judged again without its folders.

results/NAME.runs.jsonl has a line for each run: the arm, and all of its outcome but the curves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from experiments.claim import Claim
from groupwise.compare.outcomes import RunOutcome


def path_of(folder: Path, claim: Claim) -> Path:
    return folder / f"{claim.name}.runs.jsonl"


def write(folder: Path, claim: Claim, runs: Mapping[str, Sequence[RunOutcome]]) -> None:
    lines = []
    for arm in claim.arms:
        for one in runs[arm]:
            ends = {name: x for name, x in one.ends.items() if name in claim.measures}
            by_task = {name: x for name, x in one.by_task.items() if name in claim.measures}
            kept = asdict(replace(one, ends=ends, by_task=by_task, curves={}))
            del kept["curves"]
            lines.append(json.dumps({"arm": arm, **kept}, separators=(",", ":")) + "\n")
    path_of(folder, claim).write_text("".join(lines), "utf-8")


def read(folder: Path, claim: Claim) -> dict[str, list[RunOutcome]] | None:
    """The runs of each arm; None where none were kept, or an arm or a seed has none."""
    file = path_of(folder, claim)
    if not file.is_file():
        return None
    runs: dict[str, list[RunOutcome]] = {arm: [] for arm in claim.arms}
    for line in file.read_text("utf-8").splitlines():
        kept = json.loads(line)
        arm = kept.pop("arm")
        if arm in runs:
            fields: dict[str, Any] = {
                name: tuple(x) if isinstance(x, list) else x for name, x in kept.items()
            }
            runs[arm].append(RunOutcome(**fields, curves={}))
    return runs if all(len(own) == claim.seeds for own in runs.values()) else None
