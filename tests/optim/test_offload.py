"""The optimizer's numbers on the host: the same bits, wherever they are."""

from __future__ import annotations

from pathlib import Path

import cold_start
import pytest
import torch
from model_zoo import make
from runs import left_behind
from torch import Tensor

from groupwise.optim.adamw import AdamW

RATES = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def trained(
    dtype: torch.dtype, steps: int, *, offload: bool, state: dict[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and state behind so many steps, each with gradients of its own."""
    model = make("qwen3").to(dtype)
    optimizer = AdamW(model.named_parameters(), **RATES, offload=offload)
    if state is not None:
        optimizer.restore(state)
    for step in range(optimizer.steps, optimizer.steps + steps):
        drawn = torch.Generator().manual_seed(step)
        for _, parameter in sorted(model.named_parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        optimizer.step()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return weights, {name: x.clone() for name, x in optimizer.state().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_on_the_host_make_the_same_update(dtype: torch.dtype) -> None:
    """On this machine they are fetched as copies, too: what is not written back would be lost."""
    here, there = (trained(dtype, 4, offload=offload) for offload in (False, True))
    for mine, theirs in zip(here, there, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(x, theirs[name]) for name, x in mine.items())
    assert float(here[1]["exp_avg/model.norm.weight"].abs().max()) > 0


def test_a_state_is_restored_wherever_it_was_made() -> None:
    state = trained(torch.float32, 2, offload=True)[1]
    optimizers = [
        AdamW(make("qwen3").named_parameters(), **RATES, offload=o) for o in (True, False)
    ]
    for optimizer in optimizers:
        optimizer.restore(state)
        assert all(torch.equal(x, state[name]) for name, x in optimizer.state().items())


def test_a_run_with_its_optimizer_on_the_host_leaves_the_same_bits(tmp_path: Path) -> None:
    """Begun without, gone on with."""
    model = cold_start.make(tmp_path / "model")
    own = {"recipe": "ppo", "critic__alone_steps": 0}
    cold_start.run_from(model, tmp_path / "a", **own, steps=3)
    for steps, offload in ((2, False), (3, True)):
        cold_start.run_from(model, tmp_path / "b", **own, steps=steps, optim__offload=offload)
    whole, parts = left_behind(tmp_path / "a"), left_behind(tmp_path / "b")
    whole["summary"].pop("steps"), parts["summary"].pop("steps")
    assert parts == whole
