"""Streams of a batch from the inputs of newer cases: turns, roles, parts, trees, prompts' pasts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.records import Memory
from groupwise.testing.schema import Case, grid, missing, params_of, tensor

Inputs = Mapping[str, Any]
NOT_A_NUMBER = float("nan")


def filled(values: Any, name: str) -> Tensor:
    """Return a table of numbers in which null is NaN; shorter rows are filled with NaN."""
    if not isinstance(values, list | tuple) or not all(isinstance(x, list | tuple) for x in values):
        raise CaseError(f"{name} must be a list of numbers per row, got {repr(values)[:60]}.")
    width = max((len(row) for row in values), default=0)
    rows = [
        [NOT_A_NUMBER if x is None else x for x in row] + [NOT_A_NUMBER] * (width - len(row))
        for row in values
    ]
    return tensor(rows, name)


def numbered(values: Sequence[Any]) -> list[int]:
    """Number things from 0 in the order in which they first come."""
    seen: dict[Any, int] = {}
    return [seen.setdefault(value, len(seen)) for value in values]


def further_streams(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Return what the inputs say beyond a stream each."""
    inputs = case["inputs"]
    found: dict[str, Tensor] = {}
    for name, make in MAKERS.items():
        if name in inputs:
            found |= make(case, mask_NT)
    for name, tensor_NT in found.items():
        if name.endswith("_N") and len(tensor_NT) != len(mask_NT):
            raise CaseError(f"{case['kind']} {case['method']}: {name} needs a number per row.")
    return found


def _parts(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    part_NK = filled(case["inputs"]["reward_parts"], "reward_parts")
    found = {"reward_part_NK": part_NK}
    weights = params_of(case).get("weights")
    if weights is not None:
        weight_K = tensor(weights, "weights")
        if weight_K.shape != part_NK.shape[1:]:
            raise CaseError(f"weights={weights!r}: give one per part, {part_NK.shape[1]} of them.")
        found["part_weight_NK"] = weight_K.expand_as(part_NK)
    return found


def _by_turn(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Set rewards, marks and states of turns on each turn's last own token."""
    inputs = case["inputs"]
    rewards = inputs["turn_rewards"]
    if not any(isinstance(row, list | tuple) for row in rewards):
        return _call(case, mask_NT)
    reward_NT = torch.zeros(mask_NT.shape, dtype=torch.float64)
    end_NT, state_NT = torch.zeros_like(mask_NT), torch.zeros(mask_NT.shape, dtype=torch.long)
    ends, states = inputs["turn_ends"], inputs.get("states")
    order = numbered([s for row in states for s in row]) if states is not None else []
    place = iter(order)
    for row, (places, paid) in enumerate(zip(ends, rewards, strict=True)):
        for turn, at in enumerate(places):
            reward_NT[row, at], end_NT[row, at] = float(paid[turn]), True
            if states is not None:
                state_NT[row, at] = next(place)
    found = {"step_reward_NT": reward_NT, "step_end_NT": end_NT}
    return found if states is None else found | {"state_NT": state_NT}


def _call(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    inputs = case["inputs"]
    start_N1 = tensor(inputs["result_starts"], "result_starts")[:, None]
    before_NT = mask_NT & (torch.arange(mask_NT.shape[1]) < start_N1)
    start_N = torch.where(start_N1[:, 0] < 0, -1, before_NT.sum(1))
    return {
        "turn_reward_N": tensor(inputs["turn_rewards"], "turn_rewards"),
        "outcome_reward_N": tensor(inputs["outcome_rewards"], "outcome_rewards"),
        "result_start_N": start_N,
    }


def _branch_values(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Set values of steps: means of their branches' rewards; behind the last estimate, R."""
    inputs = case["inputs"]
    value_NT = torch.zeros(mask_NT.shape, dtype=torch.float64)
    end_NT = torch.zeros_like(mask_NT)
    rows = zip(inputs["mc_rewards"], inputs["step_ends"], inputs["rewards"], strict=True)
    for row, (sampled, ends, reward) in enumerate(rows):
        for found, at in zip(sampled, ends, strict=True):
            value = reward if found is None else sum(found) / len(found) if found else 0.0
            value_NT[row, at], end_NT[row, at] = float(value), True
    return {"step_value_NT": value_NT, "step_end_NT": end_NT}


def _peers(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Number roles, and comparisons: a role, or a role within its episode."""
    inputs, within = case["inputs"], params_of(case).get("episode_roles", ())
    found = {"role_N": tensor(inputs["roles"], "roles")}
    if "episode_ids" in inputs:
        pairs = zip(inputs["roles"], inputs["episode_ids"], strict=True)
        keys = [(role, episode if role in within else None) for role, episode in pairs]
        found["peer_N"] = torch.tensor(numbered(keys))
    return found


def _past(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Return the mean change of log-probability on each prompt's previous answer."""
    inputs = case["inputs"]
    then_NT, now_NT, own_NT = (
        tensor(inputs[name], name) for name in ("past_logp_old", "past_logp", "past_mask")
    )
    moved_NT = torch.where(own_NT != 0, (then_NT - now_NT).abs(), 0.0)
    return {"drift_N": moved_NT.sum(1) / (own_NT != 0).sum(1).clamp(min=1)}


def _tree(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Number the subtrees of each path, all but the leaf."""
    paths = [str(path).split("#")[:-1] for path in case["inputs"]["paths"]]
    depth = max((len(path) for path in paths), default=1)
    seen: dict[tuple[str, ...], int] = {}
    rows = [
        [
            seen.setdefault(tuple(path[: level + 1]), len(seen)) if level < len(path) else -1
            for level in range(depth)
        ]
        for path in paths
    ]
    return {"branch_NL": torch.tensor(rows)}


def _sampler(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Return the sampler's log-probabilities that give these weights of importance."""
    inputs = case["inputs"]
    if "logp_old" not in inputs:
        raise missing("logp_old", f"{case['method']} with rollout_is_weights")
    weight_NT = grid(inputs, "rollout_is_weights", mask_NT)
    old_NT = grid(inputs, "logp_old", mask_NT)
    return {"sampler_logp_NT": old_NT - weight_NT.clamp(min=1e-300).log()}


def _ages(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    now = params_of(case).get("current_version")
    if now is None:
        raise CaseError(f"{case['method']} needs the parameter current_version, as 8.")
    return {"age_NT": float(now) - grid(case["inputs"], "version", mask_NT)}


def _read(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    inputs = case["inputs"]
    total_N, own_N = (tensor(inputs[name], name) for name in ("total_tokens", "output_tokens"))
    return {"context_tokens_N": total_N - own_N}


def _log_z(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    log_z_N = tensor(case["inputs"]["log_z"], "log_z")
    return {"old_value_NT": log_z_N[:, None].expand(mask_NT.shape).clone()}


def _lessons(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    """Return an expert's rows as tokens to be imitated."""
    expert_N = tensor(case["inputs"]["expert"], "expert")
    return {"lesson_NT": (expert_N[:, None] * mask_NT).double()}


def _of_reference(case: Case, mask_NT: Tensor) -> dict[str, Tensor]:
    rewards = filled(case["inputs"]["reference_rewards"], "reference_rewards")
    return {"reference_reward_NK": rewards}


MAKERS: dict[str, Callable[[Case, Tensor], dict[str, Tensor]]] = {
    "reward_parts": _parts,
    "turn_rewards": _by_turn,
    "mc_rewards": _branch_values,
    "roles": _peers,
    "past_logp": _past,
    "paths": _tree,
    "rollout_is_weights": _sampler,
    "version": _ages,
    "total_tokens": _read,
    "log_z": _log_z,
    "expert": _lessons,
    "reference_rewards": _of_reference,
}


def group_ids(inputs: Inputs, rows: int) -> Any:
    """Return the group of each row: given, by a tree's root, each by itself, or one for all."""
    if "group_ids" in inputs:
        return inputs["group_ids"]
    if "paths" in inputs:
        return numbered([str(path).split("#")[0] for path in inputs["paths"]])
    alone = "alpha" in inputs or "reference_rewards" in inputs  # one answer a prompt
    return list(range(rows)) if alone else [0] * rows


def rewards_in(inputs: Inputs) -> Any:
    """Return the rewards of rows: given, merged ones, or what turns add up to; None for none."""
    if "rewards" in inputs or "combined_rewards" in inputs:
        rewards = inputs.get("combined_rewards", inputs.get("rewards"))
        if "expert" in inputs:  # an expert's answers are in no statistic
            flags = inputs["expert"]
            return [None if flag else x for x, flag in zip(rewards, flags, strict=True)]
        return rewards
    if "turn_rewards" in inputs and isinstance(inputs["turn_rewards"][0], list | tuple):
        return [float(sum(row)) for row in inputs["turn_rewards"]]
    return None


def memory_of(inputs: Inputs) -> Memory:
    """Return what earlier steps left: roles' baselines, prompts' expectations."""
    if "baselines" in inputs:
        return Memory(role_average=dict(enumerate(map(float, inputs["baselines"]))))
    if "alpha" in inputs and "beta" in inputs:
        pairs = zip(inputs["alpha"], inputs["beta"], strict=True)
        return Memory(prompt_beta={n: (float(a), float(b)) for n, (a, b) in enumerate(pairs)})
    return Memory()
