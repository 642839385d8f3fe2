"""Every start of a run: from which step on it ran with which configuration and code.

`starts.jsonl` has a line for each, written before the start's first step. A start owns the steps
after its own up to the next one's, so what is recorded can always be told apart by what it was made
with. Resume drops the starts behind the checkpoint like everything else that lies there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from groupwise.runfiles import schemas
from groupwise.runfiles.files import append_lines, read_lines, to_line
from groupwise.runfiles.folder import Event, RunFolder

CHANGED = "settings"  # the kind of event that says what a start changed
CODE = {"reward": "code of the reward functions", "recipe": "code of the recipe"}


@dataclass(frozen=True)
class Start:
    """One process that wrote to the run."""

    step: int  # finished ones when it began
    config: str  # as in config.toml
    origin: Mapping[str, str]  # hashes, as in the manifest
    threads: int | None = None
    changed: tuple[Mapping[str, Any], ...] = ()  # since the start before: what, old, new
    inferred: bool = False  # by a later start: the groupwise that began the run wrote none down

    def line(self) -> str:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return to_line(
            {
                "step": self.step,
                "changed": list(self.changed),
                "inferred": self.inferred,
                "threads": self.threads,
                "origin": self.origin,
                "config": self.config,
                "time/at": now,
            }
        )

    @property
    def words(self) -> str:
        """Return what it changed, and from which step on; "" if nothing."""
        if not self.changed:
            return ""
        return f"from step {self.step + 1} on: {'; '.join(map(change_words, self.changed))}"


@dataclass(frozen=True)
class Stretch:
    """Steps that were made by one start, or by several alike."""

    start: Start
    first: int
    last: int


def read_starts(folder: RunFolder) -> list[Start]:
    """Read all starts that are written down; none of a run of an older groupwise."""
    return [
        Start(
            int(line["step"]),
            str(line["config"]),
            dict(line.get("origin") or {}),
            line.get("threads"),
            tuple(line.get("changed") or ()),
            bool(line.get("inferred")),
        )
        for _, line in read_lines(folder.starts, schemas.starts)
    ]


def write_starts(folder: RunFolder, new: Sequence[Start]) -> None:
    """Add them, and say in events.jsonl what they changed.

    Events that a killed process did not come to write, or that were dropped as they stand at a step
    which is done again, are made up for.
    """
    with folder.writing(folder.starts.name):
        append_lines(folder.starts, [start.line() for start in new])
    told = {event.get("start") for event in folder.read_events() if event.get("kind") == CHANGED}
    folder.add_events(
        [
            Event(start.step + 1, CHANGED, start.words, {"start": number, "changed": start.changed})
            for number, start in enumerate(read_starts(folder), start=1)
            if start.changed and number not in told
        ]
    )


def stretches(starts: Sequence[Start], last: int) -> list[Stretch]:
    """Return who made which of the steps 1 to `last`; starts that left none are not there."""
    ends = [(one, two.step) for one, two in pairwise(starts)]
    ends += [(starts[-1], last)] if starts else []
    return [Stretch(one, one.step + 1, min(end, last)) for one, end in ends
            if one.step < min(end, last)]  # fmt: skip


def changes_on_the_way(folder: RunFolder) -> list[str]:
    """Return the changes that starts made, in words, in their order."""
    return [start.words for start in read_starts(folder) if start.changed]


def code_changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the user's code that changed; unknown where an older groupwise wrote none."""
    return [
        {"what": name, "old": old[kind], "new": new[kind]}
        for kind, name in CODE.items()
        if kind in old and kind in new and old[kind] != new[kind]
    ]


def change_words(change: Mapping[str, Any]) -> str:
    if change["what"] in CODE.values():
        return f"{change['what']} ({_digest(change['old'])} -> {_digest(change['new'])})"
    old, new = ("none" if x is None else json.dumps(x, ensure_ascii=False)
                for x in (change["old"], change["new"]))  # fmt: skip
    return f"{change['what']}: {old} -> {new}"


def _digest(value: Any) -> str:
    return str(value)[:12] or "none"
