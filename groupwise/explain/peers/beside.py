"""Settings beside the loss in another tool's file: model, data, rewards, evaluations, adapters.

Each entry says which setting it is here; what can't be read is put on a list of what to fill in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.explain.peers.answer import Answer
from groupwise.explain.peers.reading import PeerConfig
from groupwise.explain.peers.rows import hub_source

# What stands where something is to be filled in: no file of this name is anywhere.
FILL_IN = "FILL_IN"
WITHOUT_GRADER = ("sft", "dft")  # and all that learn from pairs: nothing is graded

TRL = {
    "eval_steps": "eval.every", "num_generations_eval": "eval.samples",
    "save_steps": "checkpoint.every_steps", "save_total_limit": "checkpoint.keep",
    "lora_r": "adapter.rank", "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "lora_target_modules": "adapter.targets", "use_rslora": "adapter.rslora",
    "shuffle_dataset": "data.shuffle", "gradient_checkpointing": "optim.recompute",
    "max_prompt_length": "data.max_prompt_tokens", "max_length": "data.max_row_tokens",
}  # fmt: skip
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
VERL = {
    _MODEL + "path": "model.path", _MODEL + "lora_rank": "adapter.rank",
    _MODEL + "lora_alpha": "adapter.alpha", _MODEL + "target_modules": "adapter.targets",
    _MODEL + "lora_adapter_path": "adapter.path",
    _MODEL + "enable_gradient_checkpointing": "optim.recompute",
    "data.train_files": "data.train", "data.val_files": "data.eval",
    "data.prompt_key": "data.prompt_key", "data.max_prompt_length": "data.max_prompt_tokens",
    "data.shuffle": "data.shuffle", "data.seed": "seed", "data.val_max_samples": "eval.tasks",
    _ROLLOUT + "val_kwargs.temperature": "eval.temperature",
    _ROLLOUT + "val_kwargs.n": "eval.samples", "trainer.test_freq": "eval.every",
    "trainer.save_freq": "checkpoint.every_steps",
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
}  # fmt: skip
OPENRLHF = {
    "actor.model_name_or_path": "model.path", "pretrain": "model.path",
    "data.prompt_dataset": "data.train", "prompt_data": "data.train",
    "eval.dataset": "data.eval", "eval_dataset": "data.eval",
    "data.input_key": "data.prompt_key", "input_key": "data.prompt_key",
    "data.label_key": "data.answer_key", "label_key": "data.answer_key",
    "prompt_max_len": "data.max_prompt_tokens", "eval.steps": "eval.every",
    "eval_steps": "eval.every", "eval.temperature": "eval.temperature",
    "eval_temperature": "eval.temperature", "ckpt.save_steps": "checkpoint.every_steps",
    "save_steps": "checkpoint.every_steps", "ckpt.max_num": "checkpoint.keep",
    "max_ckpt_num": "checkpoint.keep", "ds.lora.rank": "adapter.rank", "lora_rank": "adapter.rank",
    "ds.lora.alpha": "adapter.alpha", "lora_alpha": "adapter.alpha",
    "ds.lora.dropout": "adapter.dropout", "lora_dropout": "adapter.dropout",
    "ds.lora.target_modules": "adapter.targets", "target_modules": "adapter.targets",
    "actor.gradient_checkpointing_enable": "optim.recompute",
    "gradient_checkpointing": "optim.recompute",
}  # fmt: skip
PRIME_RL = {
    "model.name": "model.path", "trainer.model.name": "model.path",
    "trainer.model.lora.rank": "adapter.rank", "trainer.model.lora.alpha": "adapter.alpha",
    "trainer.model.lora.dropout": "adapter.dropout",
    "trainer.model.lora.target_modules": "adapter.targets", "ckpt.interval":
    "checkpoint.every_steps", "ckpt.keep_last": "checkpoint.keep",
    "orchestrator.eval.interval": "eval.every", "orchestrator.seed": "seed",
}  # fmt: skip
BUILT_IN = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math",
            "think_format_reward": "format(pattern='<think>...</think>...')"}  # fmt: skip
OVERLONG = "get_soft_overlong_punishment"


@dataclass
class Beside:
    """Settings beside the loss, what each was called, and what only the user can say."""

    settings: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # ours -> theirs
    fill_in: dict[str, str] = field(default_factory=dict)  # ours -> what to write there
    look_at: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)  # their names that are said here
    functions: list[str] = field(default_factory=list)  # reward functions of the script itself

    def put(self, ours: str, value: Any, theirs: str) -> None:
        self.settings[ours] = value
        self.names[ours] = theirs
        self.read.add(theirs)


def beside(config: PeerConfig, answer: Answer, place: Path) -> Beside:
    """Return what a file says beside its loss."""
    found = Beside()
    tables = {"trl": TRL, "verl": VERL, "openrlhf": OPENRLHF, "prime-rl": PRIME_RL}
    for theirs, ours in tables[config.tool].items():
        if config.values.get(theirs) is not None:
            _take(found, ours, config.values[theirs], theirs)
    tools: Mapping[str, Callable[[PeerConfig, Answer, Path, Beside], None]] = {
        "trl": _trl, "verl": _verl, "openrlhf": _openrlhf, "prime-rl": _prime_rl,
    }  # fmt: skip
    tools[config.tool](config, answer, place, found)
    _absent(config, answer, found)
    return found


def _take(found: Beside, ours: str, value: Any, theirs: str) -> None:
    """Take one value over, in our form; what has another meaning is left for the user."""
    if ours in ("eval.every", "checkpoint.every_steps", "eval.tasks"):
        if not isinstance(value, int | float) or value != int(value):
            found.look_at.append(f"{ours}: {theirs} = {value} there, and a number of steps here")
            found.read.add(theirs)
            return
        if ours == "eval.tasks" and value <= 0:
            return
        value = max(int(value), 0)
    if ours == "checkpoint.keep" and value < 1:
        return
    if ours == "adapter.targets":
        value = "all" if value in ("all-linear", ["all-linear"]) else value
    if ours in ("data.train", "data.eval"):
        value = _sources(value)
    found.put(ours, value, theirs)


def _sources(value: Any) -> Any:
    """Return files as they are, and ids of data sets as a hub's."""
    if isinstance(value, str) and value[:1] == "[":
        value = [part.strip(" '\"") for part in value.strip("[]").split(",")]
    if isinstance(value, str) and "," in value:
        value = value.split(",")
    if isinstance(value, list):
        return [_sources(each) for each in value]
    text = str(value)
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", text) and Path(text).suffix[1:] not in _ENDINGS
    return hub_source(text, "", "") if is_id and not Path(text).expanduser().exists() else text


_ENDINGS = ("json", "jsonl", "parquet", "csv", "arrow")


# --- tool by tool -----------------------------------------------------------------------------


def _trl(config: PeerConfig, answer: Answer, place: Path, found: Beside) -> None:
    values = config.values
    if model := values.get("model_name_or_path"):
        revision = values.get("model_revision")
        found.put("model.path", f"{model}@{revision}" if revision else model, "model_name_or_path")
        found.read.add("model_revision")
    _precision(values, found)
    if not values.get("use_peft"):
        _drop(found, "adapter.")
    found.read |= {"use_peft", "peft_config"} - config.unread.keys()
    if str(values.get("eval_strategy", "")) in ("no", "epoch"):
        _drop(found, "eval.every")
    updates = re.search(r"updates=(\d+)", str(answer.settings.get("recipe.schedule")))
    for ours in ("eval.every", "checkpoint.every_steps"):  # optimizer steps there, batches here
        if updates and found.settings.get(ours):
            found.settings[ours] = max(found.settings[ours] // int(updates[1]), 1)
    if values.get("save_strategy") == "no":
        found.put("checkpoint.every_steps", 0, "save_strategy")
    rows = config.method in ("SFTConfig", "DPOConfig")
    if config.method != "SFTConfig":
        _drop(found, "data.max_row_tokens")
        if "max_length" in values:
            found.read.add("max_length")
            found.look_at.append(
                "max_length: pairs that do not fit the model are dropped, none cut"
            )
    if rows:
        _drop(found, "data.max_prompt_tokens")
    _trl_data(config, found)
    if not rows:
        _trl_rewards(config, answer, place, found)


def _precision(values: Mapping[str, Any], found: Beside) -> None:
    if isinstance(half := values.get("bf16"), bool):
        found.put("model.dtype", "bfloat16" if half else "float32", "bf16")
    for name in ("dtype", "torch_dtype"):
        if values.get(name) in ("bfloat16", "float32", "auto"):
            found.put("model.dtype", values[name], name)
    if values.get("use_cpu"):
        found.put("model.device", "cpu", "use_cpu")
    for name, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if values.get(name):
            found.put("model.quantize", kind, name)


def _trl_data(config: PeerConfig, found: Beside) -> None:
    values = config.values
    if name := values.get("dataset_name"):
        subset = str(values.get("dataset_config") or "")
        split = str(values.get("dataset_train_split") or "")
        local = Path(str(name)).expanduser().exists()
        source = str(name) if local else hub_source(str(name), subset, split)
        found.put("data.train", source, "dataset_name")
        found.read |= {"dataset_config", "dataset_train_split"}
        if str(values.get("eval_strategy", "no")) != "no" and not local:
            test = hub_source(str(name), subset, str(values.get("dataset_test_split") or "test"))
            found.put("data.eval", test, "dataset_name")
            found.read.add("dataset_test_split")
    for theirs, ours in (("train_dataset", "data.train"), ("eval_dataset", "data.eval")):
        if rows_from := values.get(theirs):
            found.put(ours, rows_from, theirs)
    if found.settings.get("data.eval") == found.settings.get("data.train", ""):
        _drop(found, "data.eval")
    if rows := config.rows.get("train_dataset"):
        for ours, value in rows.settings.items():
            found.put(ours, value, "train_dataset")
        for change in rows.changes:
            if change.startswith(".train_test_split"):
                found.put("data.holdout_share", _share(change), "train_test_split")
            else:
                found.look_at.append(f"data.train: the script also does {change} to its rows")


def _share(change: str) -> float:
    said = re.search(r"test_size=(0?\.\d+)", change)
    return float(said[1]) if said else 0.05


def _trl_rewards(config: PeerConfig, answer: Answer, place: Path, found: Beside) -> None:
    listed = config.values.get("reward_funcs")
    listed = listed if isinstance(listed, list) else [listed] if listed else []
    if reward_model := config.values.get("reward_model_name_or_path"):
        listed = [f"rm(path={reward_model!r})", *listed]
        found.read.add("reward_model_name_or_path")
    weights = config.values.get("reward_weights") or [1.0] * len(listed)
    parts: dict[str, float] = {}
    for said, weight in zip(listed, weights, strict=False):
        part = _part(str(said), place, found)
        if part.startswith(OVERLONG):
            _overlong(part, answer)
        elif part:
            parts[part] = parts.get(part, 0.0) + float(weight)
    if parts:
        found.put("reward.parts", parts, "reward_funcs")
    found.read |= {"reward_funcs", "reward_weights"}


def _part(said: str, place: Path, found: Beside) -> str:
    """Return a part of the reward: a built-in one, or a function by its file."""
    name = said.partition("(")[0].rpartition(".")[2]
    if said.startswith(f"{place.name}:"):
        found.functions.append(said.rpartition(":")[2])
        return said
    if name in BUILT_IN:
        found.look_at.append(
            f"reward.parts: {BUILT_IN[name]} stands for TRL's {name}, and is read more widely "
            "(docs/graders.md)"
        )
        return BUILT_IN[name]
    if name == OVERLONG or said.startswith("rm("):
        return said if said.startswith("rm(") else f"{OVERLONG}({said.partition('(')[2]}"
    module, _, function = said.rpartition(".")
    file = (
        Path(*module.split(".")).with_suffix(".py")
        if module.replace(".", "").isidentifier()
        else None
    )
    if file is not None and function.isidentifier() and (place.parent / file).is_file():
        return f"{file.as_posix()}:{function}"
    found.fill_in["reward.parts"] = f"{said}: a function in a file, file.py:function"
    return f"{FILL_IN}.py:{function if function.isidentifier() else 'reward'}"


def _overlong(said: str, answer: Answer) -> None:
    """Make TRL's punishment of long answers the shaping that it is here."""
    numbers = [int(each) for each in re.findall(r"\d+", said)] or [1280, 256]
    if len(numbers) == 2:
        slot = f"soft_overlong(max_length={numbers[0]}, cache={numbers[1]})"
        before = answer.settings.get("recipe.shaping", "")
        answer.settings["recipe.shaping"] = f"{before}, {slot}" if before else slot


def _verl(config: PeerConfig, answer: Answer, place: Path, found: Beside) -> None:
    values = config.values
    if not values.get(_MODEL + "lora_rank"):
        _drop(found, "adapter.")
    for prefix in ("custom_reward_function.", "reward.custom_reward_function."):
        if path := values.get(f"{prefix}path"):
            name = values.get(f"{prefix}name") or "compute_score"
            found.put("reward.parts", {f"{path}:{name}": 1.0}, f"{prefix}path")
            found.read.add(f"{prefix}name")
    for prefix in ("reward_model.", "reward.reward_model."):
        path = values.get(f"{prefix}model.path", values.get(f"{prefix}model_path"))
        if values.get(f"{prefix}enable") and path:
            found.put("reward.parts", {f"rm(path={path!r})": 1.0}, f"{prefix}model.path")
            found.read |= {f"{prefix}enable", f"{prefix}model_path"}
    if "reward.parts" not in found.settings:
        files = str([values.get("data.train_files"), config.unread.get("data.train_files")]).lower()
        part = "number" if "gsm8k" in files else "math"
        found.settings["reward.parts"] = {part: 1.0}
        found.look_at.append(
            f"reward.parts: verl's own scorer goes by the column data_source; {part} stands for it"
        )


def _openrlhf(config: PeerConfig, answer: Answer, place: Path, found: Beside) -> None:
    values = config.values
    if not values.get("ds.lora.rank", values.get("lora_rank")):
        _drop(found, "adapter.")
    for name in ("data.apply_chat_template", "apply_chat_template"):
        if values.get(name):
            found.put("data.template", "chat", name)
    for name in ("data.input_template", "input_template"):
        if isinstance(text := values.get(name), str):
            found.put("data.instruction", text.replace("{}", "{prompt}"), name)
    for name in ("reward.model_name_or_path", "reward_pretrain"):
        if path := values.get(name):
            found.put("reward.parts", {f"rm(path={str(path)!r})": 1.0}, name)
    for name in ("train.agent_func_path", "agent_func_path"):
        if path := values.get(name):
            found.read.add(name)
            found.fill_in["reward.parts"] = (
                f"{path} is an agent there, which also rewards: turns.environment "
                "(docs/environments.md), or a function, file.py:function"
            )
    for name in ("reward.remote_url", "remote_rm_url"):
        if url := values.get(name):
            found.read.add(name)
            file = str(url) if str(url).endswith(".py") else f"{FILL_IN}.py"
            found.settings["reward.parts"] = {f"{file}:reward_func": 1.0}
            found.fill_in["reward.parts"] = (
                "reward_func(queries, prompts, labels) has another form there: here it is "
                "def reward_func(completions, answer): return [one number a completion]"
            )


def _prime_rl(config: PeerConfig, answer: Answer, place: Path, found: Beside) -> None:
    if not config.values.get("trainer.model.lora.rank"):
        _drop(found, "adapter.")
    for name in ("orchestrator.train.source", "orchestrator.env", "orchestrator.train.env"):
        if sources := config.values.get(name):
            found.read.add(name)
            ids = ", ".join(re.findall(r"'id': '([^']+)'", str(sources)))
            found.fill_in["data.train"] = (
                f"prime-rl takes prompts and rewards from environments ({ids or name}): rows with "
                "prompt and answer here, or turns.environment (docs/environments.md)"
            )
            found.fill_in["reward.parts"] = "what the environment's rubric asks"


# --- what is left ------------------------------------------------------------------------------


def _drop(found: Beside, start: str) -> None:
    """Take back what does not count here; its name stays among those to say something of."""
    for ours in [each for each in found.settings if each.startswith(start)]:
        del found.settings[ours]
        found.read.discard(found.names.pop(ours, ""))


def _absent(config: PeerConfig, answer: Answer, found: Beside) -> None:
    """Put a name that nothing has where a run could not do without a value."""
    unread = config.unread
    if "model.path" not in found.settings:
        found.settings["model.path"] = f"{FILL_IN}_model"
        said = next((unread[n] for n in ("model_name_or_path", _MODEL + "path") if n in unread), "")
        words = f" ({said.removeprefix(_MODEL + 'path=')} there)" if said else ""
        found.fill_in.setdefault("model.path", f"a folder, a .gguf file or an id of a hub{words}")
    if "data.train" not in found.settings:
        found.settings["data.train"] = f"{FILL_IN}.jsonl"
        names = ("train_dataset", "dataset_name", "data.train_files")
        said = next((unread[name] for name in names if name in unread), "")
        plain = said.removeprefix("data.train_files=")
        words = f"; there {plain}" if said else ""
        found.fill_in.setdefault("data.train", f"a file of rows (docs/data.md){words}")
    recipe = str(answer.settings["recipe.name"])
    graded = recipe not in WITHOUT_GRADER and "recipe.preference" not in answer.settings
    if graded and "reward.parts" not in found.settings:
        found.settings["reward.parts"] = {f"{FILL_IN}.py:reward": 1.0}
        found.fill_in.setdefault(
            "reward.parts", "math, number, ... or a function: file.py:function"
        )
    if "steps" not in answer.settings and "epochs" not in answer.settings:
        found.settings["steps"] = 100
        epochs = next((f"{config.values[name]:g} passes over the data there: " for name in
                       ("num_train_epochs", "trainer.total_epochs", "num_episodes",
                        "train.num_episodes") if name in config.values), "")  # fmt: skip
        found.read |= {"num_train_epochs", "trainer.total_epochs", "num_episodes"}
        found.read.add("train.num_episodes")
        found.fill_in["steps"] = f"{epochs}steps = passes x rows / prompts_per_step"
