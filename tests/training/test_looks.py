"""Statistics of an update: the policy is read as each update begins, and no more often."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import Start, gather, learn

from groupwise.optim.learner import PolicyLearner


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return Start(tmp_path_factory.mktemp("start"))


def test_the_policy_is_read_as_every_update_begins(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was before the first update stays; what is now moves with the weights."""
    looks: list[dict[str, torch.Tensor]] = []
    look = PolicyLearner.look

    def noted(self: PolicyLearner, *given: Any, **named: Any) -> dict[str, torch.Tensor]:
        found = look(self, *given, **named)
        looks.append({name: x.clone() for name, x in found.items()})
        return found

    monkeypatch.setattr(PolicyLearner, "look", noted)
    with start.opened(tmp_path, recipe="real") as run:
        done = learn(run, gather(run), rate=1e-2)
    assert done.metrics["updates/count"] == 4 == len(looks)
    assert torch.equal(looks[0]["now_logp_NT"], looks[0]["old_logp_NT"])
    for before, after in itertools.pairwise(looks):
        assert set(after) == {"now_logp_NT"}
        assert not torch.equal(before["now_logp_NT"], after["now_logp_NT"])


def test_one_update_asks_the_policy_once(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    look = PolicyLearner.look

    def noted(self: PolicyLearner, *given: Any, later: bool = False) -> dict[str, torch.Tensor]:
        calls.append(later)
        return look(self, *given, later=later)

    monkeypatch.setattr(PolicyLearner, "look", noted)
    with start.opened(tmp_path, recipe="top_entropy_mask") as run:
        learn(run, gather(run), rate=1e-3)
    assert calls == [False]
