"""Schedules: `schedule(batch) -> [select_NT, ...]`, the passes over one batch, in order.

A pass learns only from its tokens; denominators stay those of the whole batch. `updates` is the
number of optimizer steps that each pass is split into.
"""

from __future__ import annotations

from torch import Tensor

from groupwise.methods.slots import Count, Fraction, schedule
from groupwise.records import TokenBatch


@schedule(
    equation="one pass, {updates} update(s) per batch",
    fixes="",
    breaks="more than one update is off-policy",
)
def joint(batch: TokenBatch, *, updates: Count = 1) -> list[Tensor]:
    """Learn from all tokens together."""
    return [batch.mask_NT]


@schedule(
    passes=2,
    needs=("old_logp_NT",),
    equation="a pass on tokens with π_old < {eta}, then one on the rest with the new policy and"
    " the same π_old;"
    " {updates} update(s) each",
    fixes="frequent tokens are corrected after the rare ones moved them",
    breaks="twice the updates",
)
def low_then_high(batch: TokenBatch, *, eta: Fraction = 0.5, updates: Count = 1) -> list[Tensor]:
    """Lopti (2505.12929)."""
    rare_NT = batch.stream("old_logp_NT").exp() < eta
    return [batch.mask_NT & rare_NT, batch.mask_NT & ~rare_NT]
