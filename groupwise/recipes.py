"""Every algorithm as data. Add yours here (or in a file of your own) in a dozen lines.

The defaults of `method` are plain: z-score in the group, ratio per token, clip 0.2, token mean, one
update per batch. A recipe states what differs. `setting` holds what the paper used outside the
slots. `note` says how sure the reading is; [H] marks a choice of this house where sources are silent
or disagree. Pitfalls and what implementations disagree about are in explain/notes.toml.
"""

from __future__ import annotations

from typing import Any

from groupwise.groups.advantages import (
    greedy_baseline,
    group_mean,
    group_mean_batch_std,
    group_zscore,
    leave_one_out,
    maxrl,
    positive_part,
    raw,
    rescale_for_dead_groups,
    reweight_by_probability,
    smooth_cumulative,
    unrewarded,
    whiten_sequences,
    whiten_tokens,
)
from groupwise.groups.aggregation import (
    every_seq_mean_token_mean,
    learned_length_weight,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    seq_sum_token_mean,
    token_mean_batch,
    token_mean_group,
    token_sum,
)
from groupwise.groups.comparisons import (
    batch_mean,
    best_minus_second,
    group_mean_of_peers,
    group_zscore_per_part,
    length_weighted_mean,
    optimal_value_baseline,
    prompt_beta_mean,
    role_moving_mean,
    tree_mean,
)
from groupwise.groups.credit import (
    drift_as_process_reward,
    gae,
    gae_length_adaptive,
    group_process_zscore,
    minus_teacher_kl,
    process_rloo,
    return_to_go,
    step_difference,
)
from groupwise.groups.draws import token_mean_of_drawn
from groupwise.groups.filters import (
    accuracy_band,
    enough_mixed,
    overlong,
    reject,
    scored_by_reference,
    zero_variance,
)
from groupwise.groups.length_shaping import flawed_positive_penalty
from groupwise.groups.shaping import kl_per_sequence, kl_per_token, signed, soft_overlong
from groupwise.groups.token_baselines import (
    minus_teacher_return,
    optimal_token_baseline,
    plus_teacher_return,
)
from groupwise.groups.turns import (
    call_credit,
    plus_state_zscore,
    turn_return,
    turn_return_to_go,
    whiten_turns,
)
from groupwise.losses.across_pairs import aot, aot_unpaired, bco_pair
from groupwise.losses.answer_sums import on_policy_weight, shared_length
from groupwise.losses.auxiliary import outcome_bce, positive_nll, value_loss
from groupwise.losses.corrections import (
    binary_kl_mask,
    future_influence,
    icepop,
    interpolated_mask,
    mask_outliers,
    mis_geometric,
    mis_sequence,
    negative_sequence_mask,
    replay_routing,
    second_moment_mask,
    sequence_kl_mask,
    share,
    taught,
    tis_sequence,
    tis_token,
    top_entropy,
)
from groupwise.losses.distillation import teacher_divergence, teacher_topk_divergence
from groupwise.losses.distribution_gates import (
    kl_mask,
    topk_mask,
    topk_smoothing,
    tv_mask,
    tv_one_sided,
    tv_symmetric,
)
from groupwise.losses.gates import (
    clip,
    constant,
    dual_clip,
    dynamic_clip,
    geometric_clip,
    score,
    score_by_probability,
    segment_clip,
    soft,
    unclipped,
    weight_cap,
)
from groupwise.losses.group_terms import (
    group_contrast,
    group_regression,
    partition_loss,
    trajectory_balance,
    weighted_nll,
)
from groupwise.losses.pairs import (
    best_and_worst,
    best_and_worst_ended,
    data_against_own_sample,
    judged_best_and_worst,
    labelled,
    logistic,
)
from groupwise.losses.penalties import (
    cov_drift,
    drift,
    entropy_bonus,
    kl,
    proximal,
    proximal_sequence,
)
from groupwise.losses.preferences import (
    apo_down,
    apo_zero,
    cdpo,
    chosen_nll,
    discopop,
    exo,
    f_divergence,
    hinge,
    ipo_sum,
    ipo_token_mean,
    logistic_alone,
    logistic_token_mean,
    nca,
    odds_ratio,
    robust,
    shifted,
    simpo,
    sppo_hard,
)
from groupwise.losses.ratios import (
    geomean_token_grad,
    interpolated_token,
    on_policy,
    router_shift,
    segment_geomean,
    sequence_geomean,
    sequence_product,
    token,
)
from groupwise.losses.schedules import joint, low_then_high
from groupwise.losses.scores import bradley_terry, every_pair, soft_labels
from groupwise.losses.unpaired import kto
from groupwise.losses.update_gates import cov_clip, moment_clip, silent, squared_residual
from groupwise.losses.weight_gates import (
    band_mask,
    gamma_weight,
    score_ring,
    taper,
)
from groupwise.methods.composition import PairRecipe, Recipe, UnpairedRecipe
from groupwise.methods.method import About
from groupwise.methods.registry import RECIPES, load_plugin, recipe, register
from groupwise.methods.scoring import ProcessRewardModelRecipe, RewardModelRecipe

__all__ = ["RECIPES", "load_plugin", "method", "recipe", "register"]

_ABOUT = (
    "title", "paper", "year", "family", "fixes", "breaks", "reach_for", "setting", "note", "departs",
)  # fmt: skip
_PLAIN: dict[str, Any] = {
    "advantage": group_zscore(),
    "ratio": token(),
    "gate": clip(0.2, 0.2),
    "aggregation": token_mean_batch(),
    "schedule": joint(),
}


def method(name: str, **entry: Any) -> Recipe:
    """Register a recipe: plain defaults, what differs, and where it comes from."""
    about = About(**{key: entry.pop(key) for key in _ABOUT if key in entry})
    made = Recipe(name=name, about=about, **{**_PLAIN, **entry})
    register(made)
    return made


# --- answers of the data ----------------------------------------------------------------------

method(
    "sft",
    title="supervised fine-tuning", paper="maximum likelihood", year=1922, family="supervised",
    source="data",
    advantage=raw(),
    ratio=on_policy(), gate=score(),
    aggregation=token_mean_batch(),
    setting={"learning_rate": "2e-5, ten times as much for an adapter", "epochs": 2},
    fixes="a policy that never gives a right answer, and so has nothing to learn from",
    breaks="learns what the data say, not what works; forgets what they leave out",
    reach_for="a cold start before reinforcement, or data with worked answers",
    note="[H] A row counts by its column `weight` (1 without); the mean is over all tokens of an"
    " update.",
)  # fmt: skip

method(
    "dft",
    title="DFT", paper="2508.05629", year=2025, family="supervised",
    source="data",
    advantage=raw(),
    ratio=on_policy(), gate=score_by_probability(),
    aggregation=token_mean_batch(),
    fixes="the 1/π weight that hides in supervised learning: rare tokens no longer rule the step",
    breaks="tokens that the policy holds for impossible are never learned",
    reach_for="answers close to what the model would say itself",
    note="[T] The weight is the token's own probability, without gradient; rates and lengths as for sft [H].",
)  # fmt: skip

# --- policy gradients without a ratio ---------------------------------------------------------

method(
    "reinforce",
    title="REINFORCE", paper="Williams 1992", year=1992,
    advantage=raw(),
    ratio=on_policy(), gate=score(),
    aggregation=seq_mean_token_sum(),
    fixes="the policy gradient itself, unbiased",
    breaks="huge variance; every rewarded token is pushed up",
    reach_for="a yardstick, or a first lesson",
)  # fmt: skip

method(
    "rloo",
    title="RLOO", paper="2402.14740", year=2024,
    shaping=kl_per_sequence(coef=0.03),
    advantage=leave_one_out(),
    ratio=on_policy(), gate=score(),
    aggregation=seq_mean_token_sum(),
    setting={"group_size": "2 or 4", "kl_coef": "0.03 (TL;DR), 0.10 (HH)"},
    fixes="an unbiased baseline without a critic",
    breaks="needs two or more samples per prompt; one update per batch",
    reach_for="small groups, one update per batch, an unbiased gradient",
    note="[T] KL inside the sequence's reward, before the baseline.",
)  # fmt: skip

method(
    "remax",
    title="ReMax", paper="2310.10505", year=2023,
    advantage=greedy_baseline(),
    ratio=on_policy(), gate=score(),
    aggregation=seq_mean_token_sum(),
    fixes="a baseline from one sample per prompt",
    breaks="one greedy decode more; a noisy baseline",
    reach_for="one sample per prompt and no critic",
    note="[V] from the authors' code.",
)  # fmt: skip

method(
    "gpg",
    title="GPG", paper="2504.02546", year=2025,
    filter=enough_mixed(0.6),
    advantage=(group_mean(), rescale_for_dead_groups()),
    ratio=on_policy(), gate=score(),
    fixes="nothing but the policy gradient: no ratio, no clip, no KL; dead groups do not shrink the step",
    breaks="one update per batch; noisy when few groups are mixed",
    reach_for="strictly on-policy runs where simplicity matters",
    note="[V] F = 1; α = P/(P−M) counts prompts with zero variance; 1 where all are dead [H].",
)  # fmt: skip

# --- PPO and its critics ----------------------------------------------------------------------

method(
    "ppo",
    title="PPO", paper="1707.06347", year=2017,
    shaping=kl_per_token(coef=0.01),
    advantage=(gae(gamma=1.0, lam=0.95), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    auxiliary=value_loss(limit=0.2, gamma=1.0, lam=0.95),
    setting={"paper": "γ=0.99, λ=0.95, ε=0.2", "language models": "γ=1, λ 0.95 to 1, whitened"},
    fixes="credit per token, several updates per batch",
    breaks="a critic to hold, train and distrust",
    reach_for="dense or step rewards, and the memory for a critic",
    note="[T] numbers of language-model practice; KL weight 0.01 [H].",
)  # fmt: skip

method(
    "pf_ppo",
    title="PF-PPO", paper="2409.06957", year=2024,
    shaping=kl_per_token(coef=0.01),
    advantage=(gae(gamma=1.0, lam=0.95), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    aggregation=token_mean_of_drawn(how="pow", power=2.0),
    auxiliary=value_loss(limit=0.2, gamma=1.0, lam=0.95),
    fixes="noisy rewards in the middle: answers with the largest count more often",
    breaks="biased; with rewards of 0 and 1 wrong answers are never seen",
    reach_for="rewards of a model that is sure at its ends alone",
    note="[V] verl draws whole rows anew behind the advantages, for policy and critic. Here a row counts as"
    " often as it was drawn, and stays in its update; the critic learns from all rows [H]. Chance is a"
    " function of the answers' tokens: it repeats.",
)  # fmt: skip

method(
    "ppo_dual_clip",
    title="Dual-clip PPO", paper="1912.09729", year=2019,
    shaping=kl_per_token(coef=0.01),
    advantage=(gae(gamma=1.0, lam=0.95), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    gate=dual_clip(low=0.2, high=0.2, bound=3.0),
    auxiliary=value_loss(limit=0.2, gamma=1.0, lam=0.95),
    fixes="a bad token whose ratio exploded can't dominate the loss",
    breaks="such tokens are not pushed back either",
    reach_for="PPO on stale data",
)  # fmt: skip

method(
    "vapo",
    title="VAPO", paper="2504.05118", year=2025,
    advantage=gae_length_adaptive(alpha=0.05, gamma=1.0),
    gate=clip(0.2, 0.28),
    auxiliary=(value_loss(limit=0.2, gamma=1.0, lam=1.0), positive_nll(0.1)),
    schedule=joint(updates=16),
    setting={"prompts": 512, "group_size": 16, "learning_rate": "1e-6, critic 2e-6", "value_only_steps": 50},
    fixes="critics that fail on long answers: λ by length, Monte-Carlo targets",
    breaks="a critic, and 50 steps to warm it up",
    reach_for="long answers and the memory for a critic",
    note="[T] λ is negative below 20 tokens: held at 0 [H].",
)  # fmt: skip

method(
    "vineppo",
    title="VinePPO", paper="2410.01679", year=2024,
    advantage=(
        step_difference(branches=9, most_steps=25, split="line"),
        whiten_tokens(ddof=1, eps_in_var=1e-8),
    ),
    penalty=kl(coef=1e-4, estimator="k3"),
    setting={"group_size": 8, "prompts": 64, "learning_rate": 1e-6, "temperature": 0.6, "passes": "2 x 8 updates"},
    fixes="a critic's errors: values of steps are means of sampled answers",
    breaks="sampling costs branches x steps times the answers' own; a step is one action",
    reach_for="answers in steps, sampling cheaper than a critic",
    note="[V] equation, K, the cap, whitening and KL from the release. It values the first 25 steps,"
    " here they are spread over the answer [H]; it samples K answers for the root, here the group's"
    " others are its value [H]; it splits solutions of MATH by rules of LaTeX, here by lines or"
    " sentences [H].",
)  # fmt: skip

# --- group baselines --------------------------------------------------------------------------

method(
    "grpo",
    title="GRPO", paper="2402.03300", year=2024,
    advantage=group_zscore(ddof=1, eps=1e-6),
    aggregation=seq_mean_token_mean(),
    penalty=kl(coef=0.04, estimator="k3"),
    setting={"group_size": 64, "learning_rate": 1e-6, "completions": 1024},
    fixes="no critic: the group is the baseline",
    breaks="short right answers and long wrong ones are favoured; 1/σ weighs prompts",
    reach_for="the reference point of the family",
    note="[V] clip 0.2, ddof and ε are not in the paper [H]. DeepSeek-R1: G=16, β=0.001, ε=10 [T].",
)  # fmt: skip

method(
    "grpo_process",
    title="GRPO with process supervision", paper="2402.03300", year=2024, family="variant",
    advantage=group_process_zscore(ddof=1, eps=1e-6),
    aggregation=seq_mean_token_mean(),
    penalty=kl(coef=0.04, estimator="k3"),
    setting={"group_size": 64, "learning_rate": 1e-6, "completions": 1024},
    fixes="credit per reasoning step",
    breaks="needs a step grader; its noise is summed over steps",
    reach_for="a trustworthy reward per step",
)  # fmt: skip

method(
    "dapo",
    title="DAPO", paper="2503.14476", year=2025,
    filter=(zero_variance(), overlong()),
    shaping=soft_overlong(max_length=20480, cache=4096),
    gate=clip(0.2, 0.28),
    schedule=joint(updates=16),
    setting={"group_size": 16, "prompts": 512, "learning_rate": 1e-6, "warmup_steps": 20},
    fixes="entropy collapse (clip-higher), dead groups, length bias, truncation noise",
    breaks="dynamic sampling costs rollouts; long answers weigh more",
    reach_for="long chains of thought with a verifier",
    note="[V] aggregation as in all code; the printed formula is dapo_group. The paper draws until the"
    " batch is full; here three times by default [H], as the rest brought nothing that could be"
    " measured (docs/log.md): refills='until full' is the paper's.",
)  # fmt: skip

method(
    "dapo_group",
    title="DAPO as printed", paper="2503.14476", year=2025, family="variant",
    filter=(zero_variance(), overlong()),
    shaping=soft_overlong(max_length=20480, cache=4096),
    gate=clip(0.2, 0.28),
    aggregation=token_mean_group(),
    schedule=joint(updates=16),
    setting={"group_size": 16, "prompts": 512, "learning_rate": 1e-6, "warmup_steps": 20},
    fixes="as DAPO, every prompt counting the same",
    breaks="no public code trains with it",
    reach_for="comparing the formula with the code",
)  # fmt: skip

method(
    "dr_grpo",
    title="Dr.GRPO", paper="2503.20783", year=2025,
    advantage=group_mean(),
    aggregation=seq_mean_token_sum_norm(length=3000),
    setting={"group_size": 8, "generation_budget": 3000},
    fixes="length bias and the 1/σ weighting of GRPO",
    breaks="a constant to choose; the step follows the reward's scale",
    reach_for="an unbiased gradient on a fixed scale",
    note="[V] `length` is your generation budget: set it.",
)  # fmt: skip

method(
    "lite_ppo",
    title="Lite PPO", paper="2508.08221", year=2025,
    advantage=group_mean_batch_std(ddof=1, eps=1e-6),
    setting={"group_size": 8},
    fixes="two tricks in place of many: batch std and token mean",
    breaks="the scale depends on the batch's mix of prompts",
    reach_for="a plain, strong default for base models",
    note="[V]",
)  # fmt: skip

method(
    "reinforce_pp",
    title="REINFORCE++", paper="2501.03262", year=2025,
    shaping=kl_per_token(coef=0.01),
    advantage=(return_to_go(gamma=1.0), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    setting={"group_size": 1},
    fixes="one sample per prompt, no critic",
    breaks="long answers dominate the statistics",
    reach_for="one sample per prompt, many prompts",
    note="[V] code; β is 0.01 or 0.001 by version [T].",
)  # fmt: skip

method(
    "reinforce_pp_baseline",
    title="REINFORCE++-baseline", paper="2501.03262", year=2025,
    advantage=(group_mean(), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    penalty=kl(coef=0.01, estimator="k2"),
    fixes="a group baseline, scaled over the batch instead of the group",
    breaks="long answers dominate the statistics",
    reach_for="groups with a robust scale, KL with the right gradient",
    note="[V] code; β = 0.01 [H].",
)  # fmt: skip

method(
    "reinforce_rej",
    title="Reinforce-Rej", paper="2504.11343", year=2025,
    filter=reject(),
    shaping=signed(),
    advantage=raw(),
    penalty=kl(coef=0.001, estimator="k3"),
    setting={"group_size": 4},
    fixes="shows how much of GRPO is just dropping uniform groups",
    breaks="no baseline: high variance",
    reach_for="an ablation of GRPO's baseline",
    note="[V] code; rewards as ±1 [H], since a 0 without a baseline teaches nothing.",
)  # fmt: skip

method(
    "maxrl",
    title="MaxRL", paper="2602.02710", year=2026,
    advantage=maxrl(eps=0.0),
    setting={"group_size": 16, "gradient_clip": 0.3},
    fixes="hard prompts count by 1/p: maximum likelihood of success",
    breaks="binary rewards only; rare successes shake the step",
    reach_for="hard prompts, pass@k",
    note="[V]",
)  # fmt: skip

method(
    "prime",
    title="PRIME", paper="2502.01456", year=2025,
    filter=accuracy_band(0.2, 0.8),
    advantage=process_rloo(beta=0.05, gamma=1.0),
    auxiliary=outcome_bce(beta=0.05),
    setting={"group_size": 4, "learning_rate": "5e-7, reward model 1e-6"},
    fixes="dense rewards from outcome labels alone",
    breaks="a reward model to hold and train online; it can be hacked",
    reach_for="sparse outcomes on long answers, memory for two more models",
    note="[V] the paper's equation 5; the release differs (explain prime).",
)  # fmt: skip

method(
    "prime_seed",
    title="PRIME, simplified", paper="after 2502.01456", year=2025, family="ablation",
    advantage=drift_as_process_reward(mix=0.5, ddof=1, eps=1e-6),
    fixes="nothing: shows what a popular reading of PRIME would do",
    breaks="pays the policy for leaving the reference",
    reach_for="an ablation only; use prime",
    note="The policy stands where the trained reward model should.",
)  # fmt: skip

method(
    "dcpo",
    title="DCPO", paper="2509.02333", year=2025,
    advantage=smooth_cumulative(ddof=1),
    gate=dynamic_clip(low=0.16, high=0.2, cap=10.0, bound=10.0),
    aggregation=seq_sum_token_mean(),
    fixes="rare tokens get room; uniform groups still teach",
    breaks="state per prompt; the step grows with the batch",
    reach_for="several epochs over the same prompts",
    note="[V] the aggregation is what micro-batches of one gave in the authors' code.",
)  # fmt: skip

method(
    "lambda_grpo",
    title="λ-GRPO", paper="2510.06870", year=2025,
    aggregation=learned_length_weight(exponent=0.0, slope=1 / 9),
    fixes="learns how much length should count",
    breaks="λ follows the loss's sign, not the task: log it",
    reach_for="a study of length weighting",
    note="[T] transcriptions only. Another paper has the same name.",
)  # fmt: skip

# --- other ratios and gates -------------------------------------------------------------------

method(
    "gspo",
    title="GSPO", paper="2507.18071", year=2025,
    ratio=sequence_geomean(),
    gate=clip(0.0003, 0.0004),
    aggregation=seq_mean_token_mean(),
    schedule=joint(updates=4),
    fixes="ratio noise on long answers and in mixtures of experts",
    breaks="one token can silence an answer; needs its own tiny clip range",
    reach_for="mixtures of experts, long answers",
    note="[V]",
)  # fmt: skip

method(
    "gspo_token",
    title="GSPO-token", paper="2507.18071", year=2025, family="variant",
    ratio=geomean_token_grad(),
    gate=clip(0.0003, 0.0004),
    aggregation=seq_mean_token_mean(),
    schedule=joint(updates=4),
    fixes="GSPO with advantages per token (multi-turn)",
    breaks="equals GSPO when they are constant",
    reach_for="GSPO with step or turn rewards",
    note="[V]",
)  # fmt: skip

method(
    "gmpo",
    title="GMPO", paper="2507.20673", year=2025,
    gate=geometric_clip(limit=0.4),
    aggregation=seq_mean_token_mean(),
    fixes="outlier ratios: a geometric mean instead of an arithmetic one",
    breaks="clipped tokens still move the answer's weight",
    reach_for="unstable ratios without a tiny clip range",
    note="[V]",
)  # fmt: skip

method(
    "cispo",
    title="CISPO", paper="2506.13585", year=2025,
    filter=(zero_variance(), overlong()),
    gate=weight_cap(cap=5.0),
    schedule=joint(updates=16),
    fixes="every token keeps its gradient, rare 'wait'-like ones too",
    breaks="no trust region; the loss value means nothing",
    reach_for="many off-policy updates, reflective behaviour",
    note="[V] the paper does not disclose its cap; 5 is ScaleRL's [H]. The cap is absolute.",
)  # fmt: skip

method(
    "sapo",
    title="SAPO", paper="2511.20347", year=2025,
    gate=soft(tau_pos=1.0, tau_neg=1.05),
    aggregation=seq_mean_token_mean(),
    fixes="a smooth gate: no edge at which a gradient dies",
    breaks="never fully off; two temperatures",
    reach_for="clip-sensitive runs",
    note="[V]",
)  # fmt: skip

method(
    "sspo",
    title="SSPO", paper="2511.04256", year=2025,
    ratio=segment_geomean(),
    gate=segment_clip(width=constant(low=0.2, high=0.2)),
    aggregation=seq_mean_token_mean(),
    fixes="between token noise and GSPO's all-or-nothing",
    breaks="needs a splitter; the paper's entropy-scaled range is not public",
    reach_for="a study of ratio levels",
    note="Abstract only; segments at punctuation and newlines, constant range [H]. Two other papers share the name.",
)  # fmt: skip

method(
    "advantage_reweighting",
    title="Advantage reweighting", paper="2505.12929", year=2025,
    advantage=(group_zscore(), reweight_by_probability(alpha=0.3)),
    gate=clip(0.2, 0.24),
    penalty=kl(coef=0.001, estimator="k3"),
    setting={"alpha": "0.2 to 0.3"},
    fixes="rare tokens, whose gradients are largest, drown the others",
    breaks="slows the tokens that explore",
    reach_for="noisy updates dominated by rare tokens",
    note="[V]",
)  # fmt: skip

method(
    "lopti",
    title="Lopti", paper="2505.12929", year=2025,
    gate=clip(0.2, 0.24),
    penalty=kl(coef=0.001, estimator="k3"),
    schedule=low_then_high(eta=0.5),
    fixes="frequent tokens are corrected after the rare ones moved them",
    breaks="twice the updates",
    reach_for="as advantage reweighting, with compute to spare",
    note="[V]",
)  # fmt: skip

method(
    "rspo",
    title="RSPO", paper="2510.23027", year=2025,
    ratio=router_shift(floor=0.8),
    gate=geometric_clip(limit=0.4),
    aggregation=seq_mean_token_mean(),
    fixes="router drift in mixtures of experts",
    breaks="needs router scores of both passes",
    reach_for="mixtures of experts whose routing moves",
    schedule=joint(updates=4),
    note="[T] v2; v1 multiplied after clipping. Updates a batch: ours.",
)  # fmt: skip

method(
    "simko",
    title="SimKO", paper="2510.14807", year=2025,
    gate=topk_smoothing(alpha=0.01, k=3, quantile=0.8, top1=1.1, low=0.2, high=0.2),
    fixes="mass piling up on the top token: pass@k falls while pass@1 rises",
    breaks="needs top-k log-probabilities with gradient",
    reach_for="pass@k",
    note="[V]; the top-k set is the current policy's, detached [H].",
)  # fmt: skip

method(
    "dppo",
    title="DPPO (binary TV)", paper="2602.04879", year=2026,
    ratio=token(anchor="sampler"),
    gate=tv_mask(delta=0.2, cap=5.0),
    setting={"delta": "0.2, LoRA 0.15"},
    fixes="a trust region in probability mass: rare tokens may move",
    breaks="sees the sampled token only",
    reach_for="a sampler that differs from the learner, rare tokens that matter",
    note="[V] cap 5 in the paper, 10 in its release.",
)  # fmt: skip

method(
    "dppo_kl",
    title="DPPO (binary KL)", paper="2602.04879", year=2026, family="variant",
    ratio=token(anchor="sampler"),
    gate=kl_mask(delta=0.05, cap=5.0),
    fixes="as dppo, stricter where the sampler was nearly sure",
    breaks="sees the sampled token only",
    reach_for="as dppo",
    note="[V]",
)  # fmt: skip

method(
    "dppo_topk",
    title="DPPO (top-K)", paper="2602.04879", year=2026, family="variant",
    ratio=token(anchor="sampler"),
    gate=topk_mask(delta=0.2, k=20, divergence="tv", members="top", cap=5.0),
    fixes="sees where the mass went",
    breaks="top-k log-probabilities from both engines",
    reach_for="a study of trust regions",
    note="[V] δ = 0.2 as for the binary form [H].",
)  # fmt: skip

method(
    "olmo3",
    title="Olmo 3's combination", paper="Olmo 3 report", year=2025,
    filter=zero_variance(),
    advantage=group_mean(),
    gate=clip(0.2, 0.272),
    correction=tis_token(cap=2.0),
    setting={"prompts": 64, "group_size": 8, "learning_rate": "1e-6 (32B: 2e-6)"},
    fixes="DAPO's and Dr.GRPO's lessons with a sampler correction",
    breaks="long answers weigh more",
    reach_for="a separate inference engine",
    note="[V] code; θ_old in the correction's numerator, as there.",
)  # fmt: skip

# --- 2025 and 2026: sequence weights, masks, terms on the log-ratio ------------------------------

method(
    "vespo",
    title="VESPO", paper="2602.10693", year=2026,
    ratio=sequence_product(), gate=gamma_weight(2.0, 3.0, 3.0, 2.0),
    fixes="a smooth weight of whole answers, without a clip",
    breaks="long answers of another policy fall silent",
    reach_for="stale answers",
    note="[V] the authors' code and scripts; its docstring names (2, 1.5) and (4, 2.5). With a sampler that"
    " is not the learner take ratio.anchor='sampler': log ρ belongs inside the weight.",
)  # fmt: skip

method(
    "luspo",
    title="LUSPO", paper="2602.05261", year=2026,
    ratio=sequence_geomean(), gate=clip(3e-4, 4e-4), aggregation=seq_mean_token_sum(),
    fixes="GSPO's pull towards short answers",
    breaks="the step grows with the answers' lengths",
    reach_for="as gspo, where answers shrink",
    note="[V] GSPO's clip range [H]; TRL has 0.2.",
)  # fmt: skip

method(
    "offpolicy_sequence_mask",
    title="Off-policy sequence mask", paper="2512.02556", year=2025,
    aggregation=seq_mean_token_mean(), correction=negative_sequence_mask(delta=1e-4, anchor="old"),
    fixes="failures that the policy has left behind stop pushing",
    breaks="one-sided: what has become likelier passes",
    reach_for="several updates a batch, or stale answers",
    note="[V] DeepSeek-V3.2's; δ is slime's, and off in TRL. A KL term of a dropped answer stays.",
)  # fmt: skip

method(
    "dro",
    title="DRO", paper="2405.19107", year=2024,
    advantage=group_mean(), ratio=on_policy(), gate=score(), penalty=proximal(beta=0.1),
    fixes="off-policy learning without a ratio",
    breaks="pulls back to the old policy, also where that one was wrong",
    reach_for="answers of an older policy",
    note="[V] what verl ships as dro and ROLL as kimi15; the id is unchecked. β must be set in verl.",
)  # fmt: skip

method(
    "kimi15",
    title="Kimi 1.5", paper="2501.12599", year=2025,
    advantage=group_mean(), ratio=on_policy(), gate=score(),
    penalty=proximal_sequence(beta=0.1), aggregation=seq_mean_token_sum(),
    fixes="off-policy learning without a ratio",
    breaks="the square of a sum grows with the square of the length",
    reach_for="as dro, with the answer's whole log-ratio",
    note="[T] as printed; what is shipped under this name squares token by token (dro).",
)  # fmt: skip

method(
    "rollout_is_mask",
    title="Rollout importance mask", paper="2602.15763", year=2026,
    ratio=token(anchor="sampler"), gate=band_mask(0.2, 0.2),
    fixes="no pass for the policy before the update",
    breaks="tokens that should be pushed back into the band are dropped, too",
    reach_for="several updates a batch, at one forward pass less",
    note="[V] SkyRL; GLM-5 [T].",
)  # fmt: skip

method(
    "outlier_mask",
    title="Outlier mask", paper="SkyRL", year=2025, family="correction",
    correction=mask_outliers(1e-4, 100.0),
    fixes="answers with one token that an engine would hardly have sampled are dropped",
    breaks="long answers are likelier to hold one",
    reach_for="a sampler that is not the learner",
    note="[V] slime's veto has the lower side alone; mask_token drops tokens instead of answers.",
)  # fmt: skip

method(
    "topr",
    title="TOPR", paper="2503.14286", year=2025,
    ratio=sequence_product(), gate=taper(1.0, 1.0, "advantage"),
    fixes="bad answers that the policy has left behind stop pushing",
    breaks="good ones are never corrected for who wrote them",
    reach_for="answers of an older or another policy",
    note="[T] the paper's ratio is of the whole answer; Trinity and ROLL take it token by token. Split by"
    " the advantage [H]: by the reward, a rewarded answer below its group's mean is pushed down at full weight.",
)  # fmt: skip

method(
    "raft_pp",
    title="RAFT++", paper="2504.11343", year=2025,
    advantage=positive_part(), penalty=kl(coef=0.001),
    fixes="a filter instead of a baseline: only good answers teach",
    breaks="entropy falls fast",
    reach_for="the simplest baseline that learns",
    note="[V] rejected tokens stay in the denominator.",
)  # fmt: skip

method(
    "decoupled_ppo",
    title="Decoupled PPO", paper="2505.24298", year=2025,
    gate=clip(0.2, 0.28), correction=icepop(0.0, 5.0),
    fixes="the clip is around a recent policy, the weight corrects for the sampler's",
    breaks="a forward pass more for the anchor",
    reach_for="samplers that lag behind (AReaL)",
    note="[V] filtered tokens stay in the denominator; tis_clamped holds them instead.",
)  # fmt: skip

method(
    "kpop_mask",
    title="KPop", paper="SkyRL", year=2026, family="correction",
    correction=binary_kl_mask(bound=0.05),
    fixes="drops tokens by how much the two distributions differ there, not by a ratio",
    breaks="they teach nothing",
    reach_for="a sampler that is not the learner",
    note="[V] the bound is ours [H].",
)  # fmt: skip

method(
    "prime_rl",
    title="prime-rl's default", paper="2602.04879", year=2026,
    advantage=group_mean(), ratio=token(anchor="sampler"), gate=tv_one_sided(0.2, 0.2),
    penalty=drift(coef=0.001),
    fixes="bounds probability mass, one forward pass less",
    breaks="r is unbounded for rare tokens",
    reach_for="samplers that lag behind (prime-rl)",
    note="[V] DPPO's mask and K2.5's drift, which acts on masked tokens, too.",
)  # fmt: skip

method(
    "prime_rl_ipo",
    title="prime-rl's IPO", paper="prime-rl", year=2026,
    advantage=group_mean(), ratio=token(anchor="sampler"), gate=tv_symmetric(0.1),
    penalty=drift(coef=0.001),
    fixes="tokens on which the two policies disagree teach nothing",
    breaks="what should be pushed back is dropped, too",
    reach_for="as prime_rl",
    note="[V] not ipo, which is a loss of pairs.",
)  # fmt: skip

for _name, _gate, _fixes, _breaks in (
    ("tinker_importance_sampling", unclipped(), "unbiased off-policy", "no trust region"),
    ("tinker_ppo", clip(0.2, 0.2), "a cheap trust region around the sampler", "clipped tokens teach nothing"),
    ("tinker_cispo", weight_cap(cap=1.2, floor=0.8), "every token keeps its gradient", "no trust region; a floor of 0.8"),
):  # fmt: skip
    method(
        _name,
        title=_name.replace("tinker_", "Tinker, ").replace("_", " "), paper="tinker cookbook", year=2025,
        advantage=group_mean(), ratio=token(anchor="sampler"), gate=_gate, aggregation=token_sum(),
        fixes=_fixes, breaks=f"{_breaks}; token sums: the step grows with the batch",
        reach_for="results that should be those of Tinker",
        note="[V] through SkyRL's backend; bounds [H], there absolute.",
    )  # fmt: skip

method(
    "fipo",
    title="FIPO", paper="2603.19835", year=2026,
    gate=clip(0.2, 0.28), correction=future_influence(),
    fixes="credit per token without a critic",
    breaks="rewards whatever the optimizer did last; nothing in the first update",
    reach_for="several updates a batch, long answers",
    note="[V] swift; the documented formula is two-sided (future_influence_two_sided).",
)  # fmt: skip

method(
    "rec",
    title="REC, ring", paper="2509.24203", year=2025,
    advantage=group_mean(), gate=score_ring(),
    fixes="off-policy REINFORCE with regions instead of ratios",
    breaks="discontinuous at four edges",
    reach_for="answers of other policies",
    note="[V] Trinity's; outer edges 0.6 and 2, its constructor has 0.4. score_one_side weighed by r is PPO's"
    " gradient.",
)  # fmt: skip

# --- 2025 and 2026: other comparisons -----------------------------------------------------------

method(
    "gdpo",
    title="GDPO", paper="2601.05242", year=2026,
    advantage=(group_zscore_per_part(ddof=1, eps=1e-4), whiten_sequences(ddof=1, eps=1e-4)),
    fixes="several rewards: a loud one no longer drowns the others",
    breaks="a part that hardly varies counts as much as the task",
    reach_for="rewards of several parts, of which each should be learned",
    note="[V] whitening over rows, the release for TRL; the one for verl whitens tokens (whiten_tokens), and"
    " both are called the paper's [H]. Weights are those of reward.parts.",
)  # fmt: skip

method(
    "opo",
    title="OPO", paper="2505.23585", year=2025,
    advantage=length_weighted_mean(), ratio=on_policy(), gate=score(),
    fixes="a baseline of less variance where answers differ in length",
    breaks="the answer itself is in its baseline",
    reach_for="strictly on-policy runs with answers of very different lengths",
    note="[V] no ratio, no clip, no KL: exact on-policy training. A group of one learns nothing here; verl"
    " keeps its raw reward.",
)  # fmt: skip

method(
    "grpo_passk",
    title="GRPO for pass@k", paper="2503.19595", year=2025,
    advantage=best_minus_second(scale="none"), aggregation=seq_mean_token_mean(),
    fixes="trains the maximum of a group: one answer of k is right",
    breaks="one answer of a group learns; where two are best, none does",
    reach_for="pass@k with graded rewards, ties being rare",
    note="[V] unscaled as in the paper; verl divides by σ_g + ε (scale='group').",
)  # fmt: skip

method(
    "otb",
    title="Optimal token baseline", paper="2602.07078", year=2026,
    advantage=optimal_token_baseline(tail="zero", weighing="none"),
    fixes="the baseline of least variance at every token",
    breaks="the answer is in its own baseline; where one answer alone goes on it learns from its whole return",
    reach_for="long answers whose variance hurts, and no critic",
    note="[V] verl, its form for tools, which numbers own tokens; the plain form finds the tail by a count"
    " that is wrong with holes. The tail's rule is in the code and not in its documentation (tail='own' is"
    " the other); weighing='sampler' multiplies w by ρ², beside a correction for the sampler.",
)  # fmt: skip

method(
    "spo",
    title="SPO", paper="2509.13232", year=2025,
    advantage=(prompt_beta_mean(half_life=0.06, low=0.875, high=0.96), whiten_sequences(ddof=1, eps=1e-8)),
    setting={"group_size": 1, "start": "8 answers a prompt, offline"},
    fixes="one answer a prompt, and no dead groups",
    breaks="state per prompt; a prompt that comes back seldom is compared with little",
    reach_for="many prompts, one answer each, several epochs",
    note="[V] verl-recipe. D is measured on the prompt's previous answer. Without answers from before, α and β"
    " begin at ½. It draws prompts by √(p(1−p)) + 0.05 there; here they come in the data's order [H].",
)  # fmt: skip

method(
    "rae",
    title="Role-conditioned advantages", paper="2506.24119", year=2025,
    advantage=role_moving_mean(decay=0.95), ratio=on_policy(), gate=score(),
    aggregation=seq_mean_token_sum(),
    fixes="self-play of several roles: each is compared with its own past",
    breaks="the order of rows matters; baselines begin at 0",
    reach_for="games between copies of the policy, zero-sum ones",
    note="[V] SPIRAL and prime-rl read the baseline before they update it. The role is the data's column `role`"
    " (0 without one). SPIRAL keys by game, too, and drops rows whose advantage is 0.",
)  # fmt: skip

method(
    "hierarchical_grpo",
    title="Hierarchical GRPO", paper="prime-rl", year=2026,
    advantage=group_mean_of_peers(), aggregation=seq_mean_token_mean(),
    fixes="a proposer and its solvers in one group are not compared with each other",
    breaks="few peers, noisy means",
    reach_for="groups in which several roles take part",
    note="[V] who makes the batch numbers the comparisons (peer_N): a role within the group, or within its"
    " episode. From Python.",
)  # fmt: skip

method(
    "flash_reinforce",
    title="FlashREINFORCE", paper="FlashREINFORCE", year=2026,
    advantage=batch_mean(), ratio=on_policy(), gate=score(), correction=sequence_kl_mask(delta=3e-3),
    fixes="one answer a prompt, and no scale",
    breaks="a prompt's difficulty stays in its advantage",
    reach_for="single rollouts of a sampler that is not the learner",
    note="[V] code; δ has no default, 3e-3 is what its test uses. Dropped answers stay in the denominator.",
)  # fmt: skip

method(
    "fapo",
    title="FAPO", paper="2510.22543", year=2025,
    shaping=flawed_positive_penalty(penalty=1.0), gate=clip(0.2, 0.28),
    fixes="right answers by wrong reasoning stop counting in full",
    breaks="needs a judge of reasoning; while no clean answer exists, flawed ones are still pushed up",
    reach_for="answers that are right by luck, and a judge that notices",
    note="[V] reward; the paper [T]. The mark is the part `flawed` of the reward, above 0.",
)  # fmt: skip

method(
    "a2po",
    title="A*-PO", paper="2505.20686", year=2025,
    filter=scored_by_reference(),
    advantage=optimal_value_baseline(beta=0.5), ratio=on_policy(),
    gate=squared_residual(beta=1e-3), aggregation=seq_mean_token_sum(),
    setting={"group_size": 1, "answers of the reference": 8},
    fixes="one answer a prompt: what it is worth was sampled before",
    breaks="the value is the reference's, and never learns",
    reach_for="short runs with one answer a prompt, and time to sample before",
    note="[V] TRL calls it A2PO, as other papers call themselves. The reference's rewards stand in the data's"
    " column `reference_rewards`. β of the value and of the loss differ, as published: then the optimum is"
    " not the KL problem's.",
)  # fmt: skip

# --- turns --------------------------------------------------------------------------------------

method(
    "turn_return_to_go",
    title="Turn returns, left one out", paper="this house", year=2026, family="variant",
    advantage=turn_return_to_go(gamma=1.0, ended="zero"),
    aggregation=seq_mean_token_mean(),
    fixes="credit per turn without bias, also where the policy decides when to stop",
    breaks="late turns have few answers to be compared with",
    reach_for="environments with rewards at turns",
    note="[H] unbiased by enumeration: a baseline of the group's other answers knows nothing of whether this"
    " one goes on.",
)  # fmt: skip

method(
    "rebn",
    title="ReBN", paper="2510.01051", year=2025,
    advantage=(turn_return(gamma=1.0), whiten_turns(ddof=1, eps=1e-9)),
    fixes="credit per turn from one episode a task",
    breaks="a task's difficulty stays in its advantage",
    reach_for="many tasks, one episode each, rewards at turns",
    note="[V] GEM; every turn counts once, however long it is.",
)  # fmt: skip

method(
    "gigpo",
    title="GiGPO", paper="2505.10978", year=2025,
    advantage=(group_zscore(), plus_state_zscore(gamma=0.95, weight=1.0, scale="group")),
    aggregation=seq_mean_token_mean(),
    fixes="credit per turn without a critic, where states come back",
    breaks="a state that one answer visits twice is compared with itself",
    reach_for="environments with few states",
    note="[V] equal states of one group are compared [H]; Trinity and ROLL compare across prompts. Trinity"
    " has γ = 1 and centres alone (scale='none'). States are equal by the environment's name for them, or else by"
    " what the policy has just been told.",
)  # fmt: skip

method(
    "mt_grpo",
    title="MT-GRPO", paper="2505.11821", year=2025,
    advantage=call_credit(coef=1.0), aggregation=seq_mean_token_mean(),
    fixes="credit for the call of a tool, apart from the answer's",
    breaks="made for one call and one answer",
    reach_for="one search or calculation before an answer",
    note="[V] release; the first result is where the first token of others stands [H], there a tag in a"
    " message. The turn's reward is that of the first turn, the outcome's all others.",
)  # fmt: skip

method(
    "treepo",
    title="TreePO", paper="2508.17445", year=2025,
    advantage=(tree_mean(weight="size"), whiten_tokens(ddof=1, eps_in_var=1e-8)),
    gate=clip(0.2, 0.28),
    fixes="credit at the places where answers part",
    breaks="needs answers that were sampled as a tree",
    reach_for="a sampler that branches",
    note="[V] authors' code; swift has the sampling alone. In a run the tree is that of"
    " the beginnings that answers of a group share; nobody samples it as one.",
)  # fmt: skip

# --- 2025 and 2026: statistics of the update, regressions -----------------------------------------

method(
    "top_entropy_mask",
    title="80/20: tokens of high entropy", paper="2506.01939", year=2025,
    gate=clip(0.2, 0.28), correction=top_entropy(fraction=0.2),
    fixes="learns where answers fork",
    breaks="four of five tokens teach nothing; a pass for entropies",
    reach_for="long chains of thought",
    note="[V] TRL and swift, off by default there; a fifth in the paper [T]. The quantile is of the update and"
    " of all ranks, as in TRL; swift's is of a device.",
)  # fmt: skip

method(
    "clip_cov",
    title="Clip-Cov", paper="2505.22617", year=2025,
    gate=cov_clip(low=0.2, high=0.2, fraction=2e-4, cov_low=1.0, cov_high=5.0),
    fixes="entropy collapse: a few tokens that would lower it most are left out, at random",
    breaks="random; a statistic of the update",
    reach_for="entropy that collapses though the clip is wide",
    note="[V] the authors' scripts widen the clip to [0, 2]; verl keeps 0.2.",
)  # fmt: skip

method(
    "kl_cov",
    title="KL-Cov", paper="2505.22617", year=2025,
    gate=unclipped(), penalty=cov_drift(coef=1.0, fraction=2e-4),
    fixes="entropy collapse: the tokens that would lower it most are held back",
    breaks="no trust region",
    reach_for="as clip_cov, without chance",
    note="[V] the authors' κ = 1; verl has 0.1. SkyRL's fraction of 0.2 is a fifth of all tokens: a thousand"
    " times more.",
)  # fmt: skip

method(
    "m2po",
    title="M2PO", paper="2510.01161", year=2025,
    gate=moment_clip(budget=0.04, floor_low=0.3, floor_high=0.5),
    schedule=joint(updates=4),
    fixes="very stale batches: a clip as wide as they need",
    breaks="a statistic of the update; at the default budget its floors usually bind",
    reach_for="samplers that lag far behind",
    note="[V] authors' code. What AReaL ships under this name is m2_mask. Updates a batch: ours.",
)  # fmt: skip

method(
    "m2_mask",
    title="Second-moment mask", paper="AReaL", year=2025, family="correction",
    gate=clip(0.2, 0.28), correction=second_moment_mask(budget=0.04),
    fixes="the tokens on which sampler and learner differ most are dropped",
    breaks="knows neither the advantage nor the policy",
    reach_for="a sampler that is not the learner",
    note="[V] called M2PO there: another method than m2po.",
)  # fmt: skip

method(
    "proximal_interpolation",
    title="Interpolated anchor", paper="2505.24298", year=2025,
    ratio=interpolated_token(), gate=clip(0.2, 0.28), correction=interpolated_mask(cap=5.0),
    fixes="decoupled PPO at one forward pass less",
    breaks="very stale tokens are hardly clipped",
    reach_for="samplers that lag behind (AReaL)",
    note="[V] α = (age−1)/age, the age in updates of the policy since a token was sampled.",
)  # fmt: skip

method(
    "real",
    title="REAL", paper="2602.05630", year=2026,
    advantage=group_mean(), ratio=on_policy(), gate=silent(), auxiliary=group_contrast(tau=0.5),
    schedule=joint(updates=4),
    fixes="bounded gradients: answers are classified, not weighed by a ratio",
    breaks="how large a reward is does not count",
    reach_for="right or wrong, and several updates a batch",
    note="[V] swift, which splits on A > 0: an answer at its group's mean counts as wrong. Updates a batch: ours.",
)  # fmt: skip

method(
    "gvpo",
    title="GVPO", paper="2504.19599", year=2025,
    advantage=group_mean(), ratio=on_policy(), gate=silent(), auxiliary=group_regression(beta=0.1),
    schedule=joint(updates=4),
    fixes="one optimum, whoever sampled the answers",
    breaks="squares of sums over answers grow with length",
    reach_for="answers of other policies",
    note="[V] verl-recipe, which divides by n−1 of a micro-batch; over the update here [H]. The id is"
    " unchecked. Updates a batch: ours.",
)  # fmt: skip

method(
    "flowrl",
    title="FlowRL", paper="2509.15207", year=2025,
    advantage=group_zscore(), ratio=on_policy(), gate=silent(),
    auxiliary=(trajectory_balance(beta=15.0, cap=10.0), partition_loss(beta=15.0, cap=10.0)),
    fixes="answers in proportion to their reward: modes do not collapse",
    breaks="a reference and a critic to hold; the loss is in the hundreds",
    reach_for="many right answers that should all stay likely",
    note="[V] the weight is capped, as in verl-recipe; the authors' code computes a clipped weight and uses the"
    " other. log Z is the critic's value of the prompt [H], there a head of its own on the policy.",
)  # fmt: skip

method(
    "chord",
    title="CHORD", paper="2508.11408", year=2025,
    gate=clip(0.2, 0.28), correction=share(by=0.9), auxiliary=weighted_nll(coef=0.1, weight="phi"),
    fixes="an expert's answers beside one's own, without forgetting",
    breaks="two signals to balance",
    reach_for="a few worked answers and a reward",
    note="[V] φ = π(1−π), on in Trinity, off in swift (weight='plain'). μ = 0.1 and 1 − μ; as it changes from"
    " step to step: warmup_cosine in train.coefs. The expert's answer is the row's `completion` or `solution`,"
    " one beside each group [H]; there it is another data set's.",
)  # fmt: skip

# --- sampler-learner corrections on plain GRPO ------------------------------------------------

_CORRECTIONS: tuple[tuple[str, str, str, Any, str, str], ...] = (
    ("tis", "TIS, token", "Yao et al. 2025", tis_token(cap=2.0), "a capped weight per token", "biased, calm"),
    ("tis_sequence", "TIS, sequence", "Yao et al. 2025", tis_sequence(cap=2.0), "a capped weight per answer", "high variance on long answers"),
    ("icepop", "IcePop", "2510.18855", icepop(0.5, 5.0), "tokens that disagree too much are dropped", "they teach nothing"),
    ("mis", "MIS, sequence", "Liu et al. 2025", mis_sequence(high=2.0), "answers that disagree too much are dropped", "long answers go first"),
    ("mis_geometric", "MIS, geometric", "Liu et al. 2025", mis_geometric(0.5, 2.0), "a mask that is fair to long answers", "weights inside it are not capped"),
)  # fmt: skip
for _name, _title, _paper, _correction, _fixes, _breaks in _CORRECTIONS:
    method(
        _name,
        title=_title, paper=_paper, year=2025, family="correction",
        aggregation=seq_mean_token_mean(),
        correction=_correction,
        fixes=_fixes,
        breaks=_breaks,
        reach_for="a sampler that is not the learner",
        note="Plain GRPO without KL, and the correction.",
    )  # fmt: skip

# --- mixtures of experts ----------------------------------------------------------------------

method(
    "routing_replay",
    title="Routing replay R2", paper="2512.01374", year=2025, family="correction",
    aggregation=seq_mean_token_mean(),
    correction=replay_routing("learner"),
    schedule=joint(updates=4),
    fixes="the learner's routing at π_old is kept: the cause is removed",
    breaks="the first mini-batch alone is unbiased",
    reach_for="mixtures of experts, with several updates a batch",
    note="Plain GRPO without KL, and the replay. Updates a batch: ours; with one it does nothing.",
)  # fmt: skip

method(
    "routing_replay_r3",
    title="Routing replay R3", paper="2510.11370", year=2025, family="correction",
    aggregation=seq_mean_token_mean(),
    correction=replay_routing("sampler"),
    fixes="the sampler's routing is kept",
    breaks="always changes the policy that is trained",
    reach_for="mixtures of experts whose sampler routes otherwise than the learner",
    note="Plain GRPO without KL, and the replay.",
)  # fmt: skip

method(
    "entropy_bonus",
    title="GRPO with an entropy bonus", paper="1602.01783", year=2016, family="variant",
    penalty=entropy_bonus(coef=1e-3),
    fixes="keeps the policy from going deterministic too early",
    breaks="can blow the entropy up: clip-higher is the gentler way",
    reach_for="entropy collapse that clip-higher does not stop",
)  # fmt: skip

# --- distillation -----------------------------------------------------------------------------

method(
    "distill",
    title="On-policy distillation", paper="Thinking Machines 2025", year=2025,
    advantage=(unrewarded(), minus_teacher_kl(coef=1.0)),
    ratio=token(anchor="sampler"), gate=unclipped(),
    aggregation=token_mean_batch(),
    setting={"learning_rate": "5e-5, 1e-4 for an adapter", "group_size": 4},
    fixes="a signal at every token, on answers that the policy itself would give",
    breaks="a second model, with the policy's tokenizer; no better than its teacher",
    reach_for="a small model that should do what a larger one, or an expert, does",
    note="[H] The mean is over all tokens of an update; no discount, as in the source.",
)  # fmt: skip

method(
    "gkd",
    title="GKD", paper="2306.13649", year=2023,
    advantage=unrewarded(),
    ratio=on_policy(), gate=score(),
    penalty=teacher_divergence(coef=1.0, beta=0.5),
    aggregation=token_mean_batch(),
    setting={"student share of answers": "0.5 to 1; here 1, or 0 with recipe.source=data"},
    fixes="the teacher's whole distribution at every token: less noise than one sampled token",
    breaks="two heads' work a token; the answers' own probabilities get no gradient",
    reach_for="as distill, where a vocabulary's worth of work a token is to be had",
    note="No gradient goes through sampling, as in the paper.",
)  # fmt: skip

method(
    "distill_topk",
    title="Distillation by top-k", paper="verl forward_kl_topk", year=2025,
    advantage=unrewarded(),
    ratio=on_policy(), gate=score(),
    penalty=teacher_topk_divergence(coef=1.0, beta=0.0, k=32),
    aggregation=token_mean_batch(),
    fixes="nearly the whole distribution, asked once a step",
    breaks="all tokens outside the teacher's likeliest are one",
    reach_for="as gkd, with several updates a batch or a teacher that is dear to ask",
    note="[H] One token stands for all others, so that nothing outside is free.",
)  # fmt: skip

method(
    "opd",
    title="On-policy distillation, the policy's own ratio", paper="Thinking Machines 2025", year=2025,
    family="variant",
    advantage=(unrewarded(), minus_teacher_return(coef=1.0, gamma=0.0, estimator="k1")),
    ratio=on_policy(), gate=score(),
    fixes="as distill, where the sampler's probabilities are not the policy's",
    breaks="a forward pass more",
    reach_for="distillation with a sampler of its own",
    note="[V] the policy's log-probability, as in prime-rl; distill takes the sampler's, as the cookbook does."
    " verl's default, estimator='k3' (held within ±10 there), is never negative and not the gradient of"
    " reverse KL.",
)  # fmt: skip

method(
    "minillm",
    title="MiniLLM", paper="2306.08543", year=2023,
    advantage=(unrewarded(), plus_teacher_return(gamma=1.0, length="mean", current="left_out")),
    ratio=on_policy(), gate=score(),
    penalty=teacher_divergence(coef=1.0, beta=1.0),
    aggregation=token_mean_batch(),
    fixes="reverse KL of whole answers: each token is judged by what follows, too",
    breaks="the long part is noisy",
    reach_for="as gkd, for answers whose first tokens decide",
    note="[T] the long part begins behind the token that the single step covers. TRL 1.10's defaults (γ = 0,"
    " the current token in both) count it twice; it did not detach the advantage and discounted by γ^s.",
)  # fmt: skip

method(
    "sdpo",
    title="SDPO", paper="2601.20802", year=2026,
    advantage=(unrewarded(), minus_teacher_return(coef=1.0, gamma=0.0, estimator="k1")),
    gate=weight_cap(cap=2.0),
    aggregation=every_seq_mean_token_mean(),
    correction=taught(),
    fixes="an answer that succeeded teaches its siblings, token by token",
    breaks="groups without a success teach nothing",
    reach_for="rare successes with much to learn in each",
    note="[V] TRL; the teacher is a mean of past policies (rate 0.05) that reads a sibling's answer before it"
    " answers: the group's first success but its own. Set teacher.path=policy, teacher.update=ema:0.95 and"
    " {sibling} in teacher.prompt.",
)  # fmt: skip

# --- preference pairs -------------------------------------------------------------------------

register(PairRecipe(
    "dpo", labelled(), logistic(beta=0.1), "the starting policy",
    About(
        "DPO", "2305.18290", 2023, "preference",
        fixes="learns from pairs without a reward model or sampling",
        breaks="the chosen answer's own probability may fall (displacement)",
        reach_for="labelled pairs and no verifier",
        note="[V] a small β moves far from the reference.",
    ),
))  # fmt: skip
for _name, _title, _paper, _year, _preference, _terms, _fixes, _breaks, _reach, _setting, _note in (
    ("hinge", "Hinge loss on pairs (SLiC)", "2305.10425", 2023, hinge(beta=0.1), (),
     "pairs that are told apart well enough teach nothing more",
     "all pairs leave at the same margin, noise included",
     "clean pairs, and a margin that should stop growing", {"beta": 0.1},
     "[V] on DPO's margin, as TRL has it; the paper's has no reference."),
    ("ipo", "IPO, mean over tokens", "2310.12036", 2023, ipo_token_mean(beta=0.1), (),
     "sure labels can't drive the margin to infinity: it has a target",
     "β is not that of DPO: 1/(2β) is the target a token",
     "few labels without noise, where DPO over-fits", {"beta": 0.1},
     "[V] token means as TRL computes them; `ipo_sum` sums as OpenRLHF does."),
    ("ipo_sum", "IPO, sums", "2310.12036", 2023, ipo_sum(beta=0.1), (),
     "sure labels can't drive the margin to infinity: it has a target",
     "a long answer reaches the target with small changes a token",
     "answers of about the same length, where DPO over-fits", {"beta": 0.1},
     "[V] sums as OpenRLHF computes them; `ipo` takes means over tokens."),
    ("cdpo", "cDPO", "Mitchell 2023", 2023, cdpo(beta=0.1, noise=0.1), (),
     "labels of which a known share is wrong: the margin stops at logit(1−ε)",
     "sure pairs are pulled back, right or wrong",
     "labels of people who disagree", {"noise": "the share of flipped labels"},
     "[V] what other tools call label smoothing of DPO."),
    ("robust_dpo", "Robust DPO", "2403.00409", 2024, robust(beta=0.1, noise=0.1), (),
     "flipped labels without bias: DPO's loss on the true ones in expectation",
     "unbounded below; a wrong guess of the share of flips is a bias again",
     "labels flipped at random at a rate that is known", {"noise": 0.1},
     "[V] not cDPO: it does not smooth labels, it undoes their noise."),
    ("exo_pair", "EXO on pairs", "2402.00856", 2024, exo(beta=0.1, noise=0.001), (),
     "seeks the mode of the preferences, as a policy trained on a reward would",
     "flat where the model is far off; undefined without a little noise",
     "clean pairs, and one good answer rather than all of them", {"noise": 0.001},
     "[V] refused without noise, where older tools put 0.001 in its place."),
    ("nca_pair", "NCA on pairs", "2402.05369", 2024, nca(beta=0.1), (),
     "the chosen answer's likelihood does not fall with the rejected one's",
     "an answer that has become twice as likely is pushed down again",
     "pairs/displaced_share near 1 with DPO", {"beta": 0.1}, "[V]"),
    ("bco_pair", "BCO on pairs", "2404.04656", 2024, bco_pair(beta=0.1), (),
     "a classifier of good and bad answers: each is pushed by itself",
     "its baseline is a mean over all steps so far, long ago ones too",
     "pairs whose two answers are good and bad, not better and worse", {"beta": 0.1},
     "[V] the running mean of TRL 0.24; TRL 1.16 has none (δ = 0)."),
    ("sppo_hard", "SPPO with sure labels", "2405.00675", 2024, sppo_hard(beta=0.1), (),
     "each answer has a target, so that both can't fall together",
     "targets are sums over an answer, and grow as β falls",
     "rounds of the policy's own pairs", {"beta": "0.001 in the paper"},
     "[V] η = 1/β of about 1e3 in the paper [T]."),
    ("aot", "AOT", "2406.05882", 2024, aot(beta=0.1, noise=0.0), (),
     "all margins together stand above the reference's, in every quantile",
     "what a pair teaches depends on which others are in the update",
     "large batches of pairs", {"beta": 0.1},
     "[V] sorted over the whole update, never over a micro-batch [H]."),
    ("aot_unpaired", "AOT, unpaired", "2406.05882", 2024, aot_unpaired(beta=0.1, noise=0.0), (),
     "chosen answers above rejected ones as two crowds: rows need not match",
     "an easy prompt's answers are compared with a hard one's",
     "good and bad answers to different prompts", {"beta": 0.1},
     "[V] what TRL 0.24 calls aot_pair is aot_unpaired in 1.16."),
    ("apo_zero", "APO-zero", "2408.06266", 2024, apo_zero(beta=0.1), (),
     "the chosen answer rises, the rejected one falls",
     "saturates, also where the model was wrong",
     "data that are better than the model", {"beta": 0.1}, "[V]"),
    ("apo_down", "APO-down", "2408.06266", 2024, apo_down(beta=0.1), (),
     "both answers fall, the rejected one more",
     "the chosen answer becomes less likely on purpose",
     "data that are worse than the model", {"beta": 0.1}, "[V]"),
    ("dpo_shift", "DPO-Shift", "2502.07599", 2025, shifted(beta=0.1, share=0.75), (),
     "the chosen answer's own probability, which DPO lets fall: the rejected one counts less",
     "the margin grows more slowly: what keeps the one costs the other",
     "pairs/displaced_share near 1 with DPO", {"share": "0.55 to 0.95"},
     "[V] authors' code, with a constant share; there it may also climb or fall with the step. POWER and PG-DPO, named beside it, are left out: no source that "
     "could be read states their losses whole."),
    ("discopop", "DiscoPOP", "2406.08414", 2024, discopop(beta=0.1, tau=0.05), (),
     "found by search: logistic where the model errs, exponential where it is right",
     "not convex", "as DPO", {"beta": 0.05}, "[V] the blend is differentiated, too."),
    ("sigmoid_norm", "DPO, mean over tokens", "2411.15124", 2024, logistic_token_mean(beta=5.0), (),
     "length gives no advantage", "β is not that of DPO",
     "chosen answers that are longer than rejected ones", {"beta": 5.0},
     "[V] open-instruct's dpo_norm; TRL's sigmoid_norm."),
    ("f_dpo", "f-DPO", "2309.16240", 2023, f_divergence(beta=0.1, divergence="js", alpha=0.5), (),
     "another divergence than the reverse KL: how much diversity is kept is a choice",
     "exponentials of whole answers are held within ±20",
     "answers that should stay diverse", {"divergence": "js"},
     "[V] α as in TRL 1.16, where α = 1 is DPO; TRL 0.24's α is 1 − α."),
    ("rpo", "RPO: DPO with an SFT term", "2404.19733", 2024, logistic(beta=0.1),
     (chosen_nll(weight=1.0),),
     "the chosen answer stays likely while the margin grows",
     "learns the style of the data with its preference",
     "pairs/displaced_share near 1 with DPO; written solutions",
     {"alpha": 1.0, "learning_rate": "7e-7"},
     "[T] settings of the paper, by readers of it. There each answer's term is divided by its own "
     "length, and the reference is the previous iterate; here the term is a mean over all chosen "
     "tokens of an update [H]."),
):  # fmt: skip
    register(PairRecipe(
        _name, labelled(), _preference, "the starting policy",
        About(
            _title, _paper, _year, "preference",
            fixes=_fixes, breaks=_breaks, reach_for=_reach, setting=_setting, note=_note,
        ),
        _terms,
    ))  # fmt: skip
register(PairRecipe(
    "simpo", labelled(), simpo(beta=2.0, gamma=0.5, noise=0.0), "",
    About(
        "SimPO", "2405.14734", 2024, "preference",
        fixes="no reference in memory; length gives no advantage",
        breaks="nothing holds the policy: many steps or a high rate ruin it",
        reach_for="pairs, and no memory for a second model",
        setting={"beta": "2.0 to 2.5", "gamma": "0.5 to 1.6", "learning_rate": "3e-7 to 1e-6"},
        note="[V] β and rates as the authors' repository advises; γ's range [T]. γ is not multiplied by β"
        " here, as in TRL; no likelihood term.",
    ),
))  # fmt: skip
register(PairRecipe(
    "orpo", labelled(), odds_ratio(beta=0.1), "",
    About(
        "ORPO", "2403.07691", 2024, "preference",
        fixes="fine-tuning and preference in one stage, without a reference",
        breaks="odds explode where an answer becomes certain",
        reach_for="pairs and a base model that was not fine-tuned yet",
        setting={"beta": 0.1, "learning_rate": "5e-6"},
        note="[V] settings of the authors' Mistral run: rate falling with 1/√step after 200 steps of "
        "warm-up, 5 epochs. Odds are of probabilities averaged over tokens. The likelihood is of the "
        "answer alone, a choice in their code; TRL's includes the prompt.",
    ),
    (chosen_nll(weight=1.0),),
))  # fmt: skip
register(PairRecipe(
    "cpo", labelled(), logistic_alone(beta=0.1, noise=0.0), "",
    About(
        "CPO", "2401.08417", 2024, "preference",
        fixes="preferences and likelihood in one stage, without a reference",
        breaks="sums over answers: the shorter one is the likelier",
        reach_for="translation and the like: pairs of about one length, and no memory for a reference",
        setting={"beta": 0.1, "alpha": 1.0},
        note="[V] the likelihood is a mean over all chosen tokens of an update, as in TRL.",
    ),
    (chosen_nll(weight=1.0),),
))  # fmt: skip
register(PairRecipe(
    "ld_dpo", labelled(), logistic(beta=0.1), "the starting policy",
    About(
        "LD-DPO", "2409.06411", 2024, "preference",
        fixes="an answer is not preferred for going on longer than the other",
        breaks="what an answer says late counts less",
        reach_for="chosen answers that are longer than rejected ones",
        setting={"alpha": "off (1) in TRL"},
        note="[V] weighs the reference's tokens, too; TRL 0.24 does not. The default α is ours [H].",
    ),
    summing=shared_length(alpha=0.5),
))  # fmt: skip
register(PairRecipe(
    "wpo", labelled(), logistic(beta=0.1), "the starting policy",
    About(
        "WPO", "2406.11827", 2024, "preference",
        fixes="pairs of another model count by how likely the policy would write them",
        breaks="a pass more over all pairs, and rare words count little",
        reach_for="pairs that other models wrote",
        setting={"beta": 0.01},
        note="[V] no cap, as in TRL 1.16; on_policy_weight_capped(cap=1) is TRL 0.24's. β in the paper [T].",
    ),
    weighing=(on_policy_weight(),),
))  # fmt: skip
register(UnpairedRecipe(
    "kto", kto(beta=0.1, desirable=1.0, undesirable=1.0), "the starting policy",
    About(
        "KTO", "2402.01306", 2024, "preference",
        fixes="learns from thumbs up and down: no pairs",
        breaks="its baseline is biased, and noisy in small batches",
        reach_for="answers with a verdict each, of which most prompts have one only",
        setting={"beta": 0.1, "batch": "8 or more", "learning_rate": "5e-7 to 5e-6"},
        note="[V] β and both weights are those of the authors' code; the rates [T]. Where labels are "
        "uneven, weights so that desirable·good : undesirable·bad lies between 1:1 and 4:3 [T].",
    ),
))  # fmt: skip
register(PairRecipe(
    "spin", data_against_own_sample(), logistic(beta=0.1), "the previous iterate",
    About(
        "SPIN", "2401.01335", 2024, "preference",
        fixes="turns SFT data into pairs: the data's solution against the model's own",
        breaks="stops when the samples match the data",
        reach_for="SFT data only",
        setting={"beta": "0.1, last round 5.0", "learning_rate": "5e-7, later 1e-7", "pairs": 64},
        note="[V] rejected answers are sampled from the reference, which reset:STEPS moves on.",
        departs=(
            "samples of the round before are not mixed in again: every pair is of this round",
        ),
    ),
))  # fmt: skip
register(PairRecipe(
    "online_dpo", best_and_worst_ended(penalty=1.0), logistic(beta=0.1), "the starting policy",
    About(
        "Online DPO", "2402.04792", 2024, "preference",
        fixes="pairs are the policy's own, and fresh: no drift away from them",
        breaks="only as good as what grades them; a step costs sampling",
        reach_for="a reward or a judge, and DPO's loss",
        setting={"group_size": 2},
        note="[V] two samples a prompt; ties are dropped [H], where TRL keeps the first.",
    ),
))  # fmt: skip
register(PairRecipe(
    "tr_dpo", labelled(), logistic(beta=0.1), "a mixture that follows the policy",
    About(
        "TR-DPO", "2404.09656", 2024, "preference",
        fixes="the reference moves along: no pull back to where it began",
        breaks="no bound on how far it goes",
        reach_for="long runs of DPO that stall at their reference",
        setting={"reference.update": "mix:0.6:512"},
        note="[V] soft updates; hard ones are reset:512.",
    ),
))  # fmt: skip
register(PairRecipe(
    "best_of_group_dpo", best_and_worst(), logistic(beta=0.1), "the previous iterate",
    About(
        "Best of a group against its worst", "2401.10020", 2024, "preference",
        fixes="pairs from the model's own candidates, graded as you like",
        breaks="only as good as what grades them; two answers of a group are learned from",
        reach_for="a reward or a judge, and pairs instead of policy gradients",
        setting={"candidates": 4, "temperature": 0.7, "top_p": 0.9},
        note="[H] self-rewarding's pairs by reward.parts: a verifier, or a judge of yours.",
    ),
))  # fmt: skip
register(PairRecipe(
    "self_rewarding", judged_best_and_worst(judgements=3, temperature=0.7, top_p=0.9),
    logistic(beta=0.1), "the previous iterate",
    About(
        "Self-rewarding", "2401.10020", 2024, "preference",
        fixes="the policy judges its own candidates: no verifier, no other judge",
        breaks="scores drift apart from what is right, and chosen and rejected grow alike",
        reach_for="prompts without answers, and a model that was taught to judge",
        setting={"candidates": 4, "temperature": 0.7, "top_p": 0.9, "rows": "3,200 and 1,775"},
        note="[T] rounds: [[stage]] with repeat; rows of judgements: sft before.",
        departs=(
            "every step judges and learns: the paper makes all pairs of a round before it learns; "
            "a judgement is read from a last line of JSON, and the rubric's words are our own",
        ),
    ),
))  # fmt: skip

# --- models that score --------------------------------------------------------------------------

register(RewardModelRecipe(
    "reward_model", every_pair(), bradley_terry(centre=0.01),
    About(
        "Reward model", "2203.02155", 2022, "reward model",
        fixes="turns preferences into a score that any answer can get",
        breaks="length and style are scored with the rest; far from the data it says anything",
        reach_for="preferences of people, and reinforcement learning afterwards",
        setting={"epochs": 1, "learning_rate": "1e-5, with adapters 1e-4"},
        note="[V] margins of 2307.09288, centring of 2312.09244; a score that starts at 0 [H].",
    ),
))  # fmt: skip
register(ProcessRewardModelRecipe(
    "process_reward_model", soft_labels(),
    about=About(
        "Process reward model", "2312.08935", 2023, "reward model",
        fixes="says at which step an answer goes wrong",
        breaks="labels by sampling are noisy, and only as good as the policy that continued",
        reach_for="long answers in steps: credit within them, or a choice among them",
        setting={"continuations": 8},
        note="[V] one number a step, read at its last token, with a sigmoid behind it.",
    ),
))  # fmt: skip

import groupwise.dialects  # noqa: E402, F401 - what other tools call GRPO
