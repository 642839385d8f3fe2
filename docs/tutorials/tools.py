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
# There is a box, and the question is how much it weighs. Nobody can know without putting it on the
# scales; whoever says `weigh` is told. Weighing costs a little, so that nobody does it twice for
# nothing.
#
# An environment is a class with two methods. `reset` gets the columns of the row by name. `step`
# gets what the model wrote, and returns the world's words, a reward, and whether it is over.

# %%
Path("scales.py").write_text(
    r'''
# scales.py
class Scales:
    """A box that can be weighed, and a question about its weight."""

    def reset(self, answer, **row):
        self.weight = answer
        return None  # no first words: the prompt says it all

    def step(self, text):
        if text.strip() == "weigh":
            return self.weight, -0.1, False
        return "", float(text.strip() == self.weight), True
'''.lstrip()
)

# %% [markdown]
# ## 2. The data
#
# A row is a box: a prompt with a number to tell it apart, and its weight. `solution` is there for
# the toy alone, which has to see once what a conversation looks like. We show it somebody who
# guesses every second time, else weighs, and does not always heed the scales: all the words of the
# game, and no good play.

# %%
import json
import random

draw = random.Random(0)


def shown(weight):
    said, kind = str(draw.randrange(10)), draw.random()
    if kind < 0.5:
        return f"{said}\n"
    return f"weigh\n[user]{weight}\n[assistant]{weight if kind < 0.9 else said}\n"


with open("boxes.jsonl", "w") as file:
    for number in draw.sample(range(1000, 10000), 600):
        weight = str(draw.randrange(10))
        row = {"prompt": f"box {number}:", "answer": weight, "solution": shown(weight)}
        print(json.dumps(row), file=file)

# %% [markdown]
# ## 3. The configuration

# %%
Path("boxes.toml").write_text(
    r'''
# boxes.toml
prompts_per_step = 16
group_size = 8
steps = 30
recipe.name = "dr_grpo"
recipe.aggregation.length = 16

model.path = "tiny"
model.device = "cpu"
model.threads = 1
tiny.width = 64
tiny.layers = 2
tiny.cold_start_accuracy = 1.0         # not to be had of guesses: the steps end it
tiny.cold_start_steps = 500

data.train = "boxes.jsonl"
data.holdout_share = 0.1
turns.environment = "scales.py:Scales"
turns.template = "[{role}]{text}\n"    # who speaks, for a model without a chat template
turns.max = 4                          # turns of the model
turns.truncated = []                   # an episode that does not end is a loss, not a cut
engine.max_tokens = 32                 # of the model, all its turns together

optim.learning_rate = 7e-4
optim.warmup_steps = 5
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
groupwise("check-reward boxes.toml")

# %% [markdown]
# `probe` lets the model play. It says how episodes end and how many turns they take:

# %%
groupwise("probe boxes.toml --prompts 16")

# %% [markdown]
# ## 5. Train

# %%
groupwise("train boxes.toml")
groupwise("report runs/boxes")

# %% [markdown]
# Nobody has shown the model that weighing pays. It found out: an episode that was won had a
# weighing in it more often than one that was lost.
#
# ![Share of held-out boxes whose weight was named, over the steps of the run](tools.png)
#
# ## 6. What was said
#
# The rollouts of every step are a file, and an episode's conversation is in it:

# %%
from groupwise.runfiles.rollouts import read

for step in (1, 30):
    rows = read(f"runs/boxes/rollouts/step_{step}.parquet").to_pylist()
    turns = [len(row["episode"]["turns"]) for row in rows]
    print(f"step {step}: turns of the model, on average {sum(turns) / len(turns):.1f}")
    print(repr(rows[0]["prompt_text"]), repr(rows[0]["text"]), rows[0]["reward"])

# %% [markdown]
# In the viewer (`groupwise view`) every turn stands under the name of who spoke. Words in grey are
# the world's: they are read and never learned, and no grader sees them as the model's.
#
# ![An episode in the viewer: the model weighs, the scales answer, the model says the
# weight](tools_sample.png)
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
