"""Files of other tools as TOML of ours: what is kept, what is to fill in, that all of it loads.

The inputs are written here, in the forms that people have: nothing of another project's.
"""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest

from groupwise.config import Config, load
from groupwise.errors import RecipeError
from groupwise.explain.peers.migration import Migrated, migrated, reward_module

GSM8K = '''
import re, sys
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

RULES = """Think first.
Then answer."""
BOX = re.compile(r"<answer>(.*?)</answer>"); TRAIN, G = sys.argv[1], 8

def after_hashes(text):
    return text.split("####")[1].strip()

def questions(split="train"):
    rows = load_dataset("openai/gsm8k", "main")[split]
    return rows.map(lambda row: {
        "prompt": [{"role": "system", "content": RULES},
                   {"role": "user", "content": row["question"]}],
        "answer": after_hashes(row["answer"]),
    })

def inside(text: str) -> str:
    # the last tag
    return BOX.findall(text)[-1] if BOX.search(text) else ""

def right(completions, answer, **rest):
    return [float(inside(each[0]["content"]) == gold) for each, gold in zip(completions, answer)]

args = GRPOConfig(
    output_dir="out", learning_rate=5e-6, lr_scheduler_type="cosine", warmup_ratio=0.1,
    per_device_train_batch_size=4, gradient_accumulation_steps=8, num_generations=G,
    max_completion_length=300, max_steps=250, beta=0.04, seed=7, temperature=0.9,
    reward_weights=[1.0, 0.5], bf16=True, report_to="none", eval_steps=25, some_new_flag=1,
)
trainer = GRPOTrainer(
    model="org/base-1b", reward_funcs=[right, think_format_reward], args=args,
    train_dataset=questions(), eval_dataset=questions("test"),
    peft_config=LoraConfig(r=16, lora_alpha=64, target_modules="all-linear"),
)
trainer.train()
'''
PLAIN = """
from datasets import load_dataset
from trl import GRPOTrainer
from scores import short
rows = load_dataset("json", data_files="rows.jsonl", split="train").filter(lambda row: row["ok"])
GRPOTrainer(model="base", reward_funcs=short, train_dataset=rows).train()
"""
ROWS = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained("models/base")
SFTTrainer(model, train_dataset=load_dataset("csv", data_files="rows.csv"),
           args=SFTConfig(num_train_epochs=2, max_length=512, learning_rate=1e-5))
pairs = load_dataset("org/pairs")
DPOTrainer("models/sft", train_dataset=pairs["train"], eval_dataset=pairs["test"],
           args=DPOConfig(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2], beta=0.05))
"""
VERL = """
set -x
MODEL=${MODEL:-"${HOME}/models/base"}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files="['$HOME/gsm8k/a.parquet', '$HOME/gsm8k/b.parquet']" \\
    data.val_files=$HOME/gsm8k/test.parquet data.train_batch_size=64 \\
    data.max_prompt_length=256 data.max_response_length=400 \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.model.lora_rank=32 \\
    actor_rollout_ref.model.lora_alpha=16 actor_rollout_ref.model.target_modules=all-linear \\
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.rollout.n=5 trainer.test_freq=5 trainer.save_freq=-1 \\
    trainer.n_gpus_per_node=8 trainer.total_epochs=15 $@
"""
VERL_YAML = """
algorithm: {adv_estimator: rloo}
data: {train_files: train.parquet, prompt_key: prompt, train_batch_size: 32, seed: 3}
actor_rollout_ref:
  model: {path: org/base}
  rollout: {n: 4, temperature: 0.7, val_kwargs: {n: 2, temperature: 0.5}}
custom_reward_function: {path: mine.py, name: score}
trainer: {total_training_steps: 40, save_freq: 10, max_actor_ckpt_to_keep: 3}
"""
OPENRLHF = """
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path org/base --reward.remote_url rewards.py \\
   --data.prompt_dataset prompts.jsonl --data.input_key question --data.label_key gold \\
   --data.apply_chat_template --data.input_template "Solve: {}" --train.num_episodes 2 \\
   --rollout.batch_size 64 --rollout.n_samples_per_prompt 4 --train.batch_size 256 \\
   --rollout.max_new_tokens 512 --algo.advantage.estimator group_norm --eval.steps 10
"""
PRIME_RL = """
max_steps = 20
[model]
name = "org/base"
[orchestrator]
batch_size = 64
group_size = 8
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "reverse"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[trainer.model.lora]
rank = 8
alpha = 16
"""
TRL_YAML = """
model_name_or_path: org/base
dataset_name: org/rows
dataset_config: easy
reward_funcs: [accuracy_reward, get_soft_overlong_punishment]
num_generations: 4
max_completion_length: 1280
learning_rate: 1.0e-6
max_steps: 10
use_peft: false
lora_r: 16
"""
CONFIGURED = """
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser
from datasets import load_dataset

def short(completions, **rest):
    return [1.0 / len(each) for each in completions]

if __name__ == "__main__":
    own, args, model = TrlParser((Own, GRPOConfig, ModelConfig)).parse_args_and_config()
    rows = load_dataset("org/rows", split="train")
    GRPOTrainer(model=model.model_name_or_path, reward_funcs=[short], args=args, train_dataset=rows)
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, "utf-8")
    return path


def one(folder: Path, name: str, text: str) -> tuple[Migrated, Config]:
    (found,) = migrated(written(folder, name, text), "mine_rewards.py")
    return found, load(tomllib.loads(found.text))


def comment(found: Migrated, start: str) -> str:
    """Return the comment of a setting."""
    line = next(line for line in found.text.splitlines() if line.startswith(f"{start} = "))
    return line.partition(" # ")[2]


def test_a_script_of_trl_with_all_that_its_trainer_gets(tmp_path: Path) -> None:
    found, config = one(tmp_path, "train.py", GSM8K)
    assert found.exact and not found.fill_in
    assert (config.prompts_per_step, config.group_size, config.steps) == (4, 8, 250)
    assert config.seed == 7 and config.engine.max_tokens == 300
    assert config.engine.temperature == 0.9
    assert (config.optim.learning_rate, config.optim.schedule) == (5e-6, "cosine")
    assert config.optim.warmup_steps == 25
    assert str(config.recipe.penalty[0]) == "kl_importance(coef=0.04)"
    assert (config.model.path, config.model.dtype) == ("org/base-1b", "bfloat16")
    assert (config.adapter.rank, config.adapter.alpha, config.adapter.targets) == (16, 64, "all")
    assert config.data.train == "gsm8k:hub:openai/gsm8k/main/train*"
    assert config.data.eval == "gsm8k:hub:openai/gsm8k/main/test*"
    assert config.data.template == "chat"
    assert config.data.system == "Think first.\nThen answer."
    assert dict(config.reward.parts) == {
        "mine_rewards.py:right": 1.0,
        "format(pattern='<think>...</think>...')": 0.5,
    }
    assert config.eval.every == 25
    assert "some_new_flag" in found.text.partition("# Not known")[2]


def test_each_setting_says_what_it_was_called(tmp_path: Path) -> None:
    found, _ = one(tmp_path, "train.py", GSM8K)
    both = "per_device_train_batch_size, gradient_accumulation_steps"
    assert comment(found, "prompts_per_step") == both
    assert comment(found, "group_size") == "num_generations"
    assert comment(found, "penalty") == "beta"
    plain, _ = one(tmp_path, "train.sh", "trl grpo --num_generations 4 --model_name_or_path a/b\n")
    assert comment(plain, "schedule") == "the default of TRL 1.16.0"


def test_reward_functions_come_in_a_file_of_their_own(tmp_path: Path) -> None:
    """The script would train where it is imported, and asks for arguments."""
    path = written(tmp_path, "train.py", GSM8K)
    text = reward_module(path, migrated(path, "mine_rewards.py"))
    assert "trl" not in text and "argv" not in text and "# the last tag" in text
    spec = importlib.util.spec_from_file_location(
        "mine_rewards", written(tmp_path, "mine_rewards.py", text)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = [[{"content": "<answer>4</answer>"}], [{"content": "4"}]]
    assert module.right(said, ["4", "4"]) == [1.0, 0.0]


def test_a_trainer_without_arguments_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "scores.py", "def short(completions, **rest): ...\n")
    found, config = one(tmp_path, "plain.py", PLAIN)
    assert (config.model.path, config.data.train) == ("base", "rows.jsonl")
    assert dict(config.reward.parts) == {"scores.py:short": 1.0}
    assert found.fill_in.keys() == {"steps"}
    assert "the script also does .filter(lambda row: row['ok'])" in " ".join(found.text.split())


def test_rows_and_pairs(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.py", ROWS)
    sft, dpo = (load(tomllib.loads(each.text)) for each in migrated(path, "r.py"))
    assert (sft.recipe.name, sft.model.path, sft.data.train) == ("sft", "models/base", "rows.csv")
    assert (sft.epochs, sft.data.max_row_tokens) == (2.0, 512)
    assert sft.optim.learning_rate == 1e-5
    assert [str(each) for each in dpo.recipe.of("preference")] == ["logistic(beta=0.05)"]
    assert [str(each) for each in dpo.recipe.of("likelihood")] == ["chosen_nll(weight=0.2)"]
    assert dpo.model.path == "models/sft" and dpo.data.eval == "hub:org/pairs/**/test*"


def test_a_shell_script_of_verl(tmp_path: Path) -> None:
    found, config = one(tmp_path, "run.sh", VERL)
    assert config.model.path == "~/models/base"
    assert config.data.train == ("~/gsm8k/a.parquet", "~/gsm8k/b.parquet")
    assert config.data.eval == "~/gsm8k/test.parquet" and config.data.max_prompt_tokens == 256
    assert (config.prompts_per_step, config.group_size) == (64, 5)
    assert (config.adapter.rank, config.adapter.targets) == (32, "all")
    assert (config.eval.every, config.checkpoint.every_steps) == (5, 0)
    assert "15 passes" in found.fill_in["steps"] and "steps = 100" in found.text
    assert dict(config.reward.parts) == {"number": 1.0}
    assert "trainer.n_gpus_per_node: torchrun" in found.text


def test_a_yaml_of_verl(tmp_path: Path) -> None:
    found, config = one(tmp_path, "ppo.yaml", VERL_YAML)
    assert found.exact and not found.fill_in
    assert dict(config.reward.parts) == {"mine.py:score": 1.0}
    assert (config.steps, config.seed, config.engine.temperature) == (40, 3, 0.7)
    assert (config.eval.samples, config.eval.temperature) == (2, 0.5)
    assert (config.checkpoint.every_steps, config.checkpoint.keep) == (10, 3)


def test_flags_of_openrlhf(tmp_path: Path) -> None:
    found, config = one(tmp_path, "run.sh", OPENRLHF)
    assert (config.data.train, config.data.prompt_key) == ("prompts.jsonl", "question")
    assert (config.data.answer_key, config.data.template) == ("gold", "chat")
    assert config.data.instruction == "Solve: {prompt}"
    assert (config.prompts_per_step, config.eval.every) == (64, 10)
    assert dict(config.reward.parts) == {"rewards.py:reward_func": 1.0}
    assert "reward_func(queries, prompts, labels)" in found.fill_in["reward.parts"]
    assert comment(found, "prompts_per_step") == "rollout.batch_size"


def test_a_toml_of_prime_rl(tmp_path: Path) -> None:
    found, config = one(tmp_path, "rl.toml", PRIME_RL)
    assert (config.model.path, config.steps, config.prompts_per_step) == ("org/base", 20, 8)
    assert (config.adapter.rank, config.adapter.alpha) == (8, 16)
    assert "reverse-text" in found.fill_in["data.train"]
    assert config.data.train == "FILL_IN.jsonl"


def test_a_yaml_of_trl(tmp_path: Path) -> None:
    _, config = one(tmp_path, "grpo.yaml", TRL_YAML)
    assert config.data.train == "hub:org/rows/easy/train*"
    assert dict(config.reward.parts) == {"math": 1.0}
    shaping = [str(each) for each in config.recipe.of("shaping")]
    assert shaping == ["soft_overlong(max_length=1280, cache=256)"]
    assert config.adapter.rank == 0, "use_peft is off"


def test_a_script_with_the_command_that_starts_it(tmp_path: Path) -> None:
    """Alone it says nothing of its settings, and is refused with what to give instead."""
    script = written(tmp_path, "own.py", CONFIGURED)
    with pytest.raises(RecipeError, match="reads its settings from the command line"):
        migrated(script, "r.py")
    flags = "--model_name_or_path org/base --num_generations 4 --max_steps 30 --beta 0.1"
    found, config = one(tmp_path, "go.sh", f"accelerate launch own.py {flags}\n")
    assert (config.model.path, config.group_size, config.steps) == ("org/base", 4, 30)
    assert config.data.train == "hub:org/rows"
    assert "own.py" in found.where


@pytest.mark.parametrize(
    ("settings", "slot"),
    [
        ("", "logistic(beta=0.1)"),
        ("loss_type='ipo', beta=0.2", "ipo_token_mean(beta=0.2)"),
        ("loss_type='robust', label_smoothing=0.2", "robust(beta=0.1, noise=0.2)"),
        ("loss_type='exo_pair'", "exo(beta=0.1, noise=0.001)"),
        ("f_divergence_type='js_divergence'",
         "f_divergence(beta=0.1, divergence='js', alpha=0.5)"),
        ("loss_type='discopop', discopop_tau=0.1", "discopop(beta=0.1, tau=0.1)"),
    ],
)  # fmt: skip
def test_preferences_of_trl(tmp_path: Path, settings: str, slot: str) -> None:
    found, config = one(tmp_path, "dpo.py", f"args = DPOConfig({settings})\n")
    assert found.exact
    assert [str(each) for each in config.recipe.of("preference")] == [slot]


def test_steps_are_batches_and_not_updates(tmp_path: Path) -> None:
    text = "args = GRPOConfig(steps_per_generation=4, eval_steps=20, save_steps=2, max_steps=40)\n"
    _, config = one(tmp_path, "t.py", text)
    assert (config.steps, config.eval.every, config.checkpoint.every_steps) == (10, 5, 1)


def test_what_a_preference_can_t_say_is_named(tmp_path: Path) -> None:
    text = "args = DPOConfig(loss_type=['sigmoid', 'hinge'])\n"
    assert "sigmoid, hinge at once" in one(tmp_path, "dpo.py", text)[0].text
    found, _ = one(tmp_path, "dpo.py", "args = DPOConfig(loss_type='bco_pair')\n")
    assert not found.exact and "running mean" in found.text


PROMPTS: list[tuple[str, dict[str, Any]]] = [
    ('lambda x: {"prompt": x["q"]}', {"prompt_key": "q"}),
    ('lambda x: {"prompt": f"Solve {x[\'q\']} now", "answer": x["gold"]}',
     {"prompt_key": "q", "answer_key": "gold", "instruction": "Solve {prompt} now"}),
    ('lambda x: {"prompt": [{"role": "user", "content": HEAD + x["q"]}]}',
     {"prompt_key": "q", "instruction": "Say: {prompt}", "template": "chat"}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "wanted"), PROMPTS)
def test_columns_that_a_script_makes(tmp_path: Path, function: str, wanted: dict[str, Any]) -> None:
    text = (
        f"HEAD = 'Say: '\nrows = load_dataset('org/rows')['train'].map({function})\n"
        "GRPOTrainer(model='m', reward_funcs='org/judge', train_dataset=rows)\n"
    )
    found, config = one(tmp_path, "t.py", text)
    assert {name: getattr(config.data, name) for name in wanted} == wanted
    assert "also does" not in found.text
    assert dict(config.reward.parts) == {"rm(path='org/judge')": 1.0}


def test_rows_that_only_a_run_would_make(tmp_path: Path) -> None:
    text = (
        "rows = Dataset.from_list([make(i) for i in range(9)])\n"
        "GRPOTrainer(model=pick(), reward_funcs=[lambda **k: 0], train_dataset=rows)\n"
    )
    found, config = one(tmp_path, "t.py", text)
    assert found.fill_in.keys() == {"model.path", "data.train", "reward.parts", "steps"}
    assert "make(i) for i in range(9)" in found.fill_in["data.train"]
    assert config.model.path == "FILL_IN_model"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.py", "print(1)\n", "no configuration that is known"),
        ("a.toml", "prompts_per_step = 4\n", "no configuration that is known"),
        (
            "a.sh",
            "python3 -m verl.trainer.fsdp_sft_trainer data.x=1\n",
            "sft_trainer, which is not",
        ),
        ("a.sh", "deepspeed --module openrlhf.cli.train_dpo --a 1\n", "train_dpo, which is not"),
        ("a.yaml", "learning_rate: 1\n", "no configuration that is known"),
    ],
)
def test_files_of_none_of_them(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        migrated(written(tmp_path, name, text), "r.py")
