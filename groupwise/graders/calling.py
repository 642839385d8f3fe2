"""Calls of a user's reward function, and their results.

They are made in a worker process (`loading.serve`), or here for a function that is no file's.
Nothing but plain values goes back, so that both sides agree on what was returned.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, NamedTuple, TypeVar

from groupwise.common.forked import one_process
from groupwise.graders.mathematics.extract import find

T = TypeVar("T")


class Signature(NamedTuple):
    """The arguments of a function: name -> whether it must be given."""

    wanted: dict[str, bool]
    takes_rest: bool
    asynchronous: bool
    rubric: Literal["", "samples", "groups"] = ""  # of several functions: what each is called for


class Returned(NamedTuple):
    """The result of one call."""

    status: Literal["ok", "error", "timeout"]
    value: Any  # plain; of an error, what to say


class OddValue(NamedTuple):
    """A value that is no number, list or dict, kept as its printed form."""

    shown: str
    kind: str


class Parser:
    """A parser for functions of the `verifiers` kind: finds the answer in a completion."""

    def parse(self, text: str) -> str:
        return find(text).text

    def parse_answer(self, completion: Any) -> str:
        said = completion if isinstance(completion, str) else str(completion[-1]["content"])
        return find(said).text


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing; for functions that log through an argument."""


# What other tools hand over and that can't cross to another process.
TOOLS: dict[str, Any] = {"parser": Parser(), "log_extra": _nothing, "log_metric": _nothing}


def signature(function: Callable[..., Any]) -> Signature:
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
    function: Callable[..., Any], calls: Sequence[Mapping[str, Any]], limit: float
) -> list[Returned]:
    """Return what each call returned, or how it failed. Async ones run together, each within
    `limit`.
    """
    ready = [_with_tools(function, known) for known in calls]
    if not inspect.iscoroutinefunction(function):
        return [_call_one(function, known) for known in ready]

    async def together() -> list[Returned]:
        return await asyncio.gather(*(_await_one(function, known, limit) for known in ready))

    return in_a_loop(together())


def in_a_loop(work: Coroutine[Any, Any, T]) -> T:
    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own thread
        return thread.submit(asyncio.run, work).result()


def _with_tools(function: Callable[..., Any], known: Mapping[str, Any]) -> dict[str, Any]:
    wanted = signature(function).wanted
    return {**known, **{key: tool for key, tool in TOOLS.items() if key in wanted}}


def _call_one(function: Callable[..., Any], known: Mapping[str, Any]) -> Returned:
    try:
        with one_process():
            found = function(**known)
        return Returned("ok", plain(found))
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        return Returned("error", failure(function, error, known))


async def _await_one(
    function: Callable[..., Any], known: Mapping[str, Any], limit: float
) -> Returned:
    async def alone() -> Any:
        with one_process():  # within the task: a child must not get back to the event loop
            return await function(**known)

    try:
        return Returned("ok", plain(await asyncio.wait_for(alone(), limit or None)))
    except TimeoutError as error:
        if limit and not error.args:
            return Returned("timeout", f"took longer than {limit:g} s and was stopped")
        return Returned("error", failure(function, error, known))
    except (
        Exception,
        SystemExit,
        asyncio.CancelledError,
    ) as error:  # the boundary to the user's code
        return Returned("error", failure(function, error, known))


def plain(value: Any) -> Any:
    """Turn numbers of array libraries, and lists and dicts of them, into Python's; else keep the
    looks.

    A reward is no text: of a long one the beginning will do, for words about it.
    """
    if value is None or type(value) in (bool, float):
        return value
    if type(value) is str:
        return _short(value)
    if isinstance(value, Mapping):
        return {_short(str(key)): plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(each) for each in value)
    if isinstance(value, list):
        return [plain(each) for each in value]
    date = getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M")  # numpy counts them
    if isinstance(value, (numbers.Real, Decimal)) and not date:
        return _plain_number(value)
    if hasattr(value, "tolist") and hasattr(value, "shape") and not date:
        return plain(value.tolist())
    return OddValue(_short(repr(value)), type(value).__name__)


def _plain_number(value: Any) -> Any:
    """Keep an int: it may be a place in a text. One too large for a float is no reward."""
    try:
        number = float(value)
    except (OverflowError, ValueError):  # 10**400, Decimal("sNaN")
        return OddValue("a number too large for a float, or none", type(value).__name__)
    return int(value) if isinstance(value, numbers.Integral) else number


def failure(
    function: Callable[..., Any], error: BaseException, known: Mapping[str, Any] | None = None
) -> str:
    """Return the exception, its message, and the line of the user's file that led to it.

    `known` are the arguments that it was called with.
    """
    frames = extract_tb(error.__traceback__)
    home = inspect.getsourcefile(inspect.unwrap(function))
    own = [frame for frame in frames if frame.filename == home] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    hint = _hint(error, known or {})
    return f"raised {type(error).__name__}: {_short(str(error))}{place}{hint}"


def _hint(error: BaseException, known: Mapping[str, Any]) -> str:
    """Explain the form of completions, where a function took texts for messages or messages for
    texts.
    """
    said = str(error)
    wants_messages = (
        isinstance(error, TypeError) and "string indices must be integers" in said
    ) or (isinstance(error, AttributeError) and "'str' object has no attribute 'get'" in said)
    if wants_messages:
        batch = (
            " Where prompts are messages, they are messages, too." if "completions" in known else ""
        )
        return (
            f". Completions are strings here, not lists of messages.{batch}"
            " Use the completion itself where the function takes [0]['content'] of it"
        )
    chat = "'list' object has no attribute" in said or "expected string or bytes-like" in said
    if not isinstance(error, (AttributeError, TypeError)) or not chat:
        return ""
    if any(isinstance(each, list) for each in known.get("completions") or ()):
        return (
            ". Completions were given as messages, [{'role': 'assistant', 'content': ...}], as in "
            "TRL where the prompt is a list of messages: take completion[0]['content']. A function "
            "whose parameter is `completion`, for one sample, is given the text"
        )
    return (
        ". The prompt of a chat is a list of messages, not a string: take "
        "prompt[-1]['content'], or write the function for the completion alone"
    )


def _short(text: str, width: int = 120) -> str:
    return text if len(text) <= width else f"{text[:width]}..."
