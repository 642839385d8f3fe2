"""Runs made sick on purpose (benchmarks/sick.py): the right rule is the first to say so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sick

FAST = ("no overlong handling", "int8 rollouts, no correction", "learning rate too high",
        "data too hard", "a grader that throws a coin", "weights not synced")  # fmt: skip
SLOW = [pytest.param(n, marks=pytest.mark.slow) for n in sick.SICK if n not in FAST]
QUIET = ("dapo", "gspo")
SLOWLY_QUIET = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(sick.RECIPES)
    if name not in (*QUIET, *sick.BREAKS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return sick.cold_start(tmp_path_factory.mktemp("sick"))


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_the_right_rule_fires_first(name: str, model: str, tmp_path: Path) -> None:
    few = {"steps": 6} if name in FAST else {}
    found = sick.make_sick(name, model, tmp_path / "run", **few)
    assert found.first is not None
    assert found.first.rule.name in sick.SICK[name].expected
    assert found.findings[0] is found.first


@pytest.mark.parametrize("recipe", [*QUIET, *SLOWLY_QUIET])
def test_healthy_runs_stay_quiet(recipe: str, model: str, tmp_path: Path) -> None:
    found = sick.make_healthy(recipe, model, tmp_path / "run", 20 if recipe in QUIET else 30)
    if found is not None:  # the recipe trains here
        assert [f"{finding.step}: {finding}" for finding in found.sick] == []
