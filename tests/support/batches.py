"""Random batches that carry every stream any recipe reads (`groupwise.testing.toy`), and losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise import Recipe, TokenBatch, batch_phase, passes, token_phase
from groupwise.recipes import RECIPES, recipe
from groupwise.testing.toy import (
    EXPERTS,
    LAYERS,
    TOP_K,
    VOCABULARY,
    Leaves,
    extra_streams,
    learner_outputs,
    leaves,
)
from groupwise.testing.toy import Toy as Sample
from groupwise.testing.toy import random_toy as random_sample

__all__ = [
    "EXPERTS", "LAYERS", "POLICY_RECIPES", "TOP_K", "VOCABULARY", "Leaves", "Sample",
    "extra_streams", "learner_outputs", "leaves", "loss_and_gradients", "random_sample",
]  # fmt: skip

recipe("grpo")  # fills the registry
POLICY_RECIPES: list[str] = [name for name, entry in RECIPES.items() if isinstance(entry, Recipe)]


def loss_and_gradients(
    made: Recipe,
    sample: Sample,
    parts: Sequence[Sequence[int]] | None = None,
    batch: TokenBatch | None = None,
) -> tuple[float, list[Tensor]]:
    """Loss and gradients in every leaf, summed over all passes and over micro-batches `parts`."""
    leaf = leaves(sample)
    extra = extra_streams(made, leaf)
    batch = sample.build(**extra) if batch is None else batch
    done = batch_phase(made, batch).batch
    total = torch.zeros((), dtype=torch.float64)
    for one_pass in passes(made, done):
        for part in parts or [range(sample.rows)]:
            rows = torch.as_tensor(list(part))
            outputs = learner_outputs(made, sample, leaf, rows)
            total = total + token_phase(made, one_pass.select(rows), **outputs).loss
    gradients = torch.autograd.grad(total, leaf.all(), allow_unused=True)
    return float(total.detach()), [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaf.all(), gradients, strict=True)
    ]
