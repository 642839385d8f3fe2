"""Random cases in the schema of ``vectors.json``, without expected values.

``random_case(rng)`` draws one case for a random pair of kind and method, or for a given pair.
Batches are ragged, prompts own rows in no particular order, some rows have no token, some are
truncated with their mask still set, some log-ratios lie far beyond the clamp of 20, and every
padded position holds junk. Cases close to a kink (a clip bound, a cap, a threshold) are drawn
again, so that two implementations cannot disagree by rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

Case = dict[str, Any]
Rng = np.random.Generator
Pair = tuple[str, str]

MARGIN = 1e-4
MAX_ROWS, MAX_TOKENS = 8, 7
AGGREGATIONS = (
    "token_mean_batch",
    "token_mean_group",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_sum_token_mean",
)
ESTIMATORS = ("k1", "k2", "k3", "k3+")
ADVANTAGE_OF_SCALE = {
    "none": "group_mean",
    "group": "group_zscore",
    "batch": "group_mean_batch_std",
}

# advantage, ratio, clip, aggregation, and further axes of each policy-loss method
POLICY_AXES: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "reinforce": ("none", "none", "none", "seq_mean_token_sum", {}),
    "rloo": (
        "leave_one_out",
        "none",
        "none",
        "seq_mean_token_sum",
        {"kl": "k1_sequence_in_reward"},
    ),
    "remax": ("greedy_baseline", "none", "none", "seq_mean_token_sum", {}),
    "gpg": (
        "group_mean",
        "none",
        "none",
        "token_mean_batch",
        {"filter": "valid_sample_rescale"},
    ),
    "ppo": ("gae", "token", "ppo", "token_mean_batch", {}),
    "ppo_dual_clip": ("group_zscore", "token", "dual", "token_mean_batch", {}),
    "grpo": ("group_zscore", "token", "ppo", "seq_mean_token_mean", {"kl": "k3_in_loss"}),
    "dapo": ("group_zscore", "token", "clip_higher", "token_mean_batch", {}),
    "dr_grpo": ("group_mean", "token", "ppo", "seq_mean_token_sum_norm", {}),
    "lite_ppo": ("group_mean_batch_std", "token", "ppo", "token_mean_batch", {}),
    "reinforce_pp": (
        "return_to_go_global_whiten",
        "token",
        "ppo",
        "token_mean_batch",
        {"kl": "k1_in_reward"},
    ),
    "reinforce_pp_baseline": (
        "group_mean_then_global_token_whiten",
        "token",
        "ppo",
        "token_mean_batch",
        {"kl": "k2_in_loss"},
    ),
    "reinforce_rej": (
        "raw_reward",
        "token",
        "ppo",
        "token_mean_batch",
        {"filter": "zero_variance_groups", "kl": "k3_in_loss"},
    ),
    "maxrl": ("maxrl", "token", "ppo", "token_mean_batch", {}),
    "prime": ("rloo_process_plus_rloo_outcome", "token", "ppo", "token_mean_batch", {}),
    "tis": ("group_zscore", "token", "ppo", "seq_mean_token_mean", {"offpolicy": "tis_token"}),
    "icepop": ("group_zscore", "token", "ppo", "seq_mean_token_mean", {"offpolicy": "icepop"}),
    "mis": ("group_zscore", "token", "ppo", "seq_mean_token_mean", {"offpolicy": "mis_seq"}),
    "olmo3": (
        "group_mean",
        "token",
        "clip_higher",
        "token_mean_batch",
        {"offpolicy": "tis_token", "filter": "zero_variance_groups"},
    ),
    "cispo": ("group_zscore", "token", "is_weight_cap_stopgrad", "token_mean_batch", {}),
    "dppo": (
        "group_zscore",
        "token_vs_rollout",
        "divergence_mask_binary_tv",
        "token_mean_batch",
        {},
    ),
    "gspo": ("group_zscore", "sequence_geomean", "ppo", "seq_mean", {}),
    "gspo_token": (
        "token_varying",
        "sequence_geomean_token_grad",
        "ppo",
        "seq_mean_token_mean",
        {},
    ),
    "gmpo": ("group_zscore", "token", "log_space_one_sided", "geometric_mean", {}),
    "rspo": (
        "group_zscore",
        "token_times_router_shift",
        "log_space_one_sided",
        "geometric_mean",
        {},
    ),
    "sspo": ("group_zscore", "segment_geomean", "ppo", "seq_mean_token_mean", {}),
    "sapo": ("group_zscore", "token", "soft_gate", "seq_mean_token_mean", {}),
    "dcpo": (
        "group_zscore (first visit)",
        "token",
        "dynamic_bounds_of_old_prob",
        "seq_sum_token_mean",
        {},
    ),
    "lambda_grpo": ("group_zscore", "token", "ppo", "learnable_length_weight", {}),
    "advantage_reweighting": (
        "group_zscore",
        "token",
        "clip_higher",
        "token_mean_batch",
        {"reweight": "alpha*pi_old+(1-alpha)"},
    ),
    "lopti": (
        "group_zscore",
        "token",
        "clip_higher",
        "token_mean_batch",
        {"update_schedule": "low_then_high_probability"},
    ),
    "vapo": (
        "gae_length_adaptive_decoupled",
        "token",
        "clip_higher",
        "token_mean_batch",
        {"aux": "positive_nll"},
    ),
    "simko": ("group_zscore", "token_with_topk_smoothing", "ppo", "token_mean_batch", {}),
}

OTHER_AXES: dict[Pair, dict[str, str]] = {
    ("advantage", "grpo"): {"advantage": "group_zscore"},
    ("advantage", "dr_grpo"): {"advantage": "group_mean"},
    ("advantage", "rloo"): {"advantage": "leave_one_out"},
    ("advantage", "lite_ppo"): {"advantage": "group_mean_batch_std"},
    ("advantage", "maxrl"): {"advantage": "maxrl"},
    ("advantage", "remax"): {"advantage": "greedy_baseline"},
    ("advantage", "reinforce_pp"): {
        "advantage": "return_to_go_global_whiten",
        "kl": "k1_in_reward",
    },
    ("advantage", "reinforce_pp_baseline"): {"advantage": "group_mean_then_global_token_whiten"},
    ("advantage", "prime"): {"advantage": "rloo_process_plus_rloo_outcome"},
    ("advantage", "prime_seed"): {"advantage": "group_process_zscore_then_sum"},
    ("advantage", "dcpo"): {"advantage": "smooth_cumulative_standardisation"},
    ("advantage", "gpg"): {"advantage": "group_mean", "filter": "valid_sample_rescale"},
    ("advantage", "reinforce_rej"): {
        "advantage": "raw_reward",
        "filter": "zero_variance_groups",
    },
    ("gae", "ppo"): {"advantage": "gae"},
    ("gae", "vapo"): {"advantage": "gae_length_adaptive_decoupled"},
    ("filter", "dapo"): {"filter": "zero_variance_groups"},
    ("filter", "prime"): {"filter": "accuracy_band"},
    ("reward_shaping", "dapo"): {"reward": "soft_overlong"},
    ("aggregation", "aggregation"): {"aggregation": "all"},
    ("kl", "kl"): {"kl": "k1|k2|k3"},
    ("kl_expectation", "kl"): {"kl": "k1|k2|k3, loss|reward"},
    ("estimator_expectation", "estimators"): {
        "advantage": "none|group_mean|leave_one_out|group_zscore"
    },
    ("value_loss", "ppo"): {"value": "clipped"},
    ("aux_loss", "entropy_bonus"): {"aux": "entropy"},
    ("gate", "dppo"): {"clip": "divergence_mask_topk"},
    ("router", "routing_replay"): {"offpolicy": "R2|R3"},
    ("preference_loss", "dpo"): {"method": "dpo"},
    ("preference_loss", "spin"): {"method": "spin"},
    ("analytic", "dpo"): {"method": "dpo"},
    ("pair_selection", "self_rewarding"): {"method": "iterative_dpo"},
}

PAIRS: tuple[Pair, ...] = (*(("policy_loss", m) for m in POLICY_AXES), *OTHER_AXES)


# --------------------------------------------------------------------------------------------
# Draws
# --------------------------------------------------------------------------------------------


def _chance(rng: Rng, probability: float) -> bool:
    return bool(rng.random() < probability)


def _pick(rng: Rng, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _uniform(rng: Rng, low: float, high: float) -> float:
    return float(rng.uniform(low, high))


def _mask(rng: Rng, rows: int, width: int) -> np.ndarray:
    """Responses that start at position 0; now and then a row has none."""
    mask = np.zeros((rows, width))
    for i in range(rows):
        length = 0 if _chance(rng, 0.1) else int(rng.integers(1, width + 1))
        mask[i, :length] = 1.0
    return mask


def _group_ids(rng: Rng, rows: int) -> list[int]:
    """Prompts of unequal size whose rows are interleaved and whose ids are arbitrary."""
    prompts = int(rng.integers(1, rows + 1))
    names = rng.choice(np.arange(-50, 1000), size=prompts, replace=False)
    return [int(names[int(rng.integers(prompts))]) for _ in range(rows)]


def _rewards(rng: Rng, group_ids: list[int], style: str | None = None) -> list[float]:
    """Binary, signed or continuous rewards; some prompts give all rows the same."""
    style = style or _pick(rng, ("binary", "signed", "continuous"))
    low = -1.0 if style == "signed" else 0.0
    equal = {g: _pick(rng, (low, 1.0)) for g in sorted(set(group_ids)) if _chance(rng, 0.2)}
    out = []
    for g in group_ids:
        if g in equal:
            out.append(equal[g])
        elif style == "continuous":
            out.append(float(rng.normal(0.3, 0.7)))
        else:
            out.append(_pick(rng, (low, 1.0)))
    return out


def _log_ratio(rng: Rng, mask: np.ndarray, spread: float) -> np.ndarray:
    """Gaussian log-ratios; now and then tokens or a whole row lie beyond the clamp."""
    out = rng.normal(0.0, spread, size=mask.shape)
    if _chance(rng, 0.12):
        i = int(rng.integers(len(mask)))
        sign = _pick(rng, (-1.0, 1.0))
        if _chance(rng, 0.4):
            out[i] = sign * rng.uniform(21, 40, size=mask.shape[1])
        else:
            out[i, int(rng.integers(mask.shape[1]))] = sign * _uniform(rng, 21, 40)
    return out


def _log_probs(rng: Rng, mask: np.ndarray) -> dict[str, np.ndarray]:
    """Old, current, reference, rollout and PRM log-probabilities of the same tokens."""
    old = rng.uniform(-2.5, -0.05, size=mask.shape)
    shifts = {
        "logp": _log_ratio(rng, mask, 0.35),
        "logp_ref": -_log_ratio(rng, mask, 0.4),
        "logp_rollout": -_log_ratio(rng, mask, 0.4),
        "logp_prm": rng.normal(0.0, 1.0, size=mask.shape),
    }
    excess = np.maximum.reduce([old + s for s in shifts.values()]) + 0.02
    old = old - np.maximum(excess, 0.0)
    return {"logp_old": old, **{name: old + s for name, s in shifts.items()}}


def _token_rewards(rng: Rng, mask: np.ndarray) -> np.ndarray:
    """Outcome reward at the last token, or a reward at every token."""
    if _chance(rng, 0.3):
        return rng.normal(0.0, 0.5, size=mask.shape)
    out = np.zeros(mask.shape)
    for i, n in enumerate(mask.sum(axis=1).astype(int)):
        if n:
            out[i, n - 1] = _pick(rng, (0.0, 1.0))
    return out


def _segment_ids(rng: Rng, mask: np.ndarray) -> np.ndarray:
    """Contiguous segments numbered from 0 in each row."""
    return np.cumsum(rng.random(mask.shape) < 0.4, axis=1).astype(int)


def _logits(rng: Rng, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Old logits, current logits and sampled tokens, one of which may be far off its old self."""
    vocab = int(rng.integers(4, 8))
    old = rng.normal(0.0, 1.0, size=(*mask.shape, vocab))
    new = old + rng.normal(0.0, 0.3, size=old.shape)
    tokens = rng.integers(vocab, size=mask.shape)
    if _chance(rng, 0.1):
        i, t = (int(rng.integers(n)) for n in mask.shape)
        _pick(rng, (old, new))[i, t, tokens[i, t]] -= _uniform(rng, 25, 40)
    return old, new, tokens


# --------------------------------------------------------------------------------------------
# Policy losses
# --------------------------------------------------------------------------------------------

ANCHOR_FREE = ("reinforce", "remax", "gpg", "dppo", "rloo")
CORRECTED = ("tis", "icepop", "mis", "olmo3", "dppo")
NO_CLIP_RANGE = (
    "reinforce",
    "rloo",
    "remax",
    "gpg",
    "cispo",
    "dppo",
    "gmpo",
    "rspo",
    "sapo",
)
ADVANTAGES_MAY_BE_GIVEN = ("ppo", "grpo", "dapo", "tis", "cispo", "sapo", "sspo", "dppo")
REWARD_STYLE = {
    "maxrl": "binary",
    "reinforce_rej": "signed",
    "reinforce_pp_baseline": "continuous",
}


def _correction(rng: Rng, method: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of an off-policy correction that belongs to the method."""
    low, high = _uniform(rng, 0.4, 0.9), _uniform(rng, 1.1, 3.0)
    if method == "icepop":
        return "icepop", {"C_min": low, "C_max": high, "level": "token", "mode": "mask"}
    if method == "mis" and _chance(rng, 0.5):
        level = "geometric_mean_mask_token_weight"
        return "mis_seq_geo", {"C_min": low, "C_max": high, "level": level, "mode": "mask"}
    if method == "mis":
        return "mis_seq", {"C_max": high, "level": "sequence_product", "mode": "mask"}
    if method == "olmo3":
        return "tis_token", {"C": high}
    level = _pick(rng, ("token", "sequence_product"))
    name = "tis_token" if level == "token" else "tis_seq"
    return name, {"C": high, "level": level, "mode": "truncate"}


def _own_params(rng: Rng, method: str) -> dict[str, Any]:
    """Hyper-parameters that only this method has."""
    if method == "dppo":
        return {"delta": _uniform(rng, 0.02, 0.2), "ratio_cap": _uniform(rng, 1.2, 6.0)}
    if method == "reinforce_pp":
        return {
            "gamma": _uniform(rng, 0.9, 1.0),
            "ddof": int(rng.integers(2)),
            "eps_in_var": _pick(rng, (0.0, 1e-8)),
        }
    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "remax": lambda: {"greedy_reward": _uniform(rng, 0.0, 1.0)},
        "gpg": lambda: {
            "f_norm": _uniform(rng, 0.5, 2.0),
            **({"alpha": _uniform(rng, 1.0, 3.0)} if _chance(rng, 0.3) else {}),
        },
        "ppo": lambda: {
            "gamma": _uniform(rng, 0.9, 1.0),
            "lam": _uniform(rng, 0.8, 1.0),
            "whiten": _chance(rng, 0.4),
        },
        "ppo_dual_clip": lambda: {"dual_clip_c": _uniform(rng, 1.5, 3.0)},
        "reinforce_pp_baseline": lambda: {"ddof": int(rng.integers(2)), "eps_in_var": 1e-8},
        "maxrl": lambda: {"eps": _pick(rng, (0.0, 1e-6))},
        "prime": lambda: {"beta": _uniform(rng, 0.01, 0.3), "gamma": _uniform(rng, 0.9, 1.0)},
        "cispo": lambda: {
            "is_cap": _uniform(rng, 1.1, 4.0),
            "is_floor": _pick(rng, (0.0, _uniform(rng, 0.2, 0.8))),
        },
        "gmpo": lambda: {"log_clip": _uniform(rng, 0.1, 0.6)},
        "rspo": lambda: {
            "log_clip": _uniform(rng, 0.1, 0.6),
            "gamma_min": _uniform(rng, 0.6, 0.95),
        },
        "sapo": lambda: {
            "tau_pos": _uniform(rng, 0.5, 2.0),
            "tau_neg": _uniform(rng, 0.5, 2.0),
        },
        "dcpo": lambda: {
            "ratio_cap": _uniform(rng, 1.5, 10.0),
            "dual_clip_c": _uniform(rng, 1.5, 10.0),
        },
        "lambda_grpo": lambda: {
            "lam": _uniform(rng, -2.0, 2.0),
            "r": _uniform(rng, 0.05, 0.2),
            "ddof_len": 0,
        },
        "advantage_reweighting": lambda: {"alpha": _uniform(rng, 0.1, 0.9)},
        "lopti": lambda: {
            "eta": _uniform(rng, 0.2, 0.7),
            "which": _pick(rng, ("low", "high")),
        },
        "vapo": lambda: {
            "alpha": _uniform(rng, 0.1, 1.0),
            "gamma": _uniform(rng, 0.9, 1.0),
            "mu": _uniform(rng, 0.0, 0.5),
        },
        "simko": lambda: {
            "alpha": _uniform(rng, 0.01, 0.6),
            "K": int(rng.integers(1, 5)),
            "entropy_quantile": _uniform(rng, 0.1, 0.9),
            "lambda_top1": _uniform(rng, 1.0, 1.5),
        },
    }
    return draws[method]() if method in draws else {}


def _adv_options(rng: Rng) -> dict[str, Any]:
    """An override of the advantage."""
    return {
        "scale": _pick(rng, tuple(ADVANTAGE_OF_SCALE)),
        "ddof": int(rng.integers(2)),
        "eps": _pick(rng, (0.0, 1e-8, 1e-6, 1e-4)),
    }


def _kl_options(rng: Rng, method: str) -> dict[str, Any]:
    """A KL penalty: the method's own, any other, or none."""
    coef = _uniform(rng, 0.001, 0.3)
    if _chance(rng, 0.5):
        placement = _pick(rng, ("loss", "reward"))
        estimator = _pick(rng, ESTIMATORS)
        return {"kl_coef": coef, "kl_estimator": estimator, "kl_placement": placement}
    own = POLICY_AXES[method][4].get("kl")
    if own is None:
        return {}
    if own == "k1_sequence_in_reward":
        return {"kl_coef": coef}
    estimator, placement = own.split("_in_")
    return {"kl_coef": coef, "kl_estimator": estimator, "kl_placement": placement}


def _policy_case(rng: Rng, method: str) -> Case:
    advantage, ratio, clip, aggregation, more = POLICY_AXES[method]
    axes = {"advantage": advantage, "ratio": ratio, "clip": clip, "aggregation": aggregation}
    axes.update(more)
    rows, width = int(rng.integers(1, MAX_ROWS + 1)), int(rng.integers(1, MAX_TOKENS + 1))
    mask, group_ids = _mask(rng, rows, width), _group_ids(rng, rows)
    logp = _log_probs(rng, mask)
    params = _own_params(rng, method)
    inputs: dict[str, Any] = {"mask": mask}

    if method not in NO_CLIP_RANGE:
        tiny = method in ("gspo", "gspo_token") and _chance(rng, 0.4)
        params["eps_low"] = _uniform(rng, 0.0003, 0.001) if tiny else _uniform(rng, 0.05, 0.3)
        params["eps_high"] = _uniform(rng, 0.0003, 0.001) if tiny else _uniform(rng, 0.05, 0.4)
    if method == "dppo":
        axes["clip"] = "divergence_mask_binary_" + _pick(rng, ("tv", "kl"))
    if method in CORRECTED:
        inputs["logp_rollout"] = logp["logp_rollout"]
        if method != "dppo":
            axes["offpolicy"], correction = _correction(rng, method)
            params.update(correction)
    if method == "simko":
        old, new, tokens = _logits(rng, mask)
        inputs.update(logits=new, logits_old=old, tokens=tokens)
    else:
        inputs["logp"] = logp["logp"]
        if method not in ANCHOR_FREE:
            inputs["logp_old"] = logp["logp_old"]
    if method == "prime":
        inputs.update(logp_prm=logp["logp_prm"], logp_ref=logp["logp_ref"])
    if method in ("ppo", "vapo"):
        inputs["values"] = rng.normal(0.3, 0.3, size=mask.shape)
        inputs["token_rewards"] = _token_rewards(rng, mask)
    if method == "vapo":
        inputs["correct"] = [_pick(rng, (0.0, 1.0)) for _ in range(rows)]
    if method == "sspo":
        inputs["segment_ids"] = _segment_ids(rng, mask)
    if method == "rspo":
        layers = (*mask.shape, int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        inputs["router_old_topk"] = rng.uniform(0.05, 0.6, size=layers)
        drift = np.exp(rng.normal(0.0, 0.25, size=layers))
        inputs["router_new_at_old_topk"] = inputs["router_old_topk"] * drift

    _set_aggregation(rng, method, params, axes)
    given = _set_advantage(rng, method, params, axes, inputs, group_ids)
    kl = _kl_options(rng, method)
    if not (given and kl.get("kl_placement") == "reward"):
        params.update(kl)
        if kl and method != "rloo":
            axes["kl"] = f"{kl['kl_estimator']}_in_{kl['kl_placement']}"
        elif "kl_estimator" in kl:
            axes["kl"] = f"{kl['kl_estimator']}_sequence_in_{kl['kl_placement']}"
        if kl:
            inputs["logp_ref"] = logp["logp_ref"]
            if method != "simko" and kl.get("kl_placement", "reward") == "reward":
                inputs["logp_old"] = logp["logp_old"]
    if method == "rloo" and "kl_coef" in params:
        inputs["logp_old"] = logp["logp_old"]
    if not _chance(rng, 0.1):
        inputs["group_ids"] = group_ids
    if _chance(rng, 0.15):
        inputs["truncated"] = [float(_chance(rng, 0.3)) for _ in range(rows)]
        axes.setdefault("filter", "overlong")
    return {"axes": axes, "params": params, "inputs": inputs}


def _set_aggregation(rng: Rng, method: str, params: dict[str, Any], axes: dict[str, str]) -> None:
    """Keep the aggregation of the method or override it; lambda-GRPO's is the method itself."""
    default = axes["aggregation"]
    if method != "lambda_grpo" and _chance(rng, 0.5):
        params["agg"] = axes["aggregation"] = _pick(rng, AGGREGATIONS)
    elif default in AGGREGATIONS:
        params["agg"] = default
    if params.get("agg") == "seq_mean_token_sum_norm":
        params["norm_len"] = int(rng.integers(1, 20))


def _set_advantage(
    rng: Rng,
    method: str,
    params: dict[str, Any],
    axes: dict[str, str],
    inputs: dict[str, Any],
    group_ids: list[int],
) -> bool:
    """Rewards with the method's own advantage or an override, or advantages; True if the last."""
    mask = inputs["mask"]
    own = method == "gspo_token" and _chance(rng, 0.7)
    if own or (method in ADVANTAGES_MAY_BE_GIVEN and _chance(rng, 0.15)):
        if _chance(rng, 0.5) or own:
            inputs["advantages"] = rng.normal(size=mask.shape)
            axes["advantage"] = "token_varying"
        else:
            inputs["advantages"] = rng.normal(size=len(mask)).tolist()
            axes["advantage"] = "given"
        return True
    override = method in ("dcpo", "gspo_token") or _chance(rng, 0.4)
    if override:
        params["adv"] = _adv_options(rng)
        params.pop("whiten", None)
        axes["advantage"] = ADVANTAGE_OF_SCALE[params["adv"]["scale"]]
    if method != "vapo" or override:
        inputs["rewards"] = _rewards(rng, group_ids, REWARD_STYLE.get(method))
    return False


# --------------------------------------------------------------------------------------------
# Other kinds
# --------------------------------------------------------------------------------------------


def _advantage_case(rng: Rng, method: str) -> Case:
    rows, width = int(rng.integers(1, MAX_ROWS + 1)), int(rng.integers(1, MAX_TOKENS + 1))
    mask, group_ids = _mask(rng, rows, width), _group_ids(rng, rows)
    logp = _log_probs(rng, mask)
    params: dict[str, Any] = {}
    if method == "dcpo":
        sizes = [int(rng.integers(1, 6))] * int(rng.integers(1, 5))
        if _chance(rng, 0.3):
            sizes = [int(rng.integers(1, 6)) for _ in sizes]
        history = [_rewards(rng, [0] * n, _pick(rng, ("binary", "continuous"))) for n in sizes]
        return {"params": {"ddof": 1}, "inputs": {"reward_history": history}}
    inputs: dict[str, Any] = {"rewards": _rewards(rng, group_ids, REWARD_STYLE.get(method))}
    if method in ("grpo", "lite_ppo"):
        params.update(ddof=int(rng.integers(2)), eps=_pick(rng, (0.0, 1e-8, 1e-6, 1e-4)))
    elif method == "maxrl":
        params["eps"] = _pick(rng, (0.0, 1e-6))
    elif method == "remax":
        inputs["greedy_rewards"] = [_uniform(rng, 0.0, 1.0) for _ in range(rows)]
    elif method == "gpg":
        params["f_norm"] = _uniform(rng, 0.5, 2.0)
    elif method == "reinforce_pp":
        params.update(gamma=_uniform(rng, 0.8, 1.0), kl_coef=_uniform(rng, 0.0, 0.3))
        params.update(ddof=int(rng.integers(2)), eps_in_var=_pick(rng, (0.0, 1e-8)))
        inputs.update(logp_old=logp["logp_old"], logp_ref=logp["logp_ref"], mask=mask)
    elif method == "reinforce_pp_baseline":
        params.update(ddof=int(rng.integers(2)), eps_in_var=1e-8)
        inputs["mask"] = mask
    elif method == "prime":
        params.update(beta=_uniform(rng, 0.01, 0.3), gamma=_uniform(rng, 0.8, 1.0))
        inputs.update(logp_prm=logp["logp_prm"], logp_ref=logp["logp_ref"], mask=mask)
        inputs["outcome_labels"] = [_pick(rng, (0.0, 1.0)) for _ in range(rows)]
    elif method == "prime_seed":
        params.update(mix_gamma=_uniform(rng, 0.0, 1.0), ddof=int(rng.integers(2)), eps=1e-6)
        inputs.update(logp_policy=logp["logp"], logp_ref=logp["logp_ref"], mask=mask)
    if method != "remax" and not _chance(rng, 0.1):
        inputs["group_ids"] = group_ids
    return {"params": params, "inputs": inputs}


def _gae_case(rng: Rng, method: str) -> Case:
    rows, width = int(rng.integers(1, MAX_ROWS + 1)), int(rng.integers(1, MAX_TOKENS + 1))
    mask = _mask(rng, rows, width)
    values = rng.normal(0.3, 0.3, size=mask.shape)
    inputs = {"token_rewards": _token_rewards(rng, mask), "values": values, "mask": mask}
    params: dict[str, Any] = {"gamma": _uniform(rng, 0.8, 1.0)}
    if method == "vapo":
        params.update(alpha=_uniform(rng, 0.05, 1.0), lam_critic=1.0, clamp=[0, 1])
    else:
        params.update(lam=_uniform(rng, 0.7, 1.0), ddof=int(rng.integers(2)))
        params["whiten_eps_in_var"] = 1e-8
    return {"params": params, "inputs": inputs}


def _filter_case(rng: Rng, method: str) -> Case:
    if method == "prime":
        low, high = _uniform(rng, 0.05, 0.45), _uniform(rng, 0.55, 0.95)
        accuracy = [_uniform(rng, 0.0, 1.0) for _ in range(int(rng.integers(1, 9)))]
        return {"params": {"low": low, "high": high}, "inputs": {"group_accuracy": accuracy}}
    group_ids = _group_ids(rng, int(rng.integers(1, MAX_ROWS + 1)))
    inputs = {"rewards": _rewards(rng, group_ids), "group_ids": group_ids}
    return {"params": {}, "inputs": inputs}


def _shaping_case(rng: Rng, method: str) -> Case:
    cap = int(rng.integers(50, 5000))
    cache = int(rng.integers(1, cap))
    lengths = [int(n) for n in rng.integers(1, cap + 200, size=int(rng.integers(1, 9)))]
    params = {"L_max": cap, "L_cache": cache}
    return {"params": params, "inputs": {"lengths": [*lengths, cap - cache, cap, cap + 1]}}


def _masked_case(rng: Rng, kind: str) -> Case:
    """Kinds that need little more than a mask and one or two grids."""
    rows, width = int(rng.integers(1, MAX_ROWS + 1)), int(rng.integers(1, MAX_TOKENS + 1))
    mask = _mask(rng, rows, width)
    params: dict[str, Any] = {}
    inputs: dict[str, Any] = {"mask": mask}
    if kind == "kl":
        logp = _log_probs(rng, mask)
        inputs.update(logp=logp["logp"], logp_ref=logp["logp_ref"])
        return {"params": params, "inputs": inputs}
    params["norm_len"] = int(rng.integers(1, 20))
    if not _chance(rng, 0.1):
        inputs["group_ids"] = _group_ids(rng, rows)
    if kind == "aggregation":
        inputs["token_loss"] = rng.normal(size=mask.shape)
        return {"params": params, "inputs": inputs}
    params["agg"] = _pick(rng, AGGREGATIONS)
    if kind == "value_loss":
        params["cliprange_value"] = _uniform(rng, 0.05, 0.4)
        inputs["values_old"] = rng.normal(0.3, 0.3, size=mask.shape)
        inputs["values_new"] = inputs["values_old"] + rng.normal(0.0, 0.3, size=mask.shape)
        inputs["returns"] = rng.normal(0.3, 0.5, size=mask.shape)
    else:
        params["coef"] = _uniform(rng, 0.001, 0.1)
        inputs["logits"] = _logits(rng, mask)[1]
    return {"params": params, "inputs": inputs}


def _gate_case(rng: Rng) -> Case:
    rows, width = int(rng.integers(1, MAX_ROWS + 1)), int(rng.integers(1, MAX_TOKENS + 1))
    mask = _mask(rng, rows, width)
    old, new, tokens = _logits(rng, mask)
    inputs: dict[str, Any] = {"logits": new, "logits_rollout": old, "tokens": tokens}
    shape = mask.shape if _chance(rng, 0.5) else (rows,)
    inputs.update(mask=mask, advantages=rng.normal(size=shape))
    params = {"K": int(rng.integers(1, 4)), "delta_tv": _uniform(rng, 0.01, 0.1)}
    return {"params": params, "inputs": inputs}


def _small_case(rng: Rng, kind: str) -> Case:
    """Kinds without a batch."""
    n = int(rng.integers(2, 7))
    if kind == "kl_expectation":
        names = ("logits", "logits_ref", "logits_old")
        return {"params": {}, "inputs": {k: rng.normal(size=n).tolist() for k in names}}
    if kind == "estimator_expectation":
        actions = int(rng.integers(2, 5))
        inputs = {
            "logits": rng.normal(size=actions).tolist(),
            "reward_per_action": rng.normal(size=actions).tolist(),
        }
        params = {"G": int(rng.integers(2, 5)), "eps": 1e-6, "ddof": int(rng.integers(2))}
        return {"params": params, "inputs": inputs}
    if kind == "router":
        mask = np.zeros(n)
        mask[rng.choice(n, size=int(rng.integers(1, n + 1)), replace=False)] = 1.0
        inputs = {"router_logits": rng.normal(size=n).tolist(), "replay_mask": mask.tolist()}
        return {"params": {"top_k": int(rng.integers(1, n + 1))}, "inputs": inputs}
    if kind == "preference_loss":
        names = ("logp_chosen", "logp_rejected", "ref_logp_chosen", "ref_logp_rejected")
        inputs = {k: rng.uniform(-40, -1, size=n).tolist() for k in names}
        return {"params": {"beta": _uniform(rng, 0.01, 5.0)}, "inputs": inputs}
    if kind == "analytic":
        params = {"preference_probability": _uniform(rng, 0.05, 0.95)}
        return {"params": params, "inputs": {"betas": rng.uniform(0.01, 2.0, size=n).tolist()}}
    judges = int(rng.integers(1, 5))
    scores = rng.integers(0, 6, size=(n, judges)).astype(float)
    if _chance(rng, 0.1):
        scores[:] = scores[0]
    return {"params": {"n_judge": judges}, "inputs": {"judge_scores": scores.tolist()}}


def _draw(rng: Rng, kind: str, method: str) -> Case:
    if kind == "policy_loss":
        return _policy_case(rng, method)
    if kind == "advantage":
        return _advantage_case(rng, method)
    if kind == "gae":
        return _gae_case(rng, method)
    if kind == "filter":
        return _filter_case(rng, method)
    if kind == "reward_shaping":
        return _shaping_case(rng, method)
    if kind in ("aggregation", "kl", "value_loss", "aux_loss"):
        return _masked_case(rng, kind)
    if kind == "gate":
        return _gate_case(rng)
    return _small_case(rng, kind)


# --------------------------------------------------------------------------------------------
# Distance from kinks
# --------------------------------------------------------------------------------------------


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits - logits.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def _exp(x: Any) -> Any:
    return np.exp(np.clip(x, -20, 20))


def _distances(case: Case, kind: str, method: str) -> Iterator[float]:
    """Distance of every compared quantity from the bound that it is compared with."""
    params, inputs = case["params"], case["inputs"]
    if kind == "filter" and method == "prime":
        for accuracy in inputs["group_accuracy"]:
            yield from (accuracy - params["low"], accuracy - params["high"])
    if kind == "pair_selection":
        means = sorted(np.mean(inputs["judge_scores"], axis=1))
        if means[0] != means[-1]:
            yield from (means[1] - means[0], means[-1] - means[-2])
    if "mask" not in inputs:
        return
    valid = [np.flatnonzero(row) for row in inputs["mask"]]
    for i, row in enumerate(valid):
        if kind == "value_loss":
            new, old, target = (inputs[k][i][row] for k in ("values_new", "values_old", "returns"))
            near = np.clip(new, old - params["cliprange_value"], old + params["cliprange_value"])
            yield from np.abs(new - old) - params["cliprange_value"]
            yield from (new + near - 2 * target)[new != near]
        if kind == "gate":
            yield from _topk_distances(params, inputs, i, row)
        if "logp_ref" in inputs:
            for name in ("logp", "logp_old"):
                if name in inputs:
                    yield from np.abs(inputs[name][i][row] - inputs["logp_ref"][i][row]) - 20
        if kind == "policy_loss" and len(row):
            yield from _row_distances(case, method, i, row)


def _topk_distances(
    params: dict[str, Any], inputs: dict[str, Any], i: int, row: np.ndarray
) -> Iterator[float]:
    for t in row:
        p = np.exp(_log_softmax(inputs["logits"][i][t]))
        mu = np.exp(_log_softmax(inputs["logits_rollout"][i][t]))
        top = np.argsort(-mu)[: params["K"]]
        gap = p[top] - mu[top]
        yield (np.abs(gap).sum() + abs(gap.sum())) / 2 - params["delta_tv"]
        ordered = np.sort(mu)
        yield from ordered[1:] - ordered[:-1]


def _row_distances(case: Case, method: str, i: int, row: np.ndarray) -> Iterator[float]:
    params, inputs = case["params"], case["inputs"]
    n = len(row)
    if method == "simko":
        logp = _log_softmax(inputs["logits"][i][row])
        old = _log_softmax(inputs["logits_old"][i][row])
        entropy = -(np.exp(logp) * logp).sum(axis=-1)
        if n > 1:
            yield from entropy - np.quantile(entropy, params["entropy_quantile"])
        for values in logp:
            ordered = np.sort(values)
            yield from ordered[1:] - ordered[:-1]
        picked = (np.arange(n), inputs["tokens"][i][row])
        d = logp[picked] - old[picked]
    else:
        anchor = inputs["logp_rollout"] if method == "dppo" else inputs.get("logp_old")
        if anchor is None:
            return
        d = inputs["logp"][i][row] - anchor[i][row]
    if method in ("gspo", "gspo_token"):
        d = np.array([d.mean()])
    if method == "sspo":
        ids = inputs["segment_ids"][i][row]
        d = np.array([d[ids == k].mean() for k in set(ids.tolist())])
    if method == "rspo":
        new, old = inputs["router_new_at_old_topk"][i][row], inputs["router_old_topk"][i][row]
        shift = np.exp(-np.abs(np.log(new) - np.log(old)).mean(axis=(1, 2)))
        d = d + np.log(np.maximum(shift, params["gamma_min"]))
    yield from np.abs(d) - 20
    if method in ("gmpo", "rspo"):
        yield from np.abs(d) - params["log_clip"]
        yield abs(d.mean()) - 20
    if method == "lopti":
        yield from np.exp(inputs["logp_old"][i][row]) - params["eta"]
    if method == "dppo":
        p, mu = np.exp(inputs["logp"][i][row]), np.exp(inputs["logp_rollout"][i][row])
        tv = np.abs(p - mu)
        kl = mu * np.log(mu / p) + (1 - mu) * np.log((1 - mu) / (1 - p))
        yield from (tv if case["axes"]["clip"].endswith("tv") else kl) - params["delta"]
    if "dual_clip_c" in params:
        yield from _exp(d) - params["dual_clip_c"]
    if method == "dcpo":
        q = np.exp(inputs["logp_old"][i][row])
        yield from _exp(d) - (0.5 + 0.5 * np.sqrt(np.maximum(1 - 4 * params["eps_low"] / q, 0)))
        high = 0.5 + 0.5 * np.sqrt(1 + 4 * params["eps_high"] / q)
        yield from _exp(d) - np.minimum(high, params["ratio_cap"])
    elif "eps_low" in params:
        yield from _exp(d) - (1 - params["eps_low"])
        yield from _exp(d) - (1 + params["eps_high"])
    if "mode" in params or "C" in params:
        log_rho = inputs["logp_old"][i][row] - inputs["logp_rollout"][i][row]
        tested = [*log_rho, log_rho.sum(), log_rho.mean()]
        for bound in ("C", "C_min", "C_max"):
            if bound in params:
                yield from _exp(tested) - params[bound]


def _centred_by_design(case: Case) -> bool:
    """Whether centred rewards, repeated over tokens, average to 0 in exact arithmetic.

    Whitening then leaves the sign of the rows without advantage to rounding.
    """
    inputs = case["inputs"]
    if "rewards" not in inputs or "group_ids" not in inputs:
        return False
    kept = 1 - np.array(inputs.get("truncated", np.zeros(len(inputs["mask"]))))
    lengths = inputs["mask"].sum(axis=1) * kept
    ids, rewards = np.array(inputs["group_ids"]), np.array(inputs["rewards"])
    groups = [np.flatnonzero(ids == g) for g in np.unique(ids)]
    return len(groups) > 1 and all(
        np.ptp(lengths[rows]) == 0 or np.ptp(rewards[rows]) == 0 for rows in groups
    )


def _near_kink(case: Case, kind: str, method: str) -> bool:
    if (kind, method) == ("policy_loss", "reinforce_pp_baseline") and _centred_by_design(case):
        return True
    return any(abs(distance) < MARGIN for distance in _distances(case, kind, method))


# --------------------------------------------------------------------------------------------
# Junk and assembly
# --------------------------------------------------------------------------------------------


def _fill_padding(rng: Rng, inputs: dict[str, Any], junk: str) -> None:
    """Overwrite the padded positions of every grid except the mask."""
    if "mask" not in inputs:
        return
    padded = inputs["mask"] == 0
    for name, value in inputs.items():
        if name == "mask" or not isinstance(value, np.ndarray) or value.ndim < 2:
            continue
        if value.dtype.kind == "i":
            if name == "segment_ids":
                value[padded] = -1
            continue
        fill = rng.choice((-1.0, 1.0), size=value.shape) * rng.uniform(1e3, 1e6, value.shape)
        if junk == "nan":
            fill[:] = math.nan
        value[padded] = fill[padded]


def random_case(
    rng: np.random.Generator,
    kind_method: tuple[str, str] | None = None,
    junk: Literal["large", "nan"] = "large",
) -> Case:
    """Draw one case of the given (kind, method), or of any; padded positions hold ``junk``."""
    kind, method = kind_method or _pick(rng, PAIRS)
    if (kind, method) not in PAIRS:
        raise ValueError(f"unknown kind and method {(kind, method)}; known: {PAIRS}")
    case = _draw(rng, kind, method)
    while _near_kink(case, kind, method):
        case = _draw(rng, kind, method)
    inputs = case["inputs"]
    _fill_padding(rng, inputs, junk)
    return {
        "id": f"random_{kind}_{method}",
        "method": method,
        "kind": kind,
        "axes": case.get("axes", dict(OTHER_AXES.get((kind, method), {}))),
        "params": case["params"],
        "inputs": {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in inputs.items()},
        "tol": {"atol": 1e-9, "rtol": 1e-9},
    }
