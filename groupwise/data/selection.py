"""The answers of earlier runs that a run learns from: which they are, and why others went."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# The column of a task that holds an answer as it was recorded; only tasks of earlier runs have it.
RECORDED = "recorded"

# Why an answer was left out, in the order in which it is looked at: each has one reason.
REASONS = {
    "failed": "not graded, as that failed",
    "wrong": "wrong (keep.correct)",
    "unjudged": "nothing says whether they are correct (keep.correct)",
    "unended": "cut off, or ended by a stop string (keep.ended)",
    "empty": "empty",
    "language": "not in one language (keep.language)",
    "paragraph": "with too long a paragraph (keep.paragraph)",
    "fences": "with a code fence (keep.fences)",
    "solved": "to prompts that every answer solved (keep.solved)",
    "repeated": "the same as another to their prompt",
    "per_prompt": "more than a prompt may have (keep.per_prompt)",
    "evaluated": "to prompts that are held out (data.duplicates)",
    "mix": "more than data.mix asks for",
    "tokenizer": "with several turns or no end, and this model has another tokenizer",
    "long": "longer than the model holds or data.max_row_tokens allows",
}


class AnswerPlace(NamedTuple):
    """Where an answer stands in the files of earlier runs."""

    run: str
    step: int
    group: int
    sample: int
    prompt_id: int
    draw: int


@dataclass(frozen=True)
class KeptAnswers:
    """The answers that were kept, in the order of their tasks, and how many went for what."""

    runs: str  # a digest of all files that were read
    places: tuple[AnswerPlace, ...]
    dropped: Mapping[str, int] = field(default_factory=dict)  # by reason
    other: int = 0  # rows of other data beside them

    @property
    def total(self) -> int:
        return len(self.places) + sum(self.dropped.values())

    def without(self, gone: Sequence[int], reason: str) -> KeptAnswers:
        """Return what is left after the answers at these places of the list went, too."""
        if not gone:
            return self
        leaving = set(gone)
        kept = tuple(place for at, place in enumerate(self.places) if at not in leaving)
        dropped = {**self.dropped, reason: self.dropped.get(reason, 0) + len(leaving)}
        return replace(self, places=kept, dropped=dropped)

    def line(self) -> str:
        """Say what was kept, and what went."""
        told = [f"{self.dropped[name]:,} {words}" for name, words in REASONS.items()
                if self.dropped.get(name)]  # fmt: skip
        gone = f"; left out: {', '.join(told)}" if told else ""
        beside = f", beside {self.other:,} rows of data.train" if self.other else ""
        return f"answers of earlier runs: {len(self.places):,} of {self.total:,} kept{beside}{gone}"

    def lines(self) -> list[dict[str, Any]]:
        """Return where each kept answer stands, by the number of its task."""
        return [{"task": number, **place._asdict()} for number, place in enumerate(self.places)]

    def facts(self) -> dict[str, Any]:
        """Return it in numbers, for a manifest."""
        told = "\n".join(map(str, self.places))
        return {
            "answers": self.total,
            "kept": len(self.places),
            "dropped": {name: self.dropped[name] for name in REASONS if self.dropped.get(name)},
            "other": self.other,
            "digest": hashlib.sha256(told.encode()).hexdigest()[:16],
        }
