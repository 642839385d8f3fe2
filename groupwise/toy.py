"""A toy batch: every stream that a recipe may read, and a learner that is a table of logits.

Small enough to try a recipe on before a run is opened, and wide enough for its functions to act: a
few rows move by a thousandth of a nat, others by several, better and worse answers both ways, so
that narrow and wide ranges are left on either side.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from groupwise.composition import Recipe
from groupwise.groups.phase import batch_phase, passes
from groupwise.losses.heads import from_logits
from groupwise.losses.phase import token_phase
from groupwise.records import TokenBatch

GROUPS, GROUP_SIZE, WIDTH, VOCABULARY = 6, 4, 8, 24


@dataclass(frozen=True)
class Conditions:
    """Which policies of one batch may differ from each other."""

    moved: bool = False  # the policy from the one that was sampled from, by updates on this batch
    mismatch: bool = False  # the sampler's probabilities from the learner's of the same weights
    reference: bool = True  # the reference from the policy

    def missing(self) -> tuple[str, ...]:
        return tuple(each.name for each in fields(self) if not getattr(self, each.name))


def longest_list(recipe: Recipe) -> int:
    """How many of the likeliest tokens its functions read."""
    return max(slot.get("k", 1) for slot in recipe.slots())


@dataclass(frozen=True)
class Toy:
    """Streams of the batch, and what learns from it: its gradients are the update."""

    streams: dict[str, Any]
    leaves: dict[str, Tensor]

    @classmethod
    def of(cls, conditions: Conditions, longest: int = 1) -> Toy:
        """A batch under these conditions, its lists of likeliest tokens `longest` tokens long."""
        draw = torch.Generator().manual_seed(0)
        rows, vocabulary = GROUPS * GROUP_SIZE, max(VOCABULARY, 2 * longest)
        size_N = torch.logspace(-3, 0.6, GROUP_SIZE, dtype=torch.float64).repeat(GROUPS)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        def chance(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=draw, dtype=torch.float64)

        before, *steps = (normal(rows, WIDTH, vocabulary) for _ in range(5))
        differ = (conditions.moved, conditions.mismatch, conditions.reference, True)
        now, sampler, reference, judge = (
            before + size_N[:, None, None] * step if differs else before
            for step, differs in zip(steps, differ, strict=True)
        )
        token_NT = torch.randint(0, vocabulary, (rows, WIDTH), generator=draw)
        length_N = torch.randint(WIDTH // 2, WIDTH + 1, (rows,), generator=draw)
        sampled = from_logits(sampler, token_NT, longest)
        old, ref, prm = (from_logits(x, token_NT)["logp_NT"] for x in (before, reference, judge))
        reward_N = torch.arange(rows).remainder(5).remainder(2).double()
        value_NT, experts = normal(rows, WIDTH), 0.1 + 0.8 * chance(rows, WIDTH, 2, 2)
        streams = {
            "mask_NT": torch.arange(WIDTH)[None, :] < length_N[:, None],
            "group_N": torch.arange(GROUPS).repeat_interleave(GROUP_SIZE),
            "reward_N": reward_N,
            "old_logp_NT": old,
            "sampler_logp_NT": sampled["logp_NT"],
            "ref_logp_NT": ref,
            "prm_logp_NT": prm,
            "old_value_NT": value_NT,
            "step_reward_NT": normal(rows, WIDTH),
            "step_end_NT": chance(rows, WIDTH) < 0.4,
            "greedy_reward_N": torch.arange(rows).remainder(2).double(),
            "correct_N": reward_N > 0.5,
            "truncated_N": chance(rows) < 0.1,
            "segment_NT": (chance(rows, WIDTH) < 0.4).long().cumsum(1),
            "token_NT": token_NT,
            "sampler_topk_logp_NTK": sampled["topk_logp_NTK"],
            "sampler_topk_id_NTK": sampled["topk_id_NTK"],
            "old_router_NTLK": experts,
        }
        leaves = {
            "logits": now.clone(),
            "value_NT": value_NT + 0.3 * normal(rows, WIDTH),
            "prm_logp_NT": prm.clone(),
            "router_NTLK": experts + 0.1 * conditions.moved * chance(rows, WIDTH, 2, 2),
            "length_exponent": torch.tensor(0.3, dtype=torch.float64),
        }
        return cls(streams, {name: x.requires_grad_() for name, x in leaves.items()})

    def build(self, **extra: Any) -> TokenBatch:
        return TokenBatch.build(**self.streams, **extra)

    def gradients(self, recipe: Recipe) -> list[Tensor]:
        """Of the recipe's loss, in everything that learns; no update is made."""
        leaves, logits = self.leaves, self.leaves["logits"]
        own = {name: leaves[name] for name in ("length_exponent",) if name in recipe.outputs}
        ids_NTK = self.streams["sampler_topk_id_NTK"]
        with torch.random.fork_rng(devices=[]), torch.enable_grad():  # draws of plug-ins stay here
            done = batch_phase(recipe, self.build(**own)).batch
            available = {
                **leaves,
                **from_logits(logits, self.streams["token_NT"], ids_NTK.shape[-1]),
                "logp_at_sampler_topk_NTK": logits.log_softmax(-1).gather(-1, ids_NTK),
            }
            outputs = {name: available[name] for name in recipe.outputs}
            losses = [token_phase(recipe, part, **outputs).loss for part in passes(recipe, done)]
            learning = list(leaves.values())
            found = torch.autograd.grad(torch.stack(losses).sum(), learning, allow_unused=True)
        return [
            torch.zeros_like(x) if slope is None else slope
            for x, slope in zip(learning, found, strict=True)
        ]
