"""Where the answers come from that a step learns from.

To add a source, write a file with a `Source` and add it to `SOURCES`; a recipe names it, and what
it reads behind a colon: `recipe.source = "rollouts:runs/earlier"`.
"""

from __future__ import annotations

from typing import Any, Protocol

from groupwise.config import Config
from groupwise.data.cursor import TaskCursor
from groupwise.optim.assemble import Group
from groupwise.stages.data_answers import DataAnswers
from groupwise.stages.labelled_answers import LabelledAnswers
from groupwise.stages.parts import Parts
from groupwise.stages.policy_answers import PolicyAnswers
from groupwise.stages.reference_answers import ReferenceAnswers
from groupwise.stages.run_answers import RunAnswers
from groupwise.watch.clock import Clock


class Source(Protocol):
    """Gives groups of answers, each with its grade."""

    sampled: bool  # whether the policy wrote them while it learned

    def __init__(self, config: Config, place: str) -> None:
        """Refuse a `place`, what is behind the colon, that is not there or is asked for in vain."""

    def draw(
        self, parts: Parts[Any], cursor: TaskCursor, prompts: int, clock: Clock
    ) -> list[Group]:
        """Return the answers to the next prompts, a group each."""
        ...


SOURCES: dict[str, type[Source]] = {
    "policy": PolicyAnswers,
    "data": DataAnswers,
    "labels": LabelledAnswers,
    "run": RunAnswers,
    "reference": ReferenceAnswers,
}
