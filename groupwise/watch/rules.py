"""The table of health rules. The same rules judge a run while it goes on and afterwards.

A rule of your own is an entry of five lines:

    from groupwise.watch.rules import RULES, Rule, above
    RULES.append(Rule("tool errors", above("reward/part/tool_error", limit=0.1, steps=5),
        sees=("reward/part/tool_error",), since=5, threshold="a tenth", origin="our own runs",
        sure="likely", means="the tool is down", change="restart it", source="–"))
"""

# ruff: noqa: E501 - a text of the table is one line

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from groupwise.runfiles.catalogue import REWARD
from groupwise.watch import signs
from groupwise.watch.history import Test, above, all_of, any_of, below, grows


@dataclass(frozen=True)
class Rule:
    """One sickness: how it shows, how sure that is, what it means, and one thing to change."""

    name: str
    test: Test
    sees: tuple[str, ...]  # metrics, the one that it can't do without first
    since: int  # the first step that it judges
    threshold: str
    origin: str  # where the threshold comes from
    sure: Literal["certain", "likely", "possible"]
    means: str
    change: str  # one, in terms of slots and settings
    source: str
    grave: bool = True  # False: worth knowing, and no sickness
    instead: tuple[str, ...] = ()  # metrics that may stand in for the first
    of: str = ""  # the family of metrics without which a run has nothing that could be sick so

    def can_judge(self, known: Collection[str]) -> bool:
        """Return whether a run that has these metrics can have this sickness found."""
        return any(name in known for name in (self.sees[0], *self.instead))

    def concerns(self, known: Collection[str]) -> bool:
        """Return whether a run that has these metrics has what the rule is about."""
        return any(name.startswith(self.of) for name in known)


# --- the table: causes before what follows from them ----------------------------------------------

_DAPO = "Yu et al. 2025, DAPO (2503.14476)"
_TIS = "Yao et al. 2025, on rollouts that training does not agree with (TIS)"

RULES: list[Rule] = [
    Rule(
        "grader errors",
        any_of(above("reward/failed_share", limit=0.05, steps=1), above("reward/failed_share", limit=0.01, steps=3)),
        sees=("reward/failed_share",), since=1,
        threshold="5 % in a step, or 1 % in most of three", origin="reward.max_failed_share; sound graders have 0",
        sure="certain",
        means="the reward function raises or runs out of time; what is learned from is what it can grade",
        change="fix what grader_reason in the rollouts says, after `groupwise check-reward`",
        source="pains of users: exceptions that become 0 (trl#4939, verl#5635)",
    ),
    Rule(
        "no reward",
        signs.no_reward,
        sees=("reward/missing_share",), since=1,
        threshold="no answer has one, at the first steps or in most of three", origin="without a reward there is no gradient; sound rewards have 0",
        sure="certain",
        means="the reward gives no value at all, and nothing is learned: a function that ends without return, or one that is for other rows",
        change="let the reward return a number (grader_reason in the rollouts says what it did), after `groupwise check-reward`",
        source="a function without return: every value None, gradient 0, exit 0",
        instead=("reward/ungraded_share",),
    ),
    Rule(
        "calls fail",
        above("turns/failed_call_share", limit=0.3, steps=5),
        sees=("turns/failed_call_share",), since=5, of="turns/",
        threshold="three tenths of the calls", origin="our choice; policies that know their tools have below a tenth",
        sure="likely",
        means="the policy does not know how its tools are called, or they break: it learns from error texts",
        change="teach the form of calls first (recipe=sft), or mend the tool: `episode` in the rollouts has every call",
        source="ToRL (2503.23383): failed calls of a base model fall within the first steps",
    ),
    Rule(
        "calls vanish",
        signs.calls_vanish,
        sees=("turns/calls",), since=10, of="turns/",
        threshold="below a tenth of the calls of the first five steps, of at least one in four episodes", origin="our choice",
        sure="likely",
        means="the policy has stopped calling its tools: they cost tokens and failures, and brought no reward",
        change="a task that needs the tool, or an easier start (recipe=sft on calls that help)",
        source="Search-R1 (2503.09516) and ToRL: calls rise where they help",
    ),
    Rule(
        "turns at the limit",
        above("turns/limit_share", limit=0.5, steps=5),
        sees=("turns/limit_share", "turns/mean"), since=5, of="turns/",
        threshold="half of the episodes", origin="our choice",
        sure="certain",
        means="most episodes are cut off before they come to an end",
        change="raise turns.max",
        source="prime-rl: one limit in all beats limits per turn",
    ),
    Rule(
        "same calls again",
        above("turns/repeated_call_share", limit=0.3, steps=5),
        sees=("turns/repeated_call_share",), since=5, of="turns/",
        threshold="three tenths of the calls", origin="our choice",
        sure="likely",
        means="the policy asks the same thing again and again within an episode",
        change="lower turns.max_calls, or a reward that falls with calls",
        source="SimpleTIR (2509.02479): void and repeated turns precede collapse",
    ),
    Rule(
        "judge unread",
        above("judge/failed_share", limit=0.5, steps=3),
        sees=("judge/failed_share",), since=3, of="judge/",
        threshold="half of the judgements in most of three steps", origin="our choice; a model that was taught to judge has below 0.1",
        sure="certain",
        means="the policy does not judge in the form that it is asked for: few answers have a reward, by chance",
        change="teach it to judge first: a stage of sft on judgements (docs/preferences.md)",
        source="Yuan et al. 2024, self-rewarding (2401.10020): 1,775 rows of judgements",
    ),
    Rule(
        "judge agreement",
        signs.agreement_falls,
        sees=("judge/agreement", "judge/agreement_stderr"), since=1, of="judge/",
        threshold="a tenth and three standard errors below its best", origin="statistics of the held-out answers",
        sure="likely",
        means="the policy's judgements drift from what can be verified: it learns to please itself",
        change="go back to the checkpoint before, with rows of judgements in a stage of sft again",
        source="Yuan et al. 2024, self-rewarding (2401.10020): a judge that must get better with the policy",
    ),
    Rule(
        "judge guesses",
        signs.judge_guesses,
        sees=("judge/agreement", "judge/agreement_stderr"), since=1, of="judge/",
        threshold="not two standard errors above 0.5 over three evaluations that know it to a tenth", origin="statistics of the held-out answers",
        sure="likely",
        means="nothing shows that the policy can tell right answers from wrong ones: what it learns from its judgements is chance",
        change="teach it to judge first: a stage of sft on judgements (docs/preferences.md)",
        source="Yuan et al. 2024, self-rewarding (2401.10020): judges that agree with people, before they are listened to",
    ),
    Rule(
        "judge gap",
        signs.gap_closes,
        sees=("judge/gap",), since=5, of="judge/",
        threshold="a quarter of the first five steps', or a tenth of a point", origin="our choice; without a gap DPO has no gradient that means anything",
        sure="likely",
        means="the best and the worst answer are judged alike: pairs are noise, and what is learned from them too",
        change="end the round here; more candidates (double group_size) tell further apart",
        source="on self-rewarding whose chosen and rejected answers converge (2508.06026)",
    ),
    Rule(
        "judge likes length",
        signs.judged_answers_grow,
        sees=("length/sampled_mean", "judge/length_gap", "correct/mean"), since=10, of="judge/",
        threshold="answers 1.5 times as long, chosen ones longer than rejected, no more right ones", origin="as for length explosion",
        sure="likely", grave=False,
        means="the judge takes long answers for good ones",
        change="say in reward.rubric that length gives no points",
        source="Yuan et al. 2024, self-rewarding (2401.10020): answers grow from round to round",
    ),
    Rule(
        "reward noise",
        above("reward/unequal_share", limit=0.02, steps=3),
        sees=("reward/unequal_share", "reward/mean"), since=3,
        threshold="2 % of repeated answers", origin="a function of the answer has 0",
        sure="certain",
        means="the same answer to the same prompt gets different rewards: a random or stateful grader, or a judge that wavers",
        change="make the grader a function of the answer (a judge: temperature 0, votes=3)",
        source=f"{_DAPO}: reward noise",
    ),
    Rule(
        "sampler behind",
        signs.sampler_behind,
        sees=("mismatch/abs_mean", "mismatch/abs_max", "staleness/mean"), since=3,
        threshold="as for mismatch, and ten times the first step's", origin="what precision explains is there from the first step on",
        sure="likely",
        means="new weights do not reach the sampler: rollouts are of an older policy, more so with every update",
        change="mend the engine's sync (engine.weights=\"shared\" has nothing to deliver)",
        source="verl#7495, trl#5312: weights that never arrived",
    ),
    Rule(
        "mismatch",
        signs.sampler_off,
        sees=("mismatch/abs_mean", "mismatch/outside_share", "mismatch/abs_max"), since=3,
        threshold="mismatch/limit on average (0.03 nats where it is not known), or 5 % of tokens off by more than a tenth; ten times that with a correction; of verl's log, 0.01 in probability", origin="guard.mismatch; float32 has 1e-6, bfloat16 0.02; verl's FAQ calls 0.005 normal and 0.01 a precision issue",
        sure="likely",
        means="sampler and learner compute different probabilities for the same weights: another precision, temperature or template",
        change="weigh by learner/sampler: recipe.correction=\"tis_token(cap=2.0)\" (as tis has it)",
        source=_TIS,
        instead=("mismatch/probability_mean",),
    ),
    Rule(
        "old answers",
        below("lag/effective_share", limit=0.5, steps=5),
        sees=("lag/effective_share", "lag/mean"), since=5, of="lag/",
        threshold="half of the tokens in most of five steps", origin="our choice; answers of the present weights have 1",
        sure="likely",
        means="the policy has moved so far from the weights that wrote its answers that few tokens decide the update",
        change="lower train.lag, or optim.learning_rate",
        source="Fu et al. 2025, AReaL (2505.24298): accuracy falls where answers are too old",
    ),
    Rule(
        "routes drift",
        grows("router/changed_share", times=3.0, least=0.2),
        sees=("router/changed_share",), since=10, of="router/",
        threshold="three times the first steps', and a fifth of the tokens", origin="our choice; GSPO's paper has a tenth after an update, and so have healthy runs here at the most",
        sure="likely",
        means="updates send more and more tokens to other experts than they were sampled with: ratios say what routing did, not what was learned",
        change="recipe=routing_replay, which keeps the experts of a batch (or gspo, which does not mind)",
        source="Zheng et al. 2025, GSPO (2507.18071), section 5.3",
    ),
    Rule(
        "router collapse",
        any_of(signs.load_gathers, grows("router/dead_share", times=2.0, least=0.3)),
        sees=("router/load_entropy", "router/dead_share"), since=10, of="router/",
        threshold="three quarters of the first steps' evenness, or twice their dead experts and three tenths of all", origin="our choice; healthy runs here keep four fifths",
        sure="likely",
        means="tokens crowd into few experts, and the others are lost to the model",
        change="hold the router: model.freeze_router=true (or recipe.auxiliary=\"balance()\")",
        source="Fedus et al. 2021, Switch Transformer (2101.03961): what its auxiliary loss is against",
    ),
    Rule(
        "gradient",
        any_of(above("optim/skipped", "optim/not_finite", limit=0.0, steps=1), signs.gradient_spikes),
        sees=("optim/grad_norm", "optim/skipped"), since=1,
        threshold="an update that is not finite, or three spikes of ten times the median in 20 steps", origin="healthy runs here stay below 6 times",
        sure="likely",
        means="single batches move the weights far: rate too high, or a row that should not be there",
        change="halve optim.learning_rate",
        source="users: NaN, often without a precursor (verl#2505, unsloth#3006, MakazhanAlpamys/Soup#342)",
    ),
    Rule(
        "critic at 0",
        signs.no_values,
        sees=("critic/value_max", "critic/value_min", "critic/return_mean"), since=3, of="critic/value",
        threshold="every value 0 in two steps that the policy learns in, after targets that were not", origin="a critic starts at 0, and its first update changes that",
        sure="certain",
        means="the critic does not learn while the policy does: advantages are plain returns, and its memory is spent for nothing",
        change="raise critic.learning_rate, after a look at critic/skipped and critic/grad_norm: whether its updates are made at all",
        source="a value head of 0 as the start; critics that were frozen or skipped",
    ),
    Rule(
        "critic out of range",
        signs.values_out_of_range,
        sees=("critic/value_max", "critic/value_min", "critic/reward_max", "critic/reward_min"), since=5, of="critic/value",
        threshold="twice the largest reward that the run has seen, in most of five steps", origin="no target of Monte Carlo lies outside the rewards; a random head began at 14 in a published log of verl",
        sure="likely",
        means="values that no answer can reach: the critic's steps are too large, or its start was no critic",
        change="halve critic.learning_rate",
        source="verl's quickstart log: values of −14 to 9.5 for rewards of 0 and 1",
    ),
    Rule(
        "critic clipped",
        above("critic/clip_share", limit=0.5, steps=5),
        sees=("critic/clip_share",), since=5, of="critic/value",
        threshold="half of the learned tokens in most of five steps", origin="our choice; on-policy critics have 0",
        sure="likely",
        means="most values have left the range around their old ones: the critic learns from less than half of its tokens",
        change="halve critic.learning_rate",
        source="clipped value losses of PPO's implementations (OpenAI baselines and after)",
    ),
    Rule(
        "critic knows nothing",
        signs.worse_than_a_constant,
        sees=("critic/explained_variance", "critic/explained_variance_last"), since=20, of="critic/value",
        threshold="explained variance below -0.05 in most of 20 steps, all since the policy learns", origin="0 is what a constant explains; healthy runs here begin with -0.003",
        sure="likely",
        means="values are worse than one number for all tokens: they add noise to advantages in place of taking some away",
        change="teach it alone at first, in a new run: critic.alone_steps=20",
        source="Yuan et al. 2025, VC-PPO (2503.01491); Yue et al. 2025, VAPO (2504.05118): without value pre-training 11 points of 60",
    ),
    Rule(
        "clipping",
        signs.clipped,
        sees=("clip/high", "clip/low", "clip/high_probability", "clip/fraction"), since=5,
        threshold="a tenth of the learned tokens, and ratios above 2 (a fifth where ratios are not known)", origin="three times what healthy runs here have at such ratios; GSPO clips 0.15 and more, at ratios near 1",
        sure="likely",
        means="the policy has left its anchor: most of what later updates learn is thrown away",
        change="fewer updates on a batch: halve recipe.schedule.updates",
        source=f"{_DAPO}: clip-higher; Zheng et al. 2025, GSPO (2507.18071)",
        instead=("clip/fraction",),
    ),
    Rule(
        "sudden collapse",
        signs.sudden_collapse,
        sees=("entropy/mean", "correct/mean"), since=5,
        threshold="a twentieth of the first step's, within 20 steps, more than half of the mistakes still made", origin="healthy runs here keep 85 % over 20 steps",
        sure="likely",
        means="a few updates have made the policy deterministic: steps are too large",
        change="a tenth of optim.learning_rate",
        source="a real run of TRL at 300 times its rate (health.md)",
    ),
    Rule(
        "reward falls",
        signs.reward_falls,
        sees=(*REWARD, "correct/mean"), since=5,
        threshold="half of its best lost and four times what steps differ by, or seven tenths of the first step's", origin="healthy runs here lose 30 % of their best stretch at most",
        sure="likely",
        means="the policy has broken: a step too large, or a signal that points the wrong way",
        change="halve optim.learning_rate, from the checkpoint before",
        source="users: collapse (verl#2738, OpenRLHF#931)",
        instead=("reward/mean",),
    ),
    Rule(
        "entropy collapse",
        signs.entropy_collapse,
        sees=("entropy/mean", "groups/distinct_share", "correct/mean"), since=10,
        threshold="below a fifth of its start, and gone three times as fast as the mistakes", origin="healthy runs here keep two thirds over 30 to 150 steps; right ones may be sure",
        sure="likely",
        means="the policy is sure before it is right and explores no more: groups become copies",
        change="raise the upper clip: recipe.gate.high=0.28",
        source=_DAPO,
    ),
    Rule(
        "entropy explosion",
        grows("entropy/mean", times=2.0, least=0.5),
        sees=("entropy/mean",), since=10,
        threshold="twice its start, and half a nat", origin="healthy runs here stay within 1.1 times their start",
        sure="likely",
        means="the policy dissolves into noise: a rate too high, or long bad answers that hardly count",
        change="halve optim.learning_rate",
        source=f"{_DAPO}: an unhealthy increase of entropy and length",
    ),
    Rule(
        "kl",
        above("kl/ref", limit=1.0, steps=5),
        sees=("kl/ref",), since=5,
        threshold="1 nat a token", origin="our choice; healthy runs here stay below 0.3",
        sure="likely",
        means="the policy is far from where it started: what the model knew is being overwritten",
        change="halve optim.learning_rate",
        source="Shao et al. 2024, GRPO (2402.03300)",
    ),
    Rule(
        "truncation",
        above("length/truncated_share", limit=0.1, steps=5),
        sees=("length/truncated_share", "length/p95", "length/mean"), since=5,
        threshold="a tenth of the answers", origin="our choice; healthy runs here have 2 % at most",
        sure="certain",
        means="answers are cut off and graded as wrong, however good they were: noise in the reward",
        change="raise engine.max_tokens (or overlong=\"mask\" where there is no room)",
        source=f"{_DAPO}: overlong filtering alone, 30 to 36 points of AIME 2024",
    ),
    Rule(
        "length explosion",
        signs.wrong_answers_grow,
        sees=("length/wrong_mean", "length/right_mean", "length/mean"), since=10,
        threshold="wrong answers 1.5 times as long, right ones not, no gain", origin="Dr. GRPO: GRPO's wrong answers grow after the reward stands still",
        sure="likely",
        means="the loss divides by each answer's own length, so long wrong answers cost little",
        change="recipe.aggregation=\"token_mean_batch()\" (as dapo has it)",
        source="Liu et al. 2025, Dr. GRPO (2503.20783)",
        instead=("length/mean",),
    ),
    Rule(
        "repetition",
        all_of(above("text/repetition", limit=0.3, steps=5), grows("text/repetition", times=2.0, least=0.3)),
        sees=("text/repetition", "length/mean"), since=10,
        threshold="0.3 of all runs of four tokens, and twice the start", origin="ordinary prose has below 0.1",
        sure="likely",
        means="answers turn in circles",
        change="halve optim.learning_rate",
        source="users: gibberish (verl#5953, Search-R1#162)",
    ),
    Rule(
        "all groups fail",
        signs.nothing_passes,
        sees=("pass_rate/none", "groups/all_fail_share", "groups/dead_share"), since=5,
        threshold="three quarters of the groups", origin="our choice: with 8 samples a group, answers are right in under 4 % (0.75 = 0.96^8)",
        sure="certain",
        means="no answer of most groups is right: the data is too hard, or the grader calls nothing right",
        change="easier data (`groupwise probe` says which), after a look at the grader with `groupwise check-reward`",
        source=f"{_DAPO}: dynamic sampling; trl#3857",
        instead=("groups/all_fail_share",),
    ),
    Rule(
        "no signal",
        signs.no_signal,
        sees=("groups/dead_share", "reward/std"), since=5,
        threshold="nine tenths of the groups at the first step, and 95 % after it", origin="without a difference within groups the gradient is 0",
        sure="certain",
        means="all answers to a prompt get the same reward, whatever they say: the reward is constant, or the data far too easy",
        change="see what the reward gives for right and for wrong answers: `groupwise check-reward`",
        source="users: verifiers#277 (always 0)",
    ),
    Rule(
        "all groups pass",
        signs.everything_passes,
        sees=("pass_rate/all", "groups/all_pass_share", "groups/dead_share"), since=5,
        threshold="three quarters of the groups", origin="as for all groups fail",
        sure="certain", grave=False,
        means="the data is used up: nearly everything is right, and nothing is left to learn from",
        change="harder data, or end the run",
        source=f"{_DAPO}: dynamic sampling",
        instead=("groups/all_pass_share",),
    ),
    Rule(
        "dead groups",
        signs.dead_groups,
        sees=("groups/dead_share",), since=5,
        threshold="three quarters of the groups", origin="as for all groups fail",
        sure="certain", grave=False,
        means="most groups have equal rewards, and teach nothing",
        change="double group_size",
        source="trl#3857, jsboige/CoursIA#10603 (two samples a group: 70 % dead)",
    ),
    Rule(
        "KL off its target",
        above("coef/kl_over_target", limit=3.0, steps=20),
        sees=("coef/kl_over_target",), since=30, of="coef/",
        threshold="three times the target in most of 20 steps", origin="our choice; a step changes the coefficient by a fifth of answers/horizon at the most",
        sure="likely",
        means="the coefficient grows too slowly to hold the policy at its target",
        change="a tenth of the horizon in train.coefs",
        source="Ziegler et al. 2019 (1909.08593): a horizon of 10,000 answers, in runs of a million",
    ),
    Rule(
        "guessing",
        signs.guesses,
        sees=("pass_rate/skill", "correct/mean"), since=30,
        threshold="the intraclass correlation of pass rates below 0.02 in most of 20 steps, and no gain", origin="0 where every prompt is passed as often as any other",
        sure="possible",
        means="which prompt it is makes no difference to being right: answers are guessed, or rewarded at random",
        change="tasks with an open answer in place of choices (data.train)",
        source=f"{_DAPO}: answers turned into whole numbers, so that guessing does not pay",
    ),
    Rule(
        "reward hacking",
        any_of(signs.reward_without_progress, signs.paid_for_wrong),
        sees=("eval/accuracy", "reward/mean", "correct/mean"), since=10,
        threshold="held-out accuracy three standard errors (and 3 points) below its best, or training accuracy four below its start, while the reward rose", origin="statistics of the held-out tasks",
        sure="likely",
        means="the reward is had without doing the task, or training answers are memorised",
        change="change the part of reward.parts that still rises, after reading the worst samples (`groupwise view`)",
        source="Visual-RFT#176, #79; articles on reward hacking",
        instead=("correct/mean",),
    ),
    Rule(
        "stalled",
        signs.no_gain,
        sees=(*REWARD, "eval/accuracy", "optim/grad_snr"), since=60,
        threshold="from the first third of the steps to the last a gain below a tenth of reward/std, two standard errors included", origin="our choice; a gain that chance may hide does not count as none",
        sure="likely",
        means="nothing is learned: a rate too low, too few useful groups, or a reward that answers can't move",
        change="three times optim.learning_rate",
        source="trl#2703, trl#2872: lr 5e-7 with LoRA",
        instead=("reward/mean",),
    ),
    Rule(
        "noisy batches",
        signs.few_independent_samples,
        sees=("reward/std", "reward/mean"), since=20,
        threshold="as noisy as six independent answers", origin="σ/√n",
        sure="possible", grave=False,
        means="a step sees so few prompts that chance decides which way it goes",
        change="double prompts_per_step",
        source="articles: tiny batches, the commonest mistake",
    ),
    Rule(
        "uneven ranks",
        above("time/rank_imbalance", limit=1.3, steps=5),
        sees=("time/rank_imbalance",), since=5, of="time/rank_",
        threshold="1.3 in most of five steps", origin="our choice: a quarter of the ranks' time goes to waiting",
        sure="certain", grave=False,
        means="some ranks read far more tokens than others, which wait: too few answers, or a few very long ones",
        change="raise prompts_per_step, or start fewer ranks",
        source="balancing by tokens: AReaL (Karmarkar-Karp), verl (balance_batch)",
    ),
]  # fmt: skip


INTRO = """# Health rules

<!-- Generated by `make docs` from groupwise/watch/rules.py. Do not edit. -->

Curves say little to somebody who has not seen many of them. So groupwise judges every step of a run
by the rules below; each is the sign of one sickness, with what it usually means and one change to
try. [health.md](health.md) shows how they are told, and how to write one of your own.

The rules stand in the order in which they are judged: causes before what follows from them. *Sees*
names the [metrics](metrics.md) that a rule reads, *fires* says when it speaks and from which step
on. Rules marked *note* are worth knowing and no sickness.
"""


def rules_page() -> str:
    """Return docs/rules.md."""
    lines = [INTRO]
    for rule in RULES:
        metrics = ", ".join(f"`{name}`" for name in rule.sees)
        grade = rule.sure if rule.grave else f"{rule.sure}; note"
        lines += [
            f"## {rule.name}\n",
            f"- sees: {metrics}",
            f"- fires: {rule.threshold}; since step {rule.since}",
            f"- threshold from: {rule.origin}",
            f"- how sure: {grade}",
            f"- usually means: {rule.means}",
            f"- try: {rule.change}",
            f"- source: {rule.source}\n",
        ]
    return "\n".join(lines)
