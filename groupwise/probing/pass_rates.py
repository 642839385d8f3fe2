"""Pass rates of a model for each row of a file: sampled a few rows at a time, saved on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.common.progress import phase
from groupwise.data.named_sets import SETS
from groupwise.errors import ConfigError
from groupwise.evaluate.estimates import PassCount
from groupwise.evaluate.examine import described, load_candidate, prepare_suites
from groupwise.evaluate.request import Basis, Candidate, Entry, EvalRequest
from groupwise.evaluate.suites import Suite, config_of
from groupwise.prepare.rollouts import verdict
from groupwise.prepare.setup import check_data
from groupwise.records import Rollout
from groupwise.runfiles.files import append_lines, read_lines, to_line


def check(asked: EvalRequest, band: tuple[float, float]) -> None:
    low, high = band
    if not 0 <= low < high <= 1:
        raise ConfigError(f"--band {low:g},{high:g}: write two shares, the lower one first.")
    if asked.samples < 2:
        raise ConfigError(f"--samples {asked.samples} is too few. Take 2 or more.")
    if asked.temperature <= 0:
        raise ConfigError("At temperature 0 all samples of a row are the same. Set it above 0.")


def open_rows(name: str, basis: Basis, gone: Collection[int]) -> Entry:
    """Return the rows that are left, checked against their reward before a model is loaded."""
    word = name.partition(":")[0]
    suite = Suite(name, source=name, columns=word if word in SETS else "")
    config = config_of(suite, basis.config, 0, own_options=basis.written)
    # Every row has a number of its own, repeated ones too: what goes is the sieve's matter.
    config = replace(config, data=replace(config.data, duplicates="keep"))
    found = check_data(config, learns=False)
    left = [task for task in found.train if task.id not in gone]
    if not left:
        raise ConfigError(f"No row of {name} is left to look at with a model.")
    return Entry(suite, config, replace(found, train=left, held_out=[]), {})


def rates(
    entry: Entry,
    candidate: Candidate,
    basis: Basis,
    asked: EvalRequest,
    kept: Path,
    say: Callable[[str], None],
) -> dict[int, PassCount]:
    """Count samples and passes of each row. `kept` holds them line by line, so that it can
    continue.
    """
    loaded = load_candidate(candidate, basis.config)
    [sitting] = prepare_suites([entry], loaded, basis, asked)
    for note in sitting.notes:
        say(note)
    head = {
        "model": described(candidate, loaded)["weights"],
        "data": sitting.data,
        "settings": sitting.settings,
    }
    found = _before(kept, head)
    if found:
        say(f"{len(found)} rows are in {kept} already.")
    left = [task for task in sitting.setup.tasks if task.id not in found]
    with phase(f"{candidate.name} on {entry.suite.name}:", len(left), "tasks") as told:
        for first in range(0, len(left), sitting.at_once):
            groups = sitting.sample(left[first : first + sitting.at_once])
            fresh = {group[0].task.id: count_of(group) for group in groups}
            append_lines(kept, [to_line({"row": row} | c._asdict()) for row, c in fresh.items()])
            found |= fresh
            told(min(first + sitting.at_once, len(left)))
    return found


def count_of(group: list[Rollout]) -> PassCount:
    """Count the samples that are known to be right or wrong."""
    known = [right for r in group if (right := verdict(r.grade)) is not None]
    return PassCount(len(known), sum(known))


def _before(kept: Path, head: dict[str, Any]) -> dict[int, PassCount]:
    """Read the counts of a run that was stopped; raise where they are of something else."""
    if not kept.exists():
        append_lines(kept, [to_line(head)])
        return {}
    lines = [value for _, value in read_lines(kept)]
    if not lines or lines[0] != json.loads(to_line(head)):
        raise ConfigError(
            f"{kept} is of another model, other rows or other settings. Delete it, or choose "
            "another --out."
        )
    return {line["row"]: PassCount(line["samples"], line["passed"]) for line in lines[1:]}
