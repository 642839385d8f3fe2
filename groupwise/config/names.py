"""Names of settings that do not exist, and what their writer probably meant."""

from __future__ import annotations

from difflib import SequenceMatcher

from groupwise.composition import PAIR_SLOTS, RECIPE_SLOTS
from groupwise.config.values import FIELDS
from groupwise.errors import ConfigError

# What TRL, verl and others call it -> what it is here. Only for advice: names differ because
# meanings do (a batch size there may count completions, here prompts), so nothing is translated.
ELSEWHERE = {
    "num_generations": "group_size",
    "n": "group_size",
    "n_samples_per_prompt": "group_size",
    "per_device_train_batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "generation_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "optim.micro_tokens",
    "ppo_max_token_len_per_gpu": "optim.micro_tokens",
    "ppo_micro_batch_size_per_gpu": "optim.micro_tokens",
    "num_iterations": "recipe.schedule.updates",
    "ppo_mini_batch_size": "recipe.schedule.updates",
    "steps_per_generation": "recipe.schedule.updates",
    "max_steps": "steps",
    "num_train_epochs": "steps",
    "total_epochs": "steps",
    "total_training_steps": "steps",
    "algorithm": "recipe",
    "adv_estimator": "recipe",
    "loss_type": "recipe",
    "loss_agg_mode": "recipe.aggregation",
    "scale_rewards": "recipe.advantage",
    "beta": "recipe.penalty.coef",
    "kl_loss_coef": "recipe.penalty.coef",
    "kl_coef": "recipe.shaping.coef",
    "entropy_coeff": "recipe.penalty",
    "epsilon": "recipe.gate.low",
    "clip_ratio": "recipe.gate.low",
    "clip_ratio_low": "recipe.gate.low",
    "epsilon_high": "recipe.gate.high",
    "clip_ratio_high": "recipe.gate.high",
    "lr": "optim.learning_rate",
    "learning_rate": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "gradient_checkpointing": "optim.recompute",
    "max_completion_length": "engine.max_tokens",
    "max_response_length": "engine.max_tokens",
    "max_new_tokens": "engine.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "mask_truncated_completions": "overlong",
    "reward_funcs": "reward.parts",
    "reward_weights": "reward.parts",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "train_files": "data.train",
    "dataset_name": "data.train",
    "val_files": "data.eval",
    "sync_ref_model": "reference.update",
    "ref_model_mixup_alpha": "reference.update",
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
}


def unknown(key: str) -> ConfigError:
    """There is no such setting; the nearest is this one."""
    return ConfigError(f"There is no setting {key!r}. {_advice(key)}")


def _advice(key: str) -> str:
    leaf = key.rpartition(".")[2]
    if leaf in ELSEWHERE:
        return f"What other tools call {leaf!r} is {ELSEWHERE[leaf]!r} here."
    if key.partition(".")[0] in (*RECIPE_SLOTS, *PAIR_SLOTS):
        return f"Slots belong to the recipe: did you mean 'recipe.{key}'?"
    scores = {name: _likeness(key, leaf, name) for name in (*FIELDS, "recipe")}
    best = max(scores.values())
    if best < 0.6:
        return "`groupwise train --dry-run` prints all settings."
    close = [name for name, score in scores.items() if score > best - 0.05][:3]
    return f"Did you mean {' or '.join(map(repr, close))}?"


def _likeness(key: str, leaf: str, name: str) -> float:
    """Of the whole names or, a little less, of their ends: people forget the table."""
    whole = SequenceMatcher(None, key, name).ratio()
    end = SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
    return max(whole, 0.9 * end)
