"""From a case to a batch and a recipe: what the words of the case schema mean here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from groupwise.composition import Recipe, recipe
from groupwise.errors import CaseError
from groupwise.groups import advantages as adv
from groupwise.groups import aggregation, credit, filters, shaping
from groupwise.losses import distribution_gates, gates, penalties
from groupwise.records import TokenBatch
from groupwise.slots import Slot, find

Case = Mapping[str, Any]

_STREAMS = {
    "logp_old": "old_logp_NT",
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
}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def plain(x: Any, mask: Tensor | None = None) -> Any:
    """Nested lists and floats; 0 on padded positions."""
    if not isinstance(x, Tensor):
        return float(x)
    x = x.detach().double()
    if mask is not None:
        x = torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), x, 0.0)
    return x.tolist()


def whole(value: float) -> int:
    if int(value) != value:
        raise CaseError(f"{value} must be a whole number.")
    return int(value)


def params_of(case: Case) -> dict[str, Any]:
    return dict(case.get("params") or {})


def build_batch(case: Case, **overrides: Any) -> TokenBatch:
    """The batch of a case. Rewards that are missing are 0; without group ids all rows are one."""
    inputs = {**case["inputs"], **overrides}
    mask_NT = _mask(inputs)
    streams: dict[str, Tensor] = {}
    for name, stream in _STREAMS.items():
        if name in inputs:
            streams[stream] = tensor(inputs[name])
    for name in ("segment_NT", "token_NT"):
        if name in streams:
            streams[name] = torch.where(mask_NT, streams[name], 0.0).long()
    greedy = inputs.get("greedy_rewards", params_of(case).get("greedy_reward"))
    if greedy is not None:
        streams["greedy_reward_N"] = tensor(greedy).expand(len(mask_NT)).clone()
    if "token_rewards" in inputs:
        streams["token_reward_NT"] = tensor(inputs["token_rewards"])
    rewards = inputs.get("rewards")
    reward_N = (
        torch.zeros(len(mask_NT), dtype=torch.float64) if rewards is None else tensor(rewards)
    )
    groups = inputs.get("group_ids", [0] * len(mask_NT))
    parts: dict[str, Any] = {"group_N": groups, "reward_N": reward_N, **streams}
    batch = TokenBatch.build(mask_NT=mask_NT, **parts)
    if batch.truncated_N is None:
        return batch
    # A truncated row's mask may come cleared or not: the outputs are those of a cleared one.
    return TokenBatch.build(mask_NT=mask_NT & filters.overlong()(batch)[:, None], **parts)


def _mask(inputs: Mapping[str, Any]) -> Tensor:
    if "mask" in inputs:
        return tensor(inputs["mask"]) != 0
    for name in ("logp", "token_rewards", "logits", "logp_old", "token_loss", "step_reward_NT"):
        if name in inputs:
            x = tensor(inputs[name])
            return torch.ones(x.shape[:2], dtype=torch.bool)
    return torch.ones((len(inputs["rewards"]), 1), dtype=torch.bool)


def build_recipe(case: Case) -> Recipe:
    """The method's recipe with the case's hyper-parameters, without what prepares real batches.

    A case's rewards are final, so shaping other than KL goes; a given batch is past its refills, so
    the accuracy band goes; critics and reward models have kinds of their own.
    """
    made = recipe(case["method"])
    if not isinstance(made, Recipe):
        raise CaseError(f"{case['method']!r} is a preference method: use kind 'preference_loss'.")
    params, inputs = params_of(case), case["inputs"]
    changes: dict[str, Any] = {
        "filter": _filters(made),
        "advantage": chain_of(made, params, inputs),
        "gate": _gate(made, params, case.get("axes") or {}),
        "ratio": _set(made.ratio, floor=params.get("gamma_min")),
        "aggregation": _aggregation(made, params),
        "correction": _correction(made, params, inputs),
        "auxiliary": tuple(
            _set(slot, weight=params.get("mu"))
            for slot in made.auxiliary
            if slot.name == "positive_nll" and "correct" in inputs
        ),
        "schedule": _set(made.schedule, eta=params.get("eta"), updates=1),
    }
    in_reward, in_loss = _kl(made, params, inputs, changes["advantage"])
    extra = (penalty for penalty in made.penalty if penalty.name != "kl")
    return made.replace(shaping=in_reward, penalty=(*in_loss, *extra), **changes)


def _set(slot: Slot, **values: Any) -> Slot:
    """The slot with those hyper-parameters that are given and that it has."""
    changes = {key: value for key, value in values.items() if value is not None and key in slot}
    return slot.replace(**changes) if changes else slot


def _filters(made: Recipe) -> tuple[Slot, ...]:
    kept = [slot for slot in made.filter if slot.name in ("zero_variance", "reject")]
    if any(slot.name == "enough_mixed" for slot in made.filter):
        kept.append(filters.zero_variance())
    return tuple(kept)


def scaled_advantage(spec: Mapping[str, Any]) -> Slot:
    """`adv = {scale: none|group|batch, ddof, eps}`."""
    ddof, eps = spec.get("ddof", 1), spec.get("eps", 1e-6)
    options = {
        "none": adv.group_mean,
        "group": adv.group_zscore,
        "batch": adv.group_mean_batch_std,
    }
    if spec.get("scale", "group") not in options:
        raise CaseError(f"adv.scale={spec['scale']!r} is unknown: none, group or batch.")
    made = options[spec.get("scale", "group")]
    return made() if made is adv.group_mean else made(ddof=ddof, eps=eps)


def chain_of(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    """The method's advantage chain with the case's hyper-parameters."""
    base, *modifiers = made.advantage
    if "adv" in params:
        base = scaled_advantage(params["adv"])
        modifiers = [slot for slot in modifiers if slot.name != "whiten_tokens"]
    elif "old_value_NT" in base.needs and "values" not in inputs:
        base, modifiers = adv.group_zscore(), []  # a critic's recipe on a case without a critic
    elif base.name == "group_zscore" and "step_reward_NT" in inputs:
        base = credit.group_process_zscore()  # GRPO with process supervision
    own = {} if "adv" in params else {key: params.get(key) for key in ("ddof", "eps")}
    base = _set(
        base,
        **own,
        gamma=params.get("gamma"),
        lam=params.get("lam"),
        beta=params.get("beta"),
        alpha=params.get("alpha"),
        mix=params.get("mix_gamma"),
    )
    chain = [base]
    for slot in modifiers:
        if slot.name == "rescale_for_dead_groups":
            chain.extend(_gpg_factors(slot, params))
        elif slot.name == "whiten_tokens":
            if params.get("whiten", True):
                variance = params.get("whiten_eps_in_var", params.get("eps_in_var"))
                chain.append(_set(slot, ddof=params.get("ddof"), eps_in_var=variance))
        else:
            chain.append(_set(slot, alpha=params.get("alpha")))
    return tuple(chain)


def _gpg_factors(slot: Slot, params: dict[str, Any]) -> list[Slot]:
    """α given or computed, and the fixed divisor F."""
    given, divisor = params.get("alpha"), params.get("f_norm", 1.0)
    if given is not None:
        return [adv.scale(by=given / divisor)]
    return [slot] if divisor == 1.0 else [slot, adv.scale(by=1.0 / divisor)]


def _gate(made: Recipe, params: dict[str, Any], axes: Mapping[str, Any]) -> Slot:
    gate = made.gate
    if gate.name == "tv_mask" and "kl" in str(axes.get("clip", "")):
        gate = distribution_gates.kl_mask(cap=gate["cap"])
    if gate.name == "clip" and "dual_clip_c" in params:
        gate = gates.dual_clip(gate["low"], gate["high"])
    low, high = params.get("eps_low"), params.get("eps_high")
    if gate.name == "segment_clip":
        return gate.replace(width=_set(gate["width"], low=low, high=high))
    quantile, k = params.get("entropy_quantile"), params.get("K")
    return _set(
        gate,
        low=low,
        high=high,
        bound=params.get("dual_clip_c"),
        limit=params.get("log_clip"),
        cap=params.get("ratio_cap", params.get("is_cap")),
        floor=params.get("is_floor"),
        delta=params.get("delta"),
        tau_pos=params.get("tau_pos"),
        tau_neg=params.get("tau_neg"),
        alpha=params.get("alpha"),
        quantile=quantile,
        k=None if k is None else whole(k),
        top1=params.get("lambda_top1"),
    )


def _aggregation(made: Recipe, params: dict[str, Any]) -> Slot:
    chosen, length = made.aggregation, params.get("norm_len")
    if chosen.name == "learned_length_weight":
        return _set(chosen, exponent=params.get("lam"), slope=params.get("r"))
    name = params.get("agg", chosen.name)
    if name == "seq_mean":
        name = "seq_mean_token_mean"
    if name == "seq_mean_token_sum_norm":
        if length is None and "length" not in chosen:
            raise CaseError("agg seq_mean_token_sum_norm needs the parameter norm_len.")
        length = chosen["length"] if length is None else length
        return aggregation.seq_mean_token_sum_norm(length=whole(length))
    return find("aggregation", name)()


def _correction(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    """`level` and `mode` with C, or C_min and C_max."""
    if "logp_rollout" not in inputs or made.gate.definition.traits.get("anchor") == "sampler":
        return ()
    given = {"C", "C_min", "C_max", "level", "mode"} & set(params)
    if not given:
        return made.correction
    level = params.get("level")
    mode = params.get("mode")
    high = params.get("C", params.get("C_max"))
    if level is None or mode is None:
        own = made.correction[0].name if made.correction else "tis_token"
    else:
        table = {
            ("token", "truncate"): "tis_token",
            ("sequence_product", "truncate"): "tis_sequence",
            ("token", "mask"): "icepop",
            ("sequence_product", "mask"): "mis_sequence",
            ("geometric_mean_mask_token_weight", "mask"): "mis_geometric",
        }
        if (level, mode) not in table:
            raise CaseError(f"level {level!r} with mode {mode!r} is unknown: {sorted(table)}.")
        own = table[level, mode]
    return (_set(find("correction", own)(), cap=high, high=high, low=params.get("C_min")),)


def _kl(
    made: Recipe, params: dict[str, Any], inputs: Any, chain: tuple[Slot, ...]
) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """KL in the reward and in the loss: the case's words over the method's own."""
    own = [s for s in (*made.shaping, *made.penalty) if "coef" in s and "estimator" in s]
    coef = params.get("kl_coef", own[0]["coef"] if own else None)
    if coef is None or "logp_ref" not in inputs:
        return (), ()
    own_place = "reward" if own and own[0].kind == "shaping" else "loss"
    place = params.get("kl_placement", own_place)
    default = own[0]["estimator"] if own and place == own_place else None
    default = default or ("k1" if place == "reward" else "k3")
    estimator = params.get("kl_estimator", default)
    if place == "loss":
        return (), (penalties.kl(coef=coef, estimator=estimator),)
    if place != "reward":
        raise CaseError(f"kl_placement={place!r} is unknown: loss or reward.")
    dense = chain[0].definition.traits.get("dense")
    made_shaping = shaping.kl_per_token if dense else shaping.kl_per_sequence
    return (made_shaping(coef=coef, estimator=estimator.removesuffix("+")),), ()
