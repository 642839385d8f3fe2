"""The parts that a step works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from groupwise.engine.protocol import Engine
from groupwise.graders.recorded_verdicts import Ledger
from groupwise.graders.rubric import Grader
from groupwise.model.formats.checkpoint import Loaded
from groupwise.optim.learner import Learner
from groupwise.prepare.episodes import Turns
from groupwise.records import Task

if TYPE_CHECKING:
    from groupwise.stages.ahead import Ahead

L = TypeVar("L", bound=Learner)


@dataclass
class Parts(Generic[L]):
    """The model, the tasks and those who sample, grade and learn. What they hold is theirs."""

    loaded: Loaded
    tasks: Sequence[Task]
    held_out: Sequence[Task]
    grader: Grader
    engine: Engine
    learner: L  # with the roles that take part beside the policy
    ahead: Ahead | None = None  # prompts that are sampled before they are learned from, if any
    turns: Turns | None = None  # who answers the policy between its turns, where anybody does
    known: Ledger = field(default_factory=dict)  # recorded verdicts of steps that are done again

    def close(self) -> None:
        """Let go of what is under way, and of other processes."""
        if self.ahead is not None:
            self.ahead.close()
        self.engine.close()
