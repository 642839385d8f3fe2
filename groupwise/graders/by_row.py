"""The part `row` of a reward: the grader that a row names, or its source, or its named set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from groupwise.errors import RewardError
from groupwise.graders.parts import Mark, RewardPart, SampleToGrade, turns
from groupwise.records import Task

ROW = "row"
OTHERWISE = "number"  # for rows that name none


class ByRow:
    """A part that asks, for each sample, the part that its task names."""

    decides = True

    def __init__(self, make: Callable[[str], RewardPart], known: Iterable[str] = ()) -> None:
        self._make = make
        self.parts: dict[str, RewardPart] = {}
        for name in known:
            self.part(name)

    def part(self, name: str) -> RewardPart:
        """Return the part of that name, made when it is first asked for."""
        name = name or OTHERWISE
        if name == ROW:
            raise RewardError(f"{ROW!r} is no grader: it stands for the one that a row names.")
        if name not in self.parts:
            self.parts[name] = self._make(name)
        return self.parts[name]

    @property
    def needs_answers(self) -> bool:
        return self.part(OTHERWISE).needs_answers

    def problem(self, task: Task) -> str:
        try:
            return self.part(task.grader).problem(task)
        except RewardError as error:
            return str(error).rstrip(".")

    def turns(self, samples: Sequence[SampleToGrade]) -> list[list[SampleToGrade]]:
        """Split the samples as the parts that grade them do."""
        rows: dict[str, list[SampleToGrade]] = {}
        for sample in samples:
            rows.setdefault(sample.task.grader, []).append(sample)
        return [turn for name, own in rows.items() for turn in turns(self.part(name), own)]

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        """Return marks in order, each with the name of the part that gave it."""
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            rows.setdefault(sample.task.grader or OTHERWISE, []).append(row)
        marks: dict[int, Mark] = {}
        for name, own in rows.items():
            found = self.part(name).grade([samples[row] for row in own])
            marks |= {row: replace(x, part=name) for row, x in zip(own, found, strict=True)}
        return [marks[row] for row in range(len(samples))]
