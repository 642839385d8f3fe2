"""Statistics of an update: the policy is read as each update begins, and no more often."""

from __future__ import annotations

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
    read = [(each["now_logp_NT"] != 0).any(1) for each in looks]  # rows
    assert read[0].all() and sum(map(int, map(torch.sum, read[1:]))) == len(read[0]) * 3 // 4
    for number, after in enumerate(looks[1:], 1):
        assert set(after) == {"now_logp_NT"}
        own = read[number]
        assert not any(bool((own & other).any()) for other in read[1:number])  # an update's own
        assert not torch.equal(looks[0]["now_logp_NT"][own], after["now_logp_NT"][own])


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
