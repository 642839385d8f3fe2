"""A look into a step between its samples and its updates."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.stages.groups import GroupStage
from groupwise.training import loop


def before_updates(patch: pytest.MonkeyPatch, act: Callable[[int], Any]) -> None:
    """Call `act` with the number of finished steps before the updates of each step of a run."""
    at, one_step, teach = SimpleNamespace(step=0), loop.one_step, GroupStage.teach

    def noted(run: Any, *given: Any) -> Any:
        at.step = run.progress.step
        return one_step(run, *given)

    def taught(self: Any, *given: Any) -> Any:
        if self.recipe.samples:  # and not in a cold start
            act(at.step)
        return teach(self, *given)

    patch.setattr(loop, "one_step", noted)
    patch.setattr(GroupStage, "teach", taught)
