"""R1 in stages. Made of stages.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {line}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)

# %% [markdown]
# # R1 in stages
#
# DeepSeek-R1 was not one training but four, each from what the one before it had made: a **cold
# start** on a few worked solutions, **reinforcement** with a reward that can be checked, a second
# supervised stage on the best of the model's **own answers** (rejection sampling), and
# reinforcement once more. This page does the four with a toy, in one file and with one command.
#
# The toy is a transformer of two layers that works out sums step by step, a line a step. It takes
# a few minutes on a laptop, and is too small to end well: what it shows is how a chain is made and
# read. This page is also a [script](stages.py) and a [notebook](stages.ipynb). Start in an empty
# folder.
#
# ## 1. The task
#
# ```
# 3+1-4=          the question
# 3+1=4           the reasoning: one step a line
# 4-4=0           the answer is what the last line ends on
# ```
#
# Only the answer is graded. The steps before it are the toy's thoughts, and whether they are of
# use is for the model to find out.
#
# ## 2. The file
#
# Above are settings that hold for all stages, then the stages in order. Each is an ordinary run;
# what is new are the words that lead from one to the next.

# %%
Path("r1.toml").write_text(
    r'''
# r1.toml
prompts_per_step = 32
group_size = 8

model.path = "tiny"
model.device = "cpu"
model.threads = 1
tiny.width = 64
tiny.layers = 2

data.train = "chain"                   # a generator: questions and solutions, made on the spot
data.options = { terms = 3, high = 4 }
engine.max_tokens = 18

optim.learning_rate = 7e-4
optim.warmup_steps = 5
optim.beta2 = 0.95
eval.every = 10
eval.tasks = 60
eval.temperature = 1.0

[[stage]]
name = "cold"                          # learn what a solution looks like
recipe = "sft"
prompts_per_step = 64
steps = 300
optim.learning_rate = 3e-3
until = { accuracy = 0.3 }             # often enough right to learn from

[[stage]]
name = "reason"                        # goes on from the weights of `cold`
recipe = { name = "dapo", schedule = { updates = 2 }, shaping = "" }
steps = 20

[[stage]]
name = "collect"                       # begins again from nothing,
recipe = "sft"
model = "base"
source = "run"
from = ["stage:reason"]                # with the right answers that `reason` wrote
keep = { per_prompt = 4 }
mix = { other = 100 }                  # and some of the worked solutions
prompts_per_step = 64
steps = 150
eval.every = 50
optim.learning_rate = 3e-3
optim.schedule = "cosine"

[[stage]]
name = "all"                           # goes on from the weights of `collect`
recipe = { name = "dapo", schedule = { updates = 2 }, shaping = "" }
steps = 10
optim.schedule = "linear"
'''.lstrip()
)

# %% [markdown]
# A typo in the last stage should not be found after the first three. `--dry-run` checks all of
# them, prints their settings and starts none:

# %%
groupwise("train r1.toml --dry-run")

# %% [markdown]
# ## 3. Train

# %%
groupwise("train r1.toml")

# %% [markdown]
# The table has a line a stage: what it began with, and what it made of it. Three things to look
# at:
#
# - **The cold start ends early,** as soon as three in ten answers are right. More would be wasted:
#   what supervised learning does slowly, reinforcement does from here.
# - **`collect` begins from nothing** and is taught with a hundred worked solutions and the answers
#   that reinforcement has found. It comes about as far as the cold start did, which was shown all
#   of the worked solutions.
# - **The last row says nothing.** Ten steps are few, and with 60 held-out questions an accuracy
#   has a standard error of 6 points. Here everything is small, so that it is soon done.
#   `configs/r1_tiny.toml` is the same chain with longer sums, more steps and 256 questions: its
#   stages end at 30, 83, 82 and 94 % ([log](../log.md#r1-in-four-stages-on-the-embedded-model)).
#
# If it is stopped, the same command goes on, in the stage and at the step where it was. `groupwise
# train r1.toml --from reason` does that stage and all behind it anew.
#
# ## 4. The chain as one

# %%
groupwise("diagnose runs/r1")
groupwise("report runs/r1")

# %% [markdown]
# Held-out accuracy over the whole chain, from the evaluations that every stage has written down:

# %%
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
begin = 0
for stage in json.loads(Path("runs/r1/stages.json").read_text())["stages"]:
    lines = Path("runs/r1", stage["folder"], "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "eval/accuracy" in step]
    at = [begin + step["step"] for step in steps]
    axes.plot(at, [100 * step["eval/accuracy"] for step in steps], marker="o", label=stage["name"])
    begin = at[-1]
axes.set(xlabel="steps of all stages", ylabel="held-out accuracy, %", ylim=(0, 100))
axes.legend()
figure.savefig("chain.svg")

# %% [markdown]
# ![Held-out accuracy over the four stages: up in the cold start, up in reinforcement, from nothing
# again in the third stage](stages.svg)
#
# ## In earnest
#
# `configs/r1_qwen.toml` is the same chain on GSM8K and MATH with Qwen2.5-Coder-1.5B on one GPU;
# what came out stands in [rlhf.md](../rlhf.md#r1-on-real-data). The words of a stage's table, what
# is checked and when, and how a chain is gone on with: [pipelines](../pipelines.md). Rejection
# sampling: [rejection](../rejection.md).
