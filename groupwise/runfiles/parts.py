"""Parts of a reward in a run's summary: what each came to before and after, with a short name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

CHECKPOINT = re.compile(r"""[^'"(=,]*?([^/\\'"]+)[/\\]checkpoints[/\\]\w+""")


class PartChange(NamedTuple):
    """The mean of one part on the held-out tasks, before its weight."""

    name: str
    before: float | None
    after: float | None

    def __str__(self) -> str:
        sides = ("n/a" if x is None else f"{x:.3f}" for x in (self.before, self.after))
        return f"{self.name} {' -> '.join(sides)}"


def part_changes(summary: Mapping[str, Any]) -> list[PartChange]:
    """Return the parts of a reward that has several, in its order; none where it has one."""
    before, after = (summary.get(f"parts_{side}", {}) for side in ("before", "after"))
    names = dict.fromkeys([*before, *after])
    return [PartChange(short_name(name), before.get(name), after.get(name)) for name in names]


def short_name(part: str) -> str:
    """Return a part's name with the checkpoint of a run as the run's own folder, without a path."""
    return CHECKPOINT.sub(r"\1", part)
