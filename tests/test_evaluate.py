"""Held-out accuracy: what counts as a verdict."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from groupwise.records import Completion, Grade, Rollout, Task
from groupwise.validate import evaluate as evaluating


def test_a_grading_that_failed_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """One part says wrong, another one broke: nobody knows what the whole would have said."""
    tasks = [Task(number, "?", "7") for number in range(2)]
    completion = Completion((1, 2), torch.zeros(2), "eos", 0)
    right, broken = Grade(1.0, {}, True), Grade(None, {}, False, "error", "the judge is out")
    wrong = Grade(0.0, {}, False)
    graded = [[right, broken], [wrong, right]]
    groups = [
        [Rollout(task, 0, number, completion, "7", grade) for number, grade in enumerate(grades)]
        for task, grades in zip(tasks, graded, strict=True)
    ]
    monkeypatch.setattr(evaluating, "write", lambda *_, **__: [])
    monkeypatch.setattr(evaluating, "grade", lambda *_, **__: groups)
    nothing = cast(Any, None)
    found = evaluating.evaluate(nothing, nothing, nothing, tasks, nothing, 2)
    assert found.accuracy == (1.0 + 0.5) / 2
    assert found.failed_share == 0.25
