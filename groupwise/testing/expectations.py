"""Cases solved by enumeration or in closed form, without a batch of samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups import turns
from groupwise.groups.kl import VALUES
from groupwise.groups.statistics import group_stats
from groupwise.losses import penalties
from groupwise.losses.pairs import optimal_log_odds_shift
from groupwise.records import TokenBatch
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
    if case["method"] == "turn_return_to_go":
        return stopping_game(case)
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


def stopping_game(case: Case) -> dict[str, Any]:
    """Return the exact expectation of the first choice's gradient where the policy may stop.

    It stops with a reward, or goes on for another one and then wins one or not, by chance. All
    groups of that many episodes are enumerated.
    """
    params, inputs = params_of(case), case["inputs"]
    size = whole(params.get("G", 2), "G")
    going, winning = float(params.get("p_continue", 0.5)), float(params.get("q_win", 0.5))
    if not 1 <= size <= 12 or not 0 < going < 1 or not 0 <= winning <= 1:
        raise CaseError("G must lie in 1..12, p_continue between 0 and 1, q_win in [0, 1].")
    stop, on, win = (float(inputs[f"{name}_reward"]) for name in ("stop", "continue", "win"))
    gamma = float(params.get("gamma", 1.0))
    # What each kind of episode earns by turn, how likely it is, and d log π of the first choice.
    kinds = (
        ((stop,), 1.0 - going, -going),
        ((on, win), going * winning, 1.0 - going),
        ((on, 0.0), going * (1.0 - winning), 1.0 - going),
    )
    totals = {"turn_return_to_go": 0.0, "left_out": 0.0, "summed_turn_means": 0.0}
    tuples = list(itertools.product(range(3), repeat=size))
    batch = _episodes([kinds[kind][0] for group in tuples for kind in group], size)
    reward_N = batch.task_reward_N
    advantages = {
        "turn_return_to_go": turns.turn_return_to_go(gamma=gamma)(reward_N, batch)[:, 0],
        "left_out": turns.turn_return_to_go(gamma=gamma, ended="left_out")(reward_N, batch)[:, 0],
        "summed_turn_means": _summed_turn_means(batch, gamma),
    }
    chance = [math.prod(kinds[kind][1] for kind in group) for group in tuples]
    slopes = [kinds[kind][2] for group in tuples for kind in group]
    slope_N = torch.tensor(slopes, dtype=torch.float64)
    weight_N = torch.tensor(chance, dtype=torch.float64).repeat_interleave(size) / size
    for name, A_N in advantages.items():
        totals[name] = plain((weight_N * A_N * slope_N).sum())
    value = on + gamma * winning * win
    return {"true_gradient": going * (1.0 - going) * (value - stop), **totals}


def _episodes(paid: Sequence[tuple[float, ...]], size: int) -> TokenBatch:
    """Return episodes of one token a turn as a batch, groups of `size` in their order."""
    width = max(len(turn) for turn in paid)
    mask_NT = torch.tensor([[t < len(turn) for t in range(width)] for turn in paid])
    rewards = [[*turn, *[0.0] * (width - len(turn))] for turn in paid]
    return TokenBatch.build(
        mask_NT=mask_NT,
        group_N=torch.arange(len(paid)) // size,
        reward_N=[sum(turn) for turn in paid],
        step_reward_NT=torch.tensor(rewards, dtype=torch.float64),
        step_end_NT=mask_NT,
    )


def _summed_turn_means(batch: TokenBatch, gamma: float) -> Tensor:
    """Return what is biased: each turn's reward less the others' of that turn, then summed."""
    reward_NT = batch.stream("step_reward_NT")
    apart = []
    for t in range(reward_NT.shape[1]):
        own_N = torch.where(batch.mask_NT[:, t], reward_NT[:, t], torch.nan)
        alone_N = group_stats(own_N, batch).count_N == 1
        others_N = torch.where(alone_N, own_N, adv.leave_one_out()(own_N, batch))
        apart.append(gamma**t * others_N.nan_to_num(0.0))
    return torch.stack(apart).sum(0)


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
