"""One function per kind of case, each by the public slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.composition import recipe
from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups import aggregation, credit, filters
from groupwise.groups.phase import add_visits, advantages, select, shape
from groupwise.groups.shaping import overlong_penalty
from groupwise.losses import distribution_gates, penalties
from groupwise.losses.auxiliary import clipped_value_error, outcome_bce, value_loss
from groupwise.losses.heads import from_logits
from groupwise.losses.kl import VALUES
from groupwise.losses.pairs import Pairs, optimal_log_odds_shift
from groupwise.losses.routing import replay_gates, topk_experts
from groupwise.records import TokenBatch
from groupwise.testing.cases import Case, build_batch, chain_of, params_of, plain, tensor, whole
from groupwise.testing.policy import policy_loss


def _all_rows(batch: TokenBatch) -> Tensor:
    return torch.ones_like(batch.mask_NT[:, 0])


def _chain(case: Case, batch: TokenBatch) -> tuple[TokenBatch, Tensor]:
    """Shape the batch and run the method's advantage chain with the case's hyper-parameters."""
    made, params = recipe(case["method"]), params_of(case)
    chain = chain_of(made, params, case["inputs"])
    shaping = made.shaping if "kl_coef" in params else ()
    shaping = tuple(s.replace(coef=params["kl_coef"]) for s in shaping if "coef" in s)
    kept = tuple(slot for slot in made.filter if slot.name == "reject")
    made = made.replace(advantage=chain, shaping=shaping, filter=kept, auxiliary=(), penalty=())
    selection = select(made, batch)
    batch = shape(made, batch)
    batch = replace(batch, learn_N=selection.learn_N)
    return batch, advantages(made, batch, selection)


def advantage(case: Case) -> dict[str, Any]:
    """Advantages and what the method computes on the way to them."""
    method, inputs, params = case["method"], case["inputs"], params_of(case)
    if "reward_history" in inputs:
        return {"advantages_by_step": _visits(case)}
    names = {"logp_old": inputs["logp_policy"]} if "logp_policy" in inputs else {}
    batch = build_batch(case, **names)
    batch, x = _chain(case, batch)
    mask = batch.mask_NT
    found: dict[str, Any] = {"advantages": plain(x, mask if x.dim() == 2 else None)}
    reward_N = batch.stream("reward_N", "a case")
    if method == "rloo":
        size_N = torch.bincount(batch.groups.index_M)[batch.groups.index_M].double()
        found["times_G_minus1_over_G"] = plain(x * (size_N - 1) / size_N)
    elif method == "reinforce_pp":
        gamma = params.get("gamma", 1.0)
        found["token_rewards"] = plain(credit.dense_reward(reward_N, batch), mask)
        found["returns"] = plain(credit.return_to_go(gamma=gamma)(reward_N, batch), mask)
    elif method == "reinforce_pp_baseline":
        found["centered"] = plain(adv.group_mean()(reward_N, batch))
    elif method == "gpg":
        found["alpha"] = params.get("alpha", adv.dead_group_factor(batch))
    elif method == "prime":
        found.update(_prime(batch, params.get("beta", 0.05)))
    elif method == "prime_seed":
        drift_NT = batch.stream("old_logp_NT", method) - batch.stream("ref_logp_NT", method)
        found["ipr"] = plain(drift_NT, mask)
        mix = params.get("mix_gamma", 0.5)
        found["mixed_reward"] = plain(credit.mixed_reward(reward_N, batch, mix, method), mask)
    return found


def _prime(batch: TokenBatch, beta: float) -> dict[str, Any]:
    found = {"process_reward": plain(credit.implicit_reward(batch, beta, "prime"), batch.mask_NT)}
    if batch.correct_N is None:
        right_N = batch.task_reward_N > 0
        batch = replace(batch, correct_N=right_N)
    leaf = batch.stream("prm_logp_NT", "prime").clone().requires_grad_()
    term = outcome_bce(beta=beta)
    prepared = term.definition.traits["prepare"](batch, dict(term.params))
    loss = term(replace(batch, prm_logp_NT=leaf), prepared)
    (grad,) = torch.autograd.grad(loss, leaf)
    return {**found, "prm_ce_loss": plain(loss), "grad_logp_prm": plain(grad, batch.mask_NT)}


def _visits(case: Case) -> list[list[float]]:
    """One prompt, visit after visit."""
    ddof = params_of(case).get("ddof", 1)
    found, memory = [], None
    for rewards in case["inputs"]["reward_history"]:
        mask_NT = torch.ones(len(rewards), 1, dtype=torch.bool)
        batch = TokenBatch.build(
            mask_NT=mask_NT, group_N=[0] * len(rewards), reward_N=tensor(rewards), memory=memory
        )
        found.append(plain(adv.smooth_cumulative(ddof=ddof)(batch.task_reward_N, batch)))
        memory = replace(batch.memory, visits=add_visits(batch, batch.task_reward_N, ddof))
    return found


def gae(case: Case) -> dict[str, Any]:
    """Advantages, returns, and whitened or length-adaptive forms."""
    params, batch = params_of(case), build_batch(case)
    batch = replace(
        batch,
        task_reward_N=torch.zeros_like(batch.task_reward_N),
        reward_N=torch.zeros_like(batch.task_reward_N),
        learn_N=_all_rows(batch),
    )
    gamma, mask = params.get("gamma", 1.0), batch.mask_NT
    if "token_rewards" not in case["inputs"]:
        batch = replace(batch, reward_N=tensor(case["inputs"]["rewards"]))
    reward_N = batch.stream("reward_N", "gae")

    def returns(lam: float) -> Any:
        term = value_loss(gamma=gamma, lam=lam)
        return term.definition.traits["prepare"](batch, dict(term.params))["return_NT"]

    if case["method"] == "vapo":
        alpha = params.get("alpha", 0.05)
        x_NT = credit.gae_length_adaptive(alpha=alpha, gamma=gamma)(reward_N, batch)
        lam_N = credit.length_adaptive_lambda(batch.length_N, alpha)
        return {
            "advantages": plain(x_NT, mask),
            "lam_policy": plain(torch.where(mask.any(1), lam_N, 0.0)),
            "critic_returns": plain(returns(params.get("lam_critic", 1.0)), mask),
        }
    lam = params.get("lam", 0.95)
    x_NT = credit.gae(gamma=gamma, lam=lam)(reward_N, batch)
    whiten = adv.whiten_tokens(
        ddof=params.get("ddof", 1), eps_in_var=params.get("whiten_eps_in_var", 1e-8)
    )
    return {
        "advantages": plain(x_NT, mask),
        "returns": plain(returns(lam), mask),
        "advantages_whitened": plain(whiten(x_NT, batch), mask),
    }


def value(case: Case) -> dict[str, Any]:
    """Clipped value loss."""
    params, inputs = params_of(case), case["inputs"]
    batch = build_batch(case)
    batch = replace(batch, learn_N=_all_rows(batch))
    leaf = tensor(inputs["values_new"]).requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    streams = [torch.where(batch.mask_NT, x, zero) for x in (leaf, tensor(inputs["returns"]))]
    limit = params.get("cliprange_value", 0.2)
    weights_NT = _weights(batch, params)
    error_NT, clipped_NT = clipped_value_error(
        streams[0], batch.stream("old_value_NT", "a case"), streams[1], limit
    )
    loss = (weights_NT * error_NT).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    mask = batch.mask_NT
    return {
        "loss": plain(loss),
        "grad_values": plain(grad, mask),
        "clipped": plain(clipped_NT.double(), mask),
    }


def _weights(batch: TokenBatch, params: dict[str, Any]) -> Tensor:
    name = params.get("agg", "token_mean_batch")
    if name == "seq_mean_token_sum_norm":
        return aggregation.seq_mean_token_sum_norm(length=whole(params["norm_len"]))(batch)
    options = {d.name: d for d in _AGGREGATIONS}
    if name not in options:
        raise CaseError(f"agg={name!r} is unknown: {sorted(options)}.")
    return options[name]()(batch)


_AGGREGATIONS = (
    aggregation.token_mean_batch,
    aggregation.token_mean_group,
    aggregation.seq_mean_token_mean,
    aggregation.seq_mean_token_sum,
    aggregation.seq_sum_token_mean,
)


def aggregate(case: Case) -> dict[str, Any]:
    """One token loss under every aggregation."""
    params, batch = params_of(case), build_batch(case)
    batch = replace(batch, learn_N=_all_rows(batch))
    loss_NT = torch.where(batch.mask_NT, tensor(case["inputs"]["token_loss"]), 0.0)
    found = {d.name: plain((d()(batch) * loss_NT).sum()) for d in _AGGREGATIONS}
    if "norm_len" in params:
        slot = aggregation.seq_mean_token_sum_norm(length=whole(params["norm_len"]))
        found[slot.name] = plain((slot(batch) * loss_NT).sum())
    return found


def auxiliary(case: Case) -> dict[str, Any]:
    """The entropy bonus on logits."""
    params = params_of(case)
    batch = build_batch(case)
    leaf = tensor(case["inputs"]["logits"]).requires_grad_()
    entropy_NT = from_logits(leaf, None)["entropy_NT"]
    live = replace(batch, learn_N=_all_rows(batch)).with_outputs(entropy_NT=entropy_NT)
    term = penalties.entropy_bonus(coef=params.get("coef", params.get("entropy_coef", 1e-3)))
    loss = (_weights(live, params) * term(live)).sum()
    (grad,) = torch.autograd.grad(loss, leaf)
    mask = batch.mask_NT
    return {
        "entropy": plain(entropy_NT, mask),
        "loss": plain(loss),
        "grad_logits": plain(grad, mask),
    }


def preference(case: Case) -> dict[str, Any]:
    """DPO and its relatives."""
    inputs = case["inputs"]
    chosen, rejected = (
        tensor(inputs[f"logp_{x}"]).requires_grad_() for x in ("chosen", "rejected")
    )
    pairs = Pairs(
        chosen, rejected, tensor(inputs["ref_logp_chosen"]), tensor(inputs["ref_logp_rejected"])
    )
    made = recipe(case["method"])
    beta = params_of(case).get("beta", made.preference["beta"])
    out = made.preference.replace(beta=beta)(pairs)
    grads = torch.autograd.grad(out.loss, [chosen, rejected])
    return {
        "margin": plain(out.margin_N),
        "loss": plain(out.loss),
        "grad_logp_chosen": plain(grads[0]),
        "grad_logp_rejected": plain(grads[1]),
        "reward_chosen": plain(out.chosen_reward_N),
        "reward_rejected": plain(out.rejected_reward_N),
        "chosen_displaced": plain(out.displaced_N.double()),
    }


def analytic(case: Case) -> dict[str, Any]:
    """Where DPO's optimum lies."""
    p = params_of(case)["preference_probability"]
    return {
        "optimal_logodds_shift": [optimal_log_odds_shift(p, b) for b in case["inputs"]["betas"]]
    }


def pair_selection(case: Case) -> dict[str, Any]:
    """Best and worst of a prompt's judged candidates."""
    scores = tensor(case["inputs"]["judge_scores"]).mean(1)
    choice = recipe(case["method"]).pairing(scores)
    return {
        "mean_scores": plain(scores),
        "chosen": float(choice.chosen),
        "rejected": float(choice.rejected),
        "keep": float(choice.keep),
    }


def reward_shaping(case: Case) -> dict[str, Any]:
    """Soft overlong punishment."""
    params = params_of(case)
    limits = whole(params.get("L_max", 20480)), whole(params.get("L_cache", 4096))
    return {"penalty": plain(overlong_penalty(tensor(case["inputs"]["lengths"]), *limits))}


def keep(case: Case) -> dict[str, Any]:
    """Which rows (zero variance) or groups (accuracy band) a filter keeps."""
    inputs, params = case["inputs"], params_of(case)
    if "group_accuracy" in inputs:
        rows = len(inputs["group_accuracy"])
        batch = build_batch(
            {**case, "inputs": {"rewards": inputs["group_accuracy"], "group_ids": range(rows)}}
        )
        band = filters.accuracy_band(params.get("low", 0.2), params.get("high", 0.8))
        return {"keep": plain(band(batch).double())}
    return {"keep": plain(filters.zero_variance()(build_batch(case)).double())}


def kl_values(case: Case) -> dict[str, Any]:
    """Estimators per token with their gradients."""
    batch, found = build_batch(case), {}
    for name in ("k1", "k2", "k3", "k3+"):
        leaf = tensor(case["inputs"]["logp"]).requires_grad_()
        live = batch.with_outputs(logp_NT=leaf)
        values_NT = penalties.kl(coef=1.0, estimator=name)(live)
        (grad,) = torch.autograd.grad(values_NT[batch.mask_NT].sum(), leaf)
        found[name] = plain(values_NT, batch.mask_NT)
        found[f"{name}_grad_logp"] = plain(grad, batch.mask_NT)
    return found


def kl_expectation(case: Case) -> dict[str, Any]:
    """Exact expectations over a categorical: every action is a row of one token."""
    inputs = case["inputs"]
    leaf = tensor(inputs["logits"]).requires_grad_()
    logp, ref = leaf.log_softmax(-1), tensor(inputs["logits_ref"]).log_softmax(-1)
    old = tensor(inputs["logits_old"]).log_softmax(-1)
    column = {"mask": [[1.0]] * len(leaf), "rewards": [0.0] * len(leaf)}
    streams = {"logp_ref": ref[:, None].tolist(), "logp_old": old[:, None].tolist()}
    batch = build_batch({**case, "inputs": {**column, **streams}}).with_outputs(
        logp_NT=logp[:, None]
    )
    p, p_old = logp.detach().exp(), old.exp()

    def gradient(x: Tensor) -> Any:
        return plain(torch.autograd.grad(x, leaf, retain_graph=True)[0])

    found: dict[str, Any] = {}
    for name in ("k1", "k2", "k3"):
        values = penalties.kl(coef=1.0, estimator=name)(batch)[:, 0]
        found[f"E_{name}"] = plain((p * values).sum())
        found[f"E_grad_{name}_in_loss"] = gradient((p * values).sum())
    reward = VALUES["k1"](logp - ref).detach()
    found["E_grad_k1_in_reward"] = gradient((p * reward * logp).sum())
    importance = penalties.kl_importance(coef=1.0)(batch)[:, 0]
    found["E_grad_k3_in_loss_IS_corrected"] = gradient((p_old * importance).sum())
    reverse, forward = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    found["reverse_kl"], found["grad_reverse_kl"] = plain(reverse), gradient(reverse)
    found["forward_kl"], found["grad_forward_kl"] = plain(forward), gradient(forward)
    return found


def estimator_expectation(case: Case) -> dict[str, Any]:
    """Exact expectation of (1/G)ΣA∇log π over all G-tuples of actions: a group per tuple."""
    params, inputs = params_of(case), case["inputs"]
    leaf = tensor(inputs["logits"]).requires_grad_()
    logp = leaf.log_softmax(-1)
    size = whole(params.get("G", 2))
    tuples = torch.tensor(list(itertools.product(range(len(leaf)), repeat=size)))
    rewards = tensor(inputs["reward_per_action"])
    groups = torch.arange(len(tuples)).repeat_interleave(size)
    flat = {"rewards": rewards[tuples.flatten()].tolist(), "group_ids": groups.tolist()}
    batch = build_batch({**case, "params": {}, "inputs": flat})
    probability = logp.detach()[tuples].sum(1).exp()

    def expected(slot: Any) -> Tensor:
        A = slot(batch.task_reward_N, batch).reshape(tuples.shape)
        surrogate = (probability[:, None] * A * logp[tuples]).sum() / size
        return torch.autograd.grad(surrogate, leaf, retain_graph=True)[0]

    zscores = [expected(adv.group_zscore(ddof=d, eps=params.get("eps", 1e-6))) for d in (0, 1)]
    zscore = zscores[params.get("ddof", 1)]
    (true,) = torch.autograd.grad((logp.exp() * rewards).sum(), leaf, retain_graph=True)
    return {
        "true_gradient": plain(true),
        "cos_zscore_vs_true": plain(torch.cosine_similarity(zscore, true, dim=0)),
        "E_raw": plain(expected(adv.raw())),
        "E_group_mean": plain(expected(adv.group_mean())),
        "E_leave_one_out": plain(expected(adv.leave_one_out())),
        "E_zscore_ddof0": plain(zscores[0]),
        "E_zscore_ddof1": plain(zscores[1]),
    }


def gate(case: Case) -> dict[str, Any]:
    """DPPO's top-k mask from the logits of both engines."""
    inputs, params = case["inputs"], params_of(case)
    if case["method"] != "dppo":
        raise CaseError("kind 'gate' knows the method 'dppo'.")
    batch = build_batch({**case, "inputs": {**inputs, "rewards": [0.0] * len(inputs["mask"])}})
    token_NT, k = batch.stream("token_NT", "a case"), whole(params["K"])
    sampler = from_logits(tensor(inputs["logits_rollout"]), token_NT, k)
    logp_NTV = tensor(inputs["logits"]).log_softmax(-1)
    learner = from_logits(tensor(inputs["logits"]), token_NT)
    batch = batch.with_outputs(
        sampler_logp_NT=sampler["logp_NT"],
        sampler_topk_logp_NTK=sampler["topk_logp_NTK"],
        sampler_topk_id_NTK=sampler["topk_id_NTK"],
        logp_at_sampler_topk_NTK=logp_NTV.gather(-1, sampler["topk_id_NTK"]),
        logp_NT=learner["logp_NT"],
    )
    which = "kl" if "delta_kl" in params else "tv"
    slot = distribution_gates.topk_mask(
        delta=params.get(f"delta_{which}", params.get("delta", 0.2)), k=k, divergence=which
    )
    advantage_NT = adv.per_token(tensor(inputs["advantages"]), batch)
    log_ratio_NT = batch.stream("logp_NT", "a case") - batch.stream("sampler_logp_NT", "a case")
    _, clipped_NT = slot(log_ratio_NT, advantage_NT, batch)
    tv_NT, kl_NT = distribution_gates.topk_divergences(batch, k, "top")
    mask = batch.mask_NT
    return {
        "topk_tv": plain(tv_NT, mask),
        "topk_kl": plain(kl_NT, mask),
        "keep_mask": plain((~clipped_NT).double(), mask),
    }


def router(case: Case) -> dict[str, Any]:
    """Routing replay: gates, their Jacobian, and the gates without it."""
    logits = tensor(case["inputs"]["router_logits"])
    replayed = tensor(case["inputs"]["replay_mask"])
    jacobian = torch.func.jacrev(lambda s: replay_gates(s, replayed))(logits)
    own = topk_experts(logits, whole(params_of(case).get("top_k", int(replayed.sum()))))
    return {
        "gates_replay": plain(replay_gates(logits, replayed)),
        "jacobian": plain(jacobian),
        "gates_without_replay": plain(replay_gates(logits, own)),
    }


KINDS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "policy_loss": policy_loss,
    "advantage": advantage,
    "gae": gae,
    "value_loss": value,
    "aux_loss": auxiliary,
    "preference_loss": preference,
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
}
