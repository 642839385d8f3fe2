"""Exact mode repeats bit for bit: nothing is summed in an order that a GPU leaves to chance.

On a GPU `index_add` and the gradient of `index_select` add with atomics. Where two rows go to one
place, the last bits are those of the order in which they happened to arrive.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import random_sample
from model_zoo import make
from torch.utils._python_dispatch import TorchDispatchMode

from groupwise import recipe
from groupwise.groups.phase import batch_phase
from groupwise.model.layers.ops import Plain
from groupwise.model.layers.prefix import PrefixAttention
from groupwise.optim.packs import Sequences, outputs


class Atomics(TorchDispatchMode):
    """Notes additions of several rows to one place."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("aten::index_add", "aten::index_add_"):
            index = args[2]
            if len(index.unique()) < len(index):
                self.found.append(name)
        return func(*args, **(kwargs or {}))


class Shared(Plain):
    """The learner's attention on a GPU, in plain PyTorch."""

    def attention(self, prompts: Any, completions: Any, device: torch.device) -> PrefixAttention:
        return PrefixAttention(prompts, completions, device, exact=True)


def test_gradients_of_a_prompt_that_many_answers_read() -> None:
    """Every answer's first token is predicted by the prompt's last hidden state."""
    model = make("qwen2")
    model.ops = Shared()
    prompts = [(3, 1, 4)] * 4 + [(1, 5)] * 3
    sequences = Sequences(prompts, [(9, 2, 6)[: 1 + row % 3] for row in range(7)])
    with Atomics() as atomics:
        found = outputs(model, sequences.pack(range(7)), temperature=1.0)
        found["logp_NT"].sum().backward()
    assert atomics.found == []


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "lambda_grpo"])
def test_sums_over_groups(name: str) -> None:
    with Atomics() as atomics:
        batch_phase(recipe(name), random_sample(3).build())
    assert atomics.found == []
