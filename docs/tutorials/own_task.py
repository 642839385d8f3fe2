"""Your own task in fifteen minutes. Made of own_task.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {line}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)

# %% [markdown]
# # Your own task in fifteen minutes
#
# A file with questions, a function that says how good an answer is, and a model: that is all a
# training with rewards needs. This page goes the whole way once, with a task that you could
# replace by yours: a word is to be written with its letters in order, `cab>` and then `abc`.
#
# The model is a toy, so that everything runs on a laptop in a few minutes: a transformer of two
# layers that is made on the spot and reads characters. What you learn here is the way, not the
# result. At the end stands what to change for a real model.
#
# This page is also a [script](own_task.py) and a [notebook](own_task.ipynb). Start in an empty
# folder; what is shown is what they printed.
#
# ## 1. The data
#
# A row has a `prompt` and an `answer`. Each row is one line of JSON. We make 900 words to train
# on, and 200 others to see whether what was learned holds for words that were never trained on.

# %%
import json
import random

draw = random.Random(0)
words = sorted({"".join(draw.choices("abcdefgh", k=draw.choice((3, 4)))) for _ in range(1600)})
draw.shuffle(words)


def row(word):
    ordered = "".join(sorted(word))
    return {"prompt": f"{word}>", "answer": ordered, "solution": ordered}


for name, part in {"test.jsonl": words[:200], "train.jsonl": words[200:]}.items():
    with open(name, "w") as file:
        for word in part:
            print(json.dumps(row(word)), file=file)
print(open("train.jsonl").readline(), end="")

# %% [markdown]
# The column `solution` is there for the toy alone: a model that has never read anything would have
# to find out by chance what an answer looks like, so it is taught on worked solutions first, until
# three in ten of its answers are right. A real model needs no such column.
#
# ## 2. The reward
#
# A reward is a function. It asks for what it wants by name, here for the model's text and the
# row's answer, and returns a number. Half a point is for letters that stand where they should, so
# that of two wrong answers the better one is worth more.

# %%
Path("own.py").write_text(
    r'''
# own.py
def sorted_letters(completion, answer):
    """Return 1 for the letters in order, less for some of them in their places."""
    if completion == answer:
        return 1.0
    places = sum(said == right for said, right in zip(completion, answer))
    return 0.5 * places / max(len(completion), len(answer))
'''.lstrip()
)

# %% [markdown]
# ## 3. The configuration

# %%
Path("own.toml").write_text(
    r'''
# own.toml
prompts_per_step = 32          # questions in a step,
group_size = 8                 # answers to each: they are compared with each other
steps = 100
recipe.name = "grpo"           # the method,
recipe.schedule.updates = 2    # and how often the weights are changed in a step

model.path = "tiny"            # the toy
model.device = "cpu"
model.threads = 1
tiny.width = 64
tiny.layers = 2

data.train = "train.jsonl"
data.eval = "test.jsonl"
engine.max_tokens = 6          # of an answer

optim.learning_rate = 7e-4     # a real model wants 1e-6 or so
optim.warmup_steps = 5

eval.every = 10
eval.tasks = 200
eval.temperature = 1.0         # as in training

[reward.parts]
"own.py:sorted_letters" = 1.0
'''.lstrip()
)

# %% [markdown]
# ## 4. Try the reward before you train
#
# Most trainings that fail fail here: a reward that a right answer does not get, or that a wrong
# one does. `check-reward` tries the function on real rows, with right answers, wrong ones and
# known tricks. No model is loaded.

# %%
groupwise("check-reward own.toml")

# %% [markdown]
# The table is as it should be. The note below it is worth a thought: whoever just repeats the word
# gets part of a point, because some letters happen to stand in the right place. For us that is
# intended.
#
# ## 5. Look before you train
#
# A group of answers teaches something only if some are better than others. If all are wrong, or
# all are right, there is nothing to compare. `probe` samples some answers and says how that
# stands.

# %%
groupwise("probe own.toml --prompts 16")

# %% [markdown]
# Most groups have right and wrong answers in them: ready to train. (What it suggests would make
# still more of them useful, and every step dearer.) With a real model this is the moment to find
# out that the questions are too hard, or that answers are cut off, before an hour is spent.
#
# ## 6. Train

# %%
groupwise("train own.toml")

# %% [markdown]
# At the beginning it says what it is about to do, then there is a line for each step, and at the
# end stand a few questions with the model's answers before and after. The run is in `runs/own`. If
# it is stopped, by Ctrl-C or because the machine goes down, the same command goes on where it was.
#
# ![Held-out accuracy over the steps of the run](own_task.png)
#
# `groupwise report runs/own` made this picture, and a page with all the others:

# %%
groupwise("report runs/own")

# %% [markdown]
# To look at the run while it goes on, and at every single answer, `groupwise view` shows it in
# your browser. It does not end by itself, so it is not run here. As one file, to keep or to send
# to somebody:

# %%
groupwise("view --export runs/own own.html")

# %% [markdown]
# ## 7. Is it well? Is it better?
#
# `diagnose` looks for what goes wrong in such trainings. `eval` asks all held-out questions once
# more, of the checkpoint that did best on them, which need not be the last one: a run goes up and
# down on its way. (Chosen by the same questions, the best looks a little better than it is. For a
# figure to report, keep a third file of questions.)

# %%
groupwise("diagnose runs/own")
groupwise("eval runs/own")

# %% [markdown]
# ## With a real model
#
# Change these lines; everything else stays.
#
# ```toml
# model.path = "Qwen/Qwen2.5-0.5B-Instruct"    # an id of the hub, a folder, or a .gguf file
# data.template = "chat"                       # prompts become messages
# engine.max_tokens = 256
# optim.learning_rate = 1e-6
# ```
#
# Take out `model.device`, `model.threads` and the lines of `tiny`, and the column `solution` if
# you like. `groupwise plan own.toml` says what memory and time it will take, `groupwise doctor`
# whether something is missing. Further: [data](../data.md), [rewards](../graders.md), [is it
# well?](../health.md), and if you have a script for TRL, [the next tutorial](from_trl.md).
