"""The golden vectors: 79 cases, each number produced by independent routes."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from nested import assert_close, leaves_of

from groupwise.errors import CaseError
from groupwise.testing import run_case

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors.json").read_text()
)["cases"]
# Cases with padding; one of them has no input per token that could hold junk there.
MASKED = [case for case in CASES if any(0 in row for row in case["inputs"].get("mask", []))]
by_id = pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
masked_by_id = pytest.mark.parametrize("case", MASKED, ids=lambda case: case["id"])
padded_by_id = pytest.mark.parametrize(
    "case",
    [case for case in MASKED if case["id"] != "adv_reinforce_pp_baseline"],
    ids=lambda case: case["id"],
)


def without_expected(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key != "expected"}


def assert_expected(outputs: dict[str, Any], case: dict[str, Any]) -> None:
    for name, want in case["expected"].items():
        assert_close(outputs[name], want, **case["tol"], name=name)


def with_padding(case: dict[str, Any], fill: float) -> dict[str, Any]:
    """The case with `fill` on the padded positions of every input that has one per token."""
    changed = copy.deepcopy(case)
    inputs = changed["inputs"]
    mask = inputs["mask"]
    touched = 0
    for name, grid in inputs.items():
        per_token = isinstance(grid, list) and all(
            isinstance(row, list) and len(row) == len(m) for row, m in zip(grid, mask, strict=False)
        )
        if name == "mask" or not per_token or len(grid) != len(mask):
            continue
        for row, marks in zip(grid, mask, strict=True):
            for t, mark in enumerate(marks):
                if mark == 0:
                    row[t] = _filled(row[t], fill)
                    touched += 1
    assert touched, "nothing was padded: the test would be empty"
    return changed


def _filled(value: Any, fill: float) -> Any:
    return [_filled(item, fill) for item in value] if isinstance(value, list) else fill


def test_there_are_79_cases_of_42_methods() -> None:
    assert len(CASES) == 79 and len({case["id"] for case in CASES}) == 79
    assert len({case["method"] for case in CASES}) == 42


@by_id
def test_every_expected_number_comes_out(case: dict[str, Any]) -> None:
    assert_expected(run_case(case), case)


@by_id
def test_every_name_the_file_uses_comes_back_without_expected(case: dict[str, Any]) -> None:
    bare = without_expected(case)
    before = copy.deepcopy(bare)
    outputs = run_case(bare)
    same = [c for c in CASES if (c["kind"], c["method"]) == (case["kind"], case["method"])]
    assert {name for c in same for name in c["expected"]} <= set(outputs)
    assert_expected(outputs, case)
    assert bare == before, "run_case changed its input"


@by_id
def test_outputs_are_plain_floats_and_lists(case: dict[str, Any]) -> None:
    for name, value in run_case(without_expected(case)).items():
        for place, leaf in leaves_of(value):
            assert type(leaf) is float, f"{name}{place} is a {type(leaf).__name__}"
            assert math.isfinite(leaf), f"{name}{place} is {leaf}"


@by_id
def test_values_of_expected_are_never_read(case: dict[str, Any]) -> None:
    garbage = {**case, "expected": dict.fromkeys(case["expected"], "not a number")}
    outputs = run_case(garbage)
    assert outputs == run_case(without_expected(case))
    assert_expected(outputs, case)


@padded_by_id
@pytest.mark.parametrize("fill", [math.nan, math.inf, -1e30])
def test_junk_in_padding_changes_nothing(case: dict[str, Any], fill: float) -> None:
    outputs = run_case(without_expected(with_padding(case, fill)))
    assert outputs == run_case(without_expected(case))
    assert_expected(outputs, case)


@masked_by_id
def test_padded_positions_of_outputs_are_0(case: dict[str, Any]) -> None:
    mask = case["inputs"]["mask"]
    for name, grid in run_case(without_expected(case)).items():
        if not (isinstance(grid, list) and len(grid) == len(mask) and isinstance(grid[0], list)):
            continue
        for i, marks in enumerate(mask):
            for t, mark in enumerate(marks):
                if mark == 0:
                    assert not any(leaf for _, leaf in leaves_of(grid[i][t])), f"{name}[{i}][{t}]"


def test_a_name_that_does_not_exist_is_refused() -> None:
    with pytest.raises(CaseError, match="los"):
        run_case({**CASES[0], "expected": {"los": 0.0}})


@pytest.mark.parametrize("change", [{"kind": "policy_los"}, {"method": "grpoo"}])
def test_an_unknown_kind_or_method_is_refused(change: dict[str, str]) -> None:
    case = next(c for c in CASES if c["id"] == "grpo_full")
    with pytest.raises(ValueError, match=r"policy_loss|grpo"):
        run_case({**case, **change})
