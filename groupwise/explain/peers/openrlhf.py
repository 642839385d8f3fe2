"""OpenRLHF's flags: openrlhf/cli/train_ppo_ray.py, models/loss.py and ppo_utils."""

from __future__ import annotations

from typing import Any

from groupwise.explain.peers.answer import Answer, Settings, number

VERSION = "OpenRLHF 0.11.2"
DEFAULTS: dict[str, Any] = {
    "algo.advantage.estimator": "gae", "algo.advantage.gamma": 1.0, "algo.advantage.lambd": 1.0,
    "algo.advantage.no_std_norm": False, "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_threshold": [0.5, 5.0],
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k1", "algo.kl.use_loss": False,
    "algo.kl.target": None, "algo.dynamic_filtering_enable": False,
    "actor.eps_clip": 0.2, "actor.eps_clip_low_high": None, "actor.dual_clip": None,
    "actor.policy_loss_type": "ppo", "actor.entropy_coef": 0.0, "actor.aux_loss_coef": 0.0,
    "actor.loss_agg_mode": "token-mean",
    "actor.adam.lr": 1e-6, "actor.adam.betas": [0.9, 0.95], "actor.adam.eps": 1e-8,
    "actor.adam.weight_decay": 0.0, "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03, "actor.min_lr_ratio": 0.1, "actor.max_norm": 1.0,
    "actor.optim": "adam", "critic.adam.lr": 9e-6, "critic.value_clip": 0.5,
    "critic.freezing_steps": -1, "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1,
    "rollout.max_new_tokens": 1024, "rollout.temperature": 1.0, "rollout.top_p": 1.0,
    "train.batch_size": 128, "train.max_epochs": 1, "train.seed": 42,
    "reward.clip_range": [-10, 10], "reward.overlong_buffer_len": None,
    "reward.overlong_penalty_factor": 1.0, "reward.stop_properly_penalty_coef": None,
}  # fmt: skip
# What earlier versions called them, without tables.
EARLIER = {
    "advantage_estimator": "algo.advantage.estimator", "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd", "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "init_kl_coef": "algo.kl.init_coef", "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss", "kl_target": "algo.kl.target",
    "dynamic_filtering": "algo.dynamic_filtering_enable", "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high", "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type", "entropy_loss_coef": "actor.entropy_coef",
    "actor_learning_rate": "actor.adam.lr", "critic_learning_rate": "critic.adam.lr",
    "value_clip": "critic.value_clip", "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens", "temperature": "rollout.temperature",
    "top_p": "rollout.top_p", "train_batch_size": "train.batch_size",
    "max_epochs": "train.max_epochs", "seed": "train.seed", "max_norm": "actor.max_norm",
    "reward_clip_range": "reward.clip_range", "overlong_buffer_len": "reward.overlong_buffer_len",
    "aux_loss_coef": "actor.aux_loss_coef", "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "lr_scheduler": "actor.lr_scheduler", "l2": "actor.adam.weight_decay",
    "freezing_actor_steps": "critic.freezing_steps",
}  # fmt: skip
WHITEN = "whiten_tokens(ddof=0, eps_in_var=1e-08)"
PAPERS = {"gae": "ppo", "reinforce": "reinforce_pp", "reinforce_baseline": "reinforce_pp_baseline",
          "rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo"}  # fmt: skip


def openrlhf(theirs: Settings) -> Answer:
    """Answer the flags of OpenRLHF's PPO script."""
    estimator = str(theirs["algo.advantage.estimator"])
    answer = Answer(VERSION, paper=PAPERS.get(estimator, "grpo"))
    answer.settings["recipe.name"] = "ppo" if estimator == "gae" else "grpo@openrlhf"
    if estimator not in PAPERS:
        answer.missing["algo.advantage.estimator"] = f"{estimator!r} is not known"
    _advantage(theirs, answer, estimator)
    _policy_term(theirs, answer)
    _correction(theirs, answer)
    _reward(theirs, answer)
    _batch(theirs, answer)
    return answer


def _advantage(theirs: Settings, answer: Answer, estimator: str) -> None:
    gamma, coef = theirs.number("algo.advantage.gamma"), theirs.number("algo.kl.init_coef")
    kind = str(theirs["algo.kl.estimator"])
    inside = coef if not theirs["algo.kl.use_loss"] else 0.0
    answer.settings["recipe.penalty"] = (
        f"kl(coef={number(coef)}, estimator='{kind}')" if coef and not inside else ""
    )
    if theirs["algo.kl.target"] is not None:
        answer.missing["algo.kl.target"] = "the coefficient of KL stays as it is"
    if inside and kind != "k1" and estimator != "gae":
        answer.missing["algo.kl.estimator"] = "behind a group's advantage KL is k1 here"
    if estimator == "gae":
        _gae(theirs, answer, gamma, inside, kind)
        return
    baseline = {
        "reinforce": "raw()",
        "rloo": "leave_one_out()",
        "reinforce_baseline": "group_mean()",
        "dr_grpo": "group_mean()",
        "group_norm": "group_zscore(ddof=1, eps=1e-09)",
    }.get(estimator, "group_zscore(ddof=1, eps=1e-09)")
    chain = [baseline]
    low, high = theirs["reward.clip_range"] or (-10, 10)
    if -float(low) == float(high):
        chain.append(f"limit(bound={number(float(high))})")
    else:
        answer.missing["reward.clip_range"] = "the limits are the same on both sides here"
    if inside:
        chain.append(f"minus_kl_to_go(coef={number(inside)}, bound=10.0)")
    if estimator in ("reinforce", "reinforce_baseline"):
        if theirs["algo.advantage.no_std_norm"]:
            answer.missing["algo.advantage.no_std_norm"] = "tokens are centred and scaled together"
        chain.append(WHITEN)
    answer.settings["recipe.advantage"] = ", ".join(chain)
    if gamma != 1 and estimator == "reinforce":
        answer.missing["algo.advantage.gamma"] = "a reward at the end is not discounted back here"


def _gae(theirs: Settings, answer: Answer, gamma: float, inside: float, kind: str) -> None:
    both = f"gamma={number(gamma)}, lam={number(theirs.number('algo.advantage.lambd'))}"
    limit = number(theirs.number("critic.value_clip"))
    answer.settings |= {
        "recipe.shaping": f"kl_per_token(coef={number(inside)}, estimator='{kind}')"
        if inside
        else "",
        "recipe.advantage": f"gae({both}), {WHITEN}",
        "recipe.auxiliary": f"value_loss(limit={limit}, {both})",
        "critic.learning_rate": repr(theirs.number("critic.adam.lr")),
        "critic.alone_steps": max(theirs.whole("critic.freezing_steps"), 0),
    }


def _policy_term(theirs: Settings, answer: Answer) -> None:
    pair = theirs["actor.eps_clip_low_high"]
    if not (isinstance(pair, list) and len(pair) == 2):
        pair = [theirs.number("actor.eps_clip")] * 2
    both = f"low={number(float(pair[0]))}, high={number(float(pair[1]))}"
    dual = theirs["actor.dual_clip"]
    gate = f"clip({both})" if dual is None else f"dual_clip({both}, bound={number(float(dual))})"
    sequence = str(theirs["actor.policy_loss_type"]) == "gspo"
    mode = str(theirs["actor.loss_agg_mode"])
    token = mode == "token-mean" and not sequence
    answer.paper = "gspo" if sequence else answer.paper
    answer.settings |= {
        "recipe.ratio": "sequence_geomean()" if sequence else "token()",
        "recipe.gate": gate,
        "recipe.aggregation": "token_mean_batch()" if token else "seq_mean_token_mean()",
    }
    if mode not in ("token-mean", "seq-mean-token-mean"):
        answer.missing["actor.loss_agg_mode"] = f"{mode!r} is not known"
    if entropy := theirs["actor.entropy_coef"]:
        before = answer.settings["recipe.penalty"]
        bonus = f"entropy_bonus(coef={number(float(entropy))})"
        answer.settings["recipe.penalty"] = f"{before}, {bonus}" if before else bonus
    if weight := theirs.number("actor.aux_loss_coef"):
        before = answer.settings.get("recipe.auxiliary", "")
        loss = f"balance(weight={number(weight)})"
        answer.settings["recipe.auxiliary"] = f"{before}, {loss}" if before else loss


def _correction(theirs: Settings, answer: Answer) -> None:
    answer.settings["recipe.correction"] = ""
    if not theirs["algo.advantage.is_correction_enable"]:
        return
    limits = theirs["algo.advantage.is_correction_threshold"]
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (0.5, 5.0)
    both = f"low={number(float(low))}, high={number(float(high))}"
    kind = str(theirs["algo.advantage.is_correction_type"])
    made = {"tis": f"tis_clamped({both})", "icepop": f"icepop({both})",
            "seq-mask-tis": f"mis_geometric({both})"}  # fmt: skip
    if str(theirs["actor.policy_loss_type"]) == "gspo":
        answer.settings["recipe.ratio"] = "sequence_geomean(anchor='sampler')"
    elif kind in made:
        answer.settings["recipe.correction"] = made[kind]
    else:
        answer.missing["algo.advantage.is_correction_type"] = f"{kind!r} is not known"


def _reward(theirs: Settings, answer: Answer) -> None:
    answer.settings["recipe.filter"] = (
        "zero_variance()" if theirs["algo.dynamic_filtering_enable"] else ""
    )
    if (cache := theirs["reward.overlong_buffer_len"]) is not None:
        longest = theirs.whole("rollout.max_new_tokens")
        penalty = f"soft_overlong(max_length={longest}, cache={int(cache)})"
        before = answer.settings.get("recipe.shaping", "")
        answer.settings["recipe.shaping"] = f"{before}, {penalty}" if before else penalty
        if theirs.number("reward.overlong_penalty_factor") != 1:
            answer.missing["reward.overlong_penalty_factor"] = "the penalty goes to −1"
    if (coef := theirs["reward.stop_properly_penalty_coef"]) is not None:
        value = number(float(coef))
        slot = (
            f"cut_off_reward(reward={value})" if float(coef) < 0 else f"stop_properly(coef={value})"
        )
        before = answer.settings.get("recipe.shaping", "")
        answer.settings["recipe.shaping"] = f"{before}, {slot}" if before else slot


def _batch(theirs: Settings, answer: Answer) -> None:
    prompts, group = (
        theirs.whole("rollout.batch_size"),
        theirs.whole("rollout.n_samples_per_prompt"),
    )
    updates = max(prompts * group // theirs.whole("train.batch_size"), 1)
    first, second = [*theirs["actor.adam.betas"], 0.9, 0.95][:2]
    answer.settings |= {
        "prompts_per_step": prompts,
        "group_size": group,
        "recipe.schedule": f"joint(updates={updates})",
        "engine.max_tokens": theirs.whole("rollout.max_new_tokens"),
        "engine.temperature": number(theirs.number("rollout.temperature")),
        "optim.learning_rate": repr(theirs.number("actor.adam.lr")),
        "optim.weight_decay": number(theirs.number("actor.adam.weight_decay")),
        "optim.beta1": number(float(first)),
        "optim.beta2": number(float(second)),
        "optim.clip_norm": number(theirs.number("actor.max_norm")),
        "seed": theirs.whole("train.seed"),
    }
    if theirs.whole("train.max_epochs") > 1:
        answer.missing["train.max_epochs"] = (
            "whole passes over a batch; here every answer is learned from once"
        )
    if str(theirs["actor.optim"]) != "adam":
        answer.missing["actor.optim"] = "AdamW is the optimizer here"
    _course(theirs, answer)


def _course(theirs: Settings, answer: Answer) -> None:
    course = str(theirs["actor.lr_scheduler"])
    kind = course.removesuffix("_with_min_lr").removesuffix("_with_warmup")
    known = kind in ("cosine", "linear", "constant")
    answer.settings["optim.schedule"] = kind if known else "constant"
    if not known:
        answer.missing["actor.lr_scheduler"] = f"{course!r} is not known"
    if course.endswith("_with_min_lr"):
        answer.settings["optim.min_share"] = number(theirs.number("actor.min_lr_ratio"))
    share = number(theirs.number("actor.lr_warmup_ratio"))
    answer.differs.append(
        f"Its warm-up is a share ({share}) of all steps: set optim.warmup_steps to that many."
    )
