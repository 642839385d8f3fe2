"""Cases of kind `policy_loss`: batch phase, token phase, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups.advantages import per_token
from groupwise.groups.aggregation import length_softmax
from groupwise.groups.kl import bounded_exp
from groupwise.groups.phase import BatchResult, advantages, batch_phase, passes, select, shape
from groupwise.losses.corrections import (
    future_log_ratio,
    largest_binary_kl,
    mean_fall,
    mismatch,
)
from groupwise.losses.distribution_gates import entropy_threshold, simko_branches
from groupwise.losses.gates import dynamic_bounds, geometric_weight, soft_temperature
from groupwise.losses.heads import from_logits
from groupwise.losses.phase import TokenResult, token_phase
from groupwise.losses.ratios import router_drift
from groupwise.losses.weight_gates import gamma_weights
from groupwise.methods.composition import Recipe
from groupwise.records import TokenBatch
from groupwise.testing.batch import batch_for, given_advantages, sampled
from groupwise.testing.between import of_loss, taught_weights
from groupwise.testing.method import KEPT_LINKS, build_recipe
from groupwise.testing.schema import Case, grid, params_of, plain, tensor


def policy_loss(case: Case) -> dict[str, Any]:
    """Compute loss, gradient and the streams between."""
    inputs, params = case["inputs"], params_of(case)
    made = build_recipe(case)
    batch = batch_for(case, made)
    if made.aggregation.name == "learned_length_weight":
        exponent = tensor(made.aggregation["exponent"]).requires_grad_()
        batch = replace(batch, length_exponent=exponent)
    result = batch_phase(made, batch)
    rows = _row_advantages(made, batch, case)
    if "advantages" in inputs:
        result = _with_given_advantages(result, rows)
    done = result.batch
    if "which" in params:
        if params["which"] not in ("low", "high"):
            raise CaseError(f"which={params['which']!r} is unknown: low or high.")
        done = passes(made, done)[params["which"] == "high"]
        rows = done.stream("advantage_NT")
    elif made.schedule.name == "low_then_high":
        rows = done.stream("advantage_NT")
    leaf, outputs = _learner(case, made, done)
    if done.length_exponent is not None:
        outputs["length_exponent"] = done.length_exponent
    out = token_phase(made, done, **outputs)
    wanted = [leaf] if done.length_exponent is None else [leaf, done.length_exponent]
    gradients = torch.autograd.grad(out.loss, wanted, allow_unused=True)
    grad = torch.zeros_like(leaf) if gradients[0] is None else gradients[0]
    mask = batch.mask_NT
    found: dict[str, Any] = {"loss": plain(out.loss)}
    found["grad_logits" if "logits" in inputs else "grad_logp"] = plain(grad, mask)
    found["advantages"] = plain(rows, mask if rows.dim() == 2 else None)
    live = done.with_outputs(**outputs)
    with torch.no_grad():
        found.update(_streams(made, live, out))
        found.update(_named_by_method(case, made, live, out))
        found.update(_of_corrections(made, live))
        found.update(of_loss(made, live, out))
        found.update(taught_weights(made, live, out))
    if "logits" not in inputs:
        found["coef"] = plain(_coef(made, done, outputs, leaf), mask)
    if len(gradients) > 1:
        slope = gradients[1]
        found["grad_lambda"] = 0.0 if slope is None else plain(slope)
        weight_N, _ = length_softmax(done, made.aggregation["exponent"], made.aggregation["slope"])
        found["length_weight"] = plain(torch.where(batch.mask_NT.any(1), weight_N, 0.0))
    return found


def _row_advantages(made: Recipe, batch: TokenBatch, case: Case) -> Tensor:
    """Return [N] or [N, T] as the chain leaves them, before they are spread over tokens."""
    if "advantages" in case["inputs"]:
        rows = given_advantages(case, batch.mask_NT)
        for link in made.advantage[1:]:
            if link.name in KEPT_LINKS:
                rows = link(rows, batch)
        return rows
    with torch.no_grad():
        selection = select(made, batch)
        shaped = shape(made, batch)
        return advantages(made, replace(shaped, learn_N=selection.learn_N), selection)


def _with_given_advantages(result: BatchResult, rows: Tensor) -> BatchResult:
    return replace(result, batch=replace(result.batch, advantage_NT=per_token(rows, result.batch)))


def _learner(case: Case, made: Recipe, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the leaf to differentiate by, and what the learner's forward pass would give."""
    inputs = case["inputs"]
    if "logits" in inputs or {"entropy_NT", "topk_logp_NTK"} & set(made.outputs):
        leaf = grid(inputs, "logits", batch.mask_NT, 3).requires_grad_()
        k = made.gate.get("k", 1)
        return leaf, from_logits(leaf, sampled(case, batch), k)
    leaf = grid(inputs, "logp", batch.mask_NT).requires_grad_()
    outputs = {"logp_NT": leaf}
    if "router_NTLK" in made.outputs:
        outputs["router_NTLK"] = grid(inputs, "router_new_at_old_topk", batch.mask_NT, 4)
    return leaf, outputs


def _coef(made: Recipe, batch: TokenBatch, outputs: dict[str, Tensor], leaf: Tensor) -> Tensor:
    """Return w·c·A, from the policy term alone: its gradient over −u."""
    if made.gate.definition.traits.mute:
        return torch.zeros_like(leaf)
    u_NT = batch.stream("coefficient_NT")
    policy_only = made.replace(penalty=(), auxiliary=())
    loss = token_phase(policy_only, batch, **outputs).loss
    (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True)
    grad = torch.zeros_like(leaf) if grad is None else grad
    used_NT = u_NT.ne(0)
    return torch.where(used_NT, -grad / torch.where(used_NT, u_NT, 1.0), 0.0)


def _streams(made: Recipe, batch: TokenBatch, out: TokenResult) -> dict[str, Any]:
    """Return the streams that every recipe has."""
    mask = batch.mask_NT
    clipped = out.clipped_NT.double()
    found = {
        "ratio": plain(bounded_exp(out.log_ratio_NT), mask),
        "clipped": plain(clipped, mask),
    }
    if made.ratio.definition.traits.level == "sequence":
        found["seq_ratio"] = plain(_of_row(bounded_exp(out.log_ratio_NT), mask))
        advantage_NT = batch.stream("advantage_NT")
        if made.ratio.name != "geomean_token_grad" and not _varies(advantage_NT, mask):
            found["clipped"] = plain(clipped.amax(1))
    weight_NT = torch.ones_like(out.objective_NT) if out.weight_NT is None else out.weight_NT
    found["is_weight"] = plain(weight_NT, mask)
    if batch.reward_N is not None:
        found["shaped_reward"] = plain(batch.reward_N, ~batch.reward_N.isnan())
    return found


def _named_by_method(
    case: Case, made: Recipe, batch: TokenBatch, out: TokenResult
) -> dict[str, Any]:
    """Return streams that only some gates and ratios have, under the names of the case schema."""
    mask, gate, A_NT = batch.mask_NT, made.gate, batch.stream("advantage_NT")
    found: dict[str, Any] = {}
    if made.ratio.name == "segment_geomean":
        found["segment_ratio"] = plain(bounded_exp(out.log_ratio_NT), mask)
    if made.ratio.name == "router_shift":
        shift_NT = (-router_drift(batch)).exp()
        found["router_shift"] = plain(shift_NT, mask)
        found["router_weight"] = plain(shift_NT.clamp(min=made.ratio["floor"]), mask)
    if gate.name == "gamma_weight":
        good, bad = (gate["k_pos"], gate["lambda_pos"]), (gate["k_neg"], gate["lambda_neg"])
        weight_NT = gamma_weights(out.log_ratio_NT, A_NT, good, bad)
        found["weight"] = plain(_of_row(weight_NT, mask))
    if case["method"] in ("vespo", "luspo"):  # whose cases give one ratio an answer
        found["ratio"] = plain(_of_row(bounded_exp(out.log_ratio_NT), mask))
    if gate.name == "geometric_clip":
        weight_N1 = geometric_weight(out.log_ratio_NT, A_NT, batch, gate["limit"])
        found["seq_weight"] = plain(torch.where(mask.any(1), weight_N1[:, 0], 0.0))
    if gate.name == "soft":
        tau_NT = soft_temperature(A_NT, gate["tau_pos"], gate["tau_neg"])
        p_NT = torch.sigmoid(tau_NT * (bounded_exp(out.log_ratio_NT) - 1.0))
        found["gate_weight"] = plain(4.0 * p_NT * (1.0 - p_NT), mask)
    if gate.name == "dynamic_clip":
        old_NT = batch.stream("old_logp_NT").exp()
        low_NT, high_NT = dynamic_bounds(old_NT, gate["low"], gate["high"], gate["cap"])
        found["low"], found["high"] = plain(low_NT, mask), plain(high_NT, mask)
    if gate.definition.traits.anchor == "sampler":
        found["keep_mask"] = plain((~out.clipped_NT).double(), mask)
    if gate.name == "topk_smoothing":
        spread_NT, harder_NT = simko_branches(batch, A_NT, gate["quantile"])
        found["branch"] = plain(spread_NT.double() + 2.0 * harder_NT.double(), mask)
        threshold_N = entropy_threshold(batch, gate["quantile"])[:, 0]
        found["entropy_threshold"] = plain(threshold_N)
    return found


def _of_corrections(made: Recipe, batch: TokenBatch) -> dict[str, Any]:
    """Return what corrections decide by, under the names of the case schema."""
    mask, found = batch.mask_NT, dict[str, Any]()
    for slot in made.correction:
        if slot.name in ("mask_outliers", "mask_token"):
            found["mismatch"] = plain(bounded_exp(mismatch(batch)), mask)
        if slot.name == "binary_kl_mask":
            old_NT, sampler_NT = batch.stream("old_logp_NT"), batch.stream("sampler_logp_NT")
            found["divergence"] = plain(largest_binary_kl(old_NT, sampler_NT), mask)
        if slot.name == "negative_sequence_mask":
            found["seq_kl"] = plain(mean_fall(batch, slot["anchor"])[:, 0])
            found["keep"] = plain(slot(batch)[:, 0])
        if slot.name == "future_influence":
            ahead_NT = future_log_ratio(batch, slot["half_life"], slot["dual"])
            found["future_log_ratio"] = plain(ahead_NT, mask)
    return found


def _of_row(x_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """Return a value that is constant in the row, 0 for rows without tokens."""
    return torch.where(mask_NT, x_NT, 0.0).amax(1)


def _varies(x_NT: Tensor, mask_NT: Tensor) -> bool:
    low_N = torch.where(mask_NT, x_NT, torch.inf).amin(1)
    high_N = torch.where(mask_NT, x_NT, -torch.inf).amax(1)
    return bool((high_N > low_N).any())
