"""The losses that other tools compute when asked for "GRPO", so that you can keep the one you had.

Each note names the version and the files that were read. Where a number could not be read in the
tool's own code the note says so, and the house default stands.
"""

from __future__ import annotations

import warnings
from typing import Any

from groupwise.errors import RecipeWarning
from groupwise.groups.advantages import (
    group_mean,
    group_zscore,
    leave_one_out_zscore,
    limit,
    minus_kl_to_go,
    whiten_tokens,
)
from groupwise.groups.aggregation import (
    seq_mean_token_mean,
    seq_mean_token_sum_norm,
    token_mean_batch,
    token_sum,
)
from groupwise.groups.credit import gae, process_rloo_release
from groupwise.groups.filters import accuracy_band, zero_variance
from groupwise.groups.shaping import kl_per_token
from groupwise.losses.auxiliary import kl_sequence_mean, outcome_bce, value_loss
from groupwise.losses.corrections import icepop, mis_sequence, tis_token
from groupwise.losses.distribution_gates import tv_mask
from groupwise.losses.gates import clip, dual_clip, unclipped
from groupwise.losses.penalties import drift, kl
from groupwise.losses.ratios import token
from groupwise.losses.schedules import joint
from groupwise.methods.composition import Recipe
from groupwise.methods.method import About
from groupwise.methods.registry import RECIPES, register


def dialect(
    tool: str, *, note: str, setting: dict[str, Any], of: str = "grpo", **slots: Any
) -> None:
    """Register `grpo@tool`, or what a tool makes of another method."""
    source = RECIPES[of].about
    plain: dict[str, Any] = {
        "advantage": group_zscore(ddof=1, eps=1e-6),
        "ratio": token(),
        "gate": clip(0.2, 0.2),
        "aggregation": token_mean_batch(),
        "schedule": joint(),
    }
    about = About(
        title=f"{source.title} as {tool} runs it",
        paper=source.paper,
        year=2026,
        family="dialect",
        fixes="moving from that tool without changing the loss",
        breaks=f"see {of} for what the paper says",
        reach_for=f"a run that used {tool}",
        setting=setting,
        note=note,
    )
    with warnings.catch_warnings():  # a dialect repeats what a tool does, doubtful or not
        warnings.simplefilter("ignore", RecipeWarning)
        register(Recipe(name=f"{of}@{tool}", about=about, **{**plain, **slots}))


dialect(
    "trl",
    advantage=group_zscore(ddof=1, eps=1e-4),
    correction=mis_sequence(high=3.0),
    setting={"group_size": 8, "learning_rate": 1e-6},
    note="TRL 1.16.0, trl/trainer/grpo_trainer.py and grpo_config.py: loss_type 'dapo', not 'grpo'. The"
    " correction runs there only with vLLM (mode sequence_mask); with an engine that agrees it is 1."
    " beta is 0; when set, its KL is kl_importance. Rows of a group with one grade get 0, as here.",
)
dialect(
    "verl",
    gate=dual_clip(0.2, 0.2, 3.0),
    schedule=joint(updates=4),
    setting={"group_size": "1: must be set", "prompts": 1024, "learning_rate": 1e-6},
    note="verl 0.9.1, verl/trainer/ppo/core_algos.py and trainer/config: the dual clip is always on. A"
    " group of one gets its raw reward there, 0 here. The token mean is over the mini-batch.",
)
dialect(
    "openrlhf",
    advantage=(
        group_zscore(ddof=1, eps=1e-9),
        limit(bound=10.0),
        minus_kl_to_go(coef=0.01, bound=10.0),
    ),
    setting={
        "group_size": "1: must be set",
        "updates": "8 per sample of a group",
        "learning_rate": 1e-6,
    },
    note="OpenRLHF 0.11.2, openrlhf/trainer/ppo_utils/experience_maker.py and models/loss.py with"
    " estimator group_norm: the reward clip acts on the z-score; KL is added per token behind it.",
)
dialect(
    "open-instruct",
    filter=zero_variance(),
    advantage=group_mean(),
    gate=clip(0.2, 0.272),
    correction=tis_token(cap=2.0),
    penalty=kl(coef=0.05, estimator="k3"),
    setting={"group_size": 4, "prompts": 16},
    note="open-instruct at e6c3044 (August 2026), open_instruct/grpo_utils.py, data_loader.py and"
    " model_utils.py: estimator '2' counts from 0 and is k3; uniform groups are dropped without a refill."
    " The weight is called use_rho_correction now, on by default, with the same cap of 2. Its 'standard'"
    " scaling has ddof 0 and ε 1e-8. Its learning rate could not be read.",
)
dialect(
    "prime-rl",
    filter=zero_variance(),
    advantage=group_mean(),
    ratio=token(anchor="sampler"),
    gate=tv_mask(delta=0.2, cap=1e9),
    penalty=drift(coef=1e-3),
    setting={"group_size": "1: must be set", "batch": 128, "learning_rate": 1e-6},
    note="prime-rl at 559b447 (August 2026), trainer/rl/loss.py and train.py, configs/trainer.py and"
    " orchestrator.py, orchestrator/algo/grpo.py: the token mean is over all tokens that are learned, of"
    " all ranks, masked ones included. No cap on the ratio (beyond e^20 here). Tokens whose advantage is"
    " 0 leave the batch (filter_zero_advantages). A length penalty is off by default.",
)
dialect(
    "areal",
    advantage=(group_zscore(ddof=1, eps=1e-6), whiten_tokens(ddof=1, eps_in_var=0.0, eps=1e-5)),
    gate=clip(0.4, 0.4),
    correction=icepop(low=0.0, high=5.0),
    setting={"group_size": 4, "prompts": 256, "learning_rate": 1.7e-5},
    note="AReaL 1.0.4, areal/trainer/ppo/actor.py, with examples/math/gsm8k_grpo.yaml at 00d07c0 and a"
    " newer sibling: z-scores twice. Rewards become (R − 0.5)·10 there before ε = 1e-5: the same as"
    " ε = 1e-6 on R. The newest plain configuration could not be read.",
)
dialect(
    "slime",
    aggregation=seq_mean_token_mean(),
    setting={"group_size": "1: must be set", "prompts": "must be set", "learning_rate": 1e-6},
    note="slime at 624b824 (August 2026), utils/arguments.py and ppo_utils.py, ray/rollout.py,"
    " backends/megatron_utils/loss.py and cp_utils.py: an upper clip that is not set is the lower one."
    " Rows that are fully masked stay in its divisor. KL, TIS and OPSM are off by default.",
)
dialect(
    "skyrl",
    auxiliary=kl_sequence_mean(coef=0.001, estimator="k3"),
    schedule=joint(updates=4),
    setting={"group_size": 5, "prompts": 1024, "learning_rate": 1e-6},
    note="SkyRL at a956457 (August 2026), skyrl/train/config/config.py, backends/skyrl_train/utils/"
    "ppo_utils.py and workers/worker.py: token mean of the mini-batch for the policy term (an earlier"
    " one is token_mean_legacy there), sequence mean for KL. A group of one gets its raw reward there, 0"
    " here; its KL is also clamped to ±10.",
)
dialect(
    "nemo-rl",
    advantage=leave_one_out_zscore(ddof=1, eps=1e-6),
    penalty=kl(coef=0.01, estimator="k3"),
    setting={"group_size": 16, "prompts": 32, "learning_rate": 5e-6},
    note="NeMo-RL at 7ea279a (August 2026), algorithms/utils.py, advantage_estimator.py,"
    " loss/loss_functions.py, examples/configs/grpo_math_1B.yaml: mean and std both leave the own sample"
    " out; where the others agree nothing is scaled. The log-ratio of its KL is held within ±20 and the"
    " KL of a token within ±10; here the exponent is held within ±20.",
)
dialect(
    "oat",
    advantage=group_mean(),
    aggregation=seq_mean_token_sum_norm(length=512),
    correction=tis_token(cap=2.0),
    penalty=kl(coef=0.1, estimator="k3"),
    setting={"group_size": 2, "learning_rate": 5e-7},
    note="Oat 0.2.4, oat/algorithms/ppo.py and args.py: its default critic_type is drgrpo; beta 0.1 is a"
    " field it shares with DPO. `length` is generate_max_length: set yours. Updates per batch could not"
    " be worked out.",
)
dialect(
    "tinker",
    advantage=group_mean(),
    ratio=token(anchor="sampler"),
    gate=unclipped(),
    aggregation=token_sum(),
    setting={"group_size": "4 or 16 by recipe", "learning_rate": "1e-5 or 4e-5 by recipe"},
    note="tinker-cookbook 0.6.1, rl/data_processing.py and rl/train.py. The loss itself runs on a hosted"
    " service: sum, anchor and the missing clip are from its documentation, not from code.",
)
dialect(
    "verl",
    of="ppo",
    shaping=kl_per_token(coef=0.001),
    advantage=(gae(gamma=1.0, lam=1.0), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    gate=dual_clip(0.2, 0.2, 3.0),
    auxiliary=value_loss(limit=0.5, gamma=1.0, lam=1.0),
    schedule=joint(updates=4),
    setting={"group_size": 1, "prompts": 256, "learning_rate": "1e-6, critic 1e-5"},
    note="verl 0.9.1, docs/algo/ppo.md and trainer/config: what its published GSM8K numbers were made"
    " with. λ is 1, so the critic is a baseline and no bootstrap. The value loss is 0.5 x the token mean,"
    " as here; its critic's head starts at random, here at 0.",
)
dialect(
    "release",
    of="prime",
    filter=accuracy_band(0.2, 0.8),
    advantage=(process_rloo_release(beta=0.05, weight=5.0), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    auxiliary=outcome_bce(beta=0.05),
    setting={"group_size": 4, "learning_rate": "5e-7, reward model 1e-6"},
    note="PRIME at 18ad596: process rewards are divided by the largest return of the batch, both terms"
    " have weight 5, and their sum is whitened over all tokens. The clip is the house's.",
)
