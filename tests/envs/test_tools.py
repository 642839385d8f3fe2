"""Functions as tools: schemas from types and docstrings, arguments that fit them, answers."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, TypedDict, Union

import pytest
from toy_worlds import read

from groupwise.envs.answering import cut
from groupwise.envs.environment import Observation
from groupwise.envs.schemas import Unfit, fit, fitted, schema_of
from groupwise.envs.toolbox import Toolbox, tool
from groupwise.errors import WorldError


class Colour(enum.Enum):
    red = "r"
    blue = "b"


@dataclass
class Point:
    x: float
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


class Options(TypedDict, total=False):
    deep: bool
    limit: int


def rich(
    query: str,
    top: int = 3,
    kind: Literal["text", "image"] = "text",
    near: Optional[Point] = None,  # noqa: UP045
    words: list[str] | None = None,
    weights: dict[str, float] = {},  # noqa: B006
    options: Options = {},  # noqa: B006
    either: Union[int, str] = 1,  # noqa: UP007
    pair: tuple[int, str] = (1, "a"),
    colour: Colour = Colour.red,
    note: Annotated[str, "Anything."] = "",
) -> str:
    """Search for something.

    It has a second line.

    Args:
        query (str): What to look for,
            on two lines.
        top: How many.

    Returns:
        What was found: nothing of this is an argument.
    """
    return f"{query} {top} {kind} {near} {words} {weights} {options} {either} {pair} {colour}"


def test_a_schema_says_what_the_types_and_the_docstring_say() -> None:
    told = schema_of(rich)["function"]
    assert (told["name"], told["description"]) == (
        "rich",
        "Search for something. It has a second line.",
    )
    known = told["parameters"]["properties"]
    assert told["parameters"]["required"] == ["query"]
    about = "What to look for, on two lines."
    assert known["query"] == {"type": "string", "description": about}
    assert known["top"] == {"type": "integer", "description": "How many.", "default": 3}
    assert known["kind"] == {"enum": ["text", "image"], "default": "text"}
    number = {"type": "number"}
    point = {
        "type": "object",
        "properties": {
            "x": number,
            "y": number,
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["x"],
    }
    assert known["near"] == {"anyOf": [point, {"type": "null"}], "default": None}
    assert known["words"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert known["weights"] == {"type": "object", "additionalProperties": number, "default": {}}
    assert known["options"]["properties"] == {
        "deep": {"type": "boolean"},
        "limit": {"type": "integer"},
    }
    assert known["options"]["required"] == []
    assert known["either"]["anyOf"] == [{"type": "integer"}, {"type": "string"}]
    assert known["pair"] == {"type": "array"}
    assert known["colour"] == {"enum": ["r", "b"]}
    assert known["note"] == {"type": "string", "description": "Anything.", "default": ""}


def test_arguments_arrive_as_the_types_say() -> None:
    given = {
        "query": 12,
        "top": "5",
        "near": {"x": 1, "tags": ["a"]},
        "weights": {"a": 1},
        "options": {"deep": "true"},
        "either": "7",
        "pair": [2, "b"],
        "colour": "b",
    }
    found = fitted(rich, given)
    assert found["query"] == "12" and found["top"] == 5
    assert found["near"] == Point(1.0, 0.0, ["a"]) and isinstance(found["near"].x, float)
    assert found["weights"] == {"a": 1.0} and found["options"] == {"deep": True}
    assert found["either"] == "7" and found["pair"] == (2, "b") and found["colour"] is Colour.blue


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "the argument 'query' is missing"),
        ({"query": "a", "tip": 1}, "there is no argument 'tip'. Did you mean 'top'"),
        ({"query": "a", "top": "many"}, 'top must be a whole number, not "many"'),
        ({"query": "a", "top": 1.5}, "top must be a whole number, not 1.5"),
        ({"query": "a", "top": True}, "top must be a whole number, not true"),
        ({"query": ["a"]}, r'query must be a text, not \["a"\]'),
        ({"query": "a", "kind": "sound"}, r'kind must be one of \["text", "image"\], not "sound"'),
        ({"query": "a", "near": {"y": 1}}, "near lacks 'x'; or near must be null"),
        ({"query": "a", "near": {"x": 1, "z": 1}}, "near has no 'z'"),
        ({"query": "a", "words": ["a", None]}, r"words\[1\] must be a text"),
        ({"query": "a", "weights": [1]}, "weights must be an object"),
        ({"query": "a", "pair": [1]}, "pair must have 2 entries, not 1"),
        ({"query": "a", "colour": "green"}, "colour must be one of"),
    ],
)
def test_arguments_that_do_not_fit_are_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Unfit, match=words):
        fitted(rich, given)


def test_numbers_of_texts_are_bounded() -> None:
    with pytest.raises(Unfit):
        fit("9" * 5_000, int, "x")


def test_what_no_schema_has_a_word_for_is_refused() -> None:
    def odd(a: Callable[[], int]) -> int:
        """Call it."""
        return a()

    def rest(*a: int) -> int:
        """Add them."""
        return sum(a)

    for function, words in ((odd, "which no schema has a word for"), (rest, r"takes \*a")):
        with pytest.raises(WorldError, match=words):
            schema_of(function)


def box(*functions: Callable[..., Any], most: int = 4) -> Toolbox:
    return Toolbox([tool(each) for each in functions], lambda _: read, most, 5.0)


def answered(toolbox: Toolbox, text: str) -> tuple[list[str], list[str]]:
    found: Observation = asyncio.run(toolbox.answer(text))
    assert all(message["role"] == "tool" for message in found.messages)
    said = [str(message["content"]) for message in found.messages]
    return said, [call.status for call in found.calls]


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


def nothing() -> None:
    """Return nothing."""


def record() -> Any:
    """Return a record."""
    return {"ä": [1, Path("x")]}


def test_every_call_of_a_turn_is_answered_in_order() -> None:
    toolbox = box(double, nothing, record, most=5)
    said, statuses = answered(
        toolbox,
        'I think.\ncall double {"number": 4}\ncall double {\ncall doble {"number": 1}\n'
        'call double {"number": "x"}\ncall record {}\ncall nothing {}\ncall double {',
    )
    assert said == [
        "8",
        "Error: the arguments are no JSON",
        "Error: there is no tool 'doble'. Did you mean 'double'?",
        'Error: double: number must be a whole number, not "x"',
        '{"ä": [1, "PosixPath(\'x\')"]}',
        "Error: not called. A turn may have 5 calls at most.",
        "Error: not called. A turn may have 5 calls at most.",
    ]
    assert statuses == ["ok", "refused", "refused", "refused", "ok", "refused", "refused"]


def test_a_turn_without_a_call_is_answered_by_nothing() -> None:
    found = asyncio.run(box(double).answer("The answer is 8."))
    assert found == Observation()


def test_coroutines_of_a_turn_wait_together() -> None:
    """Each waits for the other: one by one they would never end."""
    gates = {name: asyncio.Event() for name in "ab"}

    async def meet(own: str, other: str) -> str:
        """Open a gate and wait at the other."""
        gates[own].set()
        await gates[other].wait()
        return f"{own} met {other}"

    calls = ['call meet {"own": "a", "other": "b"}', 'call meet {"own": "b", "other": "a"}']
    assert answered(box(meet), "\n".join(calls)) == (["a met b", "b met a"], ["ok", "ok"])


def test_a_timeout_of_the_tools_own_is_a_failure_and_not_ours() -> None:
    async def late() -> str:
        """Fail."""
        raise TimeoutError("the page did not answer")

    said, statuses = answered(box(late), "call late {}")
    assert (said, statuses) == (["Error: TimeoutError: the page did not answer"], ["failed"])


def test_a_cut_says_how_much_is_gone() -> None:
    assert cut("abcdefghij", 10) == "abcdefghij"
    assert cut("abcdefghijk", 4) == "ab\n[7 characters left out]\njk"
