"""Where a run tells what it does: its folder, its files, the screen, the health rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from groupwise.runfiles.folder import Event, RunFolder
from groupwise.runfiles.recorder import NoRecorder, Recorder
from groupwise.watch.display import Display
from groupwise.watch.health import Finding, Health
from groupwise.watch.mirrors.children import Mirrors

EVENT_PAUSE = 10  # steps between two showings of the same kind of event


@dataclass
class Reporter:
    """Writes down and shows what happens in a run."""

    folder: RunFolder
    recorder: Recorder | NoRecorder
    mirrors: Mirrors
    display: Display
    health: Health = field(default_factory=Health)
    at: int = 0  # the step under way: events belong to it
    told: dict[str, int] = field(default_factory=dict)  # when each kind of event was last shown

    def event(self, kind: str, text: str, *, shown: bool = True, **fields: Any) -> None:
        """Write to events.jsonl what people should know and, if `shown`, now and then show it."""
        if shown and self.at - self.told.get(kind, -EVENT_PAUSE) >= EVENT_PAUSE:
            self.told[kind] = self.at
            self.display.warn(text)
        self.recorder.event(self.at, kind, text, **fields)

    def judge(self, step: int, metrics: Mapping[str, Any]) -> tuple[list[Finding], list[Event]]:
        """Return what the health rules say of a step, once each, and how to write it down."""
        found = self.health.see(step, metrics)
        return found, [Event(step, "health", str(each), each.fields()) for each in found]

    def warn(self, found: Sequence[Finding]) -> None:
        """Show what the health rules say."""
        for each in found:
            self.display.warn(str(each))
