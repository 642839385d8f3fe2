"""The recipe of a case: the meaning of the hyper-parameters of the case schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.errors import CaseError, nearest
from groupwise.groups import advantages as adv
from groupwise.groups import aggregation, credit, filters, shaping
from groupwise.losses import distribution_gates, gates, penalties
from groupwise.methods.composition import Recipe
from groupwise.methods.slots import Slot, find
from groupwise.testing.batch import advantages_given
from groupwise.testing.schema import (
    CORRECTION,
    OF_SLOT,
    Case,
    missing,
    params_of,
    policy_recipe,
    whole,
)
from groupwise.testing.variants import WORDS, variant

# Links that act on advantages which a case gives.
KEPT_LINKS = ("reweight_by_probability", "minus_teacher_return")
AGGREGATIONS = (
    "token_mean_batch",
    "token_mean_group",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_sum_token_mean",
)


def build_recipe(case: Case) -> Recipe:
    """Build the method's recipe with the case's hyper-parameters, without what prepares real
    batches.

    A case's rewards are final, so shaping other than KL goes; a given batch is past its refills, so
    the accuracy band goes; critics and reward models have kinds of their own.
    """
    params, inputs = params_of(case), case["inputs"]
    made = variant(policy_recipe(case["method"]), params, inputs)
    changes: dict[str, Any] = {
        "filter": _filters(made, inputs),
        "advantage": _chain(made, params, inputs),
        "gate": _gate(made, params, case.get("axes") or {}),
        "ratio": tuned(made.ratio, params),
        "aggregation": _aggregation(made, params),
        "correction": _correction(made, case),
        "auxiliary": _auxiliary(made, params, inputs),
        "schedule": tuned(made.schedule, params).replace(updates=1),
    }
    in_reward, in_loss = _kl(made, case, changes["advantage"])
    if advantages_given(case):
        kept = [link for link in changes["advantage"] if link.name in KEPT_LINKS]
        changes["advantage"], in_reward = (adv.raw(), *kept), ()
    extra = (tuned(penalty, params) for penalty in made.penalty if penalty.name != "kl")
    return made.replace(shaping=in_reward, penalty=(*in_loss, *extra), **changes)


def tuned(slot: Slot, params: Mapping[str, Any], **generic: str) -> Slot:
    """Return the slot with the case's hyper-parameters; `generic` maps further names."""
    changes = {}
    for name, parameter in {**OF_SLOT.get(slot.name, {}), **generic}.items():
        if name in params and parameter in slot:
            value = params[name]
            changes[parameter] = whole(value, name) if parameter == "k" else value
    return slot.replace(**changes) if changes else slot


def _filters(made: Recipe, inputs: Mapping[str, Any]) -> tuple[Slot, ...]:
    if "rewards" not in inputs and "token_rewards" not in inputs:
        return ()  # nothing to compare
    kept = [slot for slot in made.filter if slot.name in ("zero_variance", "reject")]
    if any(slot.name == "enough_mixed" for slot in made.filter):
        kept.append(filters.zero_variance())
    return tuple(kept)


def scaled_advantage(spec: Any) -> Slot:
    """Read `adv = {scale: none|group|batch, ddof, eps}`."""
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
    if not isinstance(scale, str) or scale not in options:
        raise CaseError(f"adv.scale={scale!r} is unknown: none, group or batch.")
    return tuned(options[scale](), spec, ddof="ddof", eps="eps")


def _chain(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    """Return the method's advantage chain with the case's hyper-parameters."""
    base, *modifiers = made.advantage
    if params.get("clamp", [0, 1]) not in ([0, 1], (0, 1)):
        raise CaseError(f"clamp={params['clamp']!r}: λ by length is held in [0, 1] here.")
    if params.get("adv") == base.name:
        base = tuned(base, params)
    elif "adv" in params:
        base = scaled_advantage(params["adv"])
    elif "old_value_NT" in base.needs and not {"values", "values_old"} & set(inputs):
        # a critic's recipe on a case without a critic
        base, modifiers = tuned(adv.group_zscore(), params, ddof="ddof", eps="eps"), []
    else:
        if base.name == "group_zscore" and "step_reward_NT" in inputs:
            base = credit.group_process_zscore()  # GRPO with process supervision
        base = tuned(base, params, ddof="ddof", eps="eps")
    chain = [base]
    for slot in modifiers:
        if slot.name == "rescale_for_dead_groups":
            chain = _gpg_chain(base, slot, params)
        elif slot.name == "whiten_tokens":
            named = params.get("whiten") == "tokens"  # chosen, not switched on
            if named or _flag(params, "whiten", "adv" not in params):
                chain.append(tuned(slot, params, ddof="ddof"))
        else:
            chain.append(tuned(slot, params))
    return tuple(chain)


def _flag(params: dict[str, Any], name: str, default: bool) -> bool:
    if params.get(name, default) not in (True, False):
        raise CaseError(f"{name}={params[name]!r} must be true or false.")
    return bool(params.get(name, default))


def _gpg_chain(base: Slot, slot: Slot, params: dict[str, Any]) -> list[Slot]:
    """Return GPG's chain: α given or computed; F a fixed divisor, or the group's standard
    deviation.
    """
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
    """Read `agg` and `norm_len`, or take the method's own."""
    name = params.get("agg", own.name)
    name = "seq_mean_token_mean" if name == "seq_mean" else name
    if name != own.name and name not in (*AGGREGATIONS, "token_sum"):
        raise CaseError(f"agg={name!r} is unknown. {nearest(str(name), AGGREGATIONS)}")
    if name != "seq_mean_token_sum_norm":
        return own if name == own.name else find("aggregation", name)()
    length = params.get("norm_len", own.get("length"))
    if length is None:
        raise CaseError(f"agg {name} needs the parameter norm_len, as norm_len: 8.")
    return aggregation.seq_mean_token_sum_norm(length=whole(length, "norm_len"))


# Terms that a loss on log-probabilities has in any case.
OF_GROUPS = ("group_contrast", "group_regression", "trajectory_balance", "weighted_nll")


def _auxiliary(made: Recipe, params: dict[str, Any], inputs: Any) -> tuple[Slot, ...]:
    own = [tuned(slot, params) for slot in made.auxiliary if slot.name in OF_GROUPS]
    if own:
        return tuple(own)
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


def _correction(made: Recipe, case: Case) -> tuple[Slot, ...]:
    """Read `level` and `mode`, by default the method's own, with C or C_min and C_max."""
    params, inputs = params_of(case), case["inputs"]
    if case["method"] in WORDS or any(slot.name in OF_SLOT for slot in made.correction):
        return tuple(tuned(slot, params) for slot in made.correction)
    given = [name for name in CORRECTION if name in params]
    if "logp_rollout" not in inputs:
        if given:
            raise missing("logp_rollout", f"{given[0]}={params[given[0]]!r}")
        return ()
    if not given or made.gate.definition.traits.anchor == "sampler":
        return made.correction
    own = made.correction[0].name if made.correction else "tis_token"
    own_level, own_mode = _CORRECTIONS.get(own, _CORRECTIONS["tis_token"])
    level = str(params.get("level", own_level))
    mode = str(params.get("mode", "mask" if level.startswith("geometric") else own_mode))
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
    """Read the KL in the reward and in the loss: the case's words over the method's own."""
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
    dense = chain[0].definition.traits.dense
    made_shaping = shaping.kl_per_token if dense else shaping.kl_per_sequence
    return (made_shaping(coef=coef, estimator=estimator.removesuffix("+")),), ()
