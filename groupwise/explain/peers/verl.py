"""verl's configuration: trainer/config and trainer/ppo/core_algos.py."""

from __future__ import annotations

from typing import Any

from groupwise.explain.peers.answer import Answer, Settings, number

VERSION = "verl 0.9.1"
ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae", "algorithm.gamma": 1.0, "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001, "algorithm.filter_groups.enable": False,
    "algorithm.use_pf_ppo": False, "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "algorithm.filter_groups.max_num_gen_batches": 0,
    ACTOR + "clip_ratio": 0.2, ACTOR + "clip_ratio_low": 0.2, ACTOR + "clip_ratio_high": 0.2,
    ACTOR + "clip_ratio_c": 3.0, ACTOR + "tau_pos": 1.0, ACTOR + "tau_neg": 1.05,
    ACTOR + "policy_loss.loss_mode": "vanilla", ACTOR + "policy_loss.dro_beta": None,
    ACTOR + "policy_loss.clip_cov_ratio": 0.0002, ACTOR + "policy_loss.clip_cov_lb": 1.0,
    ACTOR + "policy_loss.clip_cov_ub": 5.0, ACTOR + "policy_loss.kl_cov_ratio": 0.0002,
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ACTOR + "loss_agg_mode": "token-mean", ACTOR + "loss_scale_factor": None,
    ACTOR + "entropy_coeff": 0.0, ACTOR + "use_kl_loss": False, ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl", ACTOR + "ppo_epochs": 1,
    ACTOR + "ppo_mini_batch_size": 256, ACTOR + "grad_clip": 1.0,
    ACTOR + "optim.lr": 1e-6, ACTOR + "optim.weight_decay": 0.01,
    ACTOR + "optim.lr_warmup_steps": -1, ACTOR + "optim.lr_warmup_steps_ratio": 0.0,
    ACTOR + "optim.lr_scheduler_type": "constant",
    "critic.cliprange_value": 0.5, "critic.optim.lr": 1e-5, "trainer.critic_warmup": 0,
    "data.train_batch_size": 1024, "data.max_response_length": 512,
    ROLLOUT + "n": 1, ROLLOUT + "temperature": 1.0, ROLLOUT + "top_p": 1.0, ROLLOUT + "top_k": -1,
    "trainer.total_training_steps": None,
    "reward_model.overlong_buffer.enable": False, "reward_model.overlong_buffer.len": 0,
    "reward_model.overlong_buffer.penalty_factor": 1.0,
    "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
    "reward.reward_kwargs.overlong_buffer_cfg.len": 0,
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 1.0,
}  # fmt: skip
GROUP = "group_zscore(ddof=1, eps=1e-06)"
WHITEN = "whiten_tokens(ddof=1, eps_in_var=1e-08)"
# estimator -> (its advantage, the recipe of its paper)
ADVANTAGES = {
    "grpo": (GROUP, "grpo"),
    "grpo_vectorized": (GROUP, "grpo"),
    "rloo": ("leave_one_out()", "rloo"),
    "rloo_vectorized": ("leave_one_out()", "rloo"),
    "remax": ("greedy_baseline()", "remax"),
    "reinforce_plus_plus_baseline": (f"group_mean(), {WHITEN}", "reinforce_pp_baseline"),
    "gpg": ("group_mean(), rescale_for_dead_groups()", "gpg"),
    "gdpo": (f"group_zscore_per_part(ddof=1, eps=1e-06), {WHITEN}", "gdpo"),
    "opo": ("length_weighted_mean()", "opo"),
    "grpo_passk": ("best_minus_second(scale='group', ddof=1, eps=1e-06)", "grpo_passk"),
    "optimal_token_baseline": ("optimal_token_baseline()", "otb"),
    "tir_optimal_token_baseline": ("optimal_token_baseline()", "otb"),
}
MEANS = {
    "token-mean": "token_mean_batch()",
    "seq-mean-token-sum": "seq_mean_token_sum()",
    "seq-mean-token-mean": "seq_mean_token_mean()",
    "token-sum": "token_sum()",
}
SAMPLED = "token(anchor='sampler')"
ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def verl(theirs: Settings) -> Answer:
    """Answer a configuration of verl's trainer."""
    estimator = str(theirs["algorithm.adv_estimator"])
    answer = Answer(VERSION)
    answer.settings["recipe.name"] = "ppo@verl" if estimator == "gae" else "grpo@verl"
    _advantage(theirs, answer, estimator)
    _policy_term(theirs, answer)
    _aggregation(theirs, answer)
    _correction(theirs, answer)
    _kl(theirs, answer)
    _filters(theirs, answer)
    _batch(theirs, answer, estimator)
    return answer


def _advantage(theirs: Settings, answer: Answer, estimator: str) -> None:
    gamma = number(theirs.number("algorithm.gamma"))
    if estimator == "gae":
        lam = number(theirs.number("algorithm.lam"))
        limit = number(theirs.number("critic.cliprange_value"))
        answer.paper = "ppo"
        answer.settings |= {
            "recipe.advantage": f"gae(gamma={gamma}, lam={lam}), {WHITEN}",
            "recipe.auxiliary": f"value_loss(limit={limit}, gamma={gamma}, lam={lam})",
            "critic.learning_rate": repr(theirs.number("critic.optim.lr")),
            "critic.alone_steps": theirs.whole("trainer.critic_warmup"),
        }
        return
    if estimator == "reinforce_plus_plus":
        answer.paper = "reinforce_pp"
        answer.settings["recipe.advantage"] = f"return_to_go(gamma={gamma}), {WHITEN}"
        return
    chain, answer.paper = ADVANTAGES.get(estimator, (GROUP, "grpo"))
    if estimator not in ADVANTAGES:
        answer.missing["algorithm.adv_estimator"] = f"{estimator!r} is not known"
    if chain == GROUP and not theirs["algorithm.norm_adv_by_std_in_grpo"]:
        chain, answer.paper = "group_mean()", "dr_grpo"
    answer.settings["recipe.advantage"] = chain
    if estimator == "gpg":
        answer.missing["algorithm.adv_estimator"] = (
            "verl's α of GPG counts rewards that are not 0 instead of mixed groups; here it is the "
            "paper's"
        )
    if theirs.whole(ROLLOUT + "n") == 1 and estimator in ("grpo", "rloo"):
        answer.missing[ROLLOUT + "n"] = "a group of one has its raw reward there, 0 here"


def _policy_term(theirs: Settings, answer: Answer) -> None:
    low = _either(theirs, ACTOR + "clip_ratio_low")
    high = _either(theirs, ACTOR + "clip_ratio_high")
    bound = number(theirs.number(ACTOR + "clip_ratio_c"))
    both = f"low={number(low)}, high={number(high)}"
    pos, neg = theirs.number(ACTOR + "tau_pos"), theirs.number(ACTOR + "tau_neg")
    mode = str(theirs[ACTOR + "policy_loss.loss_mode"])
    gates = {
        "vanilla": ("token()", f"dual_clip({both}, bound={bound})", ""),
        "gspo": ("geomean_token_grad()", f"clip({both})", "gspo_token"),
        "cispo": ("token()", f"weight_cap(cap={number(1 + high)}, floor={number(max(1 - low, 0))})",
                  "cispo"),
        "sapo": ("token()", f"soft(tau_pos={number(pos)}, tau_neg={number(neg)})", "sapo"),
        "gpg": ("on_policy()", "score()", "gpg"),
        "geo_mean": ("token()", f"geometric_clip(limit={number(high)})", "gmpo"),
        "dppo_tv": (SAMPLED, f"tv_mask(delta={number(high)}, cap={bound})", "dppo"),
        "dppo_kl": (SAMPLED, f"kl_mask(delta={number(high)}, cap={bound})", "dppo_kl"),
        "dro": ("token()", "score()", "dro"),
        "clip_cov": ("token()", f"cov_clip({both}, {_covariances(theirs)})", "clip_cov"),
        "kl_cov": ("token()", "unclipped()", "kl_cov"),
    }  # fmt: skip
    ratio, gate, paper = gates.get(mode, gates["vanilla"])
    answer.settings["recipe.ratio"], answer.settings["recipe.gate"] = ratio, gate
    answer.paper = paper or answer.paper
    if mode not in gates:
        answer.missing[ACTOR + "policy_loss.loss_mode"] = f"{mode!r} is not known"
    if low != high and mode in ("geo_mean", "dppo_tv", "dppo_kl"):
        answer.missing[ACTOR + "clip_ratio_low"] = f"{mode} has one limit here, and two there"
    bypass = theirs["algorithm.rollout_correction.bypass_mode"]
    if mode in ("dppo_tv", "dppo_kl") and not bypass:
        answer.missing[ACTOR + "policy_loss.loss_mode"] = (
            f"{mode} measures from the learner before the step there, unless bypass_mode is on; "
            "here from the sampler, as the paper does"
        )
    if mode == "vanilla":
        answer.differs.append("verl's plain loss always has the dual clip (clip_ratio_c).")


def _covariances(theirs: Settings) -> str:
    names = {"fraction": "clip_cov_ratio", "cov_low": "clip_cov_lb", "cov_high": "clip_cov_ub"}
    told = {ours: theirs.number(f"{ACTOR}policy_loss.{name}") for ours, name in names.items()}
    return ", ".join(f"{ours}={number(value)}" for ours, value in told.items())


def _either(theirs: Settings, name: str) -> float:
    """Return a side's clip range: clip_ratio counts where the side is null."""
    value = theirs.given.get(name, theirs.defaults[name])
    return theirs.number(ACTOR + "clip_ratio") if value is None else theirs.number(name)


def _aggregation(theirs: Settings, answer: Answer) -> None:
    mode = str(theirs[ACTOR + "loss_agg_mode"])
    loss = str(theirs[ACTOR + "policy_loss.loss_mode"])
    if loss == "sapo":
        mode = "seq-mean-token-mean"  # whatever is set
    if mode == "seq-mean-token-sum-norm":
        scale = theirs[ACTOR + "loss_scale_factor"]
        length = theirs.whole("data.max_response_length") if scale is None else int(scale)
        answer.settings["recipe.aggregation"] = f"seq_mean_token_sum_norm(length={length})"
        if scale is None:
            answer.differs.append(
                "Without loss_scale_factor verl divides by the padded width, which varies from "
                "batch to batch; here it is the most tokens of an answer."
            )
        return
    if loss == "geo_mean":
        answer.settings["recipe.aggregation"] = "seq_mean_token_mean()"
        return
    if mode not in MEANS:
        answer.missing[ACTOR + "loss_agg_mode"] = f"{mode!r} is not known"
    answer.settings["recipe.aggregation"] = MEANS.get(mode, MEANS["token-mean"])
    if loss == "gspo" and mode == "token-mean":
        answer.differs.append(
            "With token-mean a sequence weighs by its length: that is not GSPO any more; verl's "
            "own advice is seq-mean-token-mean."
        )


def _correction(theirs: Settings, answer: Answer) -> None:
    prefix = "algorithm.rollout_correction."
    kind = theirs[prefix + "rollout_is"]
    text = str(theirs[prefix + "rollout_is_threshold"])
    low, _, high = text.rpartition("_")
    made = {
        "token": f"icepop(low={low}, high={high})" if low else f"tis_token(cap={text})",
        "sequence": f"tis_sequence(cap={high})",
    }
    answer.settings["recipe.correction"] = made.get(str(kind), "")
    if theirs[prefix + "bypass_mode"]:
        answer.settings["recipe.correction"] = ""
        ratio = answer.settings["recipe.ratio"].partition("(")[0]
        if ratio != "on_policy":
            answer.settings["recipe.ratio"] = f"{ratio}(anchor='sampler')"
        if str(theirs[prefix + "loss_type"]) != "ppo_clip":
            answer.missing[prefix + "loss_type"] = "bypass mode is read with ppo_clip alone"
    if theirs[prefix + "rollout_rs"] is not None:
        answer.missing[prefix + "rollout_rs"] = (
            "rejection: mis_sequence, mis_geometric, mask_token and mask_outliers are near it; "
            "verl compares 1/ρ with its limits for token_k1"
        )


def _kl(theirs: Settings, answer: Answer) -> None:
    penalties = []
    if theirs[ACTOR + "use_kl_loss"]:
        kind = str(theirs[ACTOR + "kl_loss_type"])
        coef = number(theirs.number(ACTOR + "kl_loss_coef"))
        if kind not in ESTIMATORS:
            answer.missing[ACTOR + "kl_loss_type"] = f"{kind!r}: k1, k2 and k3 are known"
        penalties.append(f"kl(coef={coef}, estimator='{ESTIMATORS.get(kind, 'k3')}')")
    if entropy := theirs.number(ACTOR + "entropy_coeff"):
        penalties.append(f"entropy_bonus(coef={number(entropy)})")
    if str(theirs[ACTOR + "policy_loss.loss_mode"]) == "dro":
        beta = theirs[ACTOR + "policy_loss.dro_beta"]
        if beta is None:
            answer.missing[ACTOR + "policy_loss.dro_beta"] = "verl requires it; 0.1 stands here"
        penalties.append(f"proximal(beta={number(float(0.1 if beta is None else beta))})")
    if str(theirs[ACTOR + "policy_loss.loss_mode"]) == "kl_cov":
        coef = number(theirs.number(ACTOR + "policy_loss.ppo_kl_coef"))
        share = number(theirs.number(ACTOR + "policy_loss.kl_cov_ratio"))
        penalties.append(f"cov_drift(coef={coef}, fraction={share})")
    answer.settings["recipe.penalty"] = ", ".join(penalties)
    answer.settings["recipe.shaping"] = ""
    if theirs["algorithm.use_kl_in_reward"]:
        coef = number(theirs.number("algorithm.kl_ctrl.kl_coef"))
        kind = ESTIMATORS.get(str(theirs["algorithm.kl_penalty"]), "k1")
        per = "token" if "recipe.auxiliary" in answer.settings else "sequence"
        answer.settings["recipe.shaping"] = f"kl_per_{per}(coef={coef}, estimator='{kind}')"
        if str(theirs["algorithm.kl_ctrl.type"]) != "fixed":
            answer.missing["algorithm.kl_ctrl.type"] = (
                "the coefficient stays as it is, unless train.coefs has a kl_target for it"
            )


def _filters(theirs: Settings, answer: Answer) -> None:
    if theirs["algorithm.filter_groups.enable"]:
        answer.settings["recipe.filter"] = "zero_variance()"
        most = theirs.whole("algorithm.filter_groups.max_num_gen_batches")
        answer.settings["refills"] = "until full" if most <= 0 else most
    if theirs["algorithm.use_pf_ppo"]:
        answer.missing["algorithm.use_pf_ppo"] = (
            "take recipe.aggregation=token_mean_of_drawn(); there the critic draws, too"
        )
    for prefix in ("reward_model.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg"):
        if theirs[f"{prefix}.enable"]:
            _overlong(theirs, answer, prefix)


def _overlong(theirs: Settings, answer: Answer, prefix: str) -> None:
    longest, cache = theirs.whole("data.max_response_length"), theirs.whole(f"{prefix}.len")
    penalty = f"soft_overlong(max_length={longest}, cache={cache})"
    before = answer.settings["recipe.shaping"]
    answer.settings["recipe.shaping"] = f"{before}, {penalty}" if before else penalty
    if theirs.number(f"{prefix}.penalty_factor") != 1.0:
        answer.missing[f"{prefix}.penalty_factor"] = "the penalty goes to −1"


def _batch(theirs: Settings, answer: Answer, estimator: str) -> None:
    prompts, group = theirs.whole("data.train_batch_size"), theirs.whole(ROLLOUT + "n")
    updates = max(prompts // theirs.whole(ACTOR + "ppo_mini_batch_size"), 1)
    answer.settings |= {
        "prompts_per_step": prompts,
        "group_size": group,
        "recipe.schedule": f"joint(updates={updates})",
        "engine.max_tokens": theirs.whole("data.max_response_length"),
        "engine.temperature": number(theirs.number(ROLLOUT + "temperature")),
        "optim.learning_rate": repr(theirs.number(ACTOR + "optim.lr")),
        "optim.weight_decay": number(theirs.number(ACTOR + "optim.weight_decay")),
        "optim.clip_norm": number(theirs.number(ACTOR + "grad_clip")),
    }
    if theirs.whole(ACTOR + "ppo_epochs") > 1:
        answer.missing[ACTOR + "ppo_epochs"] = (
            "whole passes over a batch; here every answer is learned from once, in "
            "recipe.schedule.updates parts"
        )
    steps = theirs["trainer.total_training_steps"]
    if steps is not None:
        answer.settings["steps"] = int(steps)
    _course(theirs, answer, steps)
    if theirs.number(ROLLOUT + "top_p") < 1 or theirs.number(ROLLOUT + "top_k") > 0:
        answer.missing["top_p, top_k"] = (
            "the learner scores the whole vocabulary; sample from all tokens, or take a recipe "
            "that corrects for it, such as tis"
        )


def _course(theirs: Settings, answer: Answer, steps: Any) -> None:
    course = str(theirs[ACTOR + "optim.lr_scheduler_type"])
    answer.settings["optim.schedule"] = course if course in ("constant", "cosine") else "constant"
    if course not in ("constant", "cosine"):
        answer.missing[ACTOR + "optim.lr_scheduler_type"] = f"{course!r} is not known"
    warmup = theirs.whole(ACTOR + "optim.lr_warmup_steps")
    share = theirs.number(ACTOR + "optim.lr_warmup_steps_ratio")
    if warmup < 0:
        warmup = round(share * int(steps)) if steps is not None else 0
    answer.settings["optim.warmup_steps"] = warmup
