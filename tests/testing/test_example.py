"""The one-file example is the recipe: equal in advantage, loss and gradient, and it learns."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from groupwise import TokenBatch, batch_phase, recipe, token_phase

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", ROOT / "examples/grpo_one_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(5))
def test_one_file_equals_the_recipe_in_loss_and_gradient(example: ModuleType, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)

    def stream() -> torch.Tensor:
        return -torch.rand(12, 9, generator=g, dtype=torch.float64) * 3

    logp, old, ref = stream(), stream(), stream()
    mask = torch.arange(9)[None, :] < torch.randint(1, 10, (12, 1), generator=g)
    reward = torch.rand(12, generator=g, dtype=torch.float64)
    group = torch.arange(12) // 4

    plain = logp.clone().requires_grad_()
    advantage = example.group_advantages(reward, 4)
    loss = example.grpo_loss(plain, old, ref, mask, advantage, clip=0.2, kl_weight=0.04)
    loss.backward()

    leaf = logp.clone().requires_grad_()
    batch = TokenBatch.build(
        mask_NT=mask, group_N=group, reward_N=reward, old_logp_NT=old, ref_logp_NT=ref
    )
    done = batch_phase(recipe("grpo"), batch).batch
    result = token_phase(recipe("grpo"), done, logp_NT=leaf)
    result.loss.backward()

    assert done.advantage_NT is not None
    torch.testing.assert_close(done.advantage_NT[:, 0], advantage, rtol=0, atol=1e-13)
    torch.testing.assert_close(result.loss, loss, rtol=0, atol=1e-13)
    torch.testing.assert_close(leaf.grad, plain.grad, rtol=0, atol=1e-14)
    assert result.clipped_NT.any(), "the case must reach the clip"


def test_example_learns_to_spell(example: ModuleType) -> None:
    before, after = example.train(seed=1, steps=60, report=False)
    assert before < 0.2
    assert after > 0.9
