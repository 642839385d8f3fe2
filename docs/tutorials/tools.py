"""A model that uses a tool. Made of tools.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {line}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)

# %% [markdown]
# # A model that uses a tool
#
# So far a question went in and an answer came out. Now the model may ask back: it writes a turn,
# the world answers, and it goes on from there. What answers it is called an **environment**; a
# calculator or a search is one, and so is a game. The whole conversation, an **episode**, is one
# sample with one reward.
#
# The model here is a toy that is made on the spot and reads characters, so that a training takes a
# minute or two on a laptop. This page is also a [script](tools.py) and a [notebook](tools.ipynb).
# Start in an empty folder.
#
# ## 1. The world
#
# The questions are products such as `7*34=`. The model is bad at them, and it sits at a desk with
# a calculator: what it ends in a question mark is worked out for it, everything else is taken for
# its answer.
#
# An environment is a class with two methods. `reset` gets the columns of the row by name. `step`
# gets what the model wrote, and returns the world's words, or words, a reward, and whether it is
# over.

# %%
Path("desk.py").write_text(
    r'''
# desk.py
from groupwise.envs.builtin.calculator import value


class Desk:
    """Works out what ends in a question mark, and takes everything else for the answer."""

    def reset(self, answer, **row):
        self.answer = answer

    def step(self, text):
        if not text.endswith("?"):
            return "", float(text.strip() == self.answer), True
        try:
            return str(value(text[:-1]))
        except ValueError:
            return "what?"
'''.lstrip()
)

# %% [markdown]
# ## 2. The data
#
# `solution` is there for the toy alone, which has to see once what a conversation looks like. We
# show it somebody who mostly guesses and sometimes asks the calculator: all the words of the game,
# and no good play.

# %%
import itertools
import json
import random

draw = random.Random(0)
with open("products.jsonl", "w") as file:
    for a, b in itertools.product(range(2, 10), range(10, 100)):
        asked = f"{a}*{b}?\n[user]{a * b}\n[assistant]{a * b}\n"
        shown = asked if draw.random() < 0.4 else f"{draw.randrange(20, 900)}\n"
        row = {"prompt": f"{a}*{b}=", "answer": str(a * b), "solution": shown}
        print(json.dumps(row), file=file)

# %% [markdown]
# ## 3. The configuration

# %%
Path("desk.toml").write_text(
    r'''
# desk.toml
prompts_per_step = 16
group_size = 8
steps = 30
recipe.name = "grpo"

model.path = "tiny"
model.device = "cpu"
model.threads = 1
tiny.width = 64
tiny.layers = 2
tiny.cold_start_accuracy = 1.0         # not to be had of guesses: the steps end it
tiny.cold_start_steps = 800

data.train = "products.jsonl"
data.holdout_share = 0.1
turns.environment = "desk.py:Desk"
turns.template = "[{role}]{text}\n"    # who speaks, for a model without a chat template
turns.max = 3                          # turns of the model
engine.max_tokens = 32                 # of the model, all its turns together

optim.learning_rate = 7e-4
optim.warmup_steps = 3
optim.beta2 = 0.95
eval.every = 5
eval.tasks = 60
eval.temperature = 1.0
'''.lstrip()
)

# %% [markdown]
# ## 4. Play before you train
#
# `check-reward` plays the environment itself: who knows the answer must win, who says a wrong one
# must not, and no episode may see anything of another.

# %%
groupwise("check-reward desk.toml")

# %% [markdown]
# ## 5. Train

# %%
groupwise("train desk.toml")
groupwise("report runs/desk")

# %% [markdown]
# Nobody has told the model that asking pays. It found out: an episode that was won had a question
# in it more often than one that was lost.
#
# ![Share of held-out products that were right, over the steps of the run](tools.png)
#
# ## 6. What was said
#
# The rollouts of every step are a file, and an episode's conversation is in it:

# %%
from groupwise.runfiles.rollouts import read

for step in (1, 30):
    rows = read(f"runs/desk/rollouts/step_{step}.parquet").to_pylist()
    turns = [len(row["episode"]["turns"]) for row in rows]
    print(f"step {step}: turns of the model, on average {sum(turns) / len(turns):.1f}")
    print(repr(rows[0]["prompt_text"]), repr(rows[0]["text"]), rows[0]["reward"])

# %% [markdown]
# In the viewer (`groupwise view`) every turn stands under the name of who spoke. Words in grey are
# the world's: they are read and never learned, and no grader sees them as the model's.
#
# ![An episode in the viewer: the model asks, the calculator answers, the model says the
# product](tools_sample.png)
#
# ## With a real model
#
# Functions with types and a docstring become tools as they are; a model with a chat template calls
# them in the form that its template knows.
#
# ```toml
# model.path = "Qwen/Qwen2.5-1.5B-Instruct"
# data.template = "chat"
# turns.tools = ["calculator", "mine.py:search"]     # built in, and yours
# reward.parts = { math = 1.0 }
# ```
#
# Leave out `turns.environment` where tools are all there is, and `turns.template` where the model
# has a chat template. Environments of TRL, Gymnasium, OpenEnv, verifiers and others are taken as
# they are: [turns and tools](../turns.md), [environments](../environments.md).
