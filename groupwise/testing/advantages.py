"""Cases about rewards before they reach a loss: advantages, GAE, shaping, filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups import credit, filters, length_shaping
from groupwise.groups.phase import add_visits, advantages, select, shape
from groupwise.groups.shaping import overlong_penalty, soft_overlong
from groupwise.groups.statistics import group_stats
from groupwise.losses.auxiliary import outcome_bce, value_loss
from groupwise.methods.slots import Slot
from groupwise.records import TokenBatch
from groupwise.testing.batch import INPUT_OF, batch_for, build_batch
from groupwise.testing.between import of_advantages
from groupwise.testing.method import build_recipe, scaled_advantage
from groupwise.testing.schema import (
    Case,
    has_band,
    missing,
    params_of,
    plain,
    policy_recipe,
    rewards_of,
    tensor,
    whole,
)


def graded(batch: TokenBatch) -> Tensor:
    """Return which rows have a reward."""
    return ~batch.task_reward_N.isnan()


def advantage(case: Case) -> dict[str, Any]:
    """Return advantages and what the method computes on the way to them."""
    method, inputs, params = case["method"], case["inputs"], params_of(case)
    if "reward_history" in inputs:
        return {"advantages_by_step": _visits(case)}
    made = build_recipe(case)
    batch = batch_for(case, made)
    selection = select(made, batch)
    batch = replace(shape(made, batch), learn_N=selection.learn_N)
    x = advantages(made, batch, selection)
    mask, graded_N = batch.mask_NT, graded(batch)
    found: dict[str, Any] = {"advantages": plain(x, mask if x.dim() == 2 else None)}
    reward_N = batch.stream("reward_N")
    if method == "rloo" and x.dim() == 1:
        size_N = group_stats(reward_N, batch).count_N.clamp(min=1)
        found["times_G_minus1_over_G"] = plain(x * (size_N - 1) / size_N)
    elif method == "reinforce_pp":
        gamma = params.get("gamma", 1.0)
        found["token_rewards"] = plain(credit.dense_reward(reward_N, batch), mask)
        found["returns"] = plain(credit.return_to_go(gamma=gamma)(reward_N, batch), mask)
    elif method == "reinforce_pp_baseline":
        found["centered"] = plain(adv.group_mean()(reward_N, batch), graded_N)
    elif method == "gpg":
        found["alpha"] = float(params.get("alpha", adv.dead_group_factor(batch)))
    elif method == "prime" and "logp_prm" in inputs:
        found.update(_prime(batch, params.get("beta", 0.05)))
    elif method == "prime_seed" and made.advantage[0].name == "drift_as_process_reward":
        drift_NT = batch.stream("old_logp_NT") - batch.stream("ref_logp_NT")
        found["ipr"] = plain(drift_NT, mask)
        mix = made.advantage[0]["mix"]
        found["mixed_reward"] = plain(credit.mixed_reward(reward_N, batch, mix), mask)
    return found | of_advantages(made, batch, x)


def _prime(batch: TokenBatch, beta: float) -> dict[str, Any]:
    found = {"process_reward": plain(credit.implicit_reward(batch, beta), batch.mask_NT)}
    if batch.correct_N is None:
        right_N = batch.task_reward_N > 0
        batch = replace(batch, correct_N=right_N)
    leaf = batch.stream("prm_logp_NT").clone().requires_grad_()
    term = outcome_bce(beta=beta)
    prepared = term.definition.traits.prepare(batch, dict(term.params))
    loss = term(replace(batch, prm_logp_NT=leaf), prepared)
    (grad,) = torch.autograd.grad(loss, leaf)
    return {**found, "prm_ce_loss": plain(loss), "grad_logp_prm": plain(grad, batch.mask_NT)}


def _visits(case: Case) -> list[list[float]]:
    """Compute the advantages of one prompt, visit after visit."""
    params, history = params_of(case), case["inputs"]["reward_history"]
    own = policy_recipe(case["method"]).advantage[0]
    if own.name != "smooth_cumulative" or "adv" in params:
        raise CaseError(
            "reward_history is for a method that remembers visits (dcpo) and its own advantage: "
            "give rewards instead, as rewards: [1, 0]."
        )
    if not isinstance(history, list | tuple) or not all(isinstance(x, list) for x in history):
        raise CaseError("reward_history must be a list of rewards per visit, as [[1, 0], [0, 0]].")
    ddof = params.get("ddof", own["ddof"])
    found, memory = [], None
    for rewards in history:
        mask_NT = torch.ones(len(rewards), 1, dtype=torch.bool)
        batch = TokenBatch.build(
            mask_NT=mask_NT, group_N=[0] * len(rewards), reward_N=rewards_of(rewards), memory=memory
        )
        x_N = adv.smooth_cumulative(ddof=ddof)(batch.task_reward_N, batch)
        found.append(plain(x_N, graded(batch)))
        memory = replace(batch.memory, visits=add_visits(batch, batch.task_reward_N, ddof))
    return found


def gae(case: Case) -> dict[str, Any]:
    """Return advantages, returns, and whitened or length-adaptive forms."""
    params, inputs = params_of(case), case["inputs"]
    if params.get("clamp", [0, 1]) not in ([0, 1], (0, 1)):
        raise CaseError(f"clamp={params['clamp']!r}: λ by length is held in [0, 1] here.")
    if not {"values", "values_old"} & set(inputs):
        raise missing("values", f"gae {case['method']}")
    if "token_rewards" not in inputs and "rewards" not in inputs:
        raise missing("rewards", f"gae {case['method']} without token_rewards")
    batch = build_batch(case)
    reward_N = batch.task_reward_N
    if "token_rewards" in inputs:  # they hold the whole reward already
        reward_N = torch.where(graded(batch), torch.zeros_like(reward_N), torch.nan)
    batch = replace(batch, reward_N=reward_N, learn_N=graded(batch))
    gamma, mask = params.get("gamma", 1.0), batch.mask_NT

    def returns(lam: float) -> Any:
        term = value_loss(gamma=gamma, lam=lam)
        return term.definition.traits.prepare(batch, dict(term.params))["return_NT"]

    if case["method"] == "vapo":
        slot = credit.gae_length_adaptive(alpha=params.get("alpha", 0.05), gamma=gamma)
        lam_N = credit.length_adaptive_lambda(batch.length_N, slot["alpha"])
        return {
            "advantages": plain(slot(reward_N, batch), mask),
            "lam_policy": plain(torch.where(mask.any(1), lam_N, 0.0)),
            "critic_returns": plain(returns(params.get("lam_critic", 1.0)), mask),
        }
    lam = params.get("lam", 0.95)
    x_NT = credit.gae(gamma=gamma, lam=lam)(reward_N, batch)
    variance = params.get("whiten_eps_in_var", params.get("eps_in_var", 1e-8))
    whiten = adv.whiten_tokens(ddof=params.get("ddof", 1), eps_in_var=variance)
    return {
        "advantages": plain(x_NT, mask),
        "returns": plain(returns(lam), mask),
        "advantages_whitened": plain(whiten(x_NT, batch), mask),
    }


def reward_shaping(case: Case) -> dict[str, Any]:
    """Compute what shaping makes of rewards, and advantages of that; or the overlong penalty."""
    if case["method"] in SHAPED:
        return _shaped(case)
    names = {"L_max": "max_length", "L_cache": "cache"}
    given = {names[k]: whole(v, k) for k, v in params_of(case).items() if k in names}
    slot = soft_overlong(**given)
    if slot["cache"] > slot["max_length"]:
        raise CaseError(f"L_cache={slot['cache']} must not exceed L_max={slot['max_length']}.")
    length_N = tensor(case["inputs"]["lengths"], "lengths")
    return {"penalty": plain(overlong_penalty(length_N, slot["max_length"], slot["cache"]))}


def _fapo(params: Mapping[str, Any]) -> Slot:
    return length_shaping.flawed_positive_penalty(**_named(params, penalty="penalty"))


def _linear(params: Mapping[str, Any]) -> Slot:
    words = {"output_weight": "output", "input_weight": "context", "turns_weight": "turns"}
    return length_shaping.linear_length_penalty(**_named(params, **words))


def _stop(params: Mapping[str, Any]) -> Slot:
    coef = params.get("coef", 0.0)
    if coef < 0:
        return length_shaping.cut_off_reward(reward=coef)
    return length_shaping.stop_properly(coef=coef)


def _kimi(params: Mapping[str, Any]) -> Slot:
    return length_shaping.kimi_length()


def _cosine(params: Mapping[str, Any]) -> Slot:
    words = ("right_short", "right_long", "wrong_short", "wrong_long")
    given = _named(params, **{word: word for word in words})
    if "max_length" in params:
        given["max_length"] = whole(params["max_length"], "max_length")
    return length_shaping.cosine_length(**given)


def _named(params: Mapping[str, Any], **words: str) -> dict[str, Any]:
    return {own: params[word] for word, own in words.items() if word in params}


# The shaping of a method, and how its rewards are scaled afterwards.
SHAPED: dict[str, tuple[Callable[[Mapping[str, Any]], Slot], str]] = {
    "fapo": (_fapo, "group"),
    "linear_length_penalty": (_linear, "none"),
    "stop_properly": (_stop, "group"),
    "kimi_length": (_kimi, "group"),
    "cosine_length": (_cosine, "group"),
}


def _shaped(case: Case) -> dict[str, Any]:
    make, scale = SHAPED[case["method"]]
    params, batch = params_of(case), build_batch(case)
    slot = make(params)
    for name in slot.needs:
        if batch.find(name) is None:
            raise missing(INPUT_OF[name], f"reward_shaping {case['method']}")
    reward_N, _ = slot(batch.task_reward_N, batch)
    own: dict[str, Any] = {key: params[key] for key in ("ddof", "eps") if key in params}
    advantage = scaled_advantage(params.get("adv", {"scale": scale} | own))
    batch = replace(batch, reward_N=reward_N, learn_N=graded(batch))
    x_N = advantage(reward_N, batch)
    found = {
        "rewards": plain(reward_N, graded(batch)),
        "advantages": plain(x_N, graded(batch)),
    }
    if slot.name == "kimi_length":
        found["length_reward"] = plain(length_shaping.length_rewards(reward_N, batch))
    return found


def _drawn(case: Case) -> dict[str, Any]:
    """Return how rows weigh when they are drawn anew by their rewards."""
    params, inputs = params_of(case), case["inputs"]
    how = params.get("how", "pow")
    if how not in get_args(filters.Drawing):
        raise CaseError(f"how={how!r} is unknown: {', '.join(get_args(filters.Drawing))}.")
    reward_N = rewards_of(inputs["rewards"])
    weight_N = filters.draw_weights(reward_N, how, float(params.get("power", 2.0)))
    return {"weights": plain(weight_N), "probability": plain(weight_N / weight_N.sum())}


def keep(case: Case) -> dict[str, Any]:
    """Return which rows a filter keeps; which groups where their accuracies are given."""
    inputs, params = case["inputs"], params_of(case)
    if case["method"] == "pf_ppo":
        return _drawn(case)
    if not has_band(case):
        return {"keep": plain(filters.zero_variance()(build_batch(case)).double())}
    band = filters.accuracy_band(params.get("low", 0.2), params.get("high", 0.8))
    if "group_accuracy" in inputs:
        rewards = inputs["group_accuracy"]
        rows = len(tensor(rewards, "group_accuracy").reshape(-1))
        case = {**case, "inputs": {"rewards": rewards, "group_ids": list(range(rows))}}
    return {"keep": plain(band(build_batch(case)).double())}
