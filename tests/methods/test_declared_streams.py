"""What a slot reads, its declaration says: so the phases can check it once, before it is called."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from batches import loss_and_gradients, random_sample
from torch import Tensor

from groupwise import batch_phase, recipe, token_phase
from groupwise.errors import BatchError
from groupwise.methods.slots import REGISTRY, Slot, gate, ratio
from groupwise.recipes import RECIPES, Recipe
from groupwise.records import TokenBatch

# What every batch has when a slot is called: the policy's own, and what the phases make.
ALWAYS = {"logp_NT", "reward_N", "learn_N", "advantage_NT", "coefficient_NT"}
NAMES = [name for name, entry in RECIPES.items() if isinstance(entry, Recipe)]


@pytest.mark.parametrize("name", NAMES)
def test_slots_read_what_they_declare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[Slot] = []
    undeclared: set[tuple[str, str]] = set()
    call, stream = Slot.__call__, TokenBatch.stream

    def called(self: Slot, *args: Any) -> Any:
        inside.append(self)
        try:
            return call(self, *args)
        finally:
            inside.pop()

    def read(self: TokenBatch, wanted: str) -> Tensor:
        if inside and inside[-1].kind != "width":
            slot = inside[-1]
            said = {*slot.needs, *slot.definition.traits.outputs, *ALWAYS}
            if (
                slot.kind in ("ratio", "correction") or "anchor" in slot
            ):  # `Recipe.streams` knows when it is needed
                said.add(f"{slot.get('anchor', 'old')}_logp_NT")
            if wanted not in said:
                undeclared.add((slot.name, wanted))
        return stream(self, wanted)

    monkeypatch.setattr(Slot, "__call__", called)
    monkeypatch.setattr(TokenBatch, "stream", read)
    loss, _ = loss_and_gradients(recipe(name), random_sample(1, groups=(4, 5, 3)))
    assert math.isfinite(loss)
    assert not undeclared


def test_a_read_that_nobody_declared_names_slot_and_stream() -> None:
    @gate(equation="S = A·ℓ^φ")
    def reads_in_secret(log_ratio_NT: Tensor, advantage_NT: Tensor, batch: TokenBatch) -> Any:
        return advantage_NT * batch.stream("prm_logp_NT"), batch.mask_NT

    try:
        made = recipe("dr_grpo").replace(gate=reads_in_secret())
        mask_NT = torch.ones(2, 3, dtype=torch.bool)
        batch = TokenBatch.build(mask_NT=mask_NT, group_N=[0, 0], reward_N=[0.0, 1.0])
        ready = batch_phase(made, batch).batch
        with pytest.raises(BatchError) as caught:
            token_phase(made, ready, logp_NT=-torch.ones(2, 3))
    finally:
        del REGISTRY["gate"]["reads_in_secret"]
    text = str(caught.value)
    assert "gate reads_in_secret reads prm_logp_NT" in text
    assert "the implicit reward model's log-probabilities" in text
    assert "its needs= do not say prm_logp_NT" in text


def test_a_declared_stream_that_is_missing_is_told_before_its_slot_is_called() -> None:
    called = []

    @ratio(level="token", needs=("segment_NT",), equation="r = 1")
    def never_called(batch: TokenBatch) -> Tensor:
        called.append(batch)
        return batch.stream("segment_NT")

    try:
        made = recipe("dr_grpo").replace(ratio=never_called(), gate="unclipped()")
        mask_NT = torch.ones(2, 3, dtype=torch.bool)
        batch = TokenBatch.build(mask_NT=mask_NT, group_N=[0, 0], reward_N=[0.0, 1.0])
        with pytest.raises(BatchError, match=r"needs segment_NT .* for ratio never_called"):
            batch_phase(made, batch)
    finally:
        del REGISTRY["ratio"]["never_called"]
    assert not called


def test_slots_of_users_may_say_who_reads() -> None:
    """As they once had to: files of users and of old runs go on."""
    mask_NT = torch.ones(2, 3, dtype=torch.bool)
    batch = TokenBatch.build(mask_NT=mask_NT, group_N=[0, 0], reward_N=[0.0, 1.0])
    assert batch.stream("task_reward_N", "my gate").tolist() == [0.0, 1.0]
