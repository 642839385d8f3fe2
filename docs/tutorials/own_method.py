"""A method of your own, compared. Made of own_method.md; run it in an empty folder."""

import shlex
import subprocess
import sys
from pathlib import Path


def groupwise(line: str) -> None:
    """Run a command and show it, as a shell would."""
    print(f"$ groupwise {line}", flush=True)
    subprocess.run([sys.executable, "-m", "groupwise", *shlex.split(line)], check=True)

# %% [markdown]
# # A method of your own, compared
#
# You have an idea for a better loss. This page takes one from twelve lines of Python to a verdict:
# does it do better than GRPO, by how much, and how sure is that? Most published comparisons of
# this kind contradict each other, because they differ in more than the method, and because one run
# of each says little.
#
# Everything runs on a laptop in a few minutes: the model is a toy that adds three digits. What
# comes out holds for the toy; how to find out is the same for a real one. This page is also a
# [script](own_method.py) and a [notebook](own_method.ipynb). Start in an empty folder.
#
# ## 1. The idea
#
# GRPO compares the answers to one question with each other. Those that are better than their
# group's mean get a positive **advantage** and become likelier; those that are worse get a
# negative one and become less likely. How far one step may go is bounded by the **gate**, which is
# written in the **ratio**: how much likelier a token is now than when it was sampled.
#
# Our idea: why blame at all? Praise what was good and leave the rest alone. In the notation of the
# papers, with ratio r and advantage A:
#
# ```
# S = min(r·A, clip(r, 0.8, 1.2)·A)     where A > 0
# S = 0                                 where A ≤ 0
# ```
#
# ## 2. The method
#
# A method is a record of small functions, one for each slot. We write one function, for the slot
# `gate`, and take everything else from GRPO.

# %%
Path("mine.py").write_text(
    r'''
# mine.py
import torch
from groupwise import recipe, register
from groupwise.groups.kl import bounded_exp
from groupwise.methods.slots import Fraction, gate


@gate(equation="S = min(r·A, clip(r, 0.8, 1.2)·A) where A > 0, {blame} of it elsewhere")
def praise(log_ratio_NT, advantage_NT, batch, *, blame: Fraction = 0.0):
    """Learn from answers that are better than their group, and less from the others."""
    ratio_NT = bounded_exp(log_ratio_NT)
    bounded_NT = ratio_NT.clamp(0.8, 1.2)
    objective_NT = torch.minimum(ratio_NT * advantage_NT, bounded_NT * advantage_NT)
    weight_NT = torch.where(advantage_NT > 0, 1.0, blame)
    return objective_NT * weight_NT, (ratio_NT != bounded_NT) & batch.mask_NT


register(recipe("grpo").replace(name="praise", gate=praise(blame=0.0)))
'''.lstrip()
)

# %% [markdown]
# Names say which axes a tensor has: `_NT` is sequence by token. The signature of every kind of
# slot is in [CONTRIBUTING.md](../../CONTRIBUTING.md#slots). What did we write, and how does it
# differ from GRPO?

# %%
groupwise("explain mine.py:praise grpo")

# %% [markdown]
# Before any run a slot of yours is tried on a small batch with numbers: shapes, padding,
# gradients, and whether the sum over parts of a batch is the gradient of the whole. A slip is told
# with file and line.
#
# ## 3. The comparison
#
# `compare` trains both methods with several **seeds**. Seed 3 of one method draws the same
# questions, in the same order and with the same random numbers, as seed 3 of the other; they start
# from the same weights, sample the same number of tokens and answer the same held-out questions.
# Only the method differs.

# %%
groupwise("compare grpo mine.py:praise --seeds 5 --budget tokens=4e4 --out runs/praise")

# %% [markdown]
# ![Held-out accuracy of both methods over the tokens sampled, with bands over the
# seeds](own_method.png)
#
# How to read the verdict:
#
# - **The interval** says which differences the data allow. One that holds 0 is no difference that
#   was seen.
# - **p** says how often two equal methods would look so different, by luck of the seeds and of the
#   held-out questions. It is corrected for everything that is judged here, so that ten comparisons
#   are not ten chances to be fooled.
# - **Not separable** is a result too. It comes with the number of seeds that would show a
#   difference of this size, and the smallest difference that this design could have seen. Take
#   more seeds (`--seeds 12`: the same command goes on and keeps the runs that are done), not
#   another look at the same ones.
#
# All of it, with the curves and the slots of both methods, is in `runs/praise/compare.html`.
#
# ## 4. Why? Both methods on the same tokens
#
# A comparison says that two methods differ. `replay` says what they do differently with the same
# recorded answers. It takes a run of GRPO and asks: had my method been given this batch, what
# would it have made of it?

# %%
groupwise("replay runs/praise/runs/grpo/seed_0 --recipe mine.py:praise --step 1 --gradients")

# %% [markdown]
# The first line is the run itself, the second our method on the run's batch. The **cosine** says
# how far both pull the same way: 1 is the same direction, 0 nothing in common. Token by token they
# differ, as was intended: more than a quarter of the weight is **turned**, where GRPO blames and
# our method leaves to GRPO's penalty for going astray, which we kept. But `cos ∇θ`, the same of
# the gradient of the model's weights, is near 1: the two updates move the model in nearly the same
# direction. So it is no wonder that five seeds did not tell them apart.
#
# ## 5. Go on from here
#
# - `"mine.py:praise recipe.gate.blame=0.5"` is an arm, too, and `--sweep
#   recipe.gate.blame=0,0.5,1` tries several values.
# - With your own model, data and reward: `--config own.toml`.
# - [All methods](../algorithms.md), [comparisons](../compare.md), [replays](../replay.md); and
#   what papers' claims looked like when they were put to this test: [claims](../claims.md).
