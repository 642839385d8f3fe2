"""The far side of a user's reward function: loads its file, calls it, says what it returned.

It runs in a worker process (`serve`), or here for a function that is no file's (`Here`). Nothing
but plain values goes back, so that both sides agree on what was returned.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any, Literal, NamedTuple

from groupwise.errors import RewardError, nearest
from groupwise.graders.extract import find

NOT_LOADED = "not loaded"


class Signature(NamedTuple):
    """What a function asks for: name -> whether it must be given."""

    wanted: dict[str, bool]
    takes_rest: bool
    asynchronous: bool
    weights: tuple[float, ...] = ()  # of a rubric's functions


class Returned(NamedTuple):
    """What one call came to."""

    status: Literal["ok", "error", "timeout"]
    value: Any  # plain; of an error, what to say


class Odd(NamedTuple):
    """A value that is no number, list or dict: what it looks like."""

    shown: str
    kind: str


class Parser:
    """What a function of the `verifiers` kind may ask for: the answer in a completion."""

    def parse(self, text: str) -> str:
        return find(text).text

    def parse_answer(self, completion: Any) -> str:
        said = completion if isinstance(completion, str) else str(completion[-1]["content"])
        return find(said).text


def _nothing(*_: Any, **__: Any) -> None:
    """For functions that log through what they are handed."""


# What other tools hand over and that can't cross to another process.
TOOLS: dict[str, Any] = {"parser": Parser(), "log_extra": _nothing, "log_metric": _nothing}


# --- in the worker

_MODULES: dict[str, tuple[int, ModuleType]] = {}


def serve(task: str, file: str, name: str = "", calls: Any = (), limit: float = 0.0) -> Any:
    """`load` a file, `describe` or `call` a function of it."""
    try:
        if task == "load":
            load(file)
            return None
        if file not in _MODULES or _MODULES[file][0] != Path(file).stat().st_mtime_ns:
            return NOT_LOADED
        function = pick(_MODULES[file][1], file, name)
        return signature(function) if task == "describe" else call(function, calls, limit)
    except RewardError as error:
        return error


def load(file: str) -> None:
    path = Path(file)
    name = f"groupwise_reward_{path.stem}"
    stamp = path.stat().st_mtime_ns
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{file!r} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        lines = [f.lineno for f in extract_tb(error.__traceback__) if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
        raise RewardError(
            f"Can't load {file}{f', line {line}' if line else ''}: {type(error).__name__}: {error}."
        ) from None
    _MODULES[file] = (stamp, module)


def pick(module: ModuleType, file: str, name: str) -> Callable[..., Any] | Rubric:
    found = getattr(module, name, None)
    if found is not None and is_rubric(found):
        return Rubric(found)
    if not callable(found):
        known = [key for key, x in vars(module).items() if inspect.isroutine(x)]
        tail = nearest(name, known) if known else "It defines none."
        raise RewardError(f"{file} has no function {name!r}. {tail}")
    return found


# --- a rubric of the `verifiers` kind


def is_rubric(thing: Any) -> bool:
    return all(isinstance(getattr(thing, key, None), list) for key in ("funcs", "weights"))


class Rubric:
    """Several functions and their weights as one: the weighted sum of what they return."""

    def __init__(self, rubric: Any) -> None:
        self.functions: list[Callable[..., Any]] = list(rubric.funcs)
        self.weights = [float(weight) for weight in rubric.weights]
        if not self.functions or len(self.functions) != len(self.weights):
            raise RewardError("A rubric needs functions, and a weight for each.")


def signature(function: Callable[..., Any] | Rubric) -> Signature:
    if isinstance(function, Rubric):
        parts = [signature(each) for each in function.functions]
        wanted: dict[str, bool] = {}
        for part in parts:
            for key, required in part.wanted.items():
                wanted[key] = required or wanted.get(key, False)
        rest = any(part.takes_rest for part in parts)
        asynchronous = any(part.asynchronous for part in parts)
        return Signature(wanted, rest, asynchronous, tuple(function.weights))
    parameters = inspect.signature(function).parameters
    wanted = {
        key: parameter.default is parameter.empty
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return Signature(wanted, rest, inspect.iscoroutinefunction(function))


# --- calls


def call(
    function: Callable[..., Any] | Rubric, calls: Sequence[Mapping[str, Any]], limit: float
) -> list[Returned]:
    """What each call returned, or how it failed. Async ones run together, each within `limit`."""
    if isinstance(function, Rubric):
        parts = [call(each, _own(each, calls), limit) for each in function.functions]
        return [_weighted(row, function.weights) for row in zip(*parts, strict=True)]
    ready = [_with_tools(function, known) for known in calls]
    if not inspect.iscoroutinefunction(function):
        return [_call_one(function, known) for known in ready]

    async def together() -> list[Returned]:
        return await asyncio.gather(*(_await_one(function, known, limit) for known in ready))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own thread
        return thread.submit(asyncio.run, together()).result()


def _own(function: Callable[..., Any], calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    wanted, rest, *_ = signature(function)
    return [{k: x for k, x in known.items() if rest or k in wanted} for known in calls]


def _with_tools(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    wanted = signature(function).wanted
    return {**known, **{key: tool for key, tool in TOOLS.items() if key in wanted}}


def _weighted(row: Sequence[Returned], weights: Sequence[float]) -> Returned:
    bad = next((each for each in row if each.status != "ok"), None)
    if bad is not None:
        return bad
    known = [
        (w, each.value) for w, each in zip(weights, row, strict=True) if each.value is not None
    ]
    if not known:
        return Returned("ok", None)
    if not all(isinstance(value, (int, float)) for _, value in known):
        return Returned("error", "a function of the rubric returned no number")
    return Returned("ok", sum(weight * value for weight, value in known))


def _call_one(function: Callable[..., Any], known: Mapping[str, Any]) -> Returned:
    try:
        return Returned("ok", plain(function(**known)))
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        return Returned("error", failure(function, error))


async def _await_one(
    function: Callable[..., Any], known: Mapping[str, Any], limit: float
) -> Returned:
    try:
        return Returned("ok", plain(await asyncio.wait_for(function(**known), limit or None)))
    except TimeoutError as error:
        if limit and not error.args:
            return Returned("timeout", f"took longer than {limit:g} s and was stopped")
        return Returned("error", failure(function, error))
    except (
        Exception,
        SystemExit,
        asyncio.CancelledError,
    ) as error:  # the boundary to the user's code
        return Returned("error", failure(function, error))


def plain(value: Any) -> Any:
    """Numbers of array libraries as Python's, lists and dicts of them; else how it looks."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        return plain(value.tolist())
    if isinstance(value, numbers.Real):
        return float(value)
    return Odd(_short(repr(value)), type(value).__name__)


def failure(function: Callable[..., Any], error: BaseException) -> str:
    """The exception, its message, and the line of the user's file that led to it."""
    frames = extract_tb(error.__traceback__)
    home = inspect.getsourcefile(inspect.unwrap(function))
    own = [frame for frame in frames if frame.filename == home] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"raised {type(error).__name__}: {_short(str(error))}{place}{_hint(error)}"


def _hint(error: BaseException) -> str:
    said = str(error)
    if isinstance(error, TypeError) and "string indices must be integers" in said:
        return (
            ". Completions are strings here, not lists of messages."
            " Use the completion itself where the function takes [0]['content'] of it."
        )
    if isinstance(error, AttributeError) and "'str' object has no attribute 'get'" in said:
        return ". Completions are strings here, not lists of messages."
    chat = "'list' object has no attribute" in said or "expected string or bytes-like" in said
    if isinstance(error, (AttributeError, TypeError)) and chat:
        return (
            ". The prompt of a chat is a list of messages, not a string: take "
            "prompt[-1]['content'], or write the function for the completion alone."
        )
    return ""


def _short(text: str, width: int = 120) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
