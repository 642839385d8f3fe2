"""Lists whose order counts, and those whose order does not."""

from __future__ import annotations

import pytest

from groupwise.graders.mathematics.ordering import asks_for_order
from groupwise.graders.rubric import Grader
from groupwise.records import Task

SORT = "Arrange 3, -1 and 2 in ascending order."
FREE = "What are the roots of (x+1)(x-2)(x-3)? Separate them by commas."


def right(question: str, gold: str, said: str) -> bool:
    (grade,) = Grader({"math": 1.0}).grade([(Task(0, question, gold), said, (), "eos")])
    return grade.reward == 1.0


@pytest.mark.parametrize("written", ["{}", "\\boxed{{{}}}", "The answer is {}.", "We get ${}$."])
def test_the_order_counts_where_the_question_asks_for_one(written: str) -> None:
    assert right(SORT, "-1, 2, 3", written.format("-1, 2, 3"))
    assert not right(SORT, "-1, 2, 3", written.format("3, 2, -1"))
    assert right(FREE, "-1, 2, 3", written.format("3, 2, -1"))


def test_what_has_an_order_or_none_of_its_own_keeps_it() -> None:
    assert right(SORT, "\\{-1, 2, 3\\}", "\\boxed{\\{3, 2, -1\\}}")  # a set
    assert not right(FREE, "(1, 2)", "\\boxed{(2, 1)}")  # a tuple
    assert right(SORT, "x = 1, y = 2", "\\boxed{x = 1, y = 2}")
    assert right(
        "Sort them in ascending order: 1/3, 1/4.", "1/4, 1/3", "\\boxed{0.25, 0.3333333333333333}"
    )
    assert not right("Rank a, b, c from heaviest to lightest.", "c, a, b", "\\boxed{a, b, c}")
    assert right("Rank a, b, c from heaviest to lightest.", "c, a, b", "\\boxed{c, a, b}")


def test_which_questions_ask_for_an_order() -> None:
    for asks in (
        "Find all roots. List your answers in increasing order, separated by commas.",
        "Order the numbers from the greatest to the least.", "rank them from shortest to longest",
        "Express them in decreasing order.", "Write the names in alphabetical order.",
    ):  # fmt: skip
        assert asks_for_order(asks), asks
    for does_not in (
        "List all solutions, separated by commas.", "In order to win, give a number.",
        "The digits stand in increasing order. What are they?", "Give two numbers from the list.",
        "Write it down. The set is in ascending order.", "",
    ):  # fmt: skip
        assert not asks_for_order(does_not), does_not


def test_a_long_question_takes_no_time() -> None:
    assert not asks_for_order("list in " * 50_000)
