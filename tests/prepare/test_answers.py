"""Which text of a row a method that learns from the data's answers takes."""

from __future__ import annotations

from typing import Any

import pytest

from groupwise import recipe
from groupwise.errors import DataError
from groupwise.prepare.answers import answer_text, has_answers
from groupwise.records import Task


def task(answer: str | None = None, **columns: Any) -> Task:
    return Task(0, "p", answer, columns)


def test_a_written_solution_is_learned_and_never_the_bare_answer() -> None:
    (column,) = recipe("spin").columns
    assert answer_text(task("72", solution="48 + 24 = 72"), column) == "48 + 24 = 72"
    assert answer_text(task("72", completion="It is 72.", solution="s"), column) == "It is 72."
    assert not has_answers(task("72"), [column]) and has_answers(task(solution="s"), [column])
    with pytest.raises(DataError, match="'completion' or 'solution'"):
        answer_text(task("72"), column)


def test_an_answer_may_be_one_message_of_the_assistant() -> None:
    said = [{"role": "assistant", "content": "yes"}]
    assert answer_text(task(chosen=said), "chosen") == "yes"
    with pytest.raises(DataError, match="one message of the assistant"):
        answer_text(task(chosen=[{"role": "user", "content": "?"}, *said]), "chosen")
    with pytest.raises(DataError, match="has no text in column 'chosen'"):
        answer_text(task(chosen=["3"]), "chosen")
