"""One function per kind of case, each by the public slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups import aggregation
from groupwise.groups.phase import advantages, batch_phase, select, shape
from groupwise.groups.siblings import demonstrations
from groupwise.losses import distribution_gates, penalties
from groupwise.losses.auxiliary import clipped_value_error, value_loss
from groupwise.losses.group_terms import lesson_weights, weighted_nll
from groupwise.losses.heads import from_logits
from groupwise.losses.routing import replay_gates, topk_experts
from groupwise.records import TokenBatch
from groupwise.testing import preferences
from groupwise.testing.advantages import advantage, gae, graded, keep, reward_shaping
from groupwise.testing.batch import batch_for, build_batch, given_advantages, sampled
from groupwise.testing.between import candidates
from groupwise.testing.expectations import (
    analytic,
    estimator_expectation,
    kl_expectation,
    kl_values,
)
from groupwise.testing.method import AGGREGATIONS, aggregation_of, build_recipe
from groupwise.testing.policy import policy_loss
from groupwise.testing.schema import (
    OF_PAIR,
    Case,
    grid,
    missing,
    pair_recipe,
    params_of,
    plain,
    policy_recipe,
    rewards_of,
    tensor,
    whole,
)
from groupwise.testing.steps import schedule
from groupwise.testing.teachers import distillation


def _weights(batch: TokenBatch, params: dict[str, Any]) -> Tensor:
    return aggregation_of(params, aggregation.token_mean_batch())(batch)


def value(case: Case) -> dict[str, Any]:
    """Compute the clipped value loss."""
    params, inputs = params_of(case), case["inputs"]
    if not {"values", "values_old"} & set(inputs):
        raise missing("values_old", f"value_loss {case['method']}")
    batch = build_batch(case)
    batch = replace(batch, learn_N=graded(batch))
    leaf = grid(inputs, "values_new", batch.mask_NT).requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    target_NT = grid(inputs, "returns", batch.mask_NT)
    streams = [torch.where(batch.mask_NT, x, zero) for x in (leaf, target_NT)]
    limit = value_loss(limit=params.get("cliprange_value", 0.2))["limit"]
    error_NT, clipped_NT = clipped_value_error(
        streams[0], batch.stream("old_value_NT"), streams[1], limit
    )
    loss = 0.5 * (_weights(batch, params) * error_NT).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    mask = batch.mask_NT
    return {
        "loss": plain(loss),
        "grad_values": plain(grad, mask),
        "clipped": plain(clipped_NT.double(), mask),
    }


def aggregate(case: Case) -> dict[str, Any]:
    """Compute one token loss under every aggregation; without norm_len, Dr.GRPO's own length."""
    own = policy_recipe("dr_grpo").aggregation
    batch = build_batch(case)
    batch = replace(batch, learn_N=graded(batch))
    loss_NT = torch.where(batch.mask_NT, grid(case["inputs"], "token_loss", batch.mask_NT), 0.0)
    slots = [aggregation_of({**params_of(case), "agg": name}, own) for name in AGGREGATIONS]
    return {slot.name: plain((slot(batch) * loss_NT).sum()) for slot in slots}


def imitation(case: Case) -> dict[str, Any]:
    """Compute the likelihood of marked tokens: DFT, CHORD's φ, ECHO."""
    params, batch = params_of(case), build_batch(case)
    words = {"dft": "probability", "phi": "phi", "plain": "plain"}
    own = {"dft": "dft", "chord": "phi", "echo": "plain"}[case["method"]]
    if params.get("weight", own) not in words:
        raise CaseError(f"weight={params['weight']!r} is unknown: {', '.join(words)}.")
    weight = words[params.get("weight", own)]
    term = weighted_nll(coef=params.get("coef", 1.0), weight=weight)
    if batch.find("lesson_NT") is None:
        raise missing("select", f"aux_loss {case['method']}")
    leaf = grid(case["inputs"], "logp", batch.mask_NT).requires_grad_()
    live = batch.with_outputs(logp_NT=leaf)
    loss = term(live, term.definition.traits.prepare(batch, dict(term.params)))
    (grad,) = torch.autograd.grad(loss, leaf)
    weight_NT = lesson_weights(live, weight) * batch.stream("lesson_NT")
    return {
        "token_weight": plain(weight_NT, batch.mask_NT),
        "loss": plain(loss),
        "grad_logp": plain(grad, batch.mask_NT),
    }


def auxiliary(case: Case) -> dict[str, Any]:
    """Compute the entropy bonus on logits, or the likelihood of marked tokens."""
    if (case["kind"], case["method"]) in OF_PAIR:
        return imitation(case)
    params, inputs = params_of(case), case["inputs"]
    batch = build_batch(case)
    leaf = grid(inputs, "logits", batch.mask_NT, 3).requires_grad_()
    entropy_NT = from_logits(leaf, None)["entropy_NT"]
    live = replace(batch, learn_N=graded(batch)).with_outputs(entropy_NT=entropy_NT)
    term = penalties.entropy_bonus(coef=params.get("coef", params.get("entropy_coef", 1e-3)))
    loss = (_weights(live, params) * term(live)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    mask = batch.mask_NT
    return {
        "entropy": plain(entropy_NT, mask),
        "loss": plain(loss),
        "grad_logits": plain(grad, mask),
    }


def pair_selection(case: Case) -> dict[str, Any]:
    """Choose the best and worst of a prompt's judged candidates; or who is shown to whom."""
    if case["method"] == "sdpo":
        return _demonstrations(case)
    made = pair_recipe(case["method"])
    scores = tensor(case["inputs"]["judge_scores"], "judge_scores")
    if scores.dim() != 2 or not scores.numel():
        raise CaseError("judge_scores must be a list of judgements per candidate, as [[3], [1]].")
    choice = made.pairing(scores.mean(1))
    return {
        "mean_scores": plain(scores.mean(1)),
        "chosen": float(choice.chosen),
        "rejected": float(choice.rejected),
        "keep": float(choice.keep),
    }


def _demonstrations(case: Case) -> dict[str, Any]:
    params, inputs = params_of(case), case["inputs"]
    rewards = rewards_of(inputs["rewards"]).tolist()
    found = demonstrations(
        rewards,
        inputs.get("group_ids", [0] * len(rewards)),
        threshold=float(params.get("threshold", 1.0)),
        own=not params.get("exclude_self", True),
    )
    return {
        "demonstration": [float(row) for row in found],
        "has_teacher": [float(row >= 0) for row in found],
    }


def _covariance(case: Case) -> dict[str, Any]:
    """Return the tokens that Clip-Cov draws from, without the draw."""
    made = build_recipe(case)
    batch = batch_for({**case, "kind": "policy_loss"}, made)
    done = batch_phase(made, batch)
    rows = advantages(made, replace(shape(made, batch), learn_N=graded(batch)), select(made, batch))
    found = candidates(dict(made.gate.params), done.batch)
    return {"advantages": plain(rows), **found}


def gate(case: Case) -> dict[str, Any]:
    """Compute DPPO's top-k mask from the logits of both engines, or Clip-Cov's candidates."""
    if case["method"] == "clip_cov":
        return _covariance(case)
    inputs, params = case["inputs"], params_of(case)
    if case["method"] not in ("dppo", "dppo_topk"):
        raise CaseError(f"kind 'gate' knows the method 'dppo', not {case['method']!r}.")
    if "delta_tv" in params and "delta_kl" in params:
        raise CaseError("delta_tv and delta_kl ask for two masks: give one of the two.")
    batch, own = build_batch(case), policy_recipe("dppo_topk").gate
    mask, token_NT = batch.mask_NT, sampled(case, batch)
    logits = grid(inputs, "logits", mask, 3)
    k = whole(params.get("K", min(own["k"], logits.shape[-1])), "K")
    which = "kl" if "delta_kl" in params else "tv"
    delta = params.get(f"delta_{which}", params.get("delta", own["delta"]))
    slot = distribution_gates.topk_mask(delta=delta, k=k, divergence=which)
    sampler = from_logits(grid(inputs, "logits_rollout", mask, 3), token_NT, k)
    batch = batch.with_outputs(
        sampler_logp_NT=sampler["logp_NT"],
        sampler_topk_logp_NTK=sampler["topk_logp_NTK"],
        sampler_topk_id_NTK=sampler["topk_id_NTK"],
        logp_at_sampler_topk_NTK=logits.log_softmax(-1).gather(-1, sampler["topk_id_NTK"]),
        logp_NT=from_logits(logits, token_NT)["logp_NT"],
    )
    advantage_NT = adv.per_token(given_advantages(case, mask), batch)
    log_ratio_NT = batch.stream("logp_NT") - batch.stream("sampler_logp_NT")
    _, clipped_NT = slot(log_ratio_NT, advantage_NT, batch)
    tv_NT, kl_NT = distribution_gates.topk_divergences(batch, k, "top")
    return {
        "topk_tv": plain(tv_NT, mask),
        "topk_kl": plain(kl_NT, mask),
        "keep_mask": plain((~clipped_NT).double(), mask),
    }


def router(case: Case) -> dict[str, Any]:
    """Compute routing replay: gates, their Jacobian, and the gates without it."""
    logits = tensor(case["inputs"]["router_logits"], "router_logits")
    replayed = tensor(case["inputs"]["replay_mask"], "replay_mask")
    gates = replay_gates(logits, replayed)
    k = whole(params_of(case).get("top_k", int(replayed.sum())), "top_k")
    if not 1 <= k <= logits.shape[-1]:
        raise CaseError(f"top_k={k} must lie in 1..{logits.shape[-1]}, the number of experts.")
    jacobian = torch.func.jacrev(lambda s: replay_gates(s, replayed))(logits)
    return {
        "gates_replay": plain(gates),
        "jacobian": plain(jacobian),
        "gates_without_replay": plain(replay_gates(logits, topk_experts(logits, k))),
    }


KINDS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "policy_loss": policy_loss,
    "advantage": advantage,
    "gae": gae,
    "value_loss": value,
    "aux_loss": auxiliary,
    "preference_loss": preferences.preference,
    "unpaired_loss": preferences.unpaired,
    "reward_loss": preferences.reward_loss,
    "reference_update": preferences.reference_update,
    "reward_shaping": reward_shaping,
    "filter": keep,
    "kl": kl_values,
    "kl_expectation": kl_expectation,
    "aggregation": aggregate,
    "gate": gate,
    "router": router,
    "pair_selection": pair_selection,
    "analytic": analytic,
    "estimator_expectation": estimator_expectation,
    "schedule": schedule,
    "distillation_loss": distillation,
}
