"""A run that its budget ends: in tokens, in seconds; evaluated evenly on the way; resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cold_start
import pytest
from cold_start import configured, run_from
from runs import left_behind, metrics, quiet

from groupwise.errors import ConfigError
from groupwise.stages.checks import check_config
from groupwise.training.loop import steps, train


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cold_start.make(tmp_path_factory.mktemp("model") / "m")


def evaluated(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "eval/accuracy" in line]


def test_it_ends_with_the_step_that_reaches_its_tokens(model: str, tmp_path: Path) -> None:
    found = run_from(model, tmp_path, steps=1000, budget__tokens=300, eval__points=4)
    lines = metrics(tmp_path)
    assert lines[-1]["cost/tokens"] >= 300 > lines[-2]["cost/tokens"]
    assert found["budget"] == {"tokens": 300, "seconds": 0.0}
    reached = [
        next(x["step"] for x in lines[1:] if x["cost/tokens"] >= limit)
        for limit in (75, 150, 225, 300)
    ]
    assert [line["step"] for line in evaluated(tmp_path)] == [0, *reached]


def test_dropped_groups_count(model: str, tmp_path: Path) -> None:
    """Dynamic sampling pays for what it draws again."""
    run_from(model, tmp_path, steps=1000, budget__tokens=300, recipe="dapo",
             **{"recipe.schedule.updates": 1, "recipe.shaping": ""})  # fmt: skip
    lines = metrics(tmp_path)[1:]
    assert any(line["refill/rounds"] for line in lines)
    drawn = sum(line["refill/drawn_groups"] * 4 * line["length/sampled_mean"] for line in lines)
    assert lines[-1]["cost/tokens"] == pytest.approx(drawn)


def test_points_go_by_steps_without_a_budget(model: str, tmp_path: Path) -> None:
    run_from(model, tmp_path, steps=7, eval__points=3)
    assert [line["step"] for line in evaluated(tmp_path)] == [0, 3, 5, 7]


def test_seconds_end_it_too(model: str, tmp_path: Path) -> None:
    run_from(model, tmp_path, steps=100_000, budget__seconds=0.4, eval__points=2)
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    spent = [x["time/step"] - x.get("time/eval", 0.0) for x in lines[1:]]
    assert sum(spent) > 0.3 and sum(spent[:-1]) < 0.45
    assert lines[-1]["step"] < 1000 and "eval/accuracy" in lines[-1]


def test_a_spent_budget_is_finished_and_a_larger_one_goes_on(model: str, tmp_path: Path) -> None:
    first = run_from(model, tmp_path, steps=1000, budget__tokens=100)
    assert run_from(model, tmp_path, steps=1000, budget__tokens=100) == first
    more = run_from(model, tmp_path, steps=1000, budget__tokens=200)
    assert more["steps"] > first["steps"]


def test_stopped_and_resumed_it_leaves_the_same_bits(model: str, tmp_path: Path) -> None:
    """A schedule that follows the budget, too."""
    asked: dict[str, Any] = {
        "steps": 1000, "budget__tokens": 400, "eval__points": 3, "optim__schedule": "linear"
    }  # fmt: skip
    run_from(model, tmp_path / "whole", **asked)
    cycle = steps(configured(model, **asked), tmp_path / "parts", quiet())
    for _ in range(4):
        next(cycle)
    cycle.close()
    train(configured(model, **asked), tmp_path / "parts", quiet())
    assert left_behind(tmp_path / "parts") == left_behind(tmp_path / "whole")


def test_the_rate_goes_down_with_the_budget(model: str, tmp_path: Path) -> None:
    run_from(model, tmp_path, steps=100_000, budget__tokens=600, optim__schedule="linear")
    lines = metrics(tmp_path)
    rates = [line["optim/learning_rate"] for line in lines[1:]]
    left = [1 - line["cost/tokens"] / 600 for line in lines[2:-1]]
    assert len(rates) > 8
    for rate, share in zip(rates[2:], left, strict=True):
        assert rate == pytest.approx(1e-3 * share, abs=1e-3 * 0.1)


def test_scores_of_tasks_are_kept(model: str, tmp_path: Path) -> None:
    found = run_from(model, tmp_path, steps=2)
    assert len(found["scores_after"]) == 8 and set(found["scores_after"]) <= {0.0, 1.0}
    assert sum(found["scores_after"]) / 8 == found["accuracy_after"]


def test_labels_have_no_tokens_to_spend(model: str) -> None:
    with pytest.raises(ConfigError, match="never reached"):
        check_config(configured(model, recipe="dpo", budget__tokens=100))
