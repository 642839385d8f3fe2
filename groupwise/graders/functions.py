"""Reward functions of the user, from a file: `rewards.py:my_function`. Called by parameter names.

Which of three signatures a function has is seen from its parameters:

    completions   a batch: f(completions, prompts, answer, any_column, **rest) -> [value, ...]
    completion    one sample: f(completion, prompt, answer, any_column, **rest) -> value
    solution_str  one sample: f(data_source, solution_str, ground_truth, extra_info) -> value

A value is a number, None (the function has nothing to say), or a dict with `reward` or `score`
and, for process supervision, `steps`: [(end, reward), ...] with ends counted in characters of the
completion. Functions may be async. Completions are strings as the policy wrote them, special
tokens included. What a function gets wrong is recorded with each sample, and is never a 0.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Literal

from groupwise.errors import RewardError, nearest
from groupwise.graders.parts import Mark, Sample
from groupwise.records import Task

Shape = Literal["completions", "completion", "solution_str"]
SHAPES: tuple[Shape, ...] = ("completions", "solution_str", "completion")
ANSWERS = ("answer", "ground_truth")


class UserFunction:
    """A part of the reward that a user wrote."""

    decides = False

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function, self.name = function, name
        parameters = inspect.signature(function).parameters
        self.wanted = {
            key: parameter.default is parameter.empty
            for key, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self.takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.shape = self._shape(list(parameters))

    def _shape(self, parameters: list[str]) -> Shape:
        found = [shape for shape in SHAPES if shape in self.wanted]
        if len(found) == 1:
            return found[0]
        raise RewardError(
            f"{self.name}({', '.join(parameters)}) has {'several' if found else 'none'} of the "
            "parameters that say how to call it: completions (a batch), completion (one sample) "
            "or solution_str (one sample). Name its parameter for the policy's text so."
        )

    @property
    def needs_answers(self) -> bool:
        return any(self.wanted.get(name, False) for name in ANSWERS)

    def problem(self, task: Task) -> str:
        return ""

    def grade(self, samples: Sequence[Sample]) -> list[Mark]:
        if self.shape == "completions":
            (returned,) = self._call([self._of_batch(samples)])
            return self._marks(returned, samples)
        returned_N = self._call([self._of_one(sample) for sample in samples])
        return [self._mark(value, s) for value, s in zip(returned_N, samples, strict=True)]

    def _of_one(self, sample: Sample) -> dict[str, Any]:
        task = sample.task
        if self.shape == "solution_str":
            own = {
                "data_source": task.columns.get("data_source", ""),
                "solution_str": sample.text,
                "ground_truth": task.answer,
                "extra_info": task.columns.get("extra_info"),
            }
        else:
            own = {
                "prompt": _prompt(task),
                "completion": sample.text,
                "completion_ids": list(sample.token_ids),
                "answer": task.answer,
                "finish": sample.finish,
            }
        return {**task.columns, **own}

    def _of_batch(self, samples: Sequence[Sample]) -> dict[str, Any]:
        columns = {key: None for sample in samples for key in sample.task.columns}
        return {
            **{key: [sample.task.columns.get(key) for sample in samples] for key in columns},
            "prompts": [_prompt(sample.task) for sample in samples],
            "completions": [sample.text for sample in samples],
            "completion_ids": [list(sample.token_ids) for sample in samples],
            "answer": [sample.task.answer for sample in samples],
            "finish": [sample.finish for sample in samples],
        }

    def _call(self, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
        """What each call returned, or the error that it raised."""
        if not inspect.iscoroutinefunction(self.function):
            return [self._call_one(known) for known in calls]

        async def together() -> list[Any]:
            return await asyncio.gather(*(self._await_one(known) for known in calls))

        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own thread
            return thread.submit(asyncio.run, together()).result()

    def _call_one(self, known: Mapping[str, Any]) -> Any:
        try:
            return self.function(**self._arguments(known))
        except (Exception, SystemExit) as error:  # the boundary to the user's code
            return error

    async def _await_one(self, known: Mapping[str, Any]) -> Any:
        try:
            return await self.function(**self._arguments(known))
        except (
            Exception,
            SystemExit,
            asyncio.CancelledError,
        ) as error:  # the boundary to the user's code
            return error

    def _arguments(self, known: Mapping[str, Any]) -> dict[str, Any]:
        for name, required in self.wanted.items():
            if required and name not in known:
                raise RewardError(
                    f"it asks for {name!r}, which is no column of the data. {nearest(name, known)}"
                )
        if self.takes_rest:
            return dict(known)
        return {name: known[name] for name in self.wanted if name in known}

    def _marks(self, returned: Any, samples: Sequence[Sample]) -> list[Mark]:
        """A batch's values. A list of another length is never stretched over the samples."""
        if isinstance(returned, BaseException):
            return [self._failure(returned)] * len(samples)
        listed = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(listed, (list, tuple)):
            return [self._error(f"returned {_show(returned)} instead of a list")] * len(samples)
        if len(listed) != len(samples):
            why = f"returned {len(listed)} values for {len(samples)} completions"
            return [self._error(why)] * len(samples)
        return [self._mark(value, sample) for value, sample in zip(listed, samples, strict=True)]

    def _mark(self, value: Any, sample: Sample) -> Mark:
        if isinstance(value, BaseException):
            return self._failure(value)
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

    def _error(self, why: str) -> Mark:
        return Mark(status="error", reason=f"{self.name} {why}")

    def _failure(self, error: BaseException) -> Mark:
        """The exception, its message, and the line of the user's file that led to it."""
        if isinstance(error, RewardError):
            return self._error(f"can't be called: {error}")
        frames = extract_tb(error.__traceback__)
        home = inspect.getsourcefile(self.function)
        own = [frame for frame in frames if frame.filename == home] or frames
        place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
        chat = isinstance(error, TypeError) and "string indices must be integers" in str(error)
        hint = ". Completions are strings here, not lists of messages." if chat else ""
        return self._error(f"raised {type(error).__name__}: {_short(str(error))}{place}{hint}")


def load_function(text: str, modules: dict[Path, ModuleType]) -> UserFunction:
    """`file.py:function`. `modules` are the files loaded so far: each is run once."""
    path, _, name = text.rpartition(":")
    file = Path(path).expanduser().resolve()
    if file not in modules:
        modules[file] = _load(path, file)
    function = getattr(modules[file], name, None)
    if not callable(function):
        known = [key for key, x in vars(modules[file]).items() if inspect.isroutine(x)]
        tail = nearest(name, known) if known else "It defines none."
        raise RewardError(f"{path} has no function {name!r}. {tail}")
    return UserFunction(function, text)


def _load(path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise RewardError(
            f"There is no file {path!r} to take a reward function from. Paths are relative to "
            f"{Path.cwd()}."
        )
    name = f"groupwise_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == str(file)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        raise RewardError(
            f"Can't load {path}{f', line {line}' if line else ''}: {type(error).__name__}: {error}."
        ) from error
    return module


def _prompt(task: Task) -> str | list[dict[str, Any]]:
    return task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt]


def _number(value: Any) -> float | None:
    """A finite float of a number, a bool, or a scalar of an array library; else None."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
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
    return f"{_short(repr(value))} ({type(value).__name__})"


def _short(text: str, width: int = 120) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
