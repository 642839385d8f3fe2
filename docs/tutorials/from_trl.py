"""Coming from TRL. Made of from_trl.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {line}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)

# %% [markdown]
# # Coming from TRL
#
# You have a script with a `GRPOTrainer`. This page takes one, asks what it computes, and does the
# same run here: your reward functions stay as they are, the settings get other names, and the loss
# is the same to the last term.
#
# The model is a toy that is made on the spot, so that all of this runs on a laptop in a few
# minutes and without a network. TRL is not needed, and not run: the script is only read. This page
# is also a [script](from_trl.py) and a [notebook](from_trl.ipynb). Start in an empty folder.
#
# ## 1. What you have
#
# Rewards in TRL's form: a function gets all completions of a batch as a list, and every column of
# the data by its name. It returns a number for each.

# %%
Path("rewards.py").write_text(
    r'''
# rewards.py
import re


def right_sum(completions, answer, **kwargs):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]


def is_a_number(completions, **kwargs):
    return [float(re.fullmatch(r"\d+", text.strip()) is not None) for text in completions]
'''.lstrip()
)

# %% [markdown]
# The script that trains with them:

# %%
Path("train_trl.py").write_text(
    r'''
# train_trl.py
from datasets import load_dataset
from rewards import is_a_number, right_sum
from trl import GRPOConfig, GRPOTrainer

trainer = GRPOTrainer(
    model="my-org/my-model",
    reward_funcs=[right_sum, is_a_number],
    args=GRPOConfig(
        output_dir="out",
        num_generations=8,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=4,
        reward_weights=[1.0, 0.1],
        max_completion_length=4,
        learning_rate=7e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=150,
        beta=0.0,
    ),
    train_dataset=load_dataset("json", data_files="sums.jsonl", split="train"),
)
trainer.train()
'''.lstrip()
)

# %% [markdown]
# And the data: sums of three digits. (The column `solution` is for the toy alone. A model that has
# never read anything is taught on solutions first, until three in ten of its answers are right.)

# %%
import itertools
import json
import random

sums = list(itertools.product(range(10), repeat=3))
random.Random(0).shuffle(sums)
for name, part in {"held_out.jsonl": sums[:128], "sums.jsonl": sums[128:]}.items():
    with open(name, "w") as file:
        for a, b, c in part:
            total = str(a + b + c)
            row = {"prompt": f"{a}+{b}+{c}=", "answer": total, "solution": total}
            print(json.dumps(row), file=file)

# %% [markdown]
# ## 2. What does the script compute?
#
# "GRPO" is another loss in every tool, and its name in TRL stands for several. `explain --from`
# reads the script, without running it, and answers with settings that compute the same.

# %%
groupwise("explain --from train_trl.py")

# %% [markdown]
# Three things to see in it:
#
# - **The batch is counted in prompts.** 64 completions a device, four times accumulated, 8 to a
#   prompt: that is `prompts_per_step = 32`. What fits into memory is another matter
#   (`optim.micro_tokens`), and never changes the update.
# - **The loss is spelled out.** TRL's default (`loss_type="dapo"`) is not DAPO: without its clip
#   range, its dynamic sampling and its cost of length. `grpo@trl` is the name for what TRL does.
# - **What has no counterpart is said,** and so is what could not be read.
#
# `groupwise migrate train_trl.py sums.toml` goes one step further: it writes all that can be taken
# over into a commented configuration, rewards and data included, and lists what is left to you.
# Here the file is written by hand, to see what stands in it.
#
# ## 3. The same run here
#
# The settings from above, without those that are the default anyway, and four that are left to
# you: model, data, rewards, and how to measure. The reward functions are named by their file and
# run as they are. Their weights stand beside them.

# %%
Path("sums.toml").write_text(
    r'''
# sums.toml
recipe.name = "grpo@trl"
prompts_per_step = 32
group_size = 8
steps = 150
engine.max_tokens = 4
optim.learning_rate = 7e-4
optim.beta2 = 0.95
seed = 42

model.path = "tiny"            # in earnest: the model of your script
model.device = "cpu"
model.threads = 1
tiny.width = 64
tiny.layers = 2

data.train = "sums.jsonl"
data.eval = "held_out.jsonl"
eval.every = 10
eval.temperature = 1.0

[reward.parts]
"rewards.py:right_sum" = 1.0
"rewards.py:is_a_number" = 0.1
'''.lstrip()
)

# %% [markdown]
# TRL would run the rewards for the first time behind the first batch. Here they are tried on real
# rows before a model is loaded, with right answers, wrong ones and known tricks:

# %%
groupwise("check-reward sums.toml")

# %% [markdown]
# ## 4. Train

# %%
groupwise("train sums.toml")
groupwise("report runs/sums")

# %% [markdown]
# ![Held-out accuracy over the steps of the run](from_trl.png)
#
# Where TRL prints a loss near 0 and a mean reward, here stand held-out accuracy before, during and
# after, how many groups taught something, and at the end the same questions before and after.
# `groupwise view` shows the run in a browser, down to every token.
#
# ## 5. What is different
#
# | in TRL | here |
# |---|---|
# | `Trainer` object in a script | a file of settings and a command, or `groupwise.train(config, path, reward=function)` ([Python](../python.md)) |
# | checkpoints by `save_steps`, `resume_from_checkpoint` | the same command goes on where the run was stopped, to the same bits |
# | generation by `transformers` or vLLM, weights sent over | the learner's own forward pass samples: there is nothing to send and nothing to correct |
# | `num_iterations` passes over a batch | a batch is learned once, in `recipe.schedule.updates` parts |
# | a reward that raises ends the run | it is recorded as failed, counted, and never becomes 0 |
#
# Every setting of TRL with its name here: [Moving from TRL or verl](../migrate.md).
