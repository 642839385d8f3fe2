"""A part of a reward: the built-in ones, and how a part is written in a configuration.

"number"   "exact"   "countdown"   "length(target=100)"   "format(pattern='<think>...</think>...')"
"rewards.py:my_function"
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from groupwise.errors import RewardError, nearest
from groupwise.graders import answers
from groupwise.records import Task


class Sample(NamedTuple):
    """What there is to grade."""

    task: Task
    text: str  # the completion's tokens decoded, special tokens included
    token_ids: Sequence[int]
    finish: str


@dataclass(frozen=True)
class Mark:
    """What one part says about one sample. `value` is None unless the status is ok."""

    value: float | None = None
    status: Literal["ok", "abstained", "error"] = "ok"
    reason: str = ""
    steps: tuple[tuple[int, float], ...] = ()
    part: str = ""  # whose mark it is, where a part asks others


class Part(Protocol):
    @property
    def decides(self) -> bool:
        """Whether a value of 1 says that the answer is correct."""
        ...

    @property
    def needs_answers(self) -> bool: ...

    def problem(self, task: Task) -> str:
        """Why this task can't be graded; '' if it can."""
        ...

    def grade(self, samples: Sequence[Sample]) -> list[Mark]: ...


@dataclass(frozen=True)
class BuiltIn:
    """A check of the package, sample by sample. Without what it checks with, it abstains."""

    score: Callable[[Sample], float]
    problem: Callable[[Task], str] = field(default=lambda task: "")
    decides: bool = False
    needs_answers: bool = False

    def grade(self, samples: Sequence[Sample]) -> list[Mark]:
        return [self._mark(sample) for sample in samples]

    def _mark(self, sample: Sample) -> Mark:
        why = self.problem(sample.task)
        return Mark(status="abstained", reason=why) if why else Mark(self.score(sample))


def exact(ends: Sequence[str]) -> BuiltIn:
    def problem(task: Task) -> str:
        plain = isinstance(task.answer, (str, int, float)) and str(task.answer).strip()
        return "" if plain else f"the answer {task.answer!r} is no text"

    def score(sample: Sample) -> float:
        return answers.exact(answers.final(sample.text, ends), sample.task.answer)

    return BuiltIn(score, problem, decides=True, needs_answers=True)


def number(ends: Sequence[str]) -> BuiltIn:
    def problem(task: Task) -> str:
        known = answers.gold_number(task.answer) is not None
        return "" if known else f"the answer {task.answer!r} holds no number"

    def score(sample: Sample) -> float:
        gold = answers.gold_number(sample.task.answer)
        assert gold is not None  # `problem` has looked
        return answers.number(answers.final(sample.text, ends), gold)

    return BuiltIn(score, problem, decides=True, needs_answers=True)


def countdown(ends: Sequence[str]) -> BuiltIn:
    def given(task: Task) -> tuple[Any, Any]:
        columns = task.columns
        return columns.get("numbers", columns.get("nums")), columns.get("target")

    def problem(task: Task) -> str:
        numbers, target = given(task)
        whole = isinstance(numbers, list) and all(isinstance(x, int) for x in [*numbers, target])
        return "" if whole else "it has no columns numbers (a list) and target of whole numbers"

    def score(sample: Sample) -> float:
        return answers.countdown(answers.final(sample.text, ends), *given(sample.task))

    return BuiltIn(score, problem, decides=True)


def length(ends: Sequence[str], *, target: int = 100) -> BuiltIn:
    """Grows with the number of tokens, to 1 at the target: shows that a set-up learns at all."""
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise RewardError(f"length: target = {target!r} must be a whole number of at least 1.")
    return BuiltIn(lambda sample: min(1.0, len(sample.token_ids) / target))


def in_format(ends: Sequence[str], *, pattern: str) -> BuiltIn:
    pieces = pattern.split(answers.GAP) if isinstance(pattern, str) else [""]
    if not any(piece.strip() for piece in pieces) or not all(p.strip() for p in pieces[1:-1]):
        raise RewardError(
            f"format: pattern = {pattern!r} must be text with '...' for what may be anything, such "
            "as '<think>...</think>...'."
        )
    return BuiltIn(
        lambda sample: answers.in_format(answers.without_ends(sample.text, ends), pattern)
    )


BUILT_IN: dict[str, Callable[..., Part]] = {
    "exact": exact,
    "number": number,
    "countdown": countdown,
    "length": length,
    "format": in_format,
}
ELSEWHERE = {  # imported when asked for
    "code": "groupwise.graders.code",
    "judge": "groupwise.graders.judge",
    "rm": "groupwise.graders.scorers",
    "prm": "groupwise.graders.scorers",
}


def _find(name: str) -> Callable[..., Part]:
    if name in ELSEWHERE:
        return getattr(importlib.import_module(ELSEWHERE[name]), name)
    return BUILT_IN[name]


def built_in(text: str, ends: Sequence[str]) -> Part:
    """Read `name` or `name(option=value)`."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        options = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
    except (SyntaxError, ValueError):
        name, call, options = "", None, {}
    if not name or call is None or call.args:
        raise RewardError(
            f"Can't read {text!r} as a part of the reward. Write name, name(option=value) or "
            f"file.py:function. Names: {', '.join([*BUILT_IN, *ELSEWHERE])}."
        )
    if name not in BUILT_IN and name not in ELSEWHERE:
        raise RewardError(
            f"There is no reward {name!r}. {nearest(name, [*BUILT_IN, *ELSEWHERE])} A function of "
            "your own is written file.py:function."
        )
    known = inspect.signature(_find(name)).parameters
    own = [key for key in known if key != "ends"]
    for key in options:
        if key not in own:
            tail = nearest(key, own) if own else "It has none."
            raise RewardError(f"The reward {name} has no option {key!r}. {tail}")
    for key in own:
        if known[key].default is inspect.Parameter.empty and key not in options:
            raise RewardError(f"The reward {name} needs {key}: write {name}({key}=...).")
    return _find(name)(ends, **options)
