"""Parts of a reward: the built-in ones, and how a part is written in a configuration.

"math"   "number"   "choice"   "exact"   "countdown"   "instructions"   "language(target='en')"
"format(pattern='<think>...</think>...')"   "repetition"   "length(target=100)"
"rewards.py:my_function"
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from groupwise.engine.stopping import without_ends
from groupwise.errors import RewardError, nearest
from groupwise.graders import answers, choice, form, instructions
from groupwise.graders.mathematics import grader as mathematics
from groupwise.graders.mathematics import numbers
from groupwise.graders.mathematics.rounding import BY_KIND, Rounding

if TYPE_CHECKING:
    from groupwise.records import Episode, Task


Status = Literal["ok", "abstained", "error", "timeout"]
REPEATS = "it repeats the question"
DISORDERED = "its parts are in another order than the question asks for"


class SampleToGrade(NamedTuple):
    """A sample to grade."""

    task: Task
    # The completion's tokens decoded, special tokens included; where others than the policy wrote
    # some of it, the policy's last turn: a tool's words are not to be graded as its own.
    text: str
    token_ids: Sequence[int]  # all that the policy wrote
    finish: str
    episode: Episode | None = None  # where an environment has answered the policy

    @property
    def cut(self) -> bool:
        """Return whether it hit the limit of tokens."""
        return self.finish == "length"


@dataclass(frozen=True)
class Mark:
    """The mark of one part for one sample. `value` is None unless the status is ok."""

    value: float | None = None
    status: Status = "ok"
    reason: str = ""  # why it has no value, or how the value came about
    steps: tuple[tuple[int, float], ...] = ()
    part: str = ""  # whose mark it is, where a part asks others


class RewardPart(Protocol):
    @property
    def decides(self) -> bool:
        """Return whether a value of 1 means that the answer is correct."""
        ...

    @property
    def needs_answers(self) -> bool: ...

    def problem(self, task: Task) -> str:
        """Return why this task can't be graded; '' if it can."""
        ...

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]: ...


def of_episodes(part: RewardPart) -> bool:
    """Return whether a part grades episodes alone: no answer can be tried on it."""
    return bool(getattr(part, "of_episodes", False))


def turns(part: RewardPart, samples: Sequence[SampleToGrade]) -> list[list[SampleToGrade]]:
    """Split the samples as a part wants them, one list after the other; most take all at once."""
    own = getattr(part, "turns", None)
    return own(samples) if own is not None else [list(samples)]


@dataclass(frozen=True)
class BuiltIn:
    """A check of the package, sample by sample. Without what it checks with, it abstains."""

    score: Callable[
        [SampleToGrade], float | tuple[float, str]
    ]  # the value, or with how it came about
    problem: Callable[[Task], str] = field(default=lambda task: "")
    decides: bool = False
    needs_answers: bool = False

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        return [self._mark(sample) for sample in samples]

    def _mark(self, sample: SampleToGrade) -> Mark:
        why = self.problem(sample.task)
        if why:
            return Mark(status="abstained", reason=why)
        found = self.score(sample)
        return Mark(found[0], reason=found[1]) if isinstance(found, tuple) else Mark(found)


@dataclass(frozen=True)
class Mathematics:
    """`math`: what arithmetic does not decide goes to worker processes, all of it at once."""

    ends: tuple[str, ...]
    timeout: float
    decimals: int | None
    digits: int | Literal["by kind"] | None
    marked: bool
    decides: bool = True
    needs_answers: bool = True

    def problem(self, task: Task) -> str:
        plain = isinstance(task.answer, (str, int, float)) and not isinstance(task.answer, bool)
        good = plain and mathematics.gold_answer(str(task.answer))
        return "" if good else f"the answer {task.answer!r} is no text or number"

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        problems = [self.problem(sample.task) for sample in samples]
        good = [s for s, why in zip(samples, problems, strict=True) if not why]
        told = iter(
            mathematics.verdicts(
                [(sample.text, sample.task.answer) for sample in good],
                ends=self.ends,
                cut=[sample.cut for sample in good],
                timeout=self.timeout,
                decimals=self.decimals,
                digits=self.digits,
                marked=self.marked,
            )
        )
        return [
            Mark(status="abstained", reason=why) if why else self._mark(next(told), sample)
            for sample, why in zip(samples, problems, strict=True)
        ]

    def _mark(self, verdict: mathematics.Verdict, sample: SampleToGrade) -> Mark:
        if verdict.score == 1.0:
            question, gold = _question(sample.task), str(sample.task.answer)
            if mathematics.repeats(sample.text, gold, question, self.ends):
                return Mark(0.0, reason=REPEATS)
            rounding = Rounding(self.digits, self.decimals)
            if mathematics.disordered(sample.text, gold, question, self.ends, rounding):
                return Mark(0.0, reason=DISORDERED)
        return Mark(verdict.score, verdict.status, verdict.why)


def _question(task: Task) -> str:
    """Return the text of the last message."""
    if isinstance(task.prompt, str):
        return task.prompt
    return str(task.prompt[-1].get("content", "")) if task.prompt else ""


def math(
    ends: Sequence[str],
    *,
    timeout: float = 5.0,
    digits: int | Literal["by kind"] | None = BY_KIND,
    decimals: int | None = None,
    marked: bool = False,
) -> Mathematics:
    """Compare by mathematics. `digits`: so many digits of a decimal stand for a number that has
    more; "by kind": six for a root, sixteen for a fraction; None: it must be exact. `decimals`:
    numbers that agree when rounded to so many places are equal. `marked`: only an answer in tags or
    a box, or behind "the answer is" or ####, counts."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise RewardError(f"math: timeout = {timeout!r} must be a number of seconds above 0.")
    counts = (
        ("digits", None if digits == BY_KIND else digits, 2, 50),
        ("decimals", decimals, 0, 15),
    )
    for name, count, least, most in counts:
        whole = isinstance(count, int) and not isinstance(count, bool)
        if count is not None and not (whole and least <= count <= most):
            raise RewardError(
                f"math: {name} = {count!r} must be a whole number from {least} to {most}, or None."
            )
    if not isinstance(marked, bool):
        raise RewardError(f"math: marked = {marked!r} must be True or False.")
    mathematics.check_engine()
    return Mathematics(tuple(ends), float(timeout), decimals, digits, marked)


def multiple_choice(ends: Sequence[str]) -> BuiltIn:
    def gold(task: Task) -> str | None:
        return choice.gold_letter(task.answer, choice.options(task.columns))

    def problem(task: Task) -> str:
        return "" if gold(task) else f"the answer {task.answer!r} names no single option"

    def score(sample: SampleToGrade) -> tuple[float, str]:
        known = choice.options(sample.task.columns)
        if answers.echoes(answers.final(sample.text, ends), _question(sample.task)):
            return 0.0, REPEATS
        return choice.verdict(sample.text, str(gold(sample.task)), known, ends, cut=sample.cut)

    return BuiltIn(score, problem, decides=True, needs_answers=True)


def follow_instructions(ends: Sequence[str], *, partial: bool = False) -> BuiltIn:
    """Give 1 if all instructions are followed; with `partial`, the share of them."""

    def problem(task: Task) -> str:
        try:
            instructions.asked(task.columns)
        except ValueError as error:
            return str(error)
        return ""

    def score(sample: SampleToGrade) -> tuple[float, str]:
        checks = instructions.asked(sample.task.columns)
        found = instructions.followed(answers.final(sample.text, ends), checks)
        missed = [name for (name, _), good in zip(checks, found, strict=True) if not good]
        share = sum(found) / len(found)
        said = f"not followed: {', '.join(missed)}" if missed else "all followed"
        return (share if partial else float(share == 1.0)), said

    return BuiltIn(score, problem, decides=not partial)


def in_language(ends: Sequence[str], *, target: str = "") -> BuiltIn:
    """Give the share of a text, thoughts included, in a language: the row's, or `target`."""
    if target and target not in form.LANGUAGES:
        known = ", ".join(form.LANGUAGES)
        raise RewardError(f"language: target = {target!r} is none of {known}.")

    def wanted(task: Task) -> str:
        return target or str(task.columns.get("language", "")).lower()[:2]

    def problem(task: Task) -> str:
        given = wanted(task)
        return "" if given in form.LANGUAGES else f"its column language, {given!r}, is not known"

    def score(sample: SampleToGrade) -> float:
        text = without_ends(sample.text, ends)
        return form.language_share(text, wanted(sample.task))

    return BuiltIn(score, problem)


def repetition(ends: Sequence[str], *, words: int = 4) -> BuiltIn:
    """Give minus the share of runs of so many words that came before: −1 to 0."""
    if isinstance(words, bool) or not isinstance(words, int) or words < 1:
        raise RewardError(f"repetition: words = {words!r} must be a whole number of at least 1.")
    return BuiltIn(lambda sample: -form.repeated_share(without_ends(sample.text, ends), words))


def exact(ends: Sequence[str]) -> BuiltIn:
    def problem(task: Task) -> str:
        plain = isinstance(task.answer, (str, int, float)) and str(task.answer).strip()
        return "" if plain else f"the answer {task.answer!r} is no text"

    def score(sample: SampleToGrade) -> float:
        return answers.exact(answers.final(sample.text, ends), sample.task.answer)

    return BuiltIn(score, problem, decides=True, needs_answers=True)


def number(ends: Sequence[str]) -> BuiltIn:
    def problem(task: Task) -> str:
        known = numbers.gold_number(task.answer) is not None
        return "" if known else f"the answer {task.answer!r} holds no number"

    def score(sample: SampleToGrade) -> float:
        gold = numbers.gold_number(sample.task.answer)
        assert gold is not None  # `problem` has looked
        text = answers.final(sample.text, ends)
        right = numbers.number(text, gold, cut=sample.cut)
        return 0.0 if right and answers.echoes(text, _question(sample.task)) else right

    return BuiltIn(score, problem, decides=True, needs_answers=True)


def countdown(ends: Sequence[str]) -> BuiltIn:
    def given(task: Task) -> tuple[Any, Any]:
        columns = task.columns
        return columns.get("numbers", columns.get("nums")), columns.get("target")

    def problem(task: Task) -> str:
        numbers, target = given(task)
        whole = isinstance(numbers, list) and all(isinstance(x, int) for x in [*numbers, target])
        return "" if whole else "it has no columns numbers (a list) and target of whole numbers"

    def score(sample: SampleToGrade) -> float:
        return answers.countdown(answers.final(sample.text, ends), *given(sample.task))

    return BuiltIn(score, problem, decides=True)


def length(ends: Sequence[str], *, target: int = 100) -> BuiltIn:
    """Give tokens / target, at most 1: shows that a set-up learns at all."""
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise RewardError(f"length: target = {target!r} must be a whole number of at least 1.")
    return BuiltIn(lambda sample: min(1.0, len(sample.token_ids) / target))


def in_format(
    ends: Sequence[str], *, pattern: str = answers.THINK_ANSWER, soft: bool = False
) -> BuiltIn:
    """Give 1 for the whole pattern alone; `soft`: the share of its fixed parts in place."""
    pieces = pattern.split(answers.GAP) if isinstance(pattern, str) else [""]
    if not any(piece.strip() for piece in pieces) or not all(p.strip() for p in pieces[1:-1]):
        raise RewardError(
            f"format: pattern = {pattern!r} must be text with '...' for what may be anything, such "
            "as '<think>...</think>...'."
        )

    def score(sample: SampleToGrade) -> float:
        text = without_ends(sample.text, ends)
        return (answers.format_share if soft else answers.in_format)(text, pattern)

    return BuiltIn(score)


BUILT_IN: Mapping[str, Callable[..., RewardPart]] = {
    "math": math,
    "number": number,
    "choice": multiple_choice,
    "exact": exact,
    "countdown": countdown,
    "instructions": follow_instructions,
    "format": in_format,
    "language": in_language,
    "repetition": repetition,
    "length": length,
}
ELSEWHERE = {  # imported when asked for
    "code": "groupwise.graders.code",
    "environment": "groupwise.graders.environment",
    "judge": "groupwise.graders.judge",
    "rm": "groupwise.graders.scorers",
    "prm": "groupwise.graders.scorers",
}


def _find(name: str) -> Callable[..., RewardPart]:
    if name in ELSEWHERE:
        return getattr(importlib.import_module(ELSEWHERE[name]), name)
    return BUILT_IN[name]


def built_in(text: str, ends: Sequence[str]) -> RewardPart:
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
