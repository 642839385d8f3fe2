"""Every metric: its meaning, healthy values, and what to do otherwise. The source of
docs/metrics.md.

A name that ends in `*` stands for a family, such as the parts of the reward.
"""

# ruff: noqa: E501 - a row of the table is one line

from __future__ import annotations

from typing import NamedTuple

# The training reward, the first that a step has: that of all samples before that of what dynamic
# sampling keeps, which is neither all right nor all wrong and says less the better the model gets.
REWARD = ("reward/sampled_mean", "reward/mean")


class Metric(NamedTuple):
    """One entry of the page."""

    meaning: str
    unit: str
    healthy: str
    otherwise: str  # what to do outside the healthy range


SECTIONS: dict[str, dict[str, Metric]] = {
    "Reward and correctness": {
        "reward/mean": Metric("mean reward of the step's samples, before shaping", "reward", "rises over tens of steps; noisy from step to step", "flat: look at groups/dead_share, then at samples; falls: lower optim.learning_rate"),
        "reward/sampled_mean": Metric("mean reward of all that was sampled, groups that dynamic sampling dropped included", "reward", "rises; the fairer curve with dynamic sampling", "as for reward/mean"),
        "reward/shaped_mean": Metric("mean reward after shaping (length penalties, KL in the reward)", "reward", "close to reward/mean, and rises with it", "far below: the penalty dominates; check the recipe's shaping"),
        "reward/part/*": Metric("mean of one part of the reward, before its weight", "reward", "every part rises or stays at its best", "one rises while another falls: the policy trades them; change the weights"),
        "reward/ungraded_share": Metric("samples without a reward (grader abstained, failed, or the row was dropped as overlong)", "share", "0", "read grader_status and grader_reason in the rollouts"),
        "reward/std": Metric("standard deviation of the rewards of all samples", "reward", "above 0", "0: every answer is worth the same, nothing to learn from"),
        "reward/unequal_share": Metric("repeated answers to one prompt that did not get the same reward; absent where none repeats", "share", "0", "the grader is random, keeps state, or is a judge that wavers"),
        "reward/failed_share": Metric("samples whose grader raised or ran out of time", "share", "0; the run stops above reward.max_failed_share", "read grader_reason in the rollouts and fix the grader; such samples are never counted as 0"),
        "reward/missing_share": Metric("samples without a reward: every part abstained (returned None), or the grading failed; 0 where the recipe reads no rewards", "share", "0, or the share of rows that no part is for", "1: nothing is learned, and the run stops after three such steps in a row; look for a forgotten return"),
        "correct/mean": Metric("samples that the grader calls correct", "share", "rises", "rises while eval/accuracy does not: memorised or hacked; read samples"),
    },
    "Held-out evaluation": {
        "eval/accuracy": Metric("held-out tasks answered correctly", "share", "rises; the number to judge a run by", "falls while reward/mean rises: reward hacking or over-fitting; stop and read samples"),
        "eval/nll": Metric("mean −log p of the learned tokens of held-out rows; of recipes that learn from pairs, of the chosen answers", "nats", "falls", "rises while supervised/nll falls: rows are learned by heart; fewer steps or more data. Of pairs: as for pairs/chosen_nll"),
        "eval/token_accuracy": Metric("of the learned tokens of held-out rows: those that the policy holds for the likeliest", "share", "rises", "as for eval/nll"),
        "eval/margin": Metric("mean lead of the better answer on held-out pairs: of a reward model's score, or of the implicit reward", "score", "rises", "as for scores/margin and pairs/margin"),
        "eval/pairs_accuracy": Metric("held-out pairs whose chosen answer the policy prefers; a tie counts half", "share", "rises from 0.5", "falls while pairs/accuracy rises: over-fitting; fewer steps"),
        "eval/preference_loss": Metric("the preference loss on held-out rows", "–", "falls", "rises while loss/preference falls: over-fitting; fewer steps"),
        "eval/length_correlation": Metric("of a reward model: correlation of score and length, held out", "–", "as scores/length_correlation", "as there"),
        "eval/first_error_accuracy": Metric("of a process reward model: held-out answers whose first bad step is found", "share", "rises", "as for steps/accuracy"),
        "eval/area_under_curve": Metric("of a process reward model: how often a good step's score is above a bad one's, held out", "share", "rises from 0.5", "as for steps/accuracy"),
        "eval/positive_share": Metric("of a process reward model: held-out steps that are good", "share", "as in training", "far off: held-out rows are of another kind"),
        "eval/judge_score": Metric("mean of the policy's judgements of its held-out answers: self_rewarding", "points", "rises with eval/accuracy", "rises while eval/accuracy falls: the policy flatters itself"),
        "eval/judge_failed_share": Metric("held-out judgements without a score that could be read", "share", "as judge/failed_share", "as there"),
        "eval/accuracy_stderr": Metric("standard error of eval/accuracy, from the spread between tasks", "share", "below a third of the gain that you want to see", "raise eval.tasks or eval.samples"),
        "eval/reward": Metric("mean reward on held-out tasks", "reward", "rises with reward/mean", "as for eval/accuracy"),
        "eval/part/*": Metric("mean of one part of the reward on held-out tasks, before its weight; of rewards with several parts. A part of weight 0 is shown and not learned", "reward", "every part rises or stays at its best", "the learned part rises while one of weight 0 falls: the reward is over-optimised; stop earlier, or a larger KL weight"),
        "eval/length": Metric("mean length of held-out answers", "tokens", "as length/mean", "as for length/mean"),
        "eval/truncated_share": Metric("held-out answers that hit the token limit", "share", "below 0.1", "raise engine.max_tokens"),
        "eval/failed_share": Metric("held-out samples whose grader raised or ran out of time", "share", "0", "fix the grader: they are missing from eval/accuracy"),
        "eval/critic/correlation": Metric("of a critic's values with Monte-Carlo values at the same places: mean rewards of answers that really go on from there, on the first held-out prompts (critic.truth_prompts); absent where one of the two does not vary", "–", "rises above 0.5", "near 0: the critic ranks states no better than chance; longer critic.alone_steps, or a recipe without a critic"),
        "eval/critic/mean_error": Metric("mean |V − Monte Carlo| there", "reward", "near eval/critic/noise", "far above it: as for eval/critic/correlation"),
        "eval/critic/bias": Metric("mean of V − Monte Carlo there", "reward", "near 0", "above 0: the critic hopes for too much; below: for too little"),
        "eval/critic/bias/*": Metric("mean of V − Monte Carlo on held-out prompts, by tenth of the answer", "reward", "near 0", "as for eval/critic/bias"),
        "eval/critic/noise": Metric("how far the Monte-Carlo values themselves are off, root mean square", "reward", "falls with nothing: 16 answers a place", "–"),
        "eval/critic/points": Metric("places that were compared", "places", "four a prompt", "fewer: short answers, or grades that failed"),
        "eval/source/*": Metric("of the held-out tasks of one of several sources: accuracy and mean reward", "share, reward", "every source gets better", "one falls while others rise: change the weights in data.train"),
    },
    "Groups": {
        "groups/count": Metric("groups in the batch that was learned from", "groups", "prompts_per_step", "fewer: dynamic sampling stopped before the batch was full; easier data, or refills='until full'"),
        "groups/dead_share": Metric("groups whose rewards are all equal: nothing to learn from; useful groups are the rest", "share", "below 0.5; rises as the data is mastered", "above 0.75: data too hard or too easy, or a broken reward; see the two shares below, or raise group_size"),
        "groups/all_fail_share": Metric("dead groups without a success", "share", "below 0.5", "easier prompts, a larger group_size, a check of the reward on known answers"),
        "groups/all_pass_share": Metric("dead groups where all succeed", "share", "below 0.5; rises as the data is mastered", "harder prompts, or a recipe with dynamic sampling"),
        "groups/distinct_share": Metric("different answers within a group, of all", "share", "above 0.5, unless answers are a few tokens", "falls to 1/group_size: copies; see entropy/mean"),
        "pass_rate/*": Metric("all groups that were sampled by their pass rate: none right, to a quarter, a half, three quarters, below all, all; and skill: how much of the spread between answers is that of prompts, 0 where they are guessed", "share", "most in between; skill above 0.1", "none large: too hard; all large: too easy; skill near 0: guessing, or a random reward"),
        "curriculum/known": Metric("prompts that were answered in this run so far: a curriculum goes by them (curriculum.easy, curriculum.hard)", "prompts", "rises to the number of the data", "–"),
        "curriculum/easy_share": Metric("prompts whose running pass rate is at least curriculum.above, of those that were answered so far", "share", "rises as the data is mastered", "near 1: nothing is left to learn here; harder data"),
        "curriculum/hard_share": Metric("prompts whose running pass rate is at most curriculum.below, of those that were answered so far", "share", "falls", "near 1: the data is too hard; easier prompts, or a supervised start"),
        "curriculum/smallest_group": Metric("answers to the prompt of the step that got the fewest, where group sizes follow pass rates", "answers", "curriculum.least once prompts are mastered", "–"),
        "curriculum/largest_group": Metric("answers to the prompt that got the most", "answers", "above group_size", "far above, step after step: few prompts take most of the answers; a lower curriculum.most"),
        "curriculum/passed_over": Metric("turns of prompts that were not drawn so far, as they were too easy or too hard", "turns", "rises", "0: no prompt is outside curriculum.below to curriculum.above"),
        "advantage/edge_share": Metric("of the weight that advantages have in the loss (Σ u·|A|), that of groups near all or nothing: mean reward in the lowest or highest quarter of the step's range", "share", "no target: what the advantage makes of difficulty; z-scores have more of it than centred rewards", "–"),
        "refill/rounds": Metric("extra sampling rounds of dynamic sampling", "rounds", "0 to 1; rises as the data is mastered", "at the limit `refills`: the batch gets smaller; other data, or refills='until full'"),
        "refill/tokens": Metric("tokens sampled in these rounds; those that were dropped in the step: cost/wasted/dropped", "tokens", "below tokens/count", "what a full batch costs: other data; refill_tokens limits it"),
        "vineppo/branches": Metric("answers that were sampled from within the step's answers, for values of their steps: vineppo", "answers", "branches x valued_steps x answers", "0: answers have no steps to value; other recipe.advantage.split"),
        "vineppo/branch_tokens": Metric("tokens that branches took, beyond what they begin with; in cost/tokens", "tokens", "the price of the values: several times tokens/count", "far above: fewer branches, or a lower most_steps"),
        "vineppo/valued_steps": Metric("positions of an answer that branches go on from", "steps an answer", "as many as its written steps, less one", "0: every answer is one step, as for leave-one-out; at most_steps: longer stretches share an advantage"),
        "vineppo/truncated_share": Metric("branches that hit the length limit", "share", "near length/truncated_share", "far above it: beginnings take the room that an answer needs"),
        "vineppo/ungraded_share": Metric("branches without a grade, which are in no value", "share", "0", "as reward/missing_share"),
        "refill/drawn_groups": Metric("groups sampled for the step, dropped ones included", "groups", "below 3 x prompts_per_step", "sampling pays for groups that are thrown away: other data"),
    },
    "Length and tokens": {
        "length/mean": Metric("mean length of the completions, in tokens that the policy wrote, as in all lengths", "tokens", "changes slowly; rises where reasoning helps", "runs up with a flat reward: length bias of the recipe; drops to a few tokens: collapse, or a reward for brevity"),
        "length/sampled_mean": Metric("mean length of all completions that were sampled, dropped groups included", "tokens", "close to length/mean", "far from it: the filter prefers a length"),
        "length/truncated_share": Metric("completions that hit the token limit", "share", "below 0.1", "raise engine.max_tokens, or set overlong"),
        "length/p95": Metric("95th percentile of the length of all that was sampled", "tokens", "below engine.max_tokens", "at the limit: raise engine.max_tokens"),
        "length/ended_mean": Metric("mean length of the completions that ended by themselves", "tokens", "as length/mean", "far below length/mean: few very long ones"),
        "length/right_mean": Metric("mean length of right answers", "tokens", "changes slowly", "as for length/mean"),
        "length/right_p95": Metric("95th percentile of the length of right answers", "tokens", "changes slowly", "as for length/mean"),
        "length/wrong_mean": Metric("mean length of wrong answers", "tokens", "moves with length/right_mean", "grows alone: length bias of the loss; an aggregation over tokens (dapo, dr_grpo)"),
        "length/wrong_p95": Metric("95th percentile of the length of wrong answers", "tokens", "moves with length/right_p95", "as for length/wrong_mean"),
        "length/wrong_over_right": Metric("mean length of wrong answers over that of right ones, within the groups that have both", "ratio", "steady", "grows: length bias of the loss, as for length/wrong_mean; below 1 and falling: a reward for length"),
        "text/repetition": Metric("runs of four tokens that stood in the same answer before (64 answers at most, from all over the step; so are the next two)", "share", "below 0.1", "above 0.3: answers turn in circles; lower the rate"),
        "text/answer_share": Metric("answers in a tag, a box, or behind a phrase that announces them", "share", "near 1 where the prompt asks for that, else 0", "falls: the format is being lost; a part of the reward for it"),
        "text/reflection_share": Metric("answers with words of reflection: wait, let me check, alternatively, ...", "share", "no target; rises in long reasoning", "–"),
        "tokens/count": Metric("completion tokens in the batch that the policy wrote", "tokens", "groups x group_size x length", "–"),
        "tokens/learned_share": Metric("tokens that the loss learns from, of those that the policy wrote", "share", "near 1", "low: many rows are masked as overlong or ungraded"),
        "tokens/rare_share": Metric("learned tokens that had a probability below 0.2 before the update", "share", "no target; falls with entropy/mean", "–"),
    },
    "Turns": {
        "turns/mean": Metric("turns of the policy in an episode; absent where no environment answers it (docs/turns.md)", "turns", "as many as the task takes", "at turns.max: raise it, or look at what the policy repeats; falls to 1: it has given up asking"),
        "turns/limit_share": Metric("episodes that ended at turns.max", "share", "below 0.1", "above 0.5: raise turns.max, or take an easier task"),
        "turns/failed_share": Metric("episodes whose environment failed or took too long: they have no reward", "share", "0; the run stops above reward.max_failed_share", "read `episode.reason` in the rollouts and mend the environment"),
        "turns/foreign_tokens": Metric("tokens of an episode that others wrote: read, and not learned", "tokens", "changes slowly", "far above length/mean: a lower turns.observation"),
        "turns/calls": Metric("calls of tools in an episode", "calls", "as many as the task takes", "falls to 0: the policy does without its tools; are they of use, and do calls fail?"),
        "turns/failed_call_share": Metric("calls of tools that did not succeed (raised, took too long, could not be read, named no tool, were too many)", "share", "below 0.1; falls", "above 0.3: say in the prompt how tools are called, or teach it first"),
        "turns/call_timeout_share": Metric("calls of tools that took longer than turns.timeout", "share", "0", "a faster tool, or a higher turns.timeout"),
        "turns/repeated_call_share": Metric("calls of tools that were made before in the episode, with the same arguments", "share", "below 0.1", "above 0.3: the policy turns in circles"),
        "turns/stop/*": Metric("episodes by why they ended: answered, done, max_turns, max_calls, own_tokens, context, timeout, error, branched", "share", "answered and done near 1", "a limit: raise it; timeout or error: mend the environment"),
        "turns/reward/*": Metric("mean reward of the episodes with so many turns", "reward", "no target", "falls with turns: longer is no better; a limit costs nothing"),
        "time/environment": Metric("seconds that the environment of an episode took to answer, all turns together", "s", "below the time that sampling the episode takes", "a faster tool, more turns.workers, or one written with async"),
    },
    "Stability": {
        "entropy/mean": Metric("mean entropy of the next-token distribution on learned tokens", "nats", "falls slowly and stays above 0.1 x its start", "falls fast: clip higher (dapo), lower the rate; rises without bound: lower the rate, add a KL term"),
        "ratio/mean": Metric("mean policy/anchor probability ratio", "ratio", "1 exactly on-policy, else 0.95 to 1.05", "fewer updates per batch, lower rate"),
        "ratio/max": Metric("largest ratio", "ratio", "below 10", "as for ratio/mean; look at the token in the rollouts"),
        "ratio/off": Metric("root mean square distance of the ratios from 1", "ratio", "below 0.1", "as for ratio/mean"),
        "ratio/sequence_mean": Metric("mean over answers of the geometric mean of their ratios", "ratio", "0.98 to 1.02", "as for ratio/mean"),
        "ratio/sequence_max": Metric("largest geometric mean of an answer's ratios", "ratio", "below 1.2", "as for ratio/mean"),
        "ratio/effective_sample_share": Metric("(Σr)²/(n·Σr²): how much of the batch the ratios leave", "share", "above 0.9", "as for ratio/mean"),
        "clip/high": Metric("learned tokens whose gradient the gate took away, ratio above 1", "share", "0 on-policy (nothing can clip), else below 0.1", "fewer updates per batch, lower rate"),
        "clip/low": Metric("learned tokens whose gradient the gate took away, ratio below 1", "share", "0 on-policy, else below 0.1", "as for clip/high"),
        "clip/high_probability": Metric("mean probability, before the update, of the tokens in clip/high; absent where there are none", "probability", "no target", "below 0.2: the clip holds back rare tokens; raise recipe.gate.high"),
        "clip/high_rare_share": Metric("tokens with a probability below 0.2, of those that were clipped with a ratio above 1", "share", "no target", "near 1: as for clip/high_probability"),
        "clip/high_rarity": Metric("clip/high_rare_share over tokens/rare_share: how much more often a rare token is clipped so than any token", "ratio", "no target: 1 where it makes no difference", "far above 1: the method hardly learns from surprises; raise recipe.gate.high, or cispo"),
        "clip/low_probability": Metric("mean probability of the tokens in clip/low", "probability", "no target", "–"),
        "clip/low_rare_share": Metric("tokens with a probability below 0.2, of those that were clipped with a ratio below 1", "share", "no target", "–"),
        "clip/low_rarity": Metric("clip/low_rare_share over tokens/rare_share: how much more often a rare token is clipped so than any token", "ratio", "as for clip/high_rarity", "–"),
        "clip/rare": Metric("tokens with a probability below 0.2 whose gradient the gate took away, of all such tokens", "share", "as clip/high and clip/low together", "as for clip/high_rarity"),
        "correction/mean": Metric("mean weight of the recipe's corrections, where it has any", "ratio", "0.9 to 1", "lower: the sampler is far off, or much is masked"),
        "correction/zero_share": Metric("tokens that the corrections weigh with 0", "share", "below 0.1", "as for mismatch/abs_mean"),
        "kl/ref": Metric("KL to the reference on learned tokens (k3 estimate)", "nats", "0 at the first step, then grows slowly; below 1 for most tasks", "spikes: lower the rate or raise the KL coefficient"),
        "kl/ref_k1": Metric("mean log-ratio to the reference (k1 estimate of kl/ref): noisier while the two are near, calmer when a rare token makes kl/ref jump", "nats", "close to kl/ref over several steps; may be below 0", "as for kl/ref"),
        "gate/mismatch_mean": Metric("mean |learner − sampler| log-probability in the check before the first step", "nats", "below guard.mismatch, else the run does not start", "as for mismatch/abs_mean"),
        "gate/mismatch_p99": Metric("99th percentile of |learner − sampler| log-probability in the check before the first step", "nats", "below 10 x its mean", "as for mismatch/abs_mean"),
        "gate/mismatch_max": Metric("largest |learner − sampler| log-probability in the check before the first step", "nats", "below 0.1", "as for mismatch/abs_mean"),
        "mismatch/abs_mean": Metric("mean |learner − sampler| log-probability for the same weights", "nats", "below 1e-3 (float32: below 1e-5)", "sampler and learner differ: temperature, precision, weights that did not arrive; or adapter.dropout, which only updates see"),
        "mismatch/abs_max": Metric("largest |learner − sampler| log-probability for the same weights", "nats", "below 0.1", "as for mismatch/abs_mean: the maximum moves first"),
        "mismatch/abs_p99": Metric("99th percentile of |learner − sampler| log-probability for the same weights", "nats", "below 10 x mismatch/abs_mean", "as for mismatch/abs_mean"),
        "mismatch/limit": Metric("what mismatch/abs_mean may be in this precision: guard.mismatch, 50 times it in bfloat16", "nats", "above mismatch/abs_mean", "as for mismatch/abs_mean"),
        "mismatch/outside_share": Metric("tokens whose ρ is outside 0.9 to 1.1", "share", "below 0.01", "as for mismatch/abs_mean"),
        "mismatch/off": Metric("root mean square distance of ρ from 1", "ratio", "below 0.01", "as for mismatch/abs_mean"),
        "mismatch/mean": Metric("mean learner/sampler probability ratio ρ", "ratio", "0.99 to 1.01", "as for mismatch/abs_mean, or a recipe with a correction"),
        "mismatch/max": Metric("largest ρ", "ratio", "below 1.1", "as for mismatch/abs_mean"),
        "mismatch/effective_sample_share": Metric("(Σρ)²/(n·Σρ²)", "share", "above 0.99", "as for mismatch/abs_mean"),
    },
    "Loss and update": {
        "loss/total": Metric("what is differentiated, mean over the step's updates", "–", "no target: near 0 on-policy, where the ratio is 1 and advantages are centred", "do not judge a run by it"),
        "loss/policy": Metric("policy term of the loss", "–", "as loss/total", "–"),
        "loss/*": Metric("other terms of the loss: penalties and auxiliary losses by name", "–", "small: the policy term should drive the update", "one dominates: lower its coefficient"),
        "optim/grad_norm": Metric("norm of the gradient before clipping, mean over the step's updates", "–", "steady within a factor of 10; 0 only if all groups are dead", "spikes: lower the rate or optim.clip_norm; 0: see groups/dead_share"),
        "optim/grad_snr": Metric("squared norm of the mean gradient over its variance, in the last 1/(1−beta1) updates: how much consecutive batches agree", "ratio", "no target: near 0 in many runs that learn; above 0 where updates agree more than chance has it", "below 0 for long: updates undo each other; lower the rate, or more prompts_per_step"),
        "optim/learning_rate": Metric("learning rate of the step", "–", "as the schedule says", "–"),
        "coef/*": Metric("a number of the recipe that changes from step to step, by its place in it, as the step learned with it (train.coefs)", "–", "as its control says", "–"),
        "coef/kl_over_target": Metric("of kl_target: the step's KL to the reference over its target, of an answer or a token as it counts", "ratio", "near 1 once the policy has moved", "far above 1 for long: a smaller horizon; far below: the target is never reached, and the coefficient falls towards 0"),
        "optim/skipped": Metric("updates skipped because loss or gradient was not finite", "updates", "0", "events.jsonl names the first bad tensor; the run stops after guard.max_skipped in a row"),
        "optim/micro_batches": Metric("forward and backward passes of the step", "passes", "as few as memory allows", "raise optim.micro_tokens; it changes memory, not the update"),
        "updates/count": Metric("optimizer steps made on the batch; 1 is on-policy, and 0 in the steps in which a critic learns alone: then what measures the policy's updates is absent", "updates", "as the recipe's schedule says", "–"),
        "weights/fingerprint": Metric("hash of the weights after the step; equal runs have equal ones", "text", "changes whenever an update was made", "stands still: updates are skipped"),
        "weights/version": Metric("optimizer steps since the start", "updates", "rises by updates/count", "stands still: updates are skipped"),
    },
    "Weights to servers": {
        "sync/probe_mean": Metric("of engines that are servers: mean |Δ log p| of engine and learner over the probe, behind every sync; the largest of all servers", "nats", "as at the first sync: 1e-6 in float32, 0.04 in bfloat16", "grows from step to step: weights arrive in part; the run stops at its limit (docs/engines.md)"),
        "sync/probe_max": Metric("the largest |Δ log p| over the probe", "nats", "as sync/probe_mean, 10 to 20 times it", "as sync/probe_mean"),
        "sync/restarts": Metric("servers of the run's own that were started again", "servers", "0", "read their log: out of memory, or a fault of the server"),
        "sync/resubmitted": Metric("answers that were asked for again, because a server failed", "answers", "0", "events.jsonl says which server, and why"),
    },
    "The router of a mixture of experts": {
        "router/changed_share": Metric("of the policy's tokens and layers: visited by other experts than when they were sampled, mean over the step's updates; with a replay, would be by the router as it is. Where the sampler recorded routes (engine.record_routes), or a pass before the updates did", "share", "0 in the first update, below 0.1 over several", "grows from step to step: fewer updates a batch, routing_replay, or gspo"),
        "router/changed_share/*": Metric("router/changed_share by layer with experts, from 0", "share", "as router/changed_share", "as there"),
        "router/replayed_share": Metric("of layers of all tokens that were read in updates: took the recorded experts; of recipes that replay them", "share", "1", "below 1: as for router/missing_share"),
        "router/missing_share": Metric("layers of tokens that should have been replayed, had no record and were routed live", "share", "0", "the engine records no routes for some answers (tokens of others between turns)"),
        "router/prompt_disagreement": Metric("of the tokens of prompts that several answers recorded: not the experts of the first record, which is taken", "share", "0 with the native engine", "an engine that computes a prompt more than once, in batches of other shapes"),
        "router/load_max": Metric("tokens of the busiest expert of any layer, as a multiple of an even share", "ratio", "stays near its start; at the most, experts / chosen", "rises: as for router/load_entropy"),
        "router/load_entropy": Metric("how evenly tokens spread over experts: entropy of the visits over that of even ones, mean of layers", "share", "above 0.6, and stays near its start", "falls: tokens crowd into few experts; a lower optim.learning_rate, model.freeze_router=true, or recipe.auxiliary=\"balance()\""),
        "router/dead_share": Metric("experts that no token of the step's answers visits", "share", "below 0.2, and stays near its start", "as for router/load_entropy"),
        "router/load/*": Metric("tokens of one expert as a multiple of an even share, by layer and expert (router/load/LAYER/EXPERT); of models with 512 experts in all, or fewer", "ratio", "0.2 to 4", "as for router/load_max"),
    },
    "The teacher": {
        "teacher/kl": Metric("mean of ℓ^μ − ℓ^T over learned tokens: an estimate of KL(policy‖teacher) at the prefixes that the policy visits", "nats a token", "falls towards 0", "rises or stands still: lower or raise optim.learning_rate; a negative one for long: the teacher holds the policy's answers likelier than it does itself, as under a scale above 1"),
        "teacher/logp": Metric("mean log-probability that the teacher gives to the policy's tokens", "nats", "rises", "far below entropy/mean with a minus: the teacher knows another template or language; look at teacher_logp in the viewer"),
        "teacher/divergence": Metric("mean divergence D_β to the teacher over learned tokens, over its whole vocabulary", "nats a token", "falls towards 0", "stands still: raise optim.learning_rate"),
    },
    "The critic": {
        "critic/explained_variance": Metric("1 − Var(R̂ − V)/Var(R̂) over learned tokens, of values before the update: what the critic knows of its targets. Absent where all targets are equal: then there is nothing to know", "share", "0 at the first step; rises within tens of steps, and ends above 0.3", "below 0: worse than a constant; critic.alone_steps=20 at the start of a new run, or halve critic.learning_rate"),
        "critic/explained_variance_first": Metric("critic/explained_variance over first tokens alone: what it knows of the prompt, as the mean of a group does", "share", "rises with critic/explained_variance", "near 0 while that rises: it reads answers and not prompts; more different prompts"),
        "critic/explained_variance_last": Metric("critic/explained_variance over last tokens alone, where the answer is written", "share", "rises; above 0.5 where the critic can tell right from wrong", "near 0: it can't tell right from wrong answers; raise critic.learning_rate"),
        "critic/bias_*": Metric("mean of V − R̂ by tenth of the answer, from 1 to 10, before the update; a tenth without tokens is absent", "reward", "near 0 in every tenth", "large in the first tenths: a start that scored ends alone; critic.alone_steps"),
        "critic/value_mean": Metric("mean value before the update", "reward", "follows critic/return_mean", "far from it: see critic/bias_*"),
        "critic/value_min": Metric("smallest value", "reward", "within the range of rewards, or a little outside", "far outside: halve critic.learning_rate"),
        "critic/value_max": Metric("largest value", "reward", "as for critic/value_min; 0 at the first step alone", "0 for longer: the critic does not learn; see critic/skipped and critic/grad_norm"),
        "critic/return_mean": Metric("mean of the targets R̂", "reward", "close to reward/shaped_mean", "far from it: rewards per token (a KL in the reward), or a small λ that leans on values"),
        "critic/reward_min": Metric("smallest reward that an answer got in all, shaped: what values should stay within", "reward", "as the reward has it", "–"),
        "critic/reward_max": Metric("largest reward that an answer got in all, shaped", "reward", "as the reward has it", "–"),
        "critic/loss": Metric("value loss, mean over the critic's updates; absent where all were skipped", "–", "falls towards ½ of the targets' variance that can't be known", "grows: halve critic.learning_rate"),
        "critic/grad_norm": Metric("norm of the critic's gradient before clipping, mean over its updates", "–", "steady within a factor of 10", "spikes: lower critic.learning_rate or critic.clip_norm"),
        "critic/clip_share": Metric("learned tokens whose value moved beyond the clip range and gets no gradient", "share", "0 in the first update of a step, else below 0.2", "above 0.5: halve critic.learning_rate, or raise recipe.auxiliary.limit"),
        "critic/skipped": Metric("updates of the critic that were skipped because loss or gradient was not finite", "updates", "0", "events.jsonl names the first bad tensor; lower critic.learning_rate"),
    },
    "The implicit reward model": {
        "prm/accuracy": Metric("answers whose reward Σβ·(ℓ^φ − ℓ^ref) is above 0 where they are right and below where they are wrong, before it learned from them", "share", "rises above the share of the commoner kind", "stays: raise reward_model.learning_rate; at 1 with a falling eval/accuracy: it is being hacked"),
        "prm/reward_right": Metric("mean of the reward Σβ·(ℓ^φ − ℓ^ref) over right answers; absent where there are none", "reward", "above prm/reward_wrong, and moves away from it", "below it: raise reward_model.learning_rate"),
        "prm/reward_wrong": Metric("mean of the reward Σβ·(ℓ^φ − ℓ^ref) over wrong answers; absent where there are none", "reward", "below prm/reward_right", "as for prm/reward_right"),
        "prm/length_correlation": Metric("correlation of that reward with the answer's length; absent where one of them does not vary", "correlation", "between −0.5 and 0.5", "near 1 or −1: it has learned lengths, and the policy will follow it; see length/mean"),
        "prm/loss": Metric("cross-entropy of the implicit reward model against being right, mean over its updates; absent where all were skipped", "nats", "0.69 at the first step, then falls", "grows: halve reward_model.learning_rate"),
        "prm/grad_norm": Metric("norm of the implicit reward model's gradient before clipping, mean over its updates", "–", "steady within a factor of 10", "spikes: lower reward_model.learning_rate or reward_model.clip_norm"),
        "prm/skipped": Metric("updates of the implicit reward model that were skipped because loss or gradient was not finite", "updates", "0", "events.jsonl names the first bad tensor; lower reward_model.learning_rate"),
    },
    "Rows of the data": {
        "supervised/nll": Metric("mean −log p of the step's learned tokens, before its update", "nats", "falls", "rises: halve optim.learning_rate; near 0: rows are learned by heart"),
        "supervised/learned_share": Metric("tokens that are learned, of all that are read: prompts and what others than the assistant say are not", "share", "as your rows have it", "near 1 for conversations: everything is learned; look at the row that is shown at the start"),
    },
    "Preference pairs": {
        "pairs/count": Metric("pairs of answers in the step", "pairs", "prompts_per_step", "fewer: groups without two different rewards give no pair"),
        "pairs/accuracy": Metric("pairs whose chosen answer the policy prefers, measured from the reference", "share", "rises from 0.5", "stays: raise the rate; at 1 early: the pairs are too easy"),
        "pairs/margin": Metric("mean implicit reward of chosen minus rejected answers", "reward", "rises slowly", "runs away: raise beta or lower the rate"),
        "pairs/chosen_reward": Metric("mean implicit reward of chosen answers", "reward", "above 0", "below 0: chosen answers become less likely; see pairs/displaced_share"),
        "pairs/rejected_reward": Metric("mean implicit reward of rejected answers", "reward", "below pairs/chosen_reward", "as for pairs/margin"),
        "pairs/chosen_nll": Metric("−log-probability a token of chosen answers, under the policy before the update", "nats", "steady or falls", "rises: chosen answers are forgotten; add recipe.likelihood='chosen_nll()'"),
        "judge/judgements": Metric("judgements that the policy wrote of its own answers: self_rewarding", "judgements", "recipe.pairing.judgements x answers", "fewer: see judge/unasked_share"),
        "judge/tokens": Metric("tokens of the judgements that the policy wrote of its own answers; in cost/tokens", "tokens", "steady", "grows: judgements ramble; lower recipe.pairing.max_tokens"),
        "judge/failed_share": Metric("judgements without a score that could be read, or cut off", "share", "below 0.1", "near 1: teach judging first, with sft on judgements"),
        "judge/unasked_share": Metric("answers that were not judged, as the question about them does not fit the model", "share", "0", "lower engine.max_tokens or recipe.pairing.max_tokens, or take a model with a longer context"),
        "judge/gap": Metric("mean judged reward of a group's best answer minus its worst, ties included", "points", "steady, well above 0", "falls towards 0: chosen and rejected answers are no longer told apart; end the rounds"),
        "judge/length_gap": Metric("mean length of the best answer minus the worst, where they are told apart", "tokens", "near 0", "far above 0: the judge likes length, and length/sampled_mean grows"),
        "judge/agreement": Metric("at evaluations: how often a right held-out answer is judged above a wrong one; a tie counts half. Absent where none can be verified, or all are right or wrong", "share", "above 0.5, steady or rises", "falls: the judge drifts from what is right; go back to a checkpoint before it"),
        "judge/agreement_stderr": Metric("standard error of judge/agreement", "share", "below 0.05", "raise eval.tasks"),
        "answers/count": Metric("labelled answers in the step", "answers", "prompts_per_step", "–"),
        "answers/good_share": Metric("answers of the step that are labelled good", "share", "as in the data", "far from 0.5: recipe.preference.desirable and undesirable balance them"),
        "answers/good_reward": Metric("mean implicit reward of answers labelled good; absent where there are none", "reward", "above answers/bad_reward", "below it: the labels can't be told from the text, or raise the rate"),
        "answers/bad_reward": Metric("mean implicit reward of answers labelled bad; absent where there are none", "reward", "falls", "as for answers/good_reward"),
        "answers/baseline": Metric("estimate of the KL to the reference, on answers behind other prompts than theirs, at least 0", "nats", "small, grows slowly", "runs away: raise beta or lower the rate"),
        "answers/mismatched": Metric("answers that the baseline is estimated from", "answers", "prompts_per_step", "fewer: prompts repeat within a step, or answers to others do not fit behind them"),
        "pairs/displaced_share": Metric("pairs that are preferred although the chosen answer became less likely", "share", "below 0.5", "a recipe with a term for the chosen answer's own likelihood"),
    },
    "Models that score": {
        "scores/accuracy": Metric("comparisons in which the better answer has the higher score; a tie counts half, a row once", "share", "rises from 0.5", "stays: raise the rate, or the preferences can't be told from the text"),
        "scores/margin": Metric("mean lead of the better answer's score", "score", "rises slowly", "runs away while eval/accuracy stands still: fewer steps; it learns its rows by heart"),
        "scores/mean": Metric("mean score of all answers", "score", "near 0: centring holds it there", "drifts: raise recipe.preference.centre"),
        "scores/length_correlation": Metric("correlation of score and length in tokens; absent where one of them does not vary", "–", "as in your preferences, else near 0", "near 1: it scores length; balance the data"),
        "scores/pairs": Metric("comparisons in the step", "pairs", "prompts_per_step or more", "–"),
        "steps/accuracy": Metric("labelled steps whose score has the right sign (good from a label of 0.5 on); a tie counts half", "share", "rises above steps/positive_share", "stays there: all steps are called good; more bad ones, or a higher rate"),
        "steps/first_error_accuracy": Metric("answers whose first bad step is found, or that rightly have none", "share", "rises", "as for steps/accuracy"),
        "steps/area_under_curve": Metric("how often a good step has a higher score than a bad one; absent without both", "share", "rises from 0.5", "as for steps/accuracy"),
        "steps/positive_share": Metric("labelled steps that are good", "share", "0.2 to 0.8", "near 0 or 1: accuracy says little; look at steps/area_under_curve"),
        "steps/count": Metric("labelled steps in the step's rows", "steps", "–", "–"),
    },
    "Collections (`groupwise collect`)": {
        "collected/prompts": Metric("prompts that were answered in the step", "prompts", "as many as the engine holds at once", "–"),
        "collected/answers": Metric("answers to them, --samples each", "answers", "prompts x samples", "–"),
        "collected/correct": Metric("answers that the reward calls correct: what keep.correct leaves", "answers", "above 0", "none: an easier set, more samples, or another model"),
        "collected/failed": Metric("answers that could not be graded", "answers", "0", "fix the grader"),
        "collected/tokens": Metric("tokens that were sampled in the step", "tokens", "–", "–"),
    },
    "Lag (train.lag)": {
        "lag/mean": Metric("steps from the weights that wrote a token to those that learned from it, mean over tokens", "steps", "at most train.lag", "as large as train.lag: learning is the bottleneck; a smaller lag costs nothing"),
        "lag/max": Metric("most steps from the weights that wrote a token to those that learned from it", "steps", "at most train.lag", "–"),
        "lag/versions": Metric("weights that wrote an answer, mean over answers", "versions", "1; above with train.sync=recompute or keep", "far above 1: answers last many steps; shorter ones, or a larger batch"),
        "lag/mixed_share": Metric("answers that several weights wrote", "share", "0 with train.sync=drain", "as for lag/versions"),
        "lag/impure_share": Metric("tokens written beside caches of older weights: their log-probability is of no single policy", "share", "0 unless train.sync=keep", "large: take train.sync=recompute"),
        "lag/waiting_length": Metric("mean length of answers that are written and wait to be learned from, when new weights come", "tokens", "near length/sampled_mean", "far below it: long answers are still being written, and come later, never not"),
        "lag/effective_share": Metric("effective sample size of a step's tokens weighed by learner/sampler, (sum w)² / (n sum w²)", "share", "above 0.9", "below 0.5: few tokens decide; a smaller train.lag or learning rate"),
        "time/learner_idle": Metric("seconds in which the learner waited for a sampler beside it, or for grades", "s", "near 0 where sampling is faster", "large: sampling is the bottleneck; shorter answers, or more devices for it"),
        "time/sampler_idle": Metric("seconds in which a sampler beside the learner had nothing to do, up to the last new weights", "s", "near 0 where learning is faster", "large: learning is the bottleneck"),
    },
    "Data and cost": {
        "data/epoch": Metric("how often the data has been gone through; of several sources, the one that came round most often", "epochs", "below 10", "answers may be memorised: compare correct/mean with eval/accuracy"),
        "data/source/*": Metric("of one of several sources of data: its share of the samples, their mean reward and the share of correct ones", "share, reward", "shares as in data.train; every source gets better", "one stands still: too hard or too easy; change its weight"),
        "cost/tokens": Metric("tokens sampled since the start, refills included", "tokens", "rises", "–"),
        "cost/flops": Metric("operations of the models since the start (sampling, scoring, updates; nothing counted twice)", "FLOP", "rises", "–"),
        "cost/wasted_share": Metric("sampled tokens that taught nothing, in the step", "share", "below 0.5", "see its causes"),
        "cost/wasted/*": Metric("sampled tokens that taught nothing, by cause: dropped by dynamic sampling, ungraded, masked by a filter, dead (no advantage)", "share", "below 0.5", "dropped, dead: other data or a larger group_size; masked: raise engine.max_tokens; ungraded: fix the grader"),
        "staleness/mean": Metric("updates that the learner was ahead of the sampler when it learned from an answer", "updates", "0 on-policy", "grows: weights do not arrive"),
        "staleness/max": Metric("most updates that the learner was ahead of the sampler when it learned from an answer", "updates", "0 on-policy", "as for staleness/mean"),
        "time/device_hours": Metric("hours of the device since the start", "h", "rises", "–"),
        "time/device_hours_per_point": Metric("hours of the device by percentage points of held-out accuracy gained; absent without a gain", "h", "as low as you can", "–"),
        "time/money": Metric("what these hours cost, at watch.price", "currency", "rises", "–"),
        "time/money_per_point": Metric("money by percentage points of held-out accuracy gained; absent without a gain", "currency", "as low as you can", "–"),
        "time/sync": Metric("seconds of bringing new weights to servers, the probe included; of engines that are servers", "s", "well below time/rollout", "a faster engine.carrier, or engine.folder in memory (/dev/shm)"),
        "time/step": Metric("seconds of the step, all phases", "s", "steady", "time/bottleneck names what to look at"),
        "time/rollout": Metric("seconds of sampling", "s", "the largest phase for long answers", "more engine.slots, fewer engine.max_tokens"),
        "time/grade": Metric("seconds of grading", "s", "below a tenth of time/step", "a faster or parallel grader"),
        "time/score": Metric("seconds of scoring with the learner before the update, and with the reference, the critic and the implicit reward model", "s", "below time/update", "a recipe without reference needs less"),
        "time/update": Metric("seconds of forward, backward and optimizer, those of a critic included", "s", "about half of time/step for short answers", "raise optim.micro_tokens; optim.recompute = false"),
        "time/eval": Metric("seconds of held-out evaluation", "s", "below a tenth of all time", "raise eval.every, lower eval.tasks"),
        "time/checkpoint": Metric("seconds that training waited for checkpoints since the step before: copying to the host, or the one before that is still being written", "s", "below a twentieth of all time", "raise checkpoint.every_seconds"),
        "time/rank_wait_*": Metric("of several ranks, by rank: seconds of the step in which it waited for words of the others (verdicts, answers, what passes found), weights and gradients left out", "s", "small and alike", "one rank near 0 and all others high: they wait for it; a slower GPU, or time/grade, which is rank 0's alone"),
        "time/rank_imbalance": Metric("of several ranks: the most tokens that a rank read in the step's passes, over the mean of all", "ratio", "below 1.1", "above 1.3: few long answers; more prompts_per_step, or fewer ranks"),
        "time/rank_gather": Metric("of several ranks: seconds of bringing the whole weights together after the updates, for sampling; of the slowest rank. Gathering and summing within passes goes on beside the arithmetic and is not told apart", "s", "below a tenth of time/step", "more samples a step; faster links between machines"),
        "time/run": Metric("seconds since `train` began to load, all starts together: loading, steps, evaluation, checkpoints; not the interpreter's start before it", "s", "near the sum of time/step", "far above it: time/eval, time/checkpoint, or a slow start"),
        "time/tokens_per_second": Metric("sampled tokens per second of time/rollout", "tokens/s", "steady", "drops: another process on the machine, or longer answers"),
        "time/share/*": Metric("share of time/step that a phase takes; other: all between the phases", "share", "rollout and update together above 0.8", "grade or other large: the device waits for the host"),
        "time/update_flops_share": Metric("model FLOPs of the update (6 x weights x tokens, attention, head; nothing that is computed twice) a second, of the device's peak; absent where that is not known", "share", "above 0.4 on a GPU", "raise optim.micro_tokens; optim.recompute = false"),
        "time/rollout_bytes_per_second": Metric("weights, keys and values that sampling must read a second, each counted once a decoding step", "bytes/s", "near the device's bandwidth", "more completions at a time: raise engine.slots, prompts_per_step or group_size"),
        "time/rollout_bandwidth_share": Metric("time/rollout_bytes_per_second as a share of the device's bandwidth; absent where that is not known", "share", "above 0.4 on a GPU", "as for time/rollout_bytes_per_second"),
        "time/bottleneck": Metric("the phase that takes longest, and what holds it up", "text", "rollout or update, near a peak of the device", "grade or other: the device waits; see the phase's own row"),
        "memory/peak_bytes": Metric("peak memory of the process or device", "bytes", "below nine tenths of what there is", "lower optim.micro_tokens or engine.slots; optim.recompute = true"),
    },
}  # fmt: skip

CATALOGUE = {name: metric for part in SECTIONS.values() for name, metric in part.items()}

INTRO = """# Metrics

<!-- Generated by `make docs` from groupwise/runfiles/catalogue.py. Do not edit. -->

While a run trains it writes numbers about itself, once a step: how often answers were right, how
long they were, how far the policy moved. This page says of each what it means, which values are
healthy, and what to do about others; `groupwise diagnose RUN` looks at them for you
([health.md](health.md)). Words that are new stand in the [glossary](words.md).

Judge a run by held-out accuracy, reward, useful groups (1 − `groups/dead_share`), length and
entropy, in that order. Never by the loss. Ranges are rules of thumb for verifiable rewards.

metrics.jsonl has one JSON object a step: `step` first, then the names below in alphabetical order.
A name that does not apply to the recipe or the step is absent; a value that is not finite is null.
Names under `time/` and `memory/` depend on the clock and the machine; all others repeat bit for bit.
`*` stands for a name of your configuration. A share is a number from 0 to 1.
"""


def find(name: str) -> Metric | None:
    """Return the entry of a metric, by its name or its family."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    families = [key for key in CATALOGUE if key.endswith("*") and name.startswith(key[:-1])]
    return CATALOGUE[families[0]] if families else None


def metrics_page() -> str:
    """Return the whole of docs/metrics.md."""
    head = ("name", "meaning", "unit", "healthy", "otherwise")
    parts = [INTRO.rstrip()]
    for title, metrics in SECTIONS.items():
        rows = [(f"`{name}`", *metric) for name, metric in metrics.items()]
        cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
        table = [head, ("---",) * len(head), *cells]
        parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in table))
    return "\n\n".join(parts) + "\n"
