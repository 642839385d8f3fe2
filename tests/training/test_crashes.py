"""A run that is killed at any call that changes the disk comes back whole, and the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import crashes


@pytest.mark.slow
@pytest.mark.parametrize("run", crashes.RUNS)
def test_killed_before_and_after_every_call_it_comes_back_the_same(run: str) -> None:
    said = list[str]()
    found = {each.phase: each for each in crashes.sweep(run, tell=said.append)}
    assert said == []
    assert all(each.tried == each.held for each in found.values())
    # As many calls as there were when this was written; fewer would be tried in vain.
    least = {"start": 40, "records": 12, "save": 30, "finish": 16}
    assert all(found[phase].tried >= count for phase, count in least.items()), found
