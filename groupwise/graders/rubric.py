"""The reward of a sample: a weighted sum of parts, and the check of it before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from groupwise.beside import code_files
from groupwise.config.fields import GYM
from groupwise.data.tasks import prompt_text
from groupwise.errors import RewardError
from groupwise.globs import digest
from groupwise.graders.by_row import OTHERWISE, ROW, ByRow
from groupwise.graders.functions import TIMEOUT, UserFunction, given_function, load_function
from groupwise.graders.gym import GymScorer
from groupwise.graders.parts import Mark, Part, Sample, built_in
from groupwise.records import Grade, Task

CHECKED_ROWS = 4


class Grader:
    """Parts by name and weight, as `reward.parts` has them.

    An answer is correct if the first built-in part that decides (math, number, choice, ...) gives
    it 1. Where there is none, it is correct if the first function of the user's gives it at least
    1. Where there is neither, or where that part has no value, nothing says so.

    `ends` are the texts of the tokens and stop strings that end a completion. Built-in parts look
    past them; a user's functions get the text as it is, rubrics without the token that ended it.
    """

    def __init__(
        self,
        parts: Mapping[str, float],
        ends: Sequence[str] = (),
        graders: Sequence[str] = (),
        *,
        timeout: float = TIMEOUT,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`graders` are those that the configuration names for sources of data, `timeout` the
        seconds that a call of a user's function may take.

        `functions` are parts that are in no file, such as a notebook's. They run in this process,
        where no call can be stopped.
        """
        self.given = dict(functions or {})
        self.weights = dict(parts)
        _check_weights(self.weights)
        if graders and ROW not in parts:
            raise RewardError(
                f"data.train names graders ({', '.join(graders)}), and reward.parts has no part "
                f'"{ROW}" that would ask them. Write reward.parts = {{ "{ROW}" = 1.0 }}, with '
                "other parts beside it."
            )

        def part(name: str) -> Part:
            if name == GYM:
                return GymScorer(ends, timeout)
            if name in self.given:
                return given_function(self.given[name], name, ends)
            if _is_function(name):
                return load_function(name, timeout, ends)
            return built_in(name, ends)

        self.parts: dict[str, Part] = {
            name: ByRow(part, graders) if name == ROW else part(name) for name in parts
        }
        own = [name for name, part in self.parts.items() if part.decides]
        written = [name for name in parts if _is_function(name) or name in self.given]
        self.decider = next(iter(own or written), None)

    def code(self) -> str:
        """A hash of the files that a user's functions come from; nothing without such functions."""
        by_row = self.parts.get(ROW)
        names = [*self.parts, *(by_row.parts if isinstance(by_row, ByRow) else ())]
        files = [name.rpartition(":")[0] for name in names if _is_function(name)]
        return digest(code for file in files for code in code_files(Path(file).expanduser()))

    @property
    def by_group(self) -> bool:
        """Whether groups can be graded one by one: not if a function wants the whole batch."""
        return not any(_wants_batch(part) for part in self.parts.values())

    @property
    def needs_answers(self) -> bool:
        return any(part.needs_answers for part in self.parts.values())

    def needs_answer(self, grader: str) -> bool:
        """Of a row that names this grader, or none ("")."""
        try:
            parts = [p.part(grader) if isinstance(p, ByRow) else p for p in self.parts.values()]
        except RewardError:  # there is no such grader: `check` says so, with the row
            return False
        return any(part.needs_answers for part in parts)

    def grade(
        self, samples: Sequence[Sample | tuple[Task, str, Sequence[int], str]]
    ) -> list[Grade]:
        """A grade for each (task, text, token ids, finish), in order."""
        given = [Sample(*sample) for sample in samples]
        if not given:
            return []
        marks = {name: part.grade(given) for name, part in self.parts.items()}
        return [
            self._sum({name: marks[name][row] for name in self.parts}) for row in range(len(given))
        ]

    def _sum(self, marks: Mapping[str, Mark]) -> Grade:
        """A part that abstains is left out; one that fails leaves no reward at all."""
        values = {mark.part or name: mark.value for name, mark in marks.items()}
        verdict = None if self.decider is None else self._verdict(marks[self.decider])
        correct = None if verdict is None else verdict >= 1.0
        failed = [mark for mark in marks.values() if mark.status in ("error", "timeout")]
        if failed:
            status: Literal["error", "timeout"] = "error"
            if all(mark.status == "timeout" for mark in failed):
                status = "timeout"
            reasons = "; ".join(mark.reason for mark in failed)
            return Grade(None, values, correct, status, reasons)
        counted = [
            self.weights[name] * mark.value
            for name, mark in marks.items()
            if mark.value is not None and self.weights[name] != 0
        ]
        if not counted:
            quiet = [mark for mark in marks.values() if mark.status == "abstained"]
            reasons = "; ".join(mark.reason for mark in quiet if mark.reason)
            return Grade(None, values, correct, "abstained", reasons)
        steps = sorted(
            (end, self.weights[name] * reward)
            for name, mark in marks.items()
            for end, reward in mark.steps
        )
        reasons = "; ".join(mark.reason for mark in marks.values() if mark.reason)
        return Grade(sum(counted), values, correct, reason=reasons, steps=tuple(steps))

    def _verdict(self, mark: Mark) -> float | None:
        """What the deciding part says; a row's own grader need not be one that decides."""
        by_row = self.parts.get(ROW)
        if mark.part and isinstance(by_row, ByRow):
            part = by_row.part(mark.part)
            return mark.value if part.decides or _is_function(mark.part) else None
        return mark.value


def too_many_failed(grades: Sequence[Grade], max_share: float) -> RewardError | None:
    """Why not to go on, where more than this share of rewards failed."""
    failed = [grade.reason for grade in grades if grade.status in ("error", "timeout")]
    if not failed or len(failed) <= max_share * len(grades):
        return None
    often = max(dict.fromkeys(failed), key=failed.count)
    return RewardError(
        f"{len(failed)} of {len(grades)} rewards failed, more than reward.max_failed_share = "
        f"{max_share:g} allows. Most often: {often}. Mend the function; the run continues from its "
        "last checkpoint."
    )


def check(
    grader: Grader,
    tasks: Sequence[Task],
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[str]:
    """Try every part on a few real rows before a run; what looks odd comes back as notes.

    Refused: a task that a built-in part can't grade, and a function that raises or returns what is
    no reward for a gold answer, an empty one or an echo of the prompt.
    """
    for name, part in grader.parts.items():
        _check_tasks(name, part, tasks)
    last = len(tasks) - 1
    rows = dict.fromkeys(round(i * last / (CHECKED_ROWS - 1)) for i in range(CHECKED_ROWS))
    tried = [
        (kind, Sample(task, text, tuple(encode(text)) if encode else (), "eos"))
        for task in (tasks[row] for row in rows)
        for kind, text in _attempts(task).items()
    ]
    notes = [
        f"{name} runs in this process: a call that hangs can't be stopped. Put it in a file and "
        "write file.py:function."
        for name in grader.given
    ]
    for name, part in grader.parts.items():
        marks = part.grade([sample for _, sample in tried])
        for (kind, sample), mark in zip(tried, marks, strict=True):
            if mark.status in ("error", "timeout"):
                raise RewardError(
                    f"The reward can't be used: {mark.reason}, for {kind} of row "
                    f"{sample.task.id}, {_short(sample.text)!r}. It must return a finite number, "
                    "or None where it has nothing to say, for whatever a model may write."
                )
        values: dict[str, list[float]] = {}
        for (kind, _), mark in zip(tried, marks, strict=True):
            if mark.value is not None:
                values.setdefault(kind, []).append(mark.value)
        judges = part.decides or _is_function(name) or name in grader.given
        notes += _notes(name, values, judges)
    return notes


def _check_tasks(name: str, part: Part, tasks: Sequence[Task]) -> None:
    if not tasks:
        raise RewardError("There are no tasks to check the reward with. Check data.train.")
    first: tuple[Task, str] | None = None
    count = 0
    for task in tasks:
        if why := part.problem(task):
            count, first = count + 1, first or (task, why)
    if first is not None:
        task, why = first
        told = f"{task.grader or OTHERWISE} (reward.parts: {ROW})" if name == ROW else name
        raise RewardError(
            f"The reward {told} can't grade {count} of {len(tasks)} tasks: in row {task.id}, "
            f"{why}. Set data.answer_key, mend these rows, or use another reward."
        )


def _attempts(task: Task) -> dict[str, str]:
    gold = {} if task.answer is None else {"the gold answer": str(task.answer)}
    return gold | {"an empty answer": "", "an echo of the prompt": prompt_text(task.prompt)}


def _notes(name: str, values: Mapping[str, Sequence[float]], judges: bool) -> list[str]:
    """Values that a sound reward does not give: something for nothing, nothing for gold."""
    notes = []
    gold = min(values.get("the gold answer", [math.inf]))
    if judges and gold <= max(0.0, *values.get("an empty answer", [0.0])):
        notes.append(f"{name} gives the gold answer {gold:g}, no more than nothing.")
    for kind in ("an empty answer", "an echo of the prompt"):
        best = max(values.get(kind, [0.0]))
        if best > 0:
            notes.append(f"{name} gives {kind} {best:g}: a model may learn to write that.")
    return notes


def _wants_batch(part: Part) -> bool:
    """A function for batches, or a part that asks one."""
    if isinstance(part, UserFunction):
        return part.shape == "completions"
    return any(_wants_batch(each) for each in getattr(part, "parts", {}).values())


def _is_function(name: str) -> bool:
    return ".py:" in name


def _check_weights(weights: Mapping[str, Any]) -> None:
    for name, weight in weights.items():
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise RewardError(f"reward.parts: the weight of {name!r} is {weight!r}, no number.")
    if not any(weights.values()):
        raise RewardError(
            "reward.parts has no part with a weight: every reward would be empty. Write for "
            'example reward.parts = {"number" = 1.0}.'
        )


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
