"""TRL's GRPOConfig and RLOOConfig: trl/trainer/grpo_config.py, grpo_trainer.py and rloo_*.py."""

from __future__ import annotations

from typing import Any

from groupwise.explain.peers.answer import Answer, Settings, number

VERSION = "TRL 1.16.0"
GRPO: dict[str, Any] = {
    "learning_rate": 1e-6, "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "seed": 42, "max_steps": -1,
    "num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_iterations": 1, "max_completion_length": 512, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "beta": 0.0, "use_bias_correction_kl": True, "epsilon": 0.2, "delta": None,
    "epsilon_high": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
    "importance_sampling_level": "token", "scale_rewards": "group", "loss_type": "dapo",
    "multi_objective_aggregation": "sum_then_normalize", "mask_truncated_completions": False,
    "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False,
    "vllm_importance_sampling_correction": True, "use_vllm": False,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "off_policy_mask_threshold": None,
    "sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512,
    "router_aux_loss_coef": None, "generation_batch_size": None, "steps_per_generation": None,
}  # fmt: skip
RLOO = GRPO | {
    "num_generations": 2, "beta": 0.05, "normalize_advantages": False, "reward_clip_range": None,
}  # fmt: skip
PAPERS = {"dapo": "dapo", "grpo": "grpo", "bnpo": "grpo", "dr_grpo": "dr_grpo", "cispo": "cispo",
          "sapo": "sapo", "luspo": "luspo", "vespo": "vespo"}  # fmt: skip
MEANS = {
    "dapo": "token_mean_batch()",
    "cispo": "token_mean_batch()",
    "vespo": "token_mean_batch()",
    "bnpo": "token_mean_batch()",
    "grpo": "seq_mean_token_mean()",
    "sapo": "seq_mean_token_mean()",
    "luspo": "seq_mean_token_sum()",
}
SCALES = {
    "group": "group_zscore(ddof=1, eps=0.0001)",
    "True": "group_zscore(ddof=1, eps=0.0001)",
    "batch": "group_mean_batch_std(ddof=1, eps=0.0001)",
    "none": "group_mean()",
    "False": "group_mean()",
}


def grpo(theirs: Settings) -> Answer:
    """Answer a GRPOConfig."""
    kind = str(theirs["loss_type"])
    answer = Answer(VERSION, paper=PAPERS.get(kind, "grpo"))
    answer.settings["recipe.name"] = "grpo@trl"
    if kind not in PAPERS:
        answer.missing["loss_type"] = f"{kind!r} is no loss of {VERSION}"
        kind = "dapo"
    _advantage(theirs, answer)
    _policy_term(theirs, answer, kind)
    _correction(theirs, answer, kind)
    _penalty(theirs, answer)
    _left_out(theirs, answer)
    _batch(theirs, answer)
    return answer


def rloo(theirs: Settings) -> Answer:
    """Answer an RLOOConfig."""
    answer = Answer(VERSION, paper="rloo")
    chain = "leave_one_out()"
    if theirs["normalize_advantages"]:
        chain += ", whiten_sequences(ddof=1, eps=0.0001)"
    beta = theirs.number("beta")
    answer.settings |= {
        "recipe.name": "rloo",
        "recipe.shaping": f"kl_per_sequence(coef={number(beta)}, estimator='k1')" if beta else "",
        "recipe.advantage": chain,
        "recipe.ratio": "sequence_product()",
        "recipe.gate": _clip(theirs),
        "recipe.aggregation": "seq_mean_token_mean()",
    }
    answer.differs.append(
        "TRL clips the product of a sequence's ratios, which the paper does not have; the mean "
        "over sequences of one value each is seq_mean_token_mean here."
    )
    if theirs["reward_clip_range"] is not None:
        answer.missing["reward_clip_range"] = "rewards are never clipped; clip in the reward"
    if theirs["mask_truncated_completions"]:
        answer.settings["overlong"] = "mask"
    _batch(theirs, answer)
    return answer


def _advantage(theirs: Settings, answer: Answer) -> None:
    scale = str(theirs["scale_rewards"])
    if theirs["multi_objective_aggregation"] == "normalize_then_sum":
        answer.paper = "gdpo"
        answer.settings["recipe.advantage"] = (
            "group_zscore_per_part(ddof=1, eps=0.0001), whiten_sequences(ddof=1, eps=0.0001)"
        )
        return
    if scale not in SCALES:
        answer.missing["scale_rewards"] = f"{scale!r} is none of group, batch and none"
    answer.settings["recipe.advantage"] = SCALES.get(scale, SCALES["group"])


def _clip(theirs: Settings) -> str:
    low = theirs.number("epsilon")
    high = theirs["epsilon_high"]
    high = low if high is None else theirs.number("epsilon_high")
    if theirs["delta"] is not None:
        bound = number(theirs.number("delta"))
        return f"dual_clip(low={number(low)}, high={number(high)}, bound={bound})"
    return f"clip(low={number(low)}, high={number(high)})"


def _policy_term(theirs: Settings, answer: Answer, kind: str) -> None:
    whole = str(theirs["importance_sampling_level"]) == "sequence"
    ratio, gate = "sequence_geomean()" if whole else "token()", _clip(theirs)
    if whole and kind in ("grpo", "bnpo", "dapo", "dr_grpo"):
        answer.paper = "gspo"
    if kind == "cispo":
        high = theirs["epsilon_high"]
        cap = theirs.number("epsilon") if high is None else theirs.number("epsilon_high")
        gate = f"weight_cap(cap={number(cap)})"
        answer.differs.append("epsilon_high is CISPO's absolute cap in TRL; papers write 1 + it.")
    elif kind == "sapo":
        pos, neg = theirs.number("sapo_temperature_pos"), theirs.number("sapo_temperature_neg")
        gate = f"soft(tau_pos={number(pos)}, tau_neg={number(neg)})"
    elif kind == "vespo":
        ratio = "sequence_product()"
        names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        given = ", ".join(f"{name}={number(theirs.number(f'vespo_{name}'))}" for name in names)
        gate = f"gamma_weight({given})"
    answer.settings["recipe.ratio"], answer.settings["recipe.gate"] = ratio, gate
    if kind == "dr_grpo":
        length = theirs.whole("max_completion_length")
        answer.settings["recipe.aggregation"] = f"seq_mean_token_sum_norm(length={length})"
    else:
        answer.settings["recipe.aggregation"] = MEANS[kind]
    if kind in ("grpo", "sapo", "dr_grpo", "luspo", "bnpo"):
        answer.differs.append(
            f"TRL averages loss_type {kind!r} in each micro-batch and then over them; here it is "
            "one mean over the batch, so that no setting of memory changes it."
        )


def _correction(theirs: Settings, answer: Answer, kind: str) -> None:
    """Name the correction: TRL has it on by default, and it acts with vLLM alone."""
    answer.settings["recipe.correction"] = ""
    delta = theirs["off_policy_mask_threshold"]
    parts = []
    if (share := theirs.number("top_entropy_quantile")) < 1:
        parts.append(f"top_entropy(fraction={number(share)})")
    if delta is not None:
        anchor = "sampler" if theirs["use_vllm"] else "old"
        parts.append(f"negative_sequence_mask(delta={number(float(delta))}, anchor='{anchor}')")
    if theirs["use_vllm"] and theirs["vllm_importance_sampling_correction"]:
        parts += _vllm(theirs, answer, kind)
    answer.settings["recipe.correction"] = ", ".join(parts)


def _vllm(theirs: Settings, answer: Answer, kind: str) -> list[str]:
    mode = str(theirs["vllm_importance_sampling_mode"])
    high = theirs.number("vllm_importance_sampling_clip_max")
    low = theirs["vllm_importance_sampling_clip_min"]
    floor = 0.0 if low is None else theirs.number("vllm_importance_sampling_clip_min")
    if kind == "vespo":
        answer.settings["recipe.ratio"] = "sequence_product(anchor='sampler')"
        answer.differs.append(
            "With VESPO the correction stands inside the sequence's weight: the ratio is against "
            "the sampler. TRL bounds each token's part of it, which is not done here."
        )
        return []
    if floor and mode.endswith("truncate"):
        if mode == "token_truncate":
            return [f"tis_clamped(low={number(floor)}, high={number(high)})"]
        answer.missing["vllm_importance_sampling_clip_min"] = "a sequence's weight has no floor"
    return {
        "token_truncate": [f"tis_token(cap={number(high)})"],
        "token_mask": [f"icepop(low={number(floor)}, high={number(high)})"],
        "sequence_truncate": [f"tis_sequence(cap={number(high)})"],
        "sequence_mask": [f"mis_sequence(low={number(floor)}, high={number(high)})"],
    }.get(mode, [])


def _penalty(theirs: Settings, answer: Answer) -> None:
    parts = []
    if beta := theirs.number("beta"):
        if theirs["use_bias_correction_kl"]:
            parts.append(f"kl_importance(coef={number(beta)})")
            if str(theirs["importance_sampling_level"]) == "sequence":
                answer.missing["use_bias_correction_kl"] = (
                    "with a sequence's ratio TRL weighs each token's KL by it; here by the token's"
                )
        else:
            parts.append(f"kl(coef={number(beta)}, estimator='k3')")
    if entropy := theirs.number("entropy_coef"):
        parts.append(f"entropy_bonus(coef={number(entropy)})")
        answer.differs.append(
            "TRL's entropy bonus is a mean over tokens whatever the loss_type; here it is "
            "aggregated as the loss is, which is the same for dapo."
        )
    answer.settings["recipe.penalty"] = ", ".join(parts)
    if beta:
        moving_reference(theirs, answer)


def moving_reference(theirs: Settings, answer: Answer) -> None:
    """Let the reference follow the policy, where theirs does."""
    if theirs["sync_ref_model"]:
        share = theirs.number("ref_model_mixup_alpha")
        steps = theirs.whole("ref_model_sync_steps")
        answer.settings["reference.update"] = f"mix:{number(share)}:{steps}"


def _left_out(theirs: Settings, answer: Answer) -> None:
    if theirs["use_adaptive_entropy"]:
        answer.missing["use_adaptive_entropy"] = (
            "the entropy bonus is constant, unless train.coefs has an entropy_target for it"
        )
    if theirs["mask_truncated_completions"]:
        answer.settings["overlong"] = "mask"
    if weight := theirs["router_aux_loss_coef"]:
        answer.settings["recipe.auxiliary"] = f"balance(weight={number(float(weight))})"


def _batch(theirs: Settings, answer: Answer) -> None:
    """Count prompts and updates: TRL counts completions and optimizer steps."""
    group = theirs.whole("num_generations")
    rows = theirs.whole("per_device_train_batch_size")
    windows = max(theirs.whole("gradient_accumulation_steps"), 1)
    generation, several = theirs["generation_batch_size"], theirs["steps_per_generation"]
    if generation is not None:
        several = max(int(generation) // rows, 1)
    several = windows if several is None else max(int(several), 1)
    updates = max(several // windows, 1)
    answer.settings |= {
        "prompts_per_step": max(rows * several // group, 1),
        "group_size": group,
        "recipe.schedule": f"joint(updates={updates})",
    }
    answer.differs.append(
        f"{rows} completions x {several} passes are one batch on one device; multiply "
        "prompts_per_step by the number of devices."
    )
    if theirs.whole("num_iterations") > 1:
        answer.missing["num_iterations"] = (
            f"{theirs.whole('num_iterations')} whole passes over a batch there; here every answer "
            "is learned from once, in recipe.schedule.updates parts"
        )
    if (steps := theirs.whole("max_steps")) > 0:
        answer.settings["steps"] = max(steps // updates, 1)
    optimizer(theirs, answer)
    answer.settings |= {
        "engine.max_tokens": theirs.whole("max_completion_length"),
        "engine.temperature": number(theirs.number("temperature")),
        "seed": theirs.whole("seed"),
    }
    _nucleus(theirs, answer)


def optimizer(theirs: Settings, answer: Answer) -> None:
    """Say learning rate, schedule and AdamW's numbers, which all of TRL's trainers have."""
    course = str(theirs["lr_scheduler_type"]).rpartition(".")[2].lower()
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant",
             "constant_with_warmup": "constant"}  # fmt: skip
    if course not in known:
        answer.missing["lr_scheduler_type"] = f"{course!r}; linear, cosine and constant are known"
    warmup = theirs.whole("warmup_steps")
    steps = answer.settings.get("steps")
    if (share := theirs.number("warmup_ratio")) and steps:
        warmup = round(share * steps)
    answer.settings |= {
        "optim.learning_rate": repr(theirs.number("learning_rate")),
        "optim.schedule": known.get(course, "constant"),
        "optim.warmup_steps": warmup,
        "optim.weight_decay": number(theirs.number("weight_decay")),
        "optim.beta1": number(theirs.number("adam_beta1")),
        "optim.beta2": number(theirs.number("adam_beta2")),
        "optim.eps": repr(theirs.number("adam_epsilon")),
        "optim.clip_norm": number(theirs.number("max_grad_norm")),
    }


def _nucleus(theirs: Settings, answer: Answer) -> None:
    if theirs.number("top_p") < 1 or theirs.number("top_k") > 0:
        answer.missing["top_p, top_k"] = (
            "the learner scores the whole vocabulary: TRL's ratios are then off without a word; "
            "sample from all tokens, or take a recipe that corrects for it, such as tis"
        )
