"""The grader of a team: the first rank grades, and tells the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.graders.parts import SampleToGrade
from groupwise.graders.rubric import Grader
from groupwise.parallel.world import World
from groupwise.records import Grade, Task


class TeamGrader(Grader):
    """Grades once for all ranks: functions that keep count, judges and sandboxes are asked once."""

    def __init__(self, own: Grader, world: World) -> None:
        self.__dict__ |= vars(own)
        self.own, self.world = own, world

    @property
    def by_group(self) -> bool:
        """Return False: answers arrive together, from all ranks."""
        return False

    def grade(
        self, samples: Sequence[SampleToGrade | tuple[Task, str, Sequence[int], str]]
    ) -> list[Grade]:
        grades: list[Any] = self.world.first(lambda: self.own.grade(samples))
        return grades
