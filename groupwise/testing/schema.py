"""The words of a case: which hyper-parameters each kind and method reads, what inputs are.

A hyper-parameter that nothing reads is an error, because a misspelt one would otherwise be a
different case that passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import CaseError, nearest
from groupwise.methods.composition import PairRecipe, Recipe
from groupwise.recipes import recipe
from groupwise.testing.variants import WORDS

Case = Mapping[str, Any]

# May stand with any method, also where they change nothing (a clip range without a clip).
GENERIC = (
    "agg", "norm_len", "adv", "kl_coef", "kl_estimator", "kl_placement", "ddof", "eps", "eps_low",
    "eps_high",
)  # fmt: skip

# Slot -> {name in a case: hyper-parameter of the slot}; "" is read by the code around the slot.
OF_SLOT: dict[str, dict[str, str]] = {
    # advantage
    "return_to_go": {"gamma": "gamma"},
    "gae": {"gamma": "gamma", "lam": "lam"},
    "gae_length_adaptive": {"gamma": "gamma", "alpha": "alpha", "clamp": ""},
    "process_rloo": {"beta": "beta", "gamma": "gamma"},
    "drift_as_process_reward": {"mix_gamma": "mix"},
    "greedy_baseline": {"greedy_reward": ""},
    "rescale_for_dead_groups": {"alpha": "", "f_norm": ""},
    "reweight_by_probability": {"alpha": "alpha"},
    "whiten_tokens": {
        "whiten": "",
        "eps_in_var": "eps_in_var",
        "whiten_eps_in_var": "eps_in_var",
    },
    # ratio and gate
    "router_shift": {"gamma_min": "floor"},
    "clip": {"dual_clip_c": ""},
    "dual_clip": {"dual_clip_c": "bound"},
    "dynamic_clip": {"dual_clip_c": "bound", "ratio_cap": "cap"},
    "geometric_clip": {"log_clip": "limit"},
    "weight_cap": {"is_cap": "cap", "is_floor": "floor"},
    "soft": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "tv_mask": {"delta": "delta", "ratio_cap": "cap"},
    "kl_mask": {"delta": "delta", "ratio_cap": "cap"},
    "gamma_weight": {
        "k_pos": "k_pos",
        "lambda_pos": "lambda_pos",
        "k_neg": "k_neg",
        "lambda_neg": "lambda_neg",
    },
    "taper": {
        "positive_weight": "positive",
        "negative_weight": "negative",
        "split": "split",
    },
    "topk_mask": {"delta": "delta", "ratio_cap": "cap", "K": "k"},
    "topk_smoothing": {
        "alpha": "alpha",
        "K": "k",
        "entropy_quantile": "quantile",
        "lambda_top1": "top1",
    },
    # correction and penalty
    "negative_sequence_mask": {"delta": "delta", "anchor": "anchor"},
    "binary_kl_mask": {"bound": "bound"},
    "future_influence": {
        "half_life": "half_life",
        "range": "above",
        "safety": "safety",
        "dual": "dual",
    },
    "top_entropy": {"fraction": "fraction"},
    "second_moment_mask": {"budget": "budget"},
    "sequence_kl_mask": {"delta": "delta"},
    "interpolated_mask": {"high": "cap", "current_version": ""},
    "share": {"mu": ""},
    "taught": {},
    "cov_drift": {"fraction": "fraction", "coef": "coef"},
    # gates and terms of whole updates
    "cov_clip": {"fraction": "fraction", "cov_low": "cov_low", "cov_high": "cov_high"},
    "moment_clip": {"budget": "budget", "floor_low": "", "floor_high": ""},
    "squared_residual": {"beta2": "beta"},
    "group_contrast": {"tau": "tau"},
    "group_regression": {"beta": "beta"},
    "trajectory_balance": {"beta": "beta", "cap": "cap"},
    "partition_loss": {"beta": "beta", "cap": "cap"},
    "weighted_nll": {"mu": "", "phi": ""},
    # comparisons, turns, teachers
    "group_zscore_per_part": {"weights": "", "whiten": "", "whiten_eps": ""},
    "best_minus_second": {"scale": "scale"},
    "optimal_token_baseline": {"zero_tail": "", "eps": "eps"},
    "prompt_beta_mean": {"half_life": "half_life", "rho_min": "low", "rho_max": "high"},
    "role_moving_mean": {"decay": "decay"},
    "group_mean_of_peers": {"episode_roles": ""},
    "optimal_value_baseline": {"beta1": "beta"},
    "tree_mean": {"weight": "weight"},
    "plus_state_zscore": {
        "gamma": "gamma",
        "step_weight": "weight",
        "scale": "scale",
        "ddof": "ddof",
        "eps": "eps",
    },
    "call_credit": {"turn_coef": "coef"},
    "turn_return_to_go": {"gamma": "gamma", "ended": "ended"},
    "turn_return": {"gamma": "gamma"},
    "whiten_turns": {"ddof": "ddof", "eps": "eps"},
    "minus_teacher_return": {"coef": "coef", "gamma": "gamma", "estimator": "estimator"},
    # the rest
    "learned_length_weight": {"lam": "exponent", "r": "slope", "ddof_len": ""},
    "entropy_bonus": {"coef": "coef", "entropy_coef": "coef"},
    "positive_nll": {"mu": "weight"},
    "low_then_high": {"eta": "eta", "which": ""},
}
# Of the slots of a preference method, by the word of a case; each where a slot has the setting.
PAIR_WORDS = {
    "beta": "beta",
    "label_smoothing": "noise",
    "tau": "tau",
    "gamma": "gamma",
    "divergence": "divergence",
    "alpha": "alpha",
}
PAIR_METHODS = {"robust": "robust_dpo"}  # recipes whose cases go by another name
POLICY_METHODS = {"tir_otb": "otb"}
CORRECTION = ("C", "C_min", "C_max", "level", "mode")

# What the kinds without a recipe read.
OF_KIND: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lam", "ddof", "eps_in_var", "whiten_eps_in_var"),
    "value_loss": ("cliprange_value", "agg", "norm_len"),
    "aux_loss": ("coef", "entropy_coef", "agg", "norm_len"),
    "preference_loss": (
        *PAIR_WORDS,
        "reduce",
        "nll",
        "cap",
        "loss",
        "ties",
        "missing_eos_penalty",
    ),
    "unpaired_loss": ("beta", "desirable_weight", "undesirable_weight", "baseline"),
    "reward_loss": ("centre",),
    "reference_update": ("alpha", "every"),
    "reward_shaping": ("L_max", "L_cache"),
    "schedule": (),
    "distillation_loss": (),
    "filter": (),
    "kl": (),
    "kl_expectation": (),
    "aggregation": ("norm_len",),
    "gate": ("K", "delta", "delta_tv", "delta_kl"),
    "router": ("top_k",),
    "pair_selection": ("n_judge",),
    "analytic": ("preference_probability",),
    "estimator_expectation": ("G", "eps", "ddof"),
}
GAE_BY_LENGTH = ("gamma", "alpha", "lam_critic", "clamp")
BAND = ("low", "high")
# A method's words of one kind may stand in its cases of another, where they change nothing.
OF_METHOD: dict[str, tuple[str, ...]] = {
    "ppo": (*OF_KIND["gae"], *OF_KIND["value_loss"]),
    "vapo": (*GAE_BY_LENGTH, "eps_in_var", "whiten", "mu"),
    "dapo": OF_KIND["reward_shaping"],
    "prime": (*BAND, "beta", "gamma"),
    "dppo": OF_KIND["gate"],
    "turn_return_to_go": ("p_continue", "q_win"),
    "vineppo": ("whiten_eps_in_var",),
    "sdpo": ("is_cap",),
}
# The words of one kind of case and one method.
OF_PAIR: dict[tuple[str, str], tuple[str, ...]] = {
    ("reward_shaping", "fapo"): ("penalty",),
    ("reward_shaping", "linear_length_penalty"): ("output_weight", "input_weight", "turns_weight"),
    ("reward_shaping", "stop_properly"): ("coef",),
    ("reward_shaping", "kimi_length"): (),
    ("reward_shaping", "cosine_length"): (
        "max_length",
        "right_short",
        "right_long",
        "wrong_short",
        "wrong_long",
    ),
    ("filter", "pf_ppo"): ("how", "power"),
    ("gate", "clip_cov"): ("fraction", "cov_low", "cov_high"),
    **{("aux_loss", method): ("weight", "coef") for method in ("dft", "chord", "echo")},
    ("estimator_expectation", "turn_return_to_go"): ("G", "p_continue", "q_win", "gamma"),
    ("pair_selection", "sdpo"): ("threshold", "exclude_self"),
    ("schedule", "adaptive_entropy"): ("coef", "step", "min", "max", "target", "gate"),
    ("schedule", "chord"): ("warmup", "decay", "peak", "valley"),
    ("schedule", "gkd_mixing"): ("lambda", "seq_kd"),
    ("distillation_loss", "gjsd"): ("beta", "temperature"),
    ("distillation_loss", "topk_kl"): ("k", "direction", "tail", "support", "temperature"),
    ("distillation_loss", "minillm"): (
        "gamma",
        "length_normalise",
        "single_step",
        "include_current",
        "temperature",
    ),
}
KNOWN = frozenset(
    (
        *GENERIC,
        *CORRECTION,
        *GAE_BY_LENGTH,
        *BAND,
        *(name for names in OF_SLOT.values() for name in names),
        *(name for names in OF_KIND.values() for name in names),
        *(name for names in WORDS.values() for name in names),
        *(name for names in OF_PAIR.values() for name in names),
        *(name for names in OF_METHOD.values() for name in names),
    )
)

# Inputs in words, with an example.
INPUTS = {
    "rewards": "one per row, as [1, 0, 0, 1]",
    "mask": "1 on response tokens, as [[1, 1], [1, 0]]",
    "logp": "log-probabilities of the sampled tokens, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "logp_old": "the learner's before the update, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "logp_policy": "the policy's, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "logp_rollout": "the sampler's, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "logp_ref": "the reference model's, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "logp_prm": "the implicit reward model's, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "values": "the critic's, as [[0.2, 0.4], [0.1, 0.3]]",
    "values_old": "the critic's before the update, as [[0.2, 0.4], [0.1, 0.3]]",
    "values_new": "the critic's now, as [[0.2, 0.4], [0.1, 0.3]]",
    "returns": "the critic's targets, as [[0.2, 0.4], [0.1, 0.3]]",
    "token_loss": "as [[0.2, 0.4], [0.1, 0.3]]",
    "greedy_rewards": "of the greedy completions, one per row, as [1, 0]",
    "correct": "1 for right answers, as [1, 0]",
    "truncated": "1 for answers that were cut off, as [0, 1]",
    "segment_ids": "the segment of each token, as [[0, 0], [0, 1]]",
    "tokens": "the sampled ids, as [[2, 0], [1, 3]]",
    "step_reward_NT": "at the last token of each step, as [[0, 1], [0.5, 0]]",
    "step_end_NT": "1 on the last token of each step, as [[0, 1], [1, 0]]",
    "step_value_NT": "where a step begins, at the last token of each, as [[0, 0.4], [0.5, 0]]",
    "router_old_topk": "probabilities [row][token][layer][expert]",
    "router_new_at_old_topk": "probabilities [row][token][layer][expert]",
    "advantages": "one per row or token, as [1.5, -0.5]",
    "logits": "over the vocabulary, the last axis, as [0.1, 0.5, -0.2] for one token",
    "logits_ref": "the reference model's, as [0.1, 0.5, -0.2]",
    "logits_old": "before the update, as [0.1, 0.5, -0.2]",
    "logits_rollout": "the sampler's, as [[[0.1, 0.5, -0.2]]] for one row of one token",
    "reward_per_action": "as [1, 0, 0.5]",
    "lengths": "tokens per answer, as [100, 18000]",
    "judge_scores": "a list of judgements per candidate, as [[3, 4], [1, 2]]",
    "betas": "as [0.1, 1.0]",
    "router_logits": "one per expert, as [0.3, -1.0, 0.8]",
    "replay_mask": "1 for the recorded experts, as [1, 0, 1]",
    "logp_chosen": "sums over answers, one per pair, as [-12.0, -8.5]",
    "logp_rejected": "sums over answers, one per pair, as [-12.0, -8.5]",
    "ref_logp_chosen": "sums over answers, one per pair, as [-12.0, -8.5]",
    "ref_logp_rejected": "sums over answers, one per pair, as [-12.0, -8.5]",
    "mask_chosen": "1 on the chosen answers' tokens, as [[1, 1], [1, 0]]",
    "mask_rejected": "1 on the rejected answers' tokens, as [[1, 1], [1, 0]]",
    "len_chosen": "tokens of the chosen answers, as [6, 4]",
    "len_rejected": "tokens of the rejected answers, as [5, 3]",
    "log_sum_sq_rejected": "log of the summed squared probabilities, as [[-0.4, -0.8]]",
    "scores": "of the samples of each prompt, as [[1.0, 0.0], [0.2, 0.7]]",
    "ref_logp": "the reference's sums, as [-13.5, -9.5]",
    "kl_logp": "sums of answers to other prompts, as [-20.0, -18.0]",
    "ref_kl_logp": "the reference's sums of answers to other prompts, as [-21.0, -18.5]",
    "label": "1 for good answers, 0 for bad ones, as [1, 0]",
    "reward_chosen": "scores of the better answers, as [1.0, -0.5]",
    "reward_rejected": "scores of the worse answers, as [0.5, 0.2]",
    "step": "the number of the step, as 1024",
    "policy": "weights of the policy, as [1.0, -2.0]",
    "reference": "weights of the reference, as [0.0, -1.0]",
    "reward_parts": "one list of parts per row, as [[1.0, 0.2], [0.0, null]]",
    "sum_pi_squared": "of each token's distribution, as [[0.4, 0.8], [0.5, 0.3]]",
    "rollout_is_weights": "learner over sampler per token, as [[1.1, 0.9], [1.0, 0.8]]",
    "roles": "the role of each row, as [0, 1, 0, 1]",
    "episode_ids": "the episode of each row, as [0, 0, 1, 1]",
    "baselines": "what each role has earned so far, as [0.4, -0.2]",
    "past_logp": "the policy's on each prompt's previous answer, as [[-0.5, -1.2]]",
    "past_logp_old": "what they were when it was written, as [[-0.4, -1.0]]",
    "past_mask": "1 on the previous answers' tokens, as [[1, 1]]",
    "alpha": "of each prompt, as [6.0, 0.5]",
    "beta": "of each prompt, as [2.0, 0.5]",
    "flawed": "1 for answers that are right for wrong reasons, as [0, 1]",
    "output_tokens": "own tokens of each row, as [100, 50]",
    "total_tokens": "tokens of each row, others' included, as [110, 60]",
    "turns": "turns of each row, as [1, 3]",
    "reference_rewards": "of the reference's answers to each prompt, as [[1, 0], [0, 0]]",
    "turn_rewards": "of each row's turns, as [[0.0, 1.0], [0.5]]",
    "turn_ends": "the last own token of each turn, as [[1, 4], [0]]",
    "states": "the state that each turn begins in, as [[1, 2], [1]]",
    "outcome_rewards": "of the outcomes alone, as [1, 0]",
    "combined_rewards": "the merged ones, as [1.2, 0]",
    "result_starts": "where the first tool result begins, -1 for none, as [2, -1]",
    "mc_rewards": "of branches, a list per step and row, as [[[1, 0], [1, 1]], [[0, 0]]]",
    "step_ends": "the last own token of each step, as [[1, 4], [0]]",
    "paths": "the place of each row in its tree, as ['a#0#0', 'a#0#1']",
    "entropy": "of each token's distribution, as [[0.9, 1.7], [1.1, 0.5]]",
    "version": "of the weights that sampled each token, as [[3, 4], [3, 3]]",
    "expert": "1 for rows of an expert, as [0, 0, 1]",
    "select": "how much each token is imitated, as [[1, 0], [0.1, 0.1]]",
    "log_z": "of each row's prompt, as [0.3, -0.2]",
    "logp_teacher": "the teacher's, as [[-0.5, -1.2], [-0.3, -0.9]]",
    "has_teacher": "1 for rows with a demonstration, as [1, 0]",
    "student_logits": "over the vocabulary, as [[[0.1, 0.5, -0.2]]]",
    "teacher_logits": "over the vocabulary, as [[[0.1, 0.5, -0.2]]]",
    "entropies": "of one step after the other, as [0.5, 0.3]",
    "steps": "numbers of steps, as [0, 10, 20]",
    "u": "chances in [0, 1), one a step, as [0.1, 0.9]",
}


def missing(name: str, why: str = "this case") -> CaseError:
    """Return the error for an input that is missing."""
    return CaseError(f"{why} needs the input {name!r}: {INPUTS.get(name, 'see the schema')}.")


class Inputs(dict[str, Any]):
    """The inputs of a case: one that is missing is an error in words."""

    owner = "this case"

    def __missing__(self, name: str) -> Any:
        raise missing(name, self.owner)


def named(case: Case) -> dict[str, Any]:
    """Return the case with its inputs and hyper-parameters in checked form; None is 'not given'."""
    for key in ("inputs", "params", "axes"):
        if not isinstance(case.get(key) or {}, Mapping):
            raise CaseError(f"{key} must be a mapping from names to values, got {case[key]!r}.")
    if not isinstance(case["method"], str):
        raise CaseError(f"method must be a name such as 'grpo', got {case['method']!r}.")
    done: dict[str, Any] = dict(case)
    for key in ("inputs", "params", "axes"):
        values = case.get(key) or {}
        done[key] = {name: value for name, value in values.items() if value is not None}
    if "is_cap" in (case.get("params") or {}) and case["params"]["is_cap"] is None:
        done["params"]["is_cap"] = "none"  # not 'not given': there is no ratio at all
    done["inputs"] = Inputs(done["inputs"])
    done["inputs"].owner = f"{case['kind']} {case['method']}"
    _check_params(done, case.get("params") or {})
    return done


def _check_params(case: Case, params: Mapping[str, Any]) -> None:
    """Check that every hyper-parameter is known, and read by this kind and method or generic."""
    allowed = {*GENERIC, *OF_METHOD.get(case["method"], ()), *_names_of(case)}
    for name in params:
        if name in allowed:
            continue
        which = f"{case['kind']} {case['method']}"
        if name not in KNOWN:
            raise CaseError(f"Unknown parameter {name!r} in {which}. {nearest(str(name), KNOWN)}")
        own = ", ".join(sorted(allowed - set(GENERIC))) or "none"
        raise CaseError(f"{which} has no use for the parameter {name!r}. Its own are: {own}.")


def _names_of(case: Case) -> set[str]:
    kind, method = case["kind"], case["method"]
    if (kind, method) in OF_PAIR:
        return set(OF_PAIR[kind, method])
    if kind in ("policy_loss", "advantage"):
        made = policy_recipe(method)
        weighing = [slot for slot in made.correction if slot.name == "sequence_kl_mask"]
        slots = made.slots() if kind == "policy_loss" else (*made.advantage, *weighing)
        names = {name for slot in slots for name in OF_SLOT.get(slot.name, ())}
        weighs = kind == "policy_loss" and made.ratio.get("anchor") != "sampler"
        return {*names, *(CORRECTION if weighs else ()), *WORDS.get(method, ())}
    if kind == "preference_loss":
        return _names_of_pairs(case_recipe(case))
    if kind == "gae" and method == "vapo":
        return set(GAE_BY_LENGTH)
    if kind == "filter" and has_band(case):
        return set(BAND)
    return set(OF_KIND[kind])


def _names_of_pairs(made: PairRecipe) -> set[str]:
    slots = (made.preference, made.summing)
    found = {word for word, own in PAIR_WORDS.items() if any(own in slot for slot in slots)}
    if made.preference.name.startswith("ipo"):
        found.add("reduce")
    if made.likelihood:
        found |= {"alpha", "nll"}
    if made.weighing:
        found.add("cap")
    if "penalty" in made.pairing:
        found |= {"loss", "ties", "missing_eos_penalty"}
    return found


def has_band(case: Case) -> bool:
    """Return whether a case of kind `filter` is about the accuracy band."""
    filters = policy_recipe(case["method"]).filter
    return "group_accuracy" in case["inputs"] or any(s.name == "accuracy_band" for s in filters)


def policy_recipe(method: str) -> Recipe:
    made = recipe(POLICY_METHODS.get(method, method))
    if not isinstance(made, Recipe):
        raise CaseError(
            f"{method!r} is a preference method: use kind 'preference_loss', 'pair_selection' or "
            "'analytic'."
        )
    return made


def case_recipe(case: Case) -> PairRecipe:
    """Return the recipe of a case about pairs."""
    method = str(case["method"])
    return pair_recipe(PAIR_METHODS.get(method, method))


def pair_recipe(method: str) -> PairRecipe:
    made = recipe(method)
    if not isinstance(made, PairRecipe):
        raise CaseError(
            f"{method!r} is a policy method: use kind 'policy_loss' or 'advantage', or a "
            "preference method such as 'dpo'."
        )
    return made


def tensor(values: Any, name: str = "an input") -> Tensor:
    try:
        return torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise CaseError(
            f"{name} must be numbers in lists of equal length, got {repr(values)[:60]}."
        ) from None


def rewards_of(values: Any) -> Tensor:
    """Return one reward per row; None is 'no grade', that is NaN."""
    if isinstance(values, list | tuple):
        values = [float("nan") if value is None else value for value in values]
    reward_N = tensor(values, "rewards")
    if reward_N.dim() != 1:
        raise CaseError(f"rewards must be one number per row, got {repr(values)[:60]}.")
    return reward_N


def grid(inputs: Mapping[str, Any], name: str, mask_NT: Tensor, axes: int = 2) -> Tensor:
    """Return an input with a value per token (and further axes), of the mask's shape."""
    x = tensor(inputs[name], name)
    if x.dim() != axes or x.shape[:2] != mask_NT.shape:
        rows, width = mask_NT.shape
        raise CaseError(
            f"{name} has shape {tuple(x.shape)}, but the case has {rows} rows of {width} tokens"
            + (f" and it takes {axes} axes." if axes > 2 else ".")
        )
    return x


def plain(x: Any, mask: Tensor | None = None) -> Any:
    """Return nested lists and floats; 0 on padded positions."""
    if not isinstance(x, Tensor):
        return float(x)
    x = x.detach().double()
    if mask is not None:
        x = torch.where(mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())), x, 0.0)
    return x.tolist()


def whole(value: Any, name: str) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and float(value).is_integer() and abs(value) < 2**53):
        raise CaseError(f"{name}={value!r} must be a whole number.")
    return int(value)


def params_of(case: Case) -> dict[str, Any]:
    return dict(case.get("params") or {})
