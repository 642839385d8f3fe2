"""The reward of a sample: a weighted sum of parts, and the check of it before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.common.globs import digest
from groupwise.common.progress import phase
from groupwise.common.user_files import code_files
from groupwise.config.fields import GYM
from groupwise.data.tasks import prompt_text
from groupwise.errors import RewardError
from groupwise.graders.by_row import OTHERWISE, ROW, ByRow
from groupwise.graders.functions import TIMEOUT, UserFunction, given_function, load_function
from groupwise.graders.gym import GymScorer
from groupwise.graders.parts import (
    Mark,
    RewardPart,
    SampleToGrade,
    built_in,
    of_episodes,
    turns,
)
from groupwise.records import Grade, Task

CHECKED_ROWS = 4
OF_REWARDS = ("step_reward_NT", "correct_N")  # streams that a method may read from a reward
QUIET_ROWS = 32  # that a part which has said nothing so far is tried on


class Grader:
    """Parts by name and weight, as `reward.parts` has them.

    An answer is correct if the first built-in part that decides (math, number, choice, ...) gives
    it 1. Where there is none, it is correct if the first function of the user's gives it at least
    1. Where there is neither, or where that part has no value, nothing says so.

    `ends` are the texts of the tokens and stop strings that end a completion. Built-in parts look
    past them; a user's functions get the text without the one that ended it.
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
        """Set up the parts.

        `graders` are those that the configuration names for sources of data, `timeout` the seconds
        that a call of a user's function may take.

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

        def part(name: str) -> RewardPart:
            if name == GYM:
                return GymScorer(ends, timeout)
            if name in self.given:
                return given_function(self.given[name], name, ends)
            if _is_function(name):
                return load_function(name, timeout, ends)
            return built_in(name, ends)

        self.parts: dict[str, RewardPart] = {
            name: ByRow(part, graders) if name == ROW else part(name) for name in parts
        }
        own = [name for name, part in self.parts.items() if part.decides]
        written = [name for name in parts if _is_function(name) or name in self.given]
        self.decider = next(iter(own or written), None)

    def code(self) -> str:
        """Return a hash of the files of a user's functions; "" without such functions."""
        by_row = self.parts.get(ROW)
        names = [*self.parts, *(by_row.parts if isinstance(by_row, ByRow) else ())]
        files = [name.rpartition(":")[0] for name in names if _is_function(name)]
        return digest(code for file in files for code in code_files(Path(file).expanduser()))

    @property
    def by_group(self) -> bool:
        """Return whether groups can be graded one by one: not if a part wants the batch."""
        return not any(_wants_batch(part) for part in self.parts.values())

    def problem(self, task: Task) -> str:
        """Return why a part can't grade this task; '' if all can."""
        return next((why for part in self.parts.values() if (why := part.problem(task))), "")

    @property
    def needs_answers(self) -> bool:
        return any(part.needs_answers for part in self.parts.values())

    def needs_answer(self, grader: str) -> bool:
        """Return whether a row that names this grader, or none (""), needs an answer."""
        try:
            parts = [p.part(grader) if isinstance(p, ByRow) else p for p in self.parts.values()]
        except RewardError:  # there is no such grader: `check` says so, with the row
            return False
        return any(part.needs_answers for part in parts)

    def grade(
        self, samples: Sequence[SampleToGrade | tuple[Task, str, Sequence[int], str]]
    ) -> list[Grade]:
        """Return a grade for each (task, text, token ids, finish), in order."""
        given = [SampleToGrade(*sample) for sample in samples]
        if not given:
            return []
        marks = {name: part.grade(given) for name, part in self.parts.items()}
        return [
            self._sum({name: marks[name][row] for name in self.parts}) for row in range(len(given))
        ]

    def _sum(self, marks: Mapping[str, Mark]) -> Grade:
        """Sum the parts. One that abstains is left out; one that fails leaves no reward at all."""
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
        if not all(map(math.isfinite, (sum(counted), *(reward for _, reward in steps)))):
            why = f"the weighted sum of {', '.join(marks)} is too large for a number"
            return Grade(None, values, correct, "error", why)
        reasons = "; ".join(mark.reason for mark in marks.values() if mark.reason)
        return Grade(sum(counted), values, correct, reason=reasons, steps=tuple(steps))

    def _verdict(self, mark: Mark) -> float | None:
        """Return the deciding part's verdict; a row's own grader need not be one that decides."""
        by_row = self.parts.get(ROW)
        if mark.part and isinstance(by_row, ByRow):
            part = by_row.part(mark.part)
            return mark.value if part.decides or _is_function(mark.part) else None
        return mark.value


def too_many_failed(grades: Sequence[Grade], max_share: float) -> RewardError | None:
    """Return why not to go on, where more than this share of rewards failed."""
    failed = [grade.reason for grade in grades if grade.status in ("error", "timeout")]
    if not failed or len(failed) <= max_share * len(grades):
        return None
    often = max(dict.fromkeys(failed), key=failed.count)
    return RewardError(
        f"{len(failed)} of {len(grades)} rewards failed, more than reward.max_failed_share = "
        f"{max_share:g} allows. Most often: {often}. Mend the function; the run continues from its "
        "last checkpoint."
    )


@dataclass(frozen=True)
class Tried:
    """An answer that a part was tried on, and its mark."""

    kind: str  # what answer it was
    sample: SampleToGrade
    mark: Mark


def check(
    grader: Grader,
    tasks: Sequence[Task],
    encode: Callable[[str], Sequence[int]] | None = None,
    *,
    data: str = "data.train",
    streams: Sequence[str] = (),
) -> list[str]:
    """Try every part on a few real rows before a run; return notes on what looks odd.

    Refused: a task that a built-in part can't grade; a function that raises or returns what is no
    reward for a gold answer, an empty one or an echo of the prompt; a reward that has no value for
    any of them; one that does not give the `streams` that a method reads from it. `data` is the
    setting that the tasks are from.
    """
    for name, part in grader.parts.items():
        _check_tasks(name, part, tasks, data)
    notes = [
        f"{name} runs in this process: a call that hangs can't be stopped. Put it in a file and "
        "write file.py:function."
        for name in grader.given
    ]
    tried: dict[str, list[Tried]] = {}
    for name, part in grader.parts.items():
        if of_episodes(part):
            continue
        found = _try(name, part, _answers(tasks, CHECKED_ROWS, encode))
        if not _values(found):  # a part may be for few rows: more of them are asked
            found = _try(name, part, _answers(tasks, QUIET_ROWS, encode))
        tried[name] = found
        values: dict[str, list[float]] = {}
        for each in found:
            if each.mark.value is not None:
                values.setdefault(each.kind, []).append(each.mark.value)
        judges = part.decides or _is_function(name) or name in grader.given
        notes += [*_notes(name, values, judges), *_forms(name, part, tasks)]
    notes += _check_values(grader, tried, data)
    _check_streams(grader, tried, streams)
    return notes


def _forms(name: str, part: RewardPart, tasks: Sequence[Task]) -> list[str]:
    """Note in what form a function is given completions, where that depends on the data."""
    inner = [note for key, each in _inner(part).items() for note in _forms(key, each, tasks)]
    if not isinstance(part, UserFunction) or part.shape != "completions":
        return inner
    if isinstance(tasks[0].prompt, str):
        return []
    return [
        f"{name} is given completions as messages, [{{'role': 'assistant', 'content': ...}}], as "
        "in TRL: prompts here are messages. For texts, name its parameter `completion`."
    ]


def _answers(
    tasks: Sequence[Task], rows: int, encode: Callable[[str], Sequence[int]] | None
) -> list[tuple[str, SampleToGrade]]:
    """Return the answers to try on so many rows, from the first to the last, each with its kind."""
    last = len(tasks) - 1
    places = dict.fromkeys(round(i * last / (rows - 1)) for i in range(rows))
    return [
        (kind, SampleToGrade(task, text, tuple(encode(text)) if encode else (), "eos"))
        for task in (tasks[place] for place in places)
        for kind, text in _attempts(task).items()
    ]


def _try(name: str, part: RewardPart, answers: Sequence[tuple[str, SampleToGrade]]) -> list[Tried]:
    """Return a part's mark of each answer. The first failure ends it: one limit in all."""
    kinds = {id(sample): kind for kind, sample in answers}
    found: list[Tried] = []
    for turn in turns(part, [sample for _, sample in answers]):
        what = f"{kinds[id(turn[0])]} of row {turn[0].task.id}"
        if len(turn) > 1:
            what = f"{len(turn)} answers to {len({sample.task.id for sample in turn})} prompts"
        limit: float | None = getattr(part, "limit", None)
        with phase(f"trying the reward {name} on {what}", limit=limit, setting="reward.timeout"):
            marks = part.grade(turn)
        for sample, mark in zip(turn, marks, strict=True):
            kind = kinds[id(sample)]
            if mark.status in ("error", "timeout"):
                raise RewardError(
                    f"The reward can't be used, for {kind} of row {sample.task.id}, "
                    f"{_short(sample.text)!r}: {_ended(mark.reason)} It must return a finite "
                    "number, or None where it has nothing to say, for whatever a model may write."
                )
            found.append(Tried(kind, sample, mark))
    return found


def _values(found: Sequence[Tried]) -> list[float]:
    return [each.mark.value for each in found if each.mark.value is not None]


def _check_values(grader: Grader, tried: Mapping[str, Sequence[Tried]], data: str) -> list[str]:
    """Refuse a reward that no answer gets; return notes on parts that never give a value."""
    idle = [name for name, found in tried.items() if not _values(found)]
    weighed = [name for name, weight in grader.weights.items() if weight != 0]
    said = {name: _nothing_said(name, tried[name], data) for name in idle}
    if all(name in idle for name in weighed):
        told = "; ".join(said[name] for name in weighed)
        watching = [name for name in grader.weights if name not in weighed]
        beside = f" {', '.join(watching)} has weight 0 and only watches." if watching else ""
        raise RewardError(
            f"The reward says nothing: {told}.{beside} Without one nothing is learned or judged. A "
            "function that ends without `return` returns None: did you forget return? It must "
            "return a number; None is for the few answers that it can't judge."
        )
    return [
        f"warning: {told}: it is idle. Take it out of reward.parts, or mend it: did you forget "
        "return?"
        for told in said.values()
    ]


def _nothing_said(name: str, found: Sequence[Tried], data: str) -> str:
    rows = len({each.sample.task.id for each in found})
    often = f"all {len(found)} answers tried (right ones, empty ones and echoes of the prompt)"
    reason = next((each.mark.reason for each in found if each.mark.reason), "")
    why = f"{name} has no value" if not reason.startswith(name) else reason
    return f"{why} for {often} in {rows} rows of {data}"


def _check_streams(
    grader: Grader, tried: Mapping[str, Sequence[Tried]], streams: Sequence[str]
) -> None:
    """Refuse a reward without the streams that a method reads from it beside the number."""
    if "correct_N" in streams and grader.decider is None:
        raise RewardError(
            "The recipe reads which answers are correct, and no part of reward.parts "
            f"({', '.join(tried)}) says so: all would count as wrong. Add one that decides, such "
            "as math, number, choice or exact, or a function of yours that gives a right answer 1."
        )
    steps = any(each.mark.steps for found in tried.values() for each in found)
    steps |= any(map(of_episodes, grader.parts.values()))  # the environment may reward each turn
    if "step_reward_NT" in streams and not steps:
        raise RewardError(
            "The recipe learns from a reward for each step of an answer, and no part of "
            f"reward.parts ({', '.join(tried)}) gave any: it would silently learn from the last "
            "reward alone. Let a function return {'reward': 1.0, 'steps': [(end, reward), ...]} "
            "with ends counted in characters of the completion, take a model that judges steps, "
            'prm(path="...", process=True), or take a recipe for whole answers (grpo).'
        )


def _check_tasks(name: str, part: RewardPart, tasks: Sequence[Task], data: str) -> None:
    if not tasks:
        raise RewardError(f"There are no tasks to check the reward with. Check {data}.")
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
            f"{why}. Set data.answer_key, mend these rows, leave them out with "
            "data.drop_bad=true, or use another reward."
        )


def _attempts(task: Task) -> dict[str, str]:
    gold = {} if task.answer is None else {"the gold answer": str(task.answer)}
    return gold | {"an empty answer": "", "an echo of the prompt": prompt_text(task.prompt)}


def _notes(name: str, values: Mapping[str, Sequence[float]], judges: bool) -> list[str]:
    """Note values that a sound reward does not give: something for nothing, nothing for gold."""
    notes = []
    gold = min(values.get("the gold answer", [math.inf]))
    if judges and gold <= max(0.0, *values.get("an empty answer", [0.0])):
        notes.append(f"{name} gives the gold answer {gold:g}, no more than nothing.")
    for kind in ("an empty answer", "an echo of the prompt"):
        best = max(values.get(kind, [0.0]))
        if best > 0:
            notes.append(f"{name} gives {kind} {best:g}: a model may learn to write that.")
    return notes


def _wants_batch(part: RewardPart) -> bool:
    """Return whether it is a function for batches, a model on a GPU, or a part that asks one."""
    if isinstance(part, UserFunction):
        return part.shape == "completions"
    if getattr(part, "wants_batch", False):
        return True
    return any(_wants_batch(each) for each in _inner(part).values())


def _inner(part: RewardPart) -> Mapping[str, RewardPart]:
    """Return the parts that a part asks."""
    found: Mapping[str, RewardPart] = getattr(part, "parts", {})
    return found


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


def _ended(text: str) -> str:
    """Put a full stop behind what has no end of its own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _short(text: str, width: int = 60) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
