"""The batch of a case: the meaning of the inputs of the case schema."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups import filters
from groupwise.losses.heads import from_logits
from groupwise.methods.composition import Recipe
from groupwise.records import TokenBatch
from groupwise.testing.further import further_streams, group_ids, memory_of, rewards_in
from groupwise.testing.schema import Case, grid, missing, params_of, rewards_of, tensor

_STREAMS = {
    "logp_old": "old_logp_NT",
    "logp_policy": "old_logp_NT",
    "logp_rollout": "sampler_logp_NT",
    "logp_ref": "ref_logp_NT",
    "logp_prm": "prm_logp_NT",
    "values": "old_value_NT",
    "values_old": "old_value_NT",
    "truncated": "truncated_N",
    "correct": "correct_N",
    "outcome_labels": "correct_N",
    "segment_ids": "segment_NT",
    "tokens": "token_NT",
    "router_old_topk": "old_router_NTLK",
    "step_reward_NT": "step_reward_NT",
    "step_end_NT": "step_end_NT",
    "step_value_NT": "step_value_NT",
    "token_rewards": "token_reward_NT",
    "entropy": "now_entropy_NT",
    "sum_pi_squared": "old_square_mass_NT",
    "logp_teacher": "teacher_logp_NT",
    "select": "lesson_NT",
    "flawed": "flawed_N",
    "has_teacher": "taught_N",
    "turns": "turns_N",
}
# How to call a stream that is missing.
_OTHER_NAMES = ("logp_policy", "values_old", "outcome_labels")
INPUT_OF = {stream: name for name, stream in _STREAMS.items() if name not in _OTHER_NAMES}
INPUT_OF["greedy_reward_N"] = "greedy_rewards"
INPUT_OF |= {
    "reward_part_NK": "reward_parts",
    "state_NT": "states",
    "role_N": "roles",
    "peer_N": "episode_ids",
    "drift_N": "past_logp",
    "branch_NL": "paths",
    "age_NT": "version",
    "context_tokens_N": "total_tokens",
    "turn_reward_N": "turn_rewards",
    "outcome_reward_N": "outcome_rewards",
    "result_start_N": "result_starts",
    "reference_reward_NK": "reference_rewards",
    "now_logp_NT": "logp",
}
_WIDTH_FROM = (
    "logp", "token_rewards", "logits", "logp_old", "token_loss", "step_reward_NT", "values",
    "values_old", "logp_ref",
)  # fmt: skip


LONGEST = 1_000_000  # tokens of an answer of a case


def build_batch(case: Case) -> TokenBatch:
    """Build the batch of a case. Missing rewards are 0; without group ids there is one group."""
    inputs = case["inputs"]
    mask_NT = _mask(inputs)
    streams: dict[str, Tensor] = {}
    for name, stream in _STREAMS.items():
        if name in inputs:
            axes = len(stream.rsplit("_", 1)[1])
            streams[stream] = (
                tensor(inputs[name], name) if axes == 1 else grid(inputs, name, mask_NT, axes)
            )
    for name in ("segment_NT", "token_NT"):
        if name in streams:
            streams[name] = torch.where(mask_NT, streams[name], 0.0).long()
    greedy = inputs.get("greedy_rewards", params_of(case).get("greedy_reward"))
    if greedy is not None:
        greedy_N = tensor(greedy, "greedy_rewards")
        streams["greedy_reward_N"] = greedy_N if greedy_N.dim() else greedy_N.repeat(len(mask_NT))
    streams |= further_streams(case, mask_NT)
    rewards = rewards_in(inputs)
    nothing_N = torch.zeros(len(mask_NT), dtype=torch.float64)
    groups = group_ids(inputs, len(mask_NT))
    parts: dict[str, Any] = {
        "group_N": groups,
        "reward_N": nothing_N if rewards is None else rewards_of(rewards),
        "memory": memory_of(inputs),
        **streams,
    }
    batch = TokenBatch.build(mask_NT=mask_NT, **parts)
    if batch.truncated_N is None or case["kind"] == "reward_shaping":
        return batch
    # A truncated row's mask may come cleared or not: the outputs are those of a cleared one.
    return TokenBatch.build(mask_NT=mask_NT & filters.overlong()(batch)[:, None], **parts)


def _mask(inputs: Mapping[str, Any]) -> Tensor:
    if "mask" in inputs:
        mask = tensor(inputs["mask"], "mask") != 0
        if mask.dim() != 2:
            raise CaseError(f"mask must be a list per row, got shape {tuple(mask.shape)}.")
        return mask
    for name in _WIDTH_FROM:
        if name in inputs:
            x = tensor(inputs[name], name)
            if x.dim() < 2:
                raise CaseError(f"{name} must be a list per row, got shape {tuple(x.shape)}.")
            return torch.ones(x.shape[:2], dtype=torch.bool)
    for name in ("lengths", "output_tokens"):
        if name in inputs:
            return _mask_of_lengths(inputs[name], name)
    for name in ("rewards", "reward_parts", "correct"):
        if name in inputs:
            rows = rewards_of(inputs[name]) if name == "rewards" else _listed(inputs, name)
            return torch.ones((len(rows), 1), dtype=torch.bool)
    raise missing("rewards")


def _listed(inputs: Mapping[str, Any], name: str) -> Any:
    if not isinstance(inputs[name], list | tuple):
        raise CaseError(f"{name} must be a list, one entry per row, got {inputs[name]!r:.60}.")
    return inputs[name]


def _mask_of_lengths(values: Any, name: str) -> Tensor:
    length_N = tensor(values, name)
    if length_N.dim() != 1 or ((length_N < 0) | (length_N > LONGEST)).any():
        raise CaseError(f"{name} must be numbers of tokens, from 0 to {LONGEST}.")
    if (length_N != length_N.round()).any():
        raise CaseError(f"{name} must be whole numbers, got {values!r}.")
    return torch.arange(max(int(length_N.max()), 1)) < length_N[:, None]


def batch_for(case: Case, made: Recipe) -> TokenBatch:
    """Return the batch with all that the recipe reads, or raise an error that names what is
    missing.
    """
    inputs = case["inputs"]
    batch = build_batch(case)
    if "logits_old" in inputs:
        old = from_logits(grid(inputs, "logits_old", batch.mask_NT, 3), sampled(case, batch))
        batch = replace(batch, old_logp_NT=torch.where(batch.mask_NT, old["logp_NT"], 0.0))
    if made.gate.name == "cov_clip" and "tokens" not in inputs:
        batch = batch.with_streams(token_NT=torch.zeros_like(batch.mask_NT, dtype=torch.long))
    if "logp" in inputs and "now_logp_NT" in made.streams:
        batch = batch.with_streams(now_logp_NT=grid(inputs, "logp", batch.mask_NT))
    if "token_rewards" in inputs:
        if advantages_given(case) or made.advantage[0].definition.traits.dense:
            # token_rewards hold the whole reward already
            batch = replace(batch, task_reward_N=torch.zeros_like(batch.task_reward_N))
        elif "rewards" not in inputs:
            batch = replace(batch, task_reward_N=batch.stream("token_reward_NT").sum(1))
    elif rewards_in(inputs) is None and not (advantages_given(case) or _by_steps(made, inputs)):
        steps = " (adv is about the outcome, not the steps)" if "step_reward_NT" in inputs else ""
        raise missing("rewards", f"{case['kind']} {case['method']}{steps}")
    read = made.slots() if case["kind"] == "policy_loss" else (*made.shaping, *made.advantage)
    for slot in read:
        for name in slot.needs:
            if name in INPUT_OF and batch.find(name) is None and name not in made.outputs:
                raise missing(INPUT_OF[name], f"{case['method']} ({slot.kind} {slot.name})")
    return batch


def _by_steps(made: Recipe, inputs: Mapping[str, Any]) -> bool:
    parts = "reward_part_NK" in made.advantage[0].needs and "reward_parts" in inputs
    return parts or not made.advantage[0].definition.traits.outcome


def sampled(case: Case, batch: TokenBatch) -> Tensor:
    """Return the sampled tokens, within the vocabulary of the logits."""
    inputs = case["inputs"]
    if "tokens" not in inputs:
        raise missing("tokens", f"{case['kind']} {case['method']} on logits")
    token_NT = batch.stream("token_NT")
    vocabulary = grid(inputs, "logits", batch.mask_NT, 3).shape[-1]
    if ((token_NT < 0) | (token_NT >= vocabulary)).any():
        raise CaseError(f"tokens must lie in 0..{vocabulary - 1}, as the logits have that many.")
    return token_NT


def advantages_given(case: Case) -> bool:
    return case["kind"] == "policy_loss" and "advantages" in case["inputs"]


def given_advantages(case: Case, mask_NT: Tensor) -> Tensor:
    """Return `advantages` as given: one per row or one per token, 0 on padding."""
    rows = tensor(case["inputs"]["advantages"], "advantages")
    if rows.shape == mask_NT.shape:
        return torch.where(mask_NT, rows, 0.0)
    if rows.shape != mask_NT.shape[:1]:
        raise CaseError(
            f"advantages has shape {tuple(rows.shape)}: give one per row ({len(mask_NT)}) or one "
            f"per token {tuple(mask_NT.shape)}."
        )
    return rows
