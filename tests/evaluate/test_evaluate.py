"""Held-out accuracy: what counts as a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from groupwise.commands.shared import split_models
from groupwise.evaluate import evaluate as evaluating
from groupwise.records import Completion, Grade, Rollout, Task


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
    monkeypatch.setattr(evaluating, "sample_groups", lambda *_, **__: [])
    monkeypatch.setattr(evaluating, "grade", lambda *_, **__: groups)
    nothing = cast(Any, None)
    found = evaluating.evaluate(nothing, nothing, nothing, tasks, nothing, 2)
    assert found.accuracy == (1.0 + 0.5) / 2
    assert found.failed_share == 0.25


def test_a_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    """Folders of a comparison do: `grpo_gate.high=0.3/seed_0/config.toml`."""
    folder = tmp_path / "grpo_gate.high=0.3"
    folder.mkdir()
    (folder / "config.toml").write_text("")
    source = str(folder / "config.toml")
    assert split_models("a", [str(folder), source, "seed=3"]) == (
        ["a", str(folder)],
        folder / "config.toml",
        ["seed=3"],
    )
    assert split_models("a", ["data.template=mine.toml"]) == (
        ["a"],
        None,
        ["data.template=mine.toml"],
    )
