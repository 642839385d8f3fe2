"""Rows whose one answer was called good or bad: the column `label`."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.errors import DataError
from groupwise.records import Task


def verdict_of(task: Task) -> bool:
    """Return whether a row's answer was called good: true or false, 1 or 0."""
    label = task.columns.get("label")
    if isinstance(label, bool) or (isinstance(label, int | float) and label in (0, 1)):
        return bool(label)
    raise DataError(
        f"Row {task.id} has label {label!r}: it says whether `completion` is good, true or false. "
        "Give every row one; rows with `chosen` and `rejected` are for recipe=dpo."
    )


def check_verdicts(tasks: Sequence[Task]) -> None:
    """Refuse labels that are all the same: any answer would be made likelier, or less likely."""
    seen = {verdict_of(task) for task in tasks}
    if len(seen) == 1:
        which = "true" if seen.pop() else "false"
        raise DataError(
            f"The column `label` is {which} in every row: nothing says what sets good answers "
            "apart from bad ones. Add rows of the other kind"
            + (", or learn these answers with recipe=sft." if which == "true" else ".")
        )
