"""What `make check` says of tests that it skipped: for want of what, and how to get it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from skipped import not_tried

TESTS = Path(__file__).parents[1]
WANTED = re.compile(
    r"""["'](no (?:Chromium|Playwright|SmolLM2|bitsandbytes|public|GPU)[^"']*)["']"""
)


def test_a_package_that_is_missing_is_named_with_what_installs_it() -> None:
    with pytest.raises(pytest.skip.Exception) as found:
        pytest.importorskip("no_such_package.inside")
    assert not_tried(f"Skipped: {found.value}") == "no no_such_package: make setup"
    assert not_tried("Skipped: no SmolLM2 weights: make smollm2") == (
        "no SmolLM2 weights: make smollm2"
    )


def test_what_a_machine_lacks_is_said_with_how_to_get_it() -> None:
    texts = {path: path.read_text() for path in sorted(TESTS.glob("*/test_*.py"))}
    reasons = [reason for text in texts.values() for reason in WANTED.findall(text)]
    assert len(reasons) > 8
    assert [reason for reason in reasons if ":" not in reason] == []
