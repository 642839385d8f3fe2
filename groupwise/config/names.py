"""Names of settings that do not exist, and what their writer probably meant."""

from __future__ import annotations

from difflib import SequenceMatcher

from groupwise.config.values import FIELDS
from groupwise.errors import ConfigError
from groupwise.methods.slots import KINDS

# What TRL, verl and others call it -> what it is here. Only for advice: names differ because
# meanings do (a batch size there may count completions, here prompts), so nothing is translated.
# docs/migrate.md says what differs; a test holds the page and these tables together.
ELSEWHERE = {
    # the batch and the run
    "num_generations": "group_size",
    "n": "group_size",
    "n_samples_per_prompt": "group_size",
    "per_device_train_batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "gen_batch_size": "prompts_per_step",
    "rollout_batch_size": "prompts_per_step",
    "generation_batch_size": "prompts_per_step",
    "gradient_accumulation_steps": "optim.micro_tokens",
    "ppo_max_token_len_per_gpu": "optim.micro_tokens",
    "ppo_micro_batch_size_per_gpu": "optim.micro_tokens",
    "log_prob_micro_batch_size_per_gpu": "optim.micro_tokens",
    "num_iterations": "recipe.schedule.updates",
    "ppo_epochs": "recipe.schedule.updates",
    "ppo_mini_batch_size": "recipe.schedule.updates",
    "steps_per_generation": "recipe.schedule.updates",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "total_epochs": "epochs",
    "total_training_steps": "steps",
    # the loss
    "algorithm": "recipe",
    "adv_estimator": "recipe",
    "loss_type": "recipe",
    "loss_mode": "recipe",
    "loss_agg_mode": "recipe.aggregation",
    "loss_scale_factor": "recipe.aggregation.length",
    "scale_rewards": "recipe.advantage",
    "norm_adv_by_std_in_grpo": "recipe.advantage",
    "multi_objective_aggregation": "recipe.advantage",
    "importance_sampling_level": "recipe.ratio",
    "epsilon": "recipe.gate.low",
    "clip_ratio": "recipe.gate.low",
    "clip_ratio_low": "recipe.gate.low",
    "epsilon_high": "recipe.gate.high",
    "clip_ratio_high": "recipe.gate.high",
    "delta": "recipe.gate.bound",
    "clip_ratio_c": "recipe.gate.bound",
    "sapo_temperature_pos": "recipe.gate.tau_pos",
    "sapo_temperature_neg": "recipe.gate.tau_neg",
    "vespo_k_pos": "recipe.gate.k_pos",
    "vespo_lambda_pos": "recipe.gate.lambda_pos",
    "vespo_k_neg": "recipe.gate.k_neg",
    "vespo_lambda_neg": "recipe.gate.lambda_neg",
    "beta": "recipe.penalty.coef",
    "kl_loss_coef": "recipe.penalty.coef",
    "use_kl_loss": "recipe.penalty",
    "kl_loss_type": "recipe.penalty.estimator",
    "use_bias_correction_kl": "recipe.penalty",
    "use_kl_in_reward": "recipe.shaping",
    "kl_coef": "recipe.shaping.coef",
    "kl_penalty": "recipe.shaping.estimator",
    "entropy_coeff": "recipe.penalty",
    "entropy_coef": "recipe.penalty",
    "router_aux_loss_coef": "recipe.auxiliary",
    "filter_groups": "recipe.filter",
    "max_num_gen_batches": "refills",
    "rollout_is": "recipe.correction",
    "rollout_is_threshold": "recipe.correction.cap",
    "vllm_importance_sampling_correction": "recipe.correction",
    "vllm_importance_sampling_mode": "recipe.correction",
    "vllm_importance_sampling_clip_max": "recipe.correction.high",
    "vllm_importance_sampling_cap": "recipe.correction.high",
    "vllm_importance_sampling_clip_min": "recipe.correction.low",
    "mask_truncated_completions": "overlong",
    "top_entropy_quantile": "recipe.correction.fraction",
    "off_policy_mask_threshold": "recipe.correction.delta",
    "critic_warmup": "critic.alone_steps",
    "max_tool_calling_iterations": "turns.max",
    "multi_turn": "turns.environment",
    "tools": "turns.tools",
    "overlong_buffer": "overlong",
    "sync_ref_model": "reference.update",
    "ref_model_mixup_alpha": "reference.update",
    "ref_model_sync_steps": "reference.update",
    # the update
    "lr": "optim.learning_rate",
    "learning_rate": "optim.learning_rate",
    "lr_scheduler_type": "optim.schedule",
    "warmup_style": "optim.schedule",
    "warmup_ratio": "optim.warmup_steps",
    "lr_warmup_steps": "optim.warmup_steps",
    "lr_warmup_steps_ratio": "optim.warmup_steps",
    "adam_beta1": "optim.beta1",
    "adam_beta2": "optim.beta2",
    "adam_epsilon": "optim.eps",
    "betas": "optim.beta1",
    "max_grad_norm": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "clip_grad": "optim.clip_norm",
    "gradient_checkpointing": "optim.recompute",
    "enable_gradient_checkpointing": "optim.recompute",
    # sampling
    "max_completion_length": "engine.max_tokens",
    "max_response_length": "engine.max_tokens",
    "response_length": "engine.max_tokens",
    "max_new_tokens": "engine.max_tokens",
    "generation_kwargs": "engine.stop",
    "max_num_seqs": "engine.slots",
    # data, reward, model
    "train_files": "data.train",
    "dataset_name": "data.train",
    "train_dataset": "data.train",
    "val_files": "data.eval",
    "eval_dataset": "data.eval",
    "max_prompt_length": "data.max_prompt_tokens",
    "filter_overlong_prompts": "data.max_prompt_tokens",
    "truncation": "data.max_prompt_tokens",
    "shuffle_dataset": "data.shuffle",
    "reward_funcs": "reward.parts",
    "reward_weights": "reward.parts",
    "custom_reward_function": "reward.parts",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "torch_dtype": "model.dtype",
    "bf16": "model.dtype",
    "model_init_kwargs": "model.dtype",
    "use_cpu": "model.device",
    # adapters
    "peft_config": "adapter.rank",
    "use_peft": "adapter.rank",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.targets",
    "target_modules": "adapter.targets",
    "use_rslora": "adapter.rslora",
    "lora_adapter_path": "adapter.path",
    "load_in_4bit": "model.quantize",
    "load_in_8bit": "model.quantize",
    "use_bnb_nested_quant": "model.quantize",
    "bnb_4bit_quant_type": "model.quantize",
    # evaluation and checkpoints
    "eval_steps": "eval.every",
    "test_freq": "eval.every",
    "num_generations_eval": "eval.samples",
    "val_kwargs": "eval.temperature",
    "val_max_samples": "eval.tasks",
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
}

_NATIVE = (
    "the native engine samples from the learner's own weights; servers are named by engine.backend "
    "and engine.urls, and have their own flags (engines.md)"
)
_RANKS = (
    "torchrun says how many processes there are (scale.md); each samples by itself, and passes "
    "are dealt by tokens"
)
_FILES = (
    "everything is a file of the run: metrics.jsonl, rollouts/, events.jsonl; watch.mirrors tells "
    "trackers, too"
)
NO_ENTROPY_TARGET = "the entropy bonus is constant, unless train.coefs has an entropy_target"
# What has no counterpart, and why.
NOWHERE = {
    "use_vllm": _NATIVE,
    "vllm_mode": _NATIVE,
    "vllm_model_impl": _NATIVE,
    "vllm_enable_sleep_mode": _NATIVE,
    "vllm_structured_outputs_regex": "a forced format would sample from another distribution than "
    "the learner scores; reward the format instead",
    "vllm_server_base_url": _NATIVE,
    "vllm_server_host": _NATIVE,
    "vllm_server_port": _NATIVE,
    "vllm_server_timeout": _NATIVE,
    "vllm_group_port": _NATIVE,
    "vllm_gpu_memory_utilization": _NATIVE,
    "gpu_memory_utilization": _NATIVE,
    "vllm_max_model_length": _NATIVE,
    "vllm_tensor_parallel_size": _RANKS,
    "tensor_model_parallel_size": _RANKS,
    "n_gpus_per_node": _RANKS,
    "nnodes": _RANKS,
    "strategy": _RANKS,
    "deepspeed": _RANKS,
    "ds3_gather_for_generation": _RANKS,
    "balance_batch": _RANKS,
    "use_transformers_continuous_batching": "batching is always continuous",
    "transformers_continuous_batching_config": "batching is always continuous",
    "use_transformers_paged": "batching is always continuous",
    "cache_implementation": _NATIVE,
    "calculate_log_probs": "the sampler's log-probabilities are always recorded",
    "min_p": "the learner scores the whole vocabulary, and can't match it",
    "repetition_penalty": "the learner scores the whole vocabulary, and can't match it",
    "chat_template_kwargs": "the template is rendered as the model has it",
    "use_remove_padding": "sequences are always packed without padding",
    "use_dynamic_bsz": "micro-batches always go by tokens",
    "pad_to_multiple_of": "sequences are always packed without padding",
    "disable_dropout": "only an adapter has dropout, where adapter.dropout asks for it",
    "cast_lm_head_to_fp32": "the head always sums in float32",
    "remove_unused_columns": "all columns reach the reward",
    "trust_remote_code": "code that comes with a model is never run",
    "reward_fn_key": "all columns reach the reward, data_source too",
    "reward_manager": "a reward is a sum of parts",
    "use_adaptive_entropy": NO_ENTROPY_TARGET,
    "entropy_coef_min": NO_ENTROPY_TARGET,
    "entropy_coef_max": NO_ENTROPY_TARGET,
    "entropy_coef_delta": NO_ENTROPY_TARGET,
    "entropy_target": NO_ENTROPY_TARGET,
    "lora_modules_to_save": "an adapter is all that is trained",
    "use_dora": "LoRA and rsLoRA are what is trained",
    "exclude_modules": "adapter.targets takes a regular expression, which can leave layers out",
    "output_dir": "the run folder is an argument: --run",
    "default_local_dir": "the run folder is an argument: --run",
    "project_name": "the run folder is an argument: --run",
    "experiment_name": "the run folder is an argument: --run",
    "resume_from_checkpoint": "the same command goes on where the run stands",
    "resume_mode": "the same command goes on where the run stands",
    "val_before_train": "the starting policy is always evaluated",
    "report_to": _FILES,
    "logger": _FILES,
    "logging_steps": _FILES,
    "log_completions": _FILES,
    "log_multimodal": _FILES,
    "num_completions_to_print": _FILES,
    "log_unique_prompts": _FILES,
    "log_completions_hub_repo": _FILES,
    "rollout_data_dir": _FILES,
}


def unknown_setting(key: str) -> ConfigError:
    """Return the error for a setting that does not exist, with the nearest one."""
    return ConfigError(f"There is no setting {key!r}. {_advice(key)}")


def _advice(key: str) -> str:
    leaf = key.rpartition(".")[2]
    if leaf in ELSEWHERE:
        return f"What other tools call {leaf!r} is {ELSEWHERE[leaf]!r} here (docs/migrate.md)."
    if leaf in NOWHERE:
        return f"What other tools call {leaf!r} has no counterpart: {NOWHERE[leaf]}."
    if key.partition(".")[0] in KINDS:
        return f"Slots belong to the recipe: did you mean 'recipe.{key}'?"
    scores = {name: _likeness(key, leaf, name) for name in (*FIELDS, "recipe")}
    best = max(scores.values())
    if best < 0.6:
        return "`groupwise train --dry-run` prints all settings."
    close = [name for name, score in scores.items() if score > best - 0.05][:3]
    return f"Did you mean {' or '.join(map(repr, close))}?"


def _likeness(key: str, leaf: str, name: str) -> float:
    """Return the likeness of the whole names or, a little less, of their ends: people forget the
    table.
    """
    whole = SequenceMatcher(None, key, name).ratio()
    end = SequenceMatcher(None, leaf, name.rpartition(".")[2]).ratio()
    return max(whole, 0.9 * end)
