"""prime-rl's TOML: configs/algorithm.py, configs/trainer.py and trainer/rl/loss.py."""

from __future__ import annotations

from typing import Any

from groupwise.explain.peers.answer import Answer, Settings, number

VERSION = "prime-rl at 559b447"
ALGORITHM, LOSS, OPTIM = "orchestrator.algo.", "trainer.loss.", "trainer.optim."
SAMPLING = "orchestrator.train.sampling."
DEFAULTS: dict[str, Any] = {
    ALGORITHM + "type": "grpo", LOSS + "type": "default", LOSS + "dppo_mask_low": 0.2,
    LOSS + "dppo_mask_high": 0.2, LOSS + "ipo_threshold": 0.1, LOSS + "adv_tau": 1.0,
    LOSS + "kl_tau": 1e-3, OPTIM + "type": "adamw", OPTIM + "lr": 1e-6,
    OPTIM + "weight_decay": 0.01, OPTIM + "max_norm": 1.0, OPTIM + "betas1": 0.9,
    OPTIM + "betas2": 0.999,
    "trainer.scheduler.type": "constant", "trainer.scheduler.warmup_steps": 10,
    "orchestrator.batch_size": 128, "orchestrator.group_size": 1, "max_steps": None,
    SAMPLING + "max_completion_tokens": None, SAMPLING + "temperature": 1.0,
    "trainer.enable_router_replay": False, ALGORITHM + "length_penalty.type": "linear",
    ALGORITHM + "length_penalty.num_output_tokens_weight": 0.25,
    ALGORITHM + "length_penalty.num_input_tokens_weight": 0.1,
    ALGORITHM + "length_penalty.num_turns_weight": 0.1,
}  # fmt: skip
ADVANTAGES = {
    "grpo": "group_mean()",
    "max_rl": "maxrl()",
    "echo": "group_mean()",
    "rae": "role_moving_mean()",
}
ELSEWHERE = {
    "opd": "on-policy distillation: recipe `distill` with teacher.path",
    "opsd": "distillation from the policy that has more to read: recipe `distill`, teacher.path = "
    '"policy" and teacher.prompt',
    "sft": "learning the data's own answers: recipe `sft`",
    "hierarchical_grpo": "groups by role and episode",
}


def prime_rl(theirs: Settings) -> Answer:
    """Answer a configuration of prime-rl's trainer and orchestrator."""
    kind = str(theirs[ALGORITHM + "type"])
    answer = Answer(VERSION, paper={"max_rl": "maxrl", "rae": "rae"}.get(kind, "grpo"))
    answer.settings["recipe.name"] = "grpo@prime-rl"
    answer.settings["recipe.filter"] = ""
    answer.settings["recipe.advantage"] = ADVANTAGES.get(kind, "group_mean()")
    if kind not in ADVANTAGES:
        answer.missing[ALGORITHM + "type"] = ELSEWHERE.get(kind, f"{kind!r} is not known")
    if kind == "echo":
        answer.missing[ALGORITHM + "roles"] = "cross-entropy on the environment's tokens"
    _loss(theirs, answer)
    _length(theirs, answer)
    _batch(theirs, answer)
    return answer


def _loss(theirs: Settings, answer: Answer) -> None:
    kind = str(theirs[LOSS + "type"])
    low, high = theirs.number(LOSS + "dppo_mask_low"), theirs.number(LOSS + "dppo_mask_high")
    limit = theirs.number(LOSS + "ipo_threshold")
    gates = {
        "default": f"tv_one_sided(low={number(low)}, high={number(high)})",
        "ipo": f"tv_symmetric(delta={number(limit)})",
    }
    answer.settings |= {
        "recipe.ratio": "token(anchor='sampler')",
        "recipe.gate": gates.get(kind, gates["default"]),
        "recipe.aggregation": "token_mean_batch()",
        "recipe.penalty": "",
    }
    if tau := theirs.number(LOSS + "kl_tau"):
        answer.settings["recipe.penalty"] = f"drift(coef={number(tau)})"
    if (scale := theirs.number(LOSS + "adv_tau")) != 1:
        answer.settings["recipe.advantage"] += f", scale(by={number(scale)})"
    if kind not in gates:
        answer.missing[LOSS + "type"] = f"{kind!r}: a loss of one's own is a gate here"
    if kind == "ipo":
        answer.differs.append("Its `ipo` is a trust region and no kin of IPO for pairs.")


def _length(theirs: Settings, answer: Answer) -> None:
    prefix = ALGORITHM + "length_penalty"
    if not any(name.startswith(prefix) for name in theirs.given):
        return
    told = {
        "output": "num_output_tokens_weight",
        "context": "num_input_tokens_weight",
        "turns": "num_turns_weight",
    }
    weights = {ours: theirs.number(f"{prefix}.{name}") for ours, name in told.items()}
    given = ", ".join(f"{ours}={number(weight)}" for ours, weight in weights.items())
    answer.settings["recipe.shaping"] = f"linear_length_penalty({given})"


def _batch(theirs: Settings, answer: Answer) -> None:
    rows, group = theirs.whole("orchestrator.batch_size"), theirs.whole("orchestrator.group_size")
    answer.settings |= {
        "prompts_per_step": max(rows // max(group, 1), 1),
        "group_size": group,
        "optim.learning_rate": repr(theirs.number(OPTIM + "lr")),
        "optim.weight_decay": number(theirs.number(OPTIM + "weight_decay")),
        "optim.clip_norm": number(theirs.number(OPTIM + "max_norm")),
        "optim.beta1": number(theirs.number(OPTIM + "betas1")),
        "optim.beta2": number(theirs.number(OPTIM + "betas2")),
        "engine.temperature": number(theirs.number(SAMPLING + "temperature")),
    }
    if theirs["max_steps"] is not None:
        answer.settings["steps"] = theirs.whole("max_steps")
    if theirs[SAMPLING + "max_completion_tokens"] is not None:
        answer.settings["engine.max_tokens"] = theirs.whole(SAMPLING + "max_completion_tokens")
    if str(theirs[OPTIM + "type"]) != "adamw":
        answer.missing[OPTIM + "type"] = "AdamW is the optimizer here"
    course = str(theirs["trainer.scheduler.type"])
    answer.settings["optim.schedule"] = (
        course if course in ("linear", "cosine", "constant") else "constant"
    )
    if course != "constant":
        answer.settings["optim.warmup_steps"] = theirs.whole("trainer.scheduler.warmup_steps")
    answer.differs.append(
        "prime-rl trains behind its sampler (max_off_policy_steps); here sampler and learner hold "
        "the same weights, and the anchor is the sampler all the same."
    )
