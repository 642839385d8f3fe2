"""The golden vectors of 2025 and 2026: methods, preferences and masks beyond the first file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from nested import assert_close

from groupwise.testing import run_case

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "golden" / "vectors2.json").read_text()
)["cases"]


def test_none_is_missing() -> None:
    assert len(CASES) == 172


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_expected_number_comes_out(case: dict[str, Any]) -> None:
    outputs = run_case(case)
    for name, want in case["expected"].items():
        assert_close(outputs[name], want, **case["tol"], name=name)
