"""What a method that learns from the data's answers says of them."""

from __future__ import annotations

from groupwise import recipe
from groupwise.prepare.answers import solution_notes
from groupwise.records import Task


def tasks(*rows: tuple[str, str | None]) -> list[Task]:
    return [
        Task(number, "p", answer, {} if solution is None else {"solution": solution})
        for number, (answer, solution) in enumerate(rows)
    ]


def test_a_worked_solution_that_is_not_learned_is_named() -> None:
    rows = tasks(("72", "48 / 2 = 24, 48 + 24 = 72"), ("5", None), ("6", "6"))
    (note,) = solution_notes(recipe("spin"), rows)
    assert "learns the bare `answer` ('72'), not the worked `solution` that 1 of 3 rows" in note
    assert solution_notes(recipe("spin"), rows[1:]) == []
    assert solution_notes(recipe("self_rewarding"), rows) == []  # it learns from samples
    (long,) = solution_notes(recipe("spin"), tasks(("x" * 100, "y")))
    assert f"'{'x' * 39} ..." in long
