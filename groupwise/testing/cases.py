"""From a case to a batch and a recipe: what the words of the case schema mean here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.composition import Recipe
from groupwise.errors import CaseError, nearest
from groupwise.groups import advantages as adv
from groupwise.groups import aggregation, credit, filters, shaping
from groupwise.losses import distribution_gates, gates, penalties
from groupwise.losses.heads import from_logits
from groupwise.records import TokenBatch
from groupwise.slots import Slot, find
from groupwise.testing.schema import (
    CORRECTION,
    OF_SLOT,
    Case,
    grid,
    missing,
    params_of,
    policy_recipe,
    rewards_of,
    tensor,
    whole,
)

_STREAMS = {
    "logp_policy": "old_logp_NT",
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
    "token_rewards": "token_reward_NT",
}
# How to call a stream that is missing.
_INPUT_OF = {stream: name for name, stream in _STREAMS.items() if name != "values_old"} | {
    "greedy_reward_N": "greedy_rewards",
    "correct_N": "correct",
    "router_NTLK": "router_new_at_old_topk",
}
_WIDTH_FROM = ("logp", "token_rewards", "logits", "logp_old", "token_loss", "step_reward_NT")
AGGREGATIONS = (
    "token_mean_batch",
    "token_mean_group",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_sum_token_mean",
)


# --- the batch --------------------------------------------------------------------------------


def build_batch(case: Case) -> TokenBatch:
    """The batch of a case. Rewards that are missing are 0; without group ids all rows are one."""
    inputs = case["inputs"]
    mask_NT = _mask(inputs)
    streams: dict[str, Tensor] = {}
    for name, stream in _STREAMS.items():
        if name in inputs:
            axes = len(stream.rsplit("_", 1)[1])
            per_row = axes == 1
            streams[stream] = (
                tensor(inputs[name], name) if per_row else grid(inputs, name, mask_NT, axes)
            )
    for name in ("segment_NT", "token_NT"):
        if name in streams:
            streams[name] = torch.where(mask_NT, streams[name], 0.0).long()
    greedy = inputs.get("greedy_rewards", params_of(case).get("greedy_reward"))
    if greedy is not None:
        greedy_N = tensor(greedy, "greedy_rewards")
        streams["greedy_reward_N"] = greedy_N if greedy_N.dim() else greedy_N.repeat(len(mask_NT))
    rewards = inputs.get("rewards")
    nothing_N = torch.zeros(len(mask_NT), dtype=torch.float64)
    groups = inputs.get("group_ids", [0] * len(mask_NT))
    parts: dict[str, Any] = {
        "group_N": groups,
        "reward_N": nothing_N if rewards is None else rewards_of(rewards),
        **streams,
    }
    batch = TokenBatch.build(mask_NT=mask_NT, **parts)
    if batch.truncated_N is None:
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
    if inputs.get("rewards") is None:
        raise missing("rewards")
    return torch.ones((len(rewards_of(inputs["rewards"])), 1), dtype=torch.bool)


def batch_for(case: Case, made: Recipe) -> TokenBatch:
    """The batch with all that the recipe reads, or an error that names what is missing."""
    inputs = case["inputs"]
    batch = build_batch(case)
    if "logits_old" in inputs:
        old = from_logits(grid(inputs, "logits_old", batch.mask_NT, 3), sampled(case, batch))
        batch = replace(batch, old_logp_NT=torch.where(batch.mask_NT, old["logp_NT"], 0.0))
    if "token_rewards" in inputs:
        if made.advantage[0].definition.traits.get("dense"):
            # token_rewards hold the whole reward already
            batch = replace(batch, task_reward_N=torch.zeros_like(batch.task_reward_N))
        elif inputs.get("rewards") is None:
            batch = replace(batch, task_reward_N=batch.stream("token_reward_NT", "a case").sum(1))
    elif made.advantage[0].definition.traits.get("outcome", True):
        if inputs.get("rewards") is None and not _advantages_given(case):
            steps = " (adv is about the outcome, not the steps)" if _has_steps(inputs) else ""
            raise missing("rewards", f"{case['kind']} {case['method']}{steps}")
    read = made.slots() if case["kind"] == "policy_loss" else (*made.shaping, *made.advantage)
    if _advantages_given(case):
        read = tuple(slot for slot in read if slot.kind not in ("advantage", "shaping", "filter"))
    for slot in read:
        for name in slot.needs:
            if name in _INPUT_OF and getattr(batch, name) is None and name not in made.outputs:
                raise missing(_INPUT_OF[name], f"{case['method']} ({slot.kind} {slot.name})")
    return batch


def sampled(case: Case, batch: TokenBatch) -> Tensor:
    """The sampled tokens, within the vocabulary of the logits."""
    inputs = case["inputs"]
    if "tokens" not in inputs:
        raise missing("tokens", f"{case['kind']} {case['method']} on logits")
    token_NT = batch.stream("token_NT", "a case")
    vocabulary = tensor(inputs["logits"], "logits").shape[-1]
    if ((token_NT < 0) | (token_NT >= vocabulary)).any():
        raise CaseError(f"tokens must lie in 0..{vocabulary - 1}, as the logits have that many.")
    return token_NT


def _advantages_given(case: Case) -> bool:
    return case["kind"] == "policy_loss" and "advantages" in case["inputs"]


def _has_steps(inputs: Mapping[str, Any]) -> bool:
    return "step_reward_NT" in inputs


# --- the recipe -------------------------------------------------------------------------------


def build_recipe(case: Case) -> Recipe:
    """The method's recipe with the case's hyper-parameters, without what prepares real batches.

    A case's rewards are final, so shaping other than KL goes; a given batch is past its refills, so
    the accuracy band goes; critics and reward models have kinds of their own.
    """
    made = policy_recipe(case["method"])
    params, inputs = params_of(case), case["inputs"]
    changes: dict[str, Any] = {
        "filter": _filters(made, inputs),
        "advantage": _chain(made, params, inputs),
        "gate": _gate(made, params, case.get("axes") or {}),
        "ratio": tuned(made.ratio, params),
        "aggregation": _aggregation(made, params),
        "correction": _correction(made, params, inputs),
        "auxiliary": _auxiliary(made, params, inputs),
        "schedule": tuned(made.schedule, params).replace(updates=1),
    }
    in_reward, in_loss = _kl(made, case, changes["advantage"])
    extra = (tuned(penalty, params) for penalty in made.penalty if penalty.name != "kl")
    return made.replace(shaping=in_reward, penalty=(*in_loss, *extra), **changes)


def tuned(slot: Slot, params: Mapping[str, Any], **generic: str) -> Slot:
    """The slot with its hyper-parameters as the case has them; `generic` maps further names."""
    changes = {}
    for name, parameter in {**OF_SLOT.get(slot.name, {}), **generic}.items():
        if name in params and parameter in slot:
            value = params[name]
            changes[parameter] = whole(value, name) if parameter == "k" else value
    return slot.replace(**changes) if changes else slot


def _filters(made: Recipe, inputs: Mapping[str, Any]) -> tuple[Slot, ...]:
    if inputs.get("rewards") is None and "token_rewards" not in inputs:
        return ()  # nothing to compare
    kept = [slot for slot in made.filter if slot.name in ("zero_variance", "reject")]
    if any(slot.name == "enough_mixed" for slot in made.filter):
        kept.append(filters.zero_variance())
    return tuple(kept)


def scaled_advantage(spec: Any) -> Slot:
    """`adv = {scale: none|group|batch, ddof, eps}`."""
    if not isinstance(spec, Mapping):
        raise CaseError(f"adv={spec!r} must be a mapping such as {{'scale': 'group', 'ddof': 1}}.")
    for key in spec:
        if key not in ("scale", "ddof", "eps"):
            raise CaseError(f"adv has no {key!r}. {nearest(str(key), ('scale', 'ddof', 'eps'))}")
    options = {
        "none": adv.group_mean,
        "group": adv.group_zscore,
        "batch": adv.group_mean_batch_std,
    }
    scale = spec.get("scale", "group")
    if scale not in options:
        raise CaseError(f"adv.scale={scale!r} is unknown: none, group or batch.")
    return tuned(options[scale](), spec, ddof="ddof", eps="eps")


def _chain(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    """The method's advantage chain with the case's hyper-parameters."""
    base, *modifiers = made.advantage
    if params.get("clamp", [0, 1]) not in ([0, 1], (0, 1)):
        raise CaseError(f"clamp={params['clamp']!r}: λ by length is held in [0, 1] here.")
    if "adv" in params:
        base = scaled_advantage(params["adv"])
    elif "old_value_NT" in base.needs and not {"values", "values_old"} & set(inputs):
        # a critic's recipe on a case without a critic
        base, modifiers = tuned(adv.group_zscore(), params, ddof="ddof", eps="eps"), []
    else:
        if base.name == "group_zscore" and _has_steps(inputs):
            base = credit.group_process_zscore()  # GRPO with process supervision
        base = tuned(base, params, ddof="ddof", eps="eps")
    chain = [base]
    for slot in modifiers:
        if slot.name == "rescale_for_dead_groups":
            chain = _gpg_chain(base, slot, params)
        elif slot.name == "whiten_tokens":
            if _flag(params, "whiten", "adv" not in params):
                chain.append(tuned(slot, params, ddof="ddof"))
        else:
            chain.append(tuned(slot, params))
    return tuple(chain)


def _flag(params: dict[str, Any], name: str, default: bool) -> bool:
    if params.get(name, default) not in (True, False):
        raise CaseError(f"{name}={params[name]!r} must be true or false.")
    return bool(params.get(name, default))


def _gpg_chain(base: Slot, slot: Slot, params: dict[str, Any]) -> list[Slot]:
    """α given or computed; F a fixed divisor, or the group's standard deviation."""
    alpha, divisor = params.get("alpha"), params.get("f_norm", 1.0)
    if divisor == "std":
        if "adv" in params:
            raise CaseError("f_norm='std' and adv both choose the scale: keep one of the two.")
        base = adv.group_zscore(ddof=params.get("ddof", 1), eps=params.get("eps", 0.0))
        divisor = 1.0
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or divisor <= 0:
        raise CaseError(f"f_norm={divisor!r} must be a positive number or 'std'.")
    if alpha is not None:
        return [base, adv.scale(by=adv.scale(by=alpha)["by"] / divisor)]
    return [base, slot] if divisor == 1.0 else [base, slot, adv.scale(by=1.0 / divisor)]


def _gate(made: Recipe, params: dict[str, Any], axes: Mapping[str, Any]) -> Slot:
    gate = made.gate
    if gate.name == "tv_mask" and "kl" in str(axes.get("clip", "")):
        gate = distribution_gates.kl_mask(cap=gate["cap"])
    if gate.name == "clip" and "dual_clip_c" in params:
        gate = gates.dual_clip(gate["low"], gate["high"])
    if gate.name == "segment_clip":
        return gate.replace(width=tuned(gate["width"], params, eps_low="low", eps_high="high"))
    return tuned(gate, params, eps_low="low", eps_high="high")


def _aggregation(made: Recipe, params: dict[str, Any]) -> Slot:
    chosen = made.aggregation
    if chosen.name != "learned_length_weight":
        return aggregation_of(params, chosen)
    if params.get("agg", "token_mean_batch") != "token_mean_batch":
        raise CaseError(
            f"agg={params['agg']!r}: {made.name} weighs tokens by a learned length weight on top "
            "of token_mean_batch, and of that alone."
        )
    if params.get("ddof_len", 0) != 0:
        if "ddof" not in chosen:
            raise CaseError(
                f"ddof_len={params['ddof_len']!r}: lengths are standardised with ddof 0 here."
            )
        chosen = chosen.replace(ddof=params["ddof_len"])
    return tuned(chosen, params)


def aggregation_of(params: Mapping[str, Any], own: Slot) -> Slot:
    """`agg` and `norm_len`, or the method's own."""
    name = params.get("agg", own.name)
    name = "seq_mean_token_mean" if name == "seq_mean" else name
    if name != own.name and name not in AGGREGATIONS:
        raise CaseError(f"agg={name!r} is unknown. {nearest(str(name), AGGREGATIONS)}")
    if name != "seq_mean_token_sum_norm":
        return own if name == own.name else find("aggregation", name)()
    length = params.get("norm_len", own.get("length"))
    if length is None:
        raise CaseError(f"agg {name} needs the parameter norm_len, as norm_len: 8.")
    return aggregation.seq_mean_token_sum_norm(length=whole(length, "norm_len"))


def _auxiliary(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    terms = [tuned(slot, params) for slot in made.auxiliary if slot.name == "positive_nll"]
    if "correct" in inputs:
        return tuple(terms)
    if terms and params.get("mu"):
        raise missing("correct", f"mu={params['mu']!r}")
    return ()


# (level, mode) of each correction
_CORRECTIONS = {
    "tis_token": ("token", "truncate"),
    "tis_sequence": ("sequence_product", "truncate"),
    "icepop": ("token", "mask"),
    "mis_sequence": ("sequence_product", "mask"),
    "mis_geometric": ("geometric_mean_mask_token_weight", "mask"),
}


def _correction(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    """`level` and `mode`, by default the method's own, with C or C_min and C_max."""
    given = [name for name in CORRECTION if name in params]
    if "logp_rollout" not in inputs:
        if given:
            raise missing("logp_rollout", f"{given[0]}={params[given[0]]!r}")
        return ()
    if not given or made.gate.definition.traits.get("anchor") == "sampler":
        return made.correction
    own = made.correction[0].name if made.correction else "tis_token"
    own_level, own_mode = _CORRECTIONS.get(own, _CORRECTIONS["tis_token"])
    level = params.get("level", own_level)
    mode = params.get("mode", "mask" if level.startswith("geometric") else own_mode)
    names = {pair: name for name, pair in _CORRECTIONS.items()}
    if (level, mode) not in names:
        raise CaseError(f"level {level!r} with mode {mode!r} is unknown: {sorted(names)}.")
    if "C" in params and "C_max" in params:
        raise CaseError("C and C_max are the same bound: give one of the two.")
    if "C_min" in params and mode == "truncate":
        raise CaseError("C_min has no use with mode 'truncate', which only caps: drop it.")
    slot = find("correction", names[level, mode])()
    bounds = {"C": "cap", "C_max": "cap"} if "cap" in slot else {"C": "high", "C_max": "high"}
    return (tuned(slot, params, **bounds, C_min="low"),)


def _kl(
    made: Recipe, case: Case, chain: tuple[Slot, ...]
) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    """KL in the reward and in the loss: the case's words over the method's own."""
    params, inputs = params_of(case), case["inputs"]
    own = [s for s in (*made.shaping, *made.penalty) if "coef" in s and "estimator" in s]
    coef = params.get("kl_coef", own[0]["coef"] if own else None)
    own_place = "reward" if own and own[0].kind == "shaping" else "loss"
    place = params.get("kl_placement", own_place)
    if place not in ("loss", "reward"):
        raise CaseError(f"kl_placement={place!r} is unknown: loss or reward.")
    estimator = params.get("kl_estimator")
    if estimator not in (None, "k1", "k2", "k3", "k3+"):
        raise CaseError(f"kl_estimator={estimator!r} is unknown: k1, k2, k3 or k3+.")
    if coef is None or "logp_ref" not in inputs:
        wanted = params.get("kl_coef") and (place == "reward" or case["kind"] == "policy_loss")
        if wanted:
            raise missing("logp_ref", f"kl_coef={coef!r}")
        return (), ()
    if estimator is None and own and place == own_place:
        estimator = own[0]["estimator"]
    estimator = estimator or ("k1" if place == "reward" else "k3")
    if place == "loss":
        return (), (penalties.kl(coef=coef, estimator=estimator),)
    dense = chain[0].definition.traits.get("dense")
    made_shaping = shaping.kl_per_token if dense else shaping.kl_per_sequence
    return (made_shaping(coef=coef, estimator=estimator.removesuffix("+")),), ()
