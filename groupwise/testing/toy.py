"""A small random batch with every stream that a recipe may read, and a learner for it.

The learner is a table of logits: every output (log-probability, entropy, top-k, values, ...) is a
function of one leaf tensor, so that a gradient can be compared between two ways of computing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.losses.distillation import divergence
from groupwise.losses.heads import from_logits
from groupwise.methods.composition import Recipe
from groupwise.records import TokenBatch
from groupwise.streams import STREAMS

VOCABULARY, TOP_K, LAYERS, EXPERTS = 23, 20, 2, 2
TEACHER = ("logp_NT", "topk_logp_NTK", "topk_id_NTK")  # what a teacher says of the rows


@dataclass
class Toy:
    """Raw streams of a batch as tensors, before `TokenBatch.build`, and the learner's logits."""

    streams: dict[str, Any]
    logits_NTV: Tensor
    value_NT: Tensor
    prm_logp_NT: Tensor
    router_NTLK: Tensor
    teacher_NTV: Tensor  # the teacher's logits

    @property
    def rows(self) -> int:
        return len(self.logits_NTV)

    def take(self, rows: Sequence[int]) -> Toy:
        """Return some rows, in that order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return Toy(
            {name: x[index] for name, x in self.streams.items()},
            *(
                x[index]
                for x in (
                    self.logits_NTV,
                    self.value_NT,
                    self.prm_logp_NT,
                    self.router_NTLK,
                    self.teacher_NTV,
                )
            ),
        )

    def build(self, **extra: Any) -> TokenBatch:
        return TokenBatch.build(**self.streams, **extra)


def random_toy(
    seed: int,
    groups: Sequence[int] = (4, 4, 4),
    width: int = 6,
    dtype: torch.dtype = torch.float64,
    spread: float | Tensor = 0.3,
    *,
    moved: float = 1.0,
    mismatch: float = 0.3,
    reference: float = 0.5,
) -> Toy:
    """Make groups of the given sizes, prefix masks of random lengths, all streams filled.

    `spread` is the size of the step between old and new logits, of all rows or of each: how
    off-policy the batch is. The steps of policy, sampler and reference are multiples of it; at 0
    their log-probabilities are the old ones to the bit.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    rows = sum(groups)
    length_N = torch.randint(1, width + 1, (rows,), generator=g)
    mask_NT = torch.arange(width)[None, :] < length_N[:, None]
    size_N11 = torch.as_tensor(spread, dtype=torch.float64).expand(rows)[:, None, None]
    old = normal(rows, width, VOCABULARY)
    new, sampler, ref = (
        old + factor * size_N11 * normal(rows, width, VOCABULARY)
        for factor in (moved, mismatch, reference)
    )
    token_NT = torch.randint(0, VOCABULARY, (rows, width), generator=g)
    sampled = from_logits(sampler, token_NT, TOP_K)
    group_N = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(list(groups)))
    reward_N = torch.randint(0, 3, (rows,), generator=g).double() / 2
    value_NT = normal(rows, width)
    experts = torch.rand(rows, width, LAYERS, EXPERTS, generator=g, dtype=torch.float64)
    streams: dict[str, Any] = {
        "mask_NT": mask_NT,
        "group_N": group_N,
        "reward_N": reward_N,
        "old_logp_NT": from_logits(old, token_NT)["logp_NT"],
        "sampler_logp_NT": sampled["logp_NT"],
        "ref_logp_NT": from_logits(ref, token_NT)["logp_NT"],
        "prm_logp_NT": from_logits(ref + 0.2 * normal(*old.shape), token_NT)["logp_NT"],
        "old_value_NT": value_NT,
        "step_reward_NT": normal(rows, width),
        "step_end_NT": (torch.rand(rows, width, generator=g) < 0.4),
        "step_value_NT": value_NT.flip(1),
        "greedy_reward_N": torch.randint(0, 2, (rows,), generator=g).double(),
        "correct_N": reward_N > 0.5,
        "truncated_N": torch.rand(rows, generator=g) < 0.15,
        "segment_NT": (torch.rand(rows, width, generator=g) < 0.4).long().cumsum(1),
        "token_NT": token_NT,
        "sampler_topk_logp_NTK": sampled["topk_logp_NTK"],
        "sampler_topk_id_NTK": sampled["topk_id_NTK"],
        "old_router_NTLK": 0.1 + 0.8 * experts,
        "expert_load_NTE": experts.mean(2).round(),
        "now_logp_NT": from_logits(new, token_NT)["logp_NT"],
        "now_entropy_NT": from_logits(new, token_NT)["entropy_NT"],
        "old_square_mass_NT": old.softmax(-1).square().sum(-1),
        **_further(rows, width, group_N, seed),
    }
    for name in STREAMS:  # of roles that came later: near the reference, as a model would be
        if name.endswith("_logp_NT") and name not in streams and not name.startswith("teacher"):
            streams[name] = from_logits(ref + 0.2 * normal(*old.shape), token_NT)["logp_NT"]
    streams = {k: x.to(dtype) if x.is_floating_point() else x for k, x in streams.items()}
    made = Toy(
        streams,
        logits_NTV=new.to(dtype),
        value_NT=(value_NT + 0.3 * normal(rows, width)).to(dtype),
        prm_logp_NT=streams["prm_logp_NT"] + 0.1 * normal(rows, width).to(dtype),
        router_NTLK=(0.1 + 0.8 * (experts + 0.1 * moved * normal(*experts.shape)).clamp(0, 1)).to(
            dtype
        ),
        teacher_NTV=(ref + normal(*old.shape)).to(dtype),
    )
    teacher = from_logits(made.teacher_NTV, token_NT, TOP_K)
    streams |= {f"teacher_{name}": x for name, x in teacher.items() if name in TEACHER}
    return made


def _further(rows: int, width: int, group_N: Tensor, seed: int) -> dict[str, Tensor]:
    """Return streams that few recipes read, drawn by themselves: the others stay what they were."""
    g = torch.Generator().manual_seed(seed + 7_919)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    return {
        "age_NT": (4 * uniform(rows, width)).floor(),
        "lesson_NT": (uniform(rows, width) < 0.5).double(),
        "reward_part_NK": (3 * uniform(rows, 2)).floor() / 2,
        "reference_reward_NK": (3 * uniform(int(group_N.max()) + 1, 4)).floor()[group_N] / 2,
        "flawed_N": uniform(rows) < 0.3,
        "taught_N": uniform(rows) < 0.7,
        "role_N": (2 * uniform(rows)).long(),
        "peer_N": (2 * uniform(rows)).long(),
        "drift_N": 0.05 * uniform(rows),
        "context_tokens_N": (9 * uniform(rows)).floor(),
        "turns_N": 1 + (3 * uniform(rows)).floor(),
        "turn_reward_N": (3 * uniform(rows)).floor() / 2,
        "outcome_reward_N": (3 * uniform(rows)).floor() / 2,
        "result_start_N": (width * uniform(rows)).long() - 1,
        "branch_NL": torch.stack([group_N, 10 * group_N + (2 * uniform(rows)).long()], 1),
        "state_NT": (3 * uniform(rows, width)).long(),
    }


@dataclass
class Leaves:
    """The parameters of the table learner, all differentiable."""

    logits_NTV: Tensor
    value_NT: Tensor
    prm_logp_NT: Tensor
    exponent: Tensor

    def all(self) -> list[Tensor]:
        return [self.logits_NTV, self.value_NT, self.prm_logp_NT, self.exponent]


def leaves(toy: Toy, exponent: float = 0.3) -> Leaves:
    return Leaves(
        toy.logits_NTV.clone().requires_grad_(),
        toy.value_NT.clone().requires_grad_(),
        toy.prm_logp_NT.clone().requires_grad_(),
        torch.tensor(exponent, dtype=torch.float64, requires_grad=True),
    )


def learner_outputs(
    made: Recipe, toy: Toy, leaf: Leaves, rows: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the outputs of a forward pass over these rows, restricted to what the recipe reads."""
    index = torch.arange(toy.rows) if rows is None else rows
    token_NT = toy.streams["token_NT"][index]
    heads = from_logits(leaf.logits_NTV[index], token_NT, TOP_K)
    all_logp = _wide_logp(leaf.logits_NTV[index])
    top_ids = toy.streams["sampler_topk_id_NTK"][index]
    available = {
        **heads,
        "value_NT": leaf.value_NT[index],
        "prm_logp_NT": leaf.prm_logp_NT[index],
        "logp_at_sampler_topk_NTK": all_logp.gather(-1, top_ids),
        "logp_at_teacher_topk_NTK": all_logp.gather(-1, toy.streams["teacher_topk_id_NTK"][index]),
        "router_NTLK": toy.router_NTLK[index],
        "router_NTE": leaf.logits_NTV[index][..., :EXPERTS].softmax(-1),
        "length_exponent": leaf.exponent,
    }
    for slot in made.penalty:
        if "teacher_divergence_NT" in slot.definition.traits.outputs:
            teacher_NTV = _wide_logp(toy.teacher_NTV[index])
            apart_NT = divergence(all_logp, teacher_NTV, slot["beta"])
            available["teacher_divergence_NT"] = apart_NT
    return {name: available[name] for name in made.outputs}


def _wide_logp(logits_NTV: Tensor) -> Tensor:
    """Return log-probabilities in at least float32, as a model's head computes them."""
    wide = logits_NTV if logits_NTV.dtype == torch.float64 else logits_NTV.float()
    return wide.log_softmax(-1)


def extra_streams(made: Recipe, leaf: Leaves) -> dict[str, Tensor]:
    """Return streams that a recipe with a learnable aggregation needs beside the toy's."""
    learned = "length_exponent" in made.outputs
    return {"length_exponent": leaf.exponent} if learned else {}
