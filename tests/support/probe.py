"""One batch through both phases with the log-probabilities as the leaf: loss, gradient, streams."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from batches import Sample
from torch import Tensor

from groupwise import Recipe, TokenBatch, TokenResult, batch_phase, passes, recipe, token_phase
from groupwise.errors import RecipeWarning
from groupwise.losses.heads import from_logits


@dataclass
class Probe:
    """What came out. `grad_NT` is d loss / d logp, summed over the passes of the schedule."""

    loss: float
    grad_NT: Tensor
    result: TokenResult  # of the last pass
    batch: TokenBatch  # from the batch phase

    @property
    def u_NT(self) -> Tensor:
        return self.batch.stream("coefficient_NT")

    @property
    def advantage_NT(self) -> Tensor:
        return self.batch.stream("advantage_NT")


def altered(name: str, **slots: Any) -> Recipe:
    """A recipe with other slots, doubtful or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        return recipe(name).replace(**slots)


def composed(**slots: Any) -> Recipe:
    """Plain slots (group_zscore, token, clip, token_mean_batch, joint) and what differs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecipeWarning)
        return Recipe.from_text("composed", {}).replace(**slots)


def learner_logp(sample: Sample) -> Tensor:
    """The learner's log-probabilities of a sample, without gradient."""
    return from_logits(sample.logits_NTV, sample.streams["token_NT"])["logp_NT"]


def probe(made: Recipe, batch: TokenBatch, logp_NT: Tensor, **outputs: Tensor) -> Probe:
    """Both phases on a whole batch."""
    leaf_NT = logp_NT.detach().clone().requires_grad_()
    done = batch_phase(made, batch).batch
    results = [token_phase(made, part, logp_NT=leaf_NT, **outputs) for part in passes(made, done)]
    loss = torch.stack([result.loss for result in results]).sum()
    (grad_NT,) = torch.autograd.grad(loss, leaf_NT, allow_unused=True)
    if grad_NT is None:
        grad_NT = torch.zeros_like(leaf_NT)
    return Probe(float(loss.detach()), grad_NT, results[-1], done)


def probe_sample(made: Recipe, sample: Sample, **changes: Any) -> Probe:
    """As `probe`, on a random sample with some of its streams replaced (None takes one out)."""
    streams = {**sample.streams, **changes}
    batch = TokenBatch.build(**{name: x for name, x in streams.items() if x is not None})
    return probe(made, batch, learner_logp(sample))


def assert_same(one: Probe, other: Probe, tolerance: float = 1e-12, factor: float = 1.0) -> None:
    """Equal losses and gradients, the second `factor` times the first; and not all zero."""
    assert one.grad_NT.abs().max() > 1e-6, "no gradient: the comparison would be empty"
    assert abs(factor * one.loss - other.loss) <= tolerance
    torch.testing.assert_close(factor * one.grad_NT, other.grad_NT, rtol=0, atol=tolerance)
