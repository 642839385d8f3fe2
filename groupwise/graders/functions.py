"""Reward functions of the user, from a file: `rewards.py:my_function`. Called by parameter names.

Which signature a function has is seen from its parameters:

    completions   a batch: f(completions, prompts, answer, any_column, **rest) -> [value, ...]
    completion    one sample: f(completion, prompt, answer, any_column, **rest) -> value
    solution_str  one sample: f(data_source, solution_str, ground_truth, extra_info) -> value
    entry         one sample: f(answer, entry) -> value, a scorer as reasoning-gym has them

or it is no function but a rubric or an environment of several (`environments.py`).

A value is a number, None (the function has nothing to say), or a dict with `reward` or `score`
and, for process supervision, `steps`: [(end, reward), ...] with ends counted in characters of the
completion. Functions may be async. What a function gets wrong is recorded with each sample, and is
never a 0.

Completions are strings as the policy wrote them, without the token that ended them; other special
tokens stay. But where the prompt is a list of messages, each of the `completions` is one, too, as
in TRL: [{"role": "assistant", "content": ...}].

Files are loaded in a process of their own, where a call that takes too long is stopped.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol
from weakref import WeakValueDictionary

from groupwise.errors import RewardError, nearest
from groupwise.graders import loading
from groupwise.graders.calling import TOOLS, OddValue, Returned, Signature
from groupwise.graders.environments import rubric_of
from groupwise.graders.loading import NOT_LOADED
from groupwise.graders.mathematics.extract import find
from groupwise.graders.parts import Mark, SampleToGrade
from groupwise.graders.pool import START_SECONDS, Outcome, Pool

if TYPE_CHECKING:
    from groupwise.records import Task

Shape = Literal["completions", "completion", "solution_str", "entry", "rubric"]
SHAPES: tuple[Shape, ...] = ("completions", "solution_str", "completion", "entry")
ANSWERS = ("answer", "answers", "ground_truth")
TIMEOUT = 60.0  # seconds for a call, where nothing else is said
_POOLS: WeakValueDictionary[str, Pool] = WeakValueDictionary()  # by folder, those in use
GRACE = 2.0  # seconds more for a batch of async calls, which keep their own clock
TRIES = 3  # in vain, after which no more are made
_NOT_CALLED = Outcome(
    None, "timeout", f"{TRIES} calls in a row before it took too long, or ended their process"
)


class Caller(Protocol):
    """The place where a function runs."""

    def signature(self) -> Signature: ...

    def call(self, calls: Sequence[Mapping[str, Any]], together: bool) -> list[Returned]: ...


class LocalCaller:
    """A caller in this process: for a function that is no file's. It can't be stopped."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.reward = rubric_of(function) or function

    def signature(self) -> Signature:
        return loading.signature(self.reward)

    def call(self, calls: Sequence[Mapping[str, Any]], together: bool) -> list[Returned]:
        return loading.call(self.reward, calls, 0.0)


class WorkerCaller:
    """A caller in a worker, which loads the file and is killed when a call takes too long."""

    def __init__(self, file: Path, name: str, timeout: float) -> None:
        self.file, self.name, self.timeout = str(file), name, timeout
        self.workers = workers(str(file.parent))

    def signature(self) -> Signature:
        (outcome,) = self._run(
            [("describe", _working_folder(), self.file, self.name)], START_SECONDS
        )
        found = outcome.value
        if isinstance(found, RewardError):
            raise found
        if not isinstance(found, Signature):
            raise RewardError(f"Can't load {self.file}: {outcome.reason or found}.")
        return found

    def call(self, calls: Sequence[Mapping[str, Any]], together: bool) -> list[Returned]:
        """Make the calls, each with its own time-out; async ones, `together`, share a worker's
        loop.
        """
        batches = [list(calls)] if together else [[known] for known in calls]
        here = _working_folder()
        items = [("call", here, self.file, self.name, batch, self.timeout) for batch in batches]
        limit = self.timeout + (GRACE if together else 0.0)
        found: list[Returned] = []
        for batch, outcome in zip(batches, self._run(items, limit), strict=True):
            found += self._returned(outcome, len(batch))
        return found

    def _returned(self, outcome: Outcome, calls: int) -> list[Returned]:
        if outcome is _NOT_CALLED:
            return [Returned("timeout", f"was not called: {outcome.reason}")] * calls
        if outcome.status == "timeout":
            return [
                Returned("timeout", f"took longer than {self.timeout:g} s and was stopped")
            ] * calls
        if outcome.status != "ok":
            return [Returned("error", f"failed: {outcome.reason}")] * calls
        if not isinstance(outcome.value, list):
            return [Returned("error", f"can't be loaded: {outcome.value}")] * calls
        return list(outcome.value)

    def _run(self, items: Sequence[tuple[Any, ...]], limit: float) -> list[Outcome]:
        """Run the calls. Loading is not counted: a new worker loads the file first.

        A call that is stopped takes the worker with it, so those behind it are made again. When
        several in a row are lost and none comes through, the rest is not called: they would take
        their time one after the other.
        """
        found: dict[int, Outcome] = {}
        missing, in_vain, lost = list(range(len(items))), 0, 0
        while missing:
            told = self.workers.run([items[number] for number in missing], limit)
            now = dict(zip(missing, told, strict=True))
            found |= now
            done = [outcome for outcome in told if outcome.value != NOT_LOADED]
            missing = [number for number, outcome in now.items() if outcome.value == NOT_LOADED]
            bad = sum(outcome.status != "ok" for outcome in done)
            lost = (lost if bad == len(done) else 0) + bad
            in_vain = 0 if done else in_vain + 1
            if not missing or in_vain == TRIES:  # another caller's item may have killed the worker
                break
            if lost >= TRIES:
                return [found[n] if n not in missing else _NOT_CALLED for n in range(len(items))]
            load = ("load", _working_folder(), self.file, self.name)
            (loaded,) = self.workers.run([load], START_SECONDS)
            if loaded.status != "ok" or loaded.value is not None:
                return [found[n] if n not in missing else loaded for n in range(len(items))]
        return [found[number] for number in range(len(items))]


def _working_folder() -> str:
    """Return the working folder; "" where it was deleted, which must end no run."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


@lru_cache(maxsize=1)  # the last one stays for whoever asks next
def workers(folder: str) -> Pool:
    """Return the process for the reward code of a folder: the functions of a file share its state,
    and what they import from beside it is never another folder's module of that name.
    """
    pool = _POOLS.get(folder) or Pool("groupwise.graders.loading:serve", workers=1)
    _POOLS[folder] = pool
    return pool


class UserFunction:
    """A part of the reward that a user wrote."""

    decides = False

    def __init__(self, caller: Caller, name: str, ends: Sequence[str] = ()) -> None:
        """Set up the function; `ends` are the texts of tokens that end a completion."""
        self.caller, self.name, self.ends = caller, name, ends
        self.wanted, self.takes_rest, self.asynchronous, self.rubric = caller.signature()
        self.shape = self._shape()

    def _shape(self) -> Shape:
        if self.rubric:
            return "rubric"
        found = [shape for shape in SHAPES if shape in self.wanted]
        if len(found) == 1:
            return found[0]
        raise RewardError(
            f"{self.name}({', '.join(self.wanted)}) has {'several' if found else 'none'} of the "
            "parameters that say how to call it: completions (a batch), completion (one sample), "
            "solution_str (one sample) or entry (a scorer). Name its parameter for the policy's "
            "text so."
        )

    @property
    def needs_answers(self) -> bool:
        return any(self.wanted.get(name, False) for name in ANSWERS)

    @property
    def limit(self) -> float | None:
        """Return the seconds that a call may take."""
        return getattr(self.caller, "timeout", None)

    def turns(self, samples: Sequence[SampleToGrade]) -> list[list[SampleToGrade]]:
        """Split the samples into calls, each with the limit for itself."""
        if self.shape == "completions" or self.asynchronous:
            return [list(samples)]
        if self.rubric == "groups":
            return [list(group) for _, group in groupby(samples, lambda x: x.task.id)]
        return [[sample] for sample in samples]

    def problem(self, task: Task) -> str:
        return ""

    def grade(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        if self.shape == "completions":
            (returned,) = self._call([self._of_batch(samples)])
            return self._marks(returned, samples)
        if self.shape == "rubric":
            return self._by_rubric(samples)
        returned_N = self._call([self._of_one(sample) for sample in samples])
        return [self._mark(value, s) for value, s in zip(returned_N, samples, strict=True)]

    def _by_rubric(self, samples: Sequence[SampleToGrade]) -> list[Mark]:
        """Grade by sample, or by group where a function compares the samples of a prompt."""
        rows = [self._of_one(sample) for sample in samples]
        together = [
            [row for row, _ in group]
            for _, group in groupby(
                enumerate(samples), lambda x: x[1].task.id if self.rubric == "groups" else x[0]
            )
        ]
        problems = [self._lacks(rows[group[0]]) for group in together]
        ready = [group for group, why in zip(together, problems, strict=True) if not why]
        calls = [{"samples": [rows[row] for row in group]} for group in ready]
        told = iter(self.caller.call(calls, self.asynchronous) if calls else [])
        marks: list[Mark] = []
        for group, why in zip(together, problems, strict=True):
            returned = Returned("error", why) if why else next(told)
            found = returned.value if returned.status == "ok" else [returned] * len(group)
            own = [samples[row] for row in group]
            marks += [self._mark(each, s) for each, s in zip(found, own, strict=True)]
        return marks

    def _call(self, known: Sequence[Mapping[str, Any]]) -> list[Returned]:
        """Return each call's result; one that lacks an argument is not made."""
        problems = [self._lacks(each) for each in known]
        ready = [self._arguments(k) for k, why in zip(known, problems, strict=True) if not why]
        told = iter(self.caller.call(ready, self.asynchronous) if ready else [])
        return [Returned("error", why) if why else next(told) for why in problems]

    def _text(self, sample: SampleToGrade) -> str:
        """Return the text without the token that ended it, as other tools decode it, so that
        `completion == answer` and a pattern that ends with `$` mean what they say.
        """
        end = next((end for end in self.ends if end and sample.text.endswith(end)), "")
        return sample.text.removesuffix(end) if sample.finish == "eos" else sample.text

    def _completion(self, sample: SampleToGrade) -> str | list[dict[str, str]]:
        """Return the completion as TRL has it: a message if the prompt is messages, else text."""
        text = self._text(sample)
        if isinstance(sample.task.prompt, str):
            return text
        return [{"role": "assistant", "content": text}]

    def _of_one(self, sample: SampleToGrade) -> dict[str, Any]:
        task, prompt, text = sample.task, _prompt(sample.task), self._text(sample)
        if self.shape == "entry":
            entry = {"question": prompt, "answer": task.answer, "metadata": dict(task.columns)}
            given = task.columns.get("entry")
            return {
                "answer": find(text).text,
                "entry": given if isinstance(given, dict) else {**task.columns, **entry},
            }
        if self.shape == "solution_str":
            own = {
                "data_source": task.columns.get("data_source", ""),
                "solution_str": text,
                "ground_truth": task.answer,
                "extra_info": task.columns.get("extra_info"),
            }
        else:
            info = task.columns.get("info") or {}
            own = {
                "prompt": prompt,
                "completion": text,
                "completion_ids": list(sample.token_ids),
                "answer": task.answer,
                "finish": sample.finish,
                "info": info,
                "task": task.columns.get("task", task.source),
                **self._said([sample], lambda found: found[0]),
            }
            own["state"] = {**own, "responses": [text], "turn": 1}
        return {**task.columns, **own}

    def _of_batch(self, samples: Sequence[SampleToGrade]) -> dict[str, Any]:
        columns = {key: None for sample in samples for key in sample.task.columns}
        return {
            **{key: [sample.task.columns.get(key) for sample in samples] for key in columns},
            "prompts": [_prompt(sample.task) for sample in samples],
            "completions": [self._completion(sample) for sample in samples],
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "answer": [sample.task.answer for sample in samples],
            "answers": [sample.task.answer for sample in samples],
            "finish": [sample.finish for sample in samples],
            **self._said(samples, list),
            "trainer_state": None,
        }

    def _said(
        self, samples: Sequence[SampleToGrade], form: Callable[[list[Any]], Any]
    ) -> dict[str, Any]:
        """Return all that was said behind the prompts, as `messages`: by the policy and others.

        Where nobody answered the policy, for a function that asks for it, and the data do not.
        """
        played = any(sample.episode is not None for sample in samples)
        asked = "messages" in self.wanted and "messages" not in samples[0].task.columns
        if not played and not asked:
            return {}
        return {"messages": form([self._conversation(sample) for sample in samples])}

    def _conversation(self, sample: SampleToGrade) -> list[dict[str, Any]]:
        if sample.episode is None:
            return [{"role": "assistant", "content": self._text(sample)}]
        return [dict(message) for message in sample.episode.messages]

    def _lacks(self, known: Mapping[str, Any]) -> str:
        for name, required in self.wanted.items():
            if required and name not in known and name not in TOOLS:
                tail = nearest(name, known)
                return (
                    f"can't be called: it asks for {name!r}, which is no column of the data. {tail}"
                )
        return ""

    def _arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        if self.takes_rest:
            return dict(known)
        return {name: known[name] for name in self.wanted if name in known}

    def _marks(self, returned: Returned, samples: Sequence[SampleToGrade]) -> list[Mark]:
        """Return a batch's marks. A list of another length is never stretched over the samples."""
        if returned.status != "ok":
            return [self._failed(returned)] * len(samples)
        listed = returned.value
        if not isinstance(listed, (list, tuple)) or isinstance(listed, OddValue):
            forgot = ": did you forget return?" if listed is None else ""
            why = f"returned {_show(listed)} instead of a list{forgot}"
            return [self._error(why)] * len(samples)
        if len(listed) != len(samples):
            why = f"returned {len(listed)} values for {len(samples)} completions"
            return [self._error(why)] * len(samples)
        return [
            self._mark(Returned("ok", value), sample)
            for value, sample in zip(listed, samples, strict=True)
        ]

    def _mark(self, returned: Returned, sample: SampleToGrade) -> Mark:
        if returned.status != "ok":
            return self._failed(returned)
        value = returned.value
        steps: tuple[tuple[int, float], ...] = ()
        if isinstance(value, Mapping):
            name = "reward" if "reward" in value else "score"
            if name not in value:
                return self._error(f"returned a dict without 'reward' or 'score': {_show(value)}")
            try:
                steps = _steps(value.get("steps") or (), len(sample.text))
            except (TypeError, ValueError) as error:
                return self._error(f"returned steps that make no sense: {error}")
            value = value[name]
        if value is None:
            return Mark(status="abstained", reason=f"{self.name} returned None")
        found = _number(value)
        if found is None:
            return self._error(f"returned {_show(value)}, which is no finite number")
        return Mark(found, steps=steps)

    def _failed(self, returned: Returned) -> Mark:
        status: Literal["timeout", "error"] = "timeout" if returned.status == "timeout" else "error"
        return Mark(status=status, reason=f"{self.name} {returned.value}")

    def _error(self, why: str) -> Mark:
        return Mark(status="error", reason=f"{self.name} {why}")


def load_function(text: str, timeout: float = TIMEOUT, ends: Sequence[str] = ()) -> UserFunction:
    """Load `file.py:function`."""
    path, _, name = text.rpartition(":")
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise RewardError(
            f"There is no file {path!r} to take a reward function from. Paths are relative to "
            f"{Path.cwd()}."
        )
    return UserFunction(WorkerCaller(file, name, timeout), text, ends)


def given_function(
    function: Callable[..., Any], name: str, ends: Sequence[str] = ()
) -> UserFunction:
    """Wrap a function of this process, such as a notebook's: it runs here, without a time-out."""
    return UserFunction(LocalCaller(function), name, ends)


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    return task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt]


def _number(value: Any) -> float | None:
    """Return a number or a bool as a finite float; else None."""
    if not isinstance(value, (bool, int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _steps(steps: Any, length: int) -> tuple[tuple[int, float], ...]:
    checked: list[tuple[int, float]] = []
    for end, reward in steps:
        value = _number(reward)
        if value is None:
            raise ValueError(f"the reward {_show(reward)} is no finite number")
        if isinstance(end, bool) or not isinstance(end, int) or not 0 < end <= length:
            raise ValueError(f"the end {_show(end)} is not within the text of {length} characters")
        if checked and end <= checked[-1][0]:
            raise ValueError(f"the end {end} is not behind the one before, {checked[-1][0]}")
        checked.append((end, value))
    return tuple(checked)


def _show(value: Any) -> str:
    if isinstance(value, OddValue):
        return f"{value.shown} ({value.kind})"
    return f"{_short(repr(value))} ({type(value).__name__})"


def _short(text: str, width: int = 120) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
