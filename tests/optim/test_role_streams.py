"""A role that the package does not have: its stream goes through batches, phases and a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import left_behind, metrics, run
from torch import Tensor

from groupwise.errors import BatchError
from groupwise.methods.method import Method
from groupwise.methods.registry import recipe
from groupwise.methods.slots import NonNegative, penalty
from groupwise.model.cost import RoleSize
from groupwise.model.layers.transformer import Policy, copy_trained
from groupwise.optim.roles import ROLES
from groupwise.optim.roles.role import Role, Score
from groupwise.records import TokenBatch
from groupwise.streams import ROLE_FACTS, STREAMS, RoleFacts

NAME = "tutor_logp_NT"


@penalty(needs=(NAME,), equation="+ {coef}·(ℓ − ℓ^tutor)²")
def near_tutor(batch: TokenBatch, *, coef: NonNegative = 0.1) -> Tensor:
    """Squared distance to the tutor."""
    return coef * (batch.stream("logp_NT") - batch.stream(NAME)).square()


class Tutor(Role):
    """The starting policy with smaller weights."""

    name = "tutor"

    def __init__(self, model: Policy) -> None:
        self.model = copy_trained(model).requires_grad_(False)
        self.model.ops.lay_out(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.9)

    @classmethod
    def made(cls, model: Policy, recipe: Method, config: Any) -> Tutor:
        return cls(model)

    @classmethod
    def size(cls, config: Any, width: int) -> RoleSize:
        return RoleSize(cls.name, held=width, passes=1)

    def streams(self, score: Score) -> dict[str, Tensor]:
        return {NAME: score(self.model)}


@pytest.fixture
def tutor(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = RoleFacts("tutor", {NAME: "the tutor's log-probabilities"}, start="it", note="is new")
    monkeypatch.setitem(ROLES, "tutor", Tutor)
    monkeypatch.setitem(ROLE_FACTS, "tutor", facts)
    monkeypatch.setitem(STREAMS, NAME, facts.streams[NAME])


def batch(rows: int, value: float, width: int = 3) -> TokenBatch:
    mask_NT = torch.ones(rows, width, dtype=torch.bool)
    mask_NT[0, -1] = False
    stream_NT = torch.full((rows, width), value)
    return TokenBatch.build(
        mask_NT=mask_NT, group_N=[0] * rows, reward_N=[1.0] * rows, **{NAME: stream_NT}
    )


@pytest.mark.usefixtures("tutor")
def test_a_batch_carries_it_wherever_its_rows_go() -> None:
    first, second = batch(2, -1.0), batch(1, -2.0, width=2)
    assert first.stream(NAME).tolist() == [[-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]
    assert first.select(torch.tensor([1])).stream(NAME).tolist() == [[-1.0] * 3]
    joined = TokenBatch.join([first, second])
    assert joined.stream(NAME)[2].tolist() == [-2.0, 0.0, 0.0]
    assert joined.to("cpu").keep(torch.tensor([2])).stream(NAME).tolist() == [[-2.0, 0.0, 0.0]]
    with pytest.raises(BatchError, match="not finite: row 0, token 1"):
        first.with_streams(**{NAME: torch.tensor([[0.0, float("inf"), 0.0], [0.0, 0.0, 0.0]])})
    bare = TokenBatch.build(mask_NT=torch.ones(1, 2, dtype=torch.bool), group_N=[0], reward_N=[1.0])
    with pytest.raises(BatchError, match=f"no {NAME} .the tutor's"):
        bare.stream(NAME)
    with pytest.raises(BatchError, match="Some of the batches to join"):
        TokenBatch.join([first, bare])


def test_a_stream_that_nobody_fills_is_refused_by_name() -> None:
    with pytest.raises(BatchError, match=f"Unknown stream '{NAME}'"):
        batch(1, 0.0)


@pytest.mark.usefixtures("tutor")
def test_a_run_asks_it_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    changed: dict[str, Any] = {"recipe__penalty": "near_tutor(coef=0.5)", "eval__every": 1}
    assert recipe("dr_grpo", {"penalty": "near_tutor()"}).roles == ("tutor",)
    run(tmp_path / "whole", steps=3, **changed)
    run(tmp_path / "halves", steps=1, **changed)
    run(tmp_path / "halves", steps=3, **changed)
    assert left_behind(tmp_path / "whole") == left_behind(tmp_path / "halves")
    # A penalty in the loss, from the first step on: the tutor is not where the policy starts.
    assert all(line["loss/near_tutor"] > 1e-4 for line in metrics(tmp_path / "whole")[1:])
