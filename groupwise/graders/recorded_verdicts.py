"""Verdicts that a run has recorded: steps that are done again after a crash are not graded again.

A judge may change its mind, and costs money; what the files say stays what happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import RunError
from groupwise.records import Branch, Grade
from groupwise.runfiles.rollouts import read

STEPS = "reward_steps"
COLUMNS = ("prompt_id", "draw", "sample", "branch", "text", "reward", "reward_parts", STEPS,
           "correct", "grader_status", "grader_reason")  # fmt: skip


class Key(NamedTuple):
    """The identity of a sample. The text is part of it: another text is another sample."""

    prompt_id: int
    draw: int
    sample: int
    text: str
    branch: Branch | None = None


Ledger = dict[Key, Grade]


def recorded(files: Iterable[Path], warn: Callable[[str], None] | None = None) -> Ledger:
    """Read all verdicts of these rollout files; none of a file that was written without step
    rewards.

    With `warn`, a file that can't be read is told of and left out: its step is graded again.
    """
    tables = []
    for file in files:
        try:
            tables.append(read(file, COLUMNS))
        except RunError as error:
            if warn is None:
                raise
            warn(f"the verdicts of {file.stem} are lost and asked for again: {error}")
    return {
        Key(row["prompt_id"], row["draw"], row["sample"], row["text"], _branch(row)): Grade(
            row["reward"],
            dict(row["reward_parts"]),
            row["correct"],
            row["grader_status"],
            row["grader_reason"],
            tuple((step["end"], step["reward"]) for step in row[STEPS]),
        )
        for table in tables
        if STEPS in table.column_names
        for row in table.to_pylist()
    }


def _branch(row: Mapping[str, Any]) -> Branch | None:
    found = row["branch"]
    return None if found is None else Branch(**found)
