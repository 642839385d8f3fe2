"""Cases solved by enumeration or in closed form, without a batch of samples."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups.kl import VALUES
from groupwise.losses import penalties
from groupwise.losses.pairs import optimal_log_odds_shift
from groupwise.testing.batch import build_batch
from groupwise.testing.schema import Case, pair_recipe, params_of, plain, tensor, whole

LARGEST_ENUMERATION = 10**6


def _vector(inputs: Any, name: str, size: int | None = None) -> Tensor:
    x = tensor(inputs[name], name)
    if x.dim() != 1 or not len(x) or size not in (None, len(x)):
        want = "a list of numbers" if size is None else f"{size} numbers, one per action"
        raise CaseError(f"{name} must be {want}, got shape {tuple(x.shape)}.")
    return x


def kl_values(case: Case) -> dict[str, Any]:
    """Return estimators per token with their gradients."""
    inputs, found = case["inputs"], {}
    leaves = tensor(inputs["logp"], "logp"), tensor(inputs["logp_ref"], "logp_ref")
    batch = build_batch(case)
    for name in ("k1", "k2", "k3", "k3+"):
        leaf = leaves[0].clone().requires_grad_()
        live = batch.with_outputs(logp_NT=leaf)
        values_NT = penalties.kl(coef=1.0, estimator=name)(live)
        (grad,) = torch.autograd.grad(values_NT[batch.mask_NT].sum(), leaf)
        found[name] = plain(values_NT, batch.mask_NT)
        found[f"{name}_grad_logp"] = plain(grad, batch.mask_NT)
    return found


def kl_expectation(case: Case) -> dict[str, Any]:
    """Return exact expectations over a categorical: every action is a row of one token."""
    inputs = case["inputs"]
    leaf = _vector(inputs, "logits").requires_grad_()
    logp = leaf.log_softmax(-1)
    ref, old = (
        _vector(inputs, name, len(leaf)).log_softmax(-1) for name in ("logits_ref", "logits_old")
    )
    column = {"mask": [[1.0]] * len(leaf)}
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
    """Return the exact expectation of (1/G)ΣA∇log π over all G-tuples of actions: a group per
    tuple.
    """
    params, inputs = params_of(case), case["inputs"]
    leaf = _vector(inputs, "logits").requires_grad_()
    logp = leaf.log_softmax(-1)
    rewards = _vector(inputs, "reward_per_action", len(leaf))
    size = whole(params.get("G", 2), "G")
    if not 1 <= size <= 20 or len(leaf) ** size > LARGEST_ENUMERATION:
        raise CaseError(
            f"G={size} must lie in 1..20 and give at most {LARGEST_ENUMERATION} tuples of the "
            f"{len(leaf)} actions."
        )
    tuples = torch.tensor(list(itertools.product(range(len(leaf)), repeat=size)))
    groups = torch.arange(len(tuples)).repeat_interleave(size)
    flat = {"rewards": rewards[tuples.flatten()].tolist(), "group_ids": groups.tolist()}
    batch = build_batch({**case, "params": {}, "inputs": flat})
    probability = logp.detach()[tuples].sum(1).exp()

    def expected(slot: Any) -> Tensor:
        A = slot(batch.task_reward_N, batch).reshape(tuples.shape)
        surrogate = (probability[:, None] * A * logp[tuples]).sum() / size
        return torch.autograd.grad(surrogate, leaf, retain_graph=True)[0]

    eps, ddof = params.get("eps", 1e-6), params.get("ddof", 1)
    zscores = [expected(adv.group_zscore(ddof=d, eps=eps)) for d in (0, 1)]
    zscore = zscores[adv.group_zscore(ddof=ddof)["ddof"]]
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


def analytic(case: Case) -> dict[str, Any]:
    """Return where DPO's optimum lies."""
    pair_recipe(case["method"])
    p = params_of(case).get("preference_probability")
    if not isinstance(p, int | float) or not 0 < p < 1:
        given = "is missing" if p is None else f"is {p!r}"
        raise CaseError(
            f"The parameter preference_probability {given}: analytic {case['method']} needs a "
            "number between 0 and 1, as preference_probability: 0.9."
        )
    betas = _vector(case["inputs"], "betas").tolist()
    if min(betas) <= 0:
        raise CaseError(f"betas must be positive, got {min(betas)}.")
    return {"optimal_logodds_shift": [optimal_log_odds_shift(p, beta) for beta in betas]}
