"""Steps between of newer methods, under the names of the case schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from groupwise.groups import filters
from groupwise.groups.advantages import per_token
from groupwise.groups.comparisons import beta_after, optimal_value, prompt_beta, role_walk
from groupwise.groups.kl import bounded_exp
from groupwise.groups.statistics import reopen_holes
from groupwise.groups.token_baselines import token_baseline
from groupwise.groups.turns import last_tokens
from groupwise.losses.corrections import clamped_binary_kl
from groupwise.losses.group_terms import lesson_weights, mean_log_ratio
from groupwise.losses.phase import TokenResult
from groupwise.losses.ratios import anchor_share, interpolated, row_mean
from groupwise.losses.whole_update import (
    cov_candidates,
    covariances,
    harmful_tokens,
    share_of_tokens,
)
from groupwise.methods.composition import Recipe
from groupwise.records import TokenBatch
from groupwise.testing.schema import plain

Found = dict[str, Any]


def of_advantages(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    """Return what the chain of a recipe computes between rewards and advantages."""
    make = OF_ADVANTAGES.get(made.advantage[0].name)
    found = {} if make is None else make(made, batch, x)
    for slot in made.correction:
        if slot.name == "sequence_kl_mask":
            kl_NT, mask = clamped_binary_kl(batch), batch.mask_NT
            mean_N = row_mean(kl_NT, batch)[:, 0]
            found["sequence_kl"] = plain(mean_N)
            found["keep"] = plain((mean_N <= slot["delta"]).double())
            found["weights"] = plain(slot(batch), mask)
    if any(link.name == "plus_state_zscore" for link in made.advantage):
        base_N = made.advantage[0](batch.stream("reward_N"), batch)
        found |= {"episode_advantages": plain(base_N), **_by_turn(made, batch, x)}
    return found


def _by_turn(made: Recipe, batch: TokenBatch, x_NT: Tensor) -> Found:
    """Return an advantage per turn, row by row."""
    return {"turn_advantages": plain(x_NT[last_tokens(batch)])}


def _parts(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    sum_N = made.advantage[0](batch.stream("reward_N"), batch)
    found = {"part_sum": plain(sum_N, ~sum_N.isnan())}
    if x.dim() == 2:  # one number a row all the same, of its tokens
        found["advantages"] = plain(x.gather(1, batch.last_N[:, None])[:, 0])
    return found


def _token_baseline(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    slot = made.advantage[0]
    settings = (slot["tail"], slot["weighing"], slot["eps"])
    _, baseline_NT = token_baseline(batch.stream("reward_N"), batch, *settings)
    return {"baselines": plain(reopen_holes(baseline_NT, batch), batch.mask_NT)}


def _prompt_beta(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    slot = made.advantage[0]
    alpha_N, beta_N = prompt_beta(batch)
    settings = (slot["half_life"], slot["low"], slot["high"])
    rho_N, *after = beta_after(batch.stream("reward_N"), batch, *settings)
    names = ("alpha_after", "beta_after")
    found = {name: plain(x_N) for name, x_N in zip(names, after, strict=True)}
    return {"p_hat": plain(alpha_N / (alpha_N + beta_N)), "rho": plain(rho_N), **found}


def _roles(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    decay = made.advantage[0]["decay"]
    _, means = role_walk(batch.stream("reward_N"), batch, decay)
    most = max((*means, *batch.memory.role_average), default=-1)
    return {"baselines_after": [float(means.get(role, 0.0)) for role in range(int(most) + 1)]}


def _tree(made: Recipe, batch: TokenBatch, x: Tensor) -> Found:
    return {"centered": plain(made.advantage[0](batch.stream("reward_N"), batch))}


def _steps(made: Recipe, batch: TokenBatch, x_NT: Tensor) -> Found:
    plain_NT = made.advantage[0](batch.stream("reward_N"), batch)
    whiten = made.advantage[1](plain_NT, batch)
    marks_NT = batch.stream("step_end_NT")
    return {
        "advantages": plain(plain_NT, batch.mask_NT),
        "step_advantages": plain(plain_NT[marks_NT]),
        "advantages_whitened": plain(whiten, batch.mask_NT),
    }


OF_ADVANTAGES: dict[str, Callable[[Recipe, TokenBatch, Tensor], Found]] = {
    "group_zscore_per_part": _parts,
    "optimal_token_baseline": _token_baseline,
    "prompt_beta_mean": _prompt_beta,
    "role_moving_mean": _roles,
    "tree_mean": _tree,
    "turn_return": _by_turn,
    "turn_return_to_go": _by_turn,
    "step_difference": _steps,
}


# --- of a loss ----------------------------------------------------------------------------------


def of_loss(made: Recipe, batch: TokenBatch, out: TokenResult) -> Found:
    """Return what gates, corrections, penalties and terms decide by."""
    found: Found = {}
    for slot in made.slots():
        make = OF_LOSS.get(slot.name)
        if make is not None:
            found |= make(dict(slot.params), batch, out)
    return found


Params = dict[str, Any]


def _candidates(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return candidates(params, batch)


def candidates(params: Params, batch: TokenBatch) -> Found:
    """Return the tokens that Clip-Cov draws from, and how many it draws at the most."""
    mask, candidate_NT = batch.mask_NT, cov_candidates(batch, params)
    count = min(share_of_tokens(params["fraction"], batch), int(candidate_NT.sum()))
    return {
        "cov": plain(covariances(batch), mask),
        "candidates": plain(candidate_NT.double(), mask),
        "count": float(count),
    }


def _selected(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    selected_NT = batch.prepared["cov_drift"]["selected_NT"]
    mask = batch.mask_NT
    return {"cov": plain(covariances(batch), mask), "selected": plain(selected_NT, mask)}


def _moments(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    bounds = batch.prepared["moment_clip"]
    return {
        "harmful": plain(harmful_tokens(batch).double(), batch.mask_NT),
        "second_moment": plain(bounds["moment_N"][0]),
        "clip_low": plain(bounds["low_N"][0]),
        "clip_high": plain(bounds["high_N"][0]),
    }


def _kept_moment(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return {"second_moment_kept": plain(batch.prepared["second_moment_mask"]["moment_N"][0])}


def _threshold(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return {"threshold": plain(batch.prepared["top_entropy"]["threshold_N"][0])}


def _anchor(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    mask = batch.mask_NT
    return {
        "alpha": plain(anchor_share(batch), mask),
        "logp_prox": plain(interpolated(batch), mask),
    }


def _score(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return {"score": plain(mean_log_ratio(batch, "logp_NT"))}


def _regression(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return {"residual": plain(batch.prepared["group_regression"]["residual_N"])}


def _balance(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    """Return FlowRL's weights and residuals, and the gradient in log Z."""
    prepared = batch.prepared["trajectory_balance"]
    log_z_N = batch.stream("old_value_NT").gather(1, batch.last_N[:, None])[:, 0]
    own_N = row_mean(batch.stream("logp_NT").detach(), batch)[:, 0]
    residual_N = log_z_N + own_N - prepared["target_N"]
    slope_N = 2.0 * prepared["coefficient_N"] * prepared["weight_N"] * residual_N
    return {
        "is_weight": plain(prepared["weight_N"]),
        "residual": plain(residual_N),
        "grad_log_z": plain(slope_N),
    }


def _lessons(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    weight_NT = lesson_weights(batch, params["weight"]) * batch.stream("lesson_NT")
    return {"token_weight": plain(weight_NT, batch.mask_NT)}


def _values(params: Params, batch: TokenBatch, out: TokenResult) -> Found:
    return {
        "v_star": plain(optimal_value(batch, params["beta"])),
        "keep": plain(filters.scored_by_reference()(batch).double()),
    }


OF_LOSS: dict[str, Callable[[Params, TokenBatch, TokenResult], Found]] = {
    "cov_clip": _candidates,
    "cov_drift": _selected,
    "moment_clip": _moments,
    "second_moment_mask": _kept_moment,
    "top_entropy": _threshold,
    "interpolated_token": _anchor,
    "group_contrast": _score,
    "group_regression": _regression,
    "trajectory_balance": _balance,
    "weighted_nll": _lessons,
    "optimal_value_baseline": _values,
}


def taught_weights(made: Recipe, batch: TokenBatch, out: TokenResult) -> Found:
    """Return SDPO's weights: capped ratios of the rows that were taught."""
    if not any(slot.name == "taught" for slot in made.correction):
        return {}
    ratio_NT = torch.ones_like(out.log_ratio_NT)
    if made.gate.name == "weight_cap":
        ratio_NT = bounded_exp(out.log_ratio_NT).clamp(max=made.gate["cap"])
    taught_NT = per_token(batch.stream("taught_N").double(), batch)
    return {"weights": plain(ratio_NT * taught_NT, batch.mask_NT)}
