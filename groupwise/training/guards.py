"""When not to go on: sampler against learner, weights that were delivered, rewards, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from groupwise.config import Config
from groupwise.engine.native.copies import make_source
from groupwise.errors import GroupwiseError, RewardError, RunError
from groupwise.graders.rubric import too_many_failed
from groupwise.model.fingerprint import fingerprint, same_weights
from groupwise.model.layers.transformer import PolicyModel
from groupwise.optim.learner import Learner, Scoring
from groupwise.optim.packs import Sequences
from groupwise.prepare.rollouts import failed, sample_groups
from groupwise.prepare.setup import sampling_of
from groupwise.records import Rollout, TokenBatch
from groupwise.runfiles.files import write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.stages.collected import Collected
from groupwise.stages.parts import Parts
from groupwise.stages.stage import StepUpdates
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter

PROBES, PROBE_SAMPLES, PROBE_TOKENS = 8, 2, 32  # of the comparison before the first step
MEND = (
    "A function that ends without `return` returns None: did you forget return? Mend the reward "
    "(`groupwise check-reward` tries it)"
)
TEACH = (
    "The policy does not judge its answers as it is asked to: teach it first, in a stage of sft on "
    "judgements (docs/preferences.md), or let reward.parts grade (recipe=best_of_group_dpo)"
)
UNREWARDED_STEPS = 3  # in a row without any reward, after which a run stops
HALF_FACTOR = 50  # what bfloat16 may differ more than float32: it has 16 bits less


def check_agreement(
    config: Config, parts: Parts[Any], reporter: Reporter, *, first: bool
) -> dict[str, float]:
    """Compare sampler and learner on identical weights: the same log-probabilities, or no training.

    Before the `first` step, roles must be what they start as, too.
    """
    if config.recipe.scores:
        return {}  # there is no sampler
    learner, tasks = parts.learner, parts.tasks[:PROBES]
    sampling = sampling_of(  # the whole distribution: whether the engines agree is the question
        config,
        max_tokens=min(PROBE_TOKENS, config.engine.max_tokens),
        min_tokens=0,
        top_p=1.0,
        top_k=0,
    )
    groups = sample_groups(
        parts.engine, [(task, 0) for task in tasks], PROBE_SAMPLES, sampling, "probe"
    )
    rows = [(group.task.token_ids, done) for group in groups for done in group.completions]
    drawn = [done for _, done in rows]
    sequences = Sequences(
        [prompt for prompt, _ in rows],
        [done.token_ids for done in drawn],
        [done.mask_T for done in drawn],
    )

    score = Scoring(learner, sequences, [list(range(len(rows)))])
    learner_NT = score(learner.model)
    for role in learner.roles.values() if first else ():
        role.check_start(learner_NT, score)
    # Of tokens that others wrote the sampler knows nothing.
    sampler = torch.cat([x.logp_T if x.mask_T is None else x.logp_T[x.mask_T] for x in drawn])
    gap = (learner_NT.cpu()[sequences.mask()] - sampler).abs()
    found = {
        "gate/mismatch_mean": float(gap.mean()),
        "gate/mismatch_p99": float(gap.quantile(0.99)),
        "gate/mismatch_max": float(gap.max()),
    }
    shown = ", ".join(f"{name.rpartition('_')[2]} {value:.1e}" for name, value in found.items())
    can = parts.engine.capabilities
    if not can.shares_weights:
        reporter.display.note(f"the sampler is a copy ({can.weights}): |Δ log p| {shown}")
        return found
    limit, said = mismatch_limit(config, parts)
    if not found["gate/mismatch_mean"] <= limit:
        raise RunError(
            f"Sampler and learner disagree on identical weights: |Δ log p| {shown}, limit "
            f"{said}. Every update would be off-policy. "
            "Likely causes: a temperature, top-p or top-k on one side only; weights that did not "
            "reach the sampler; another precision or chat template; an engine that computes "
            "another model; an engine with weights of its own whose capabilities do not say so. "
            "Raise the limit only if you correct for it (recipe tis)."
        )
    return found


def mismatch_limit(config: Config, parts: Parts[Any]) -> tuple[float, str]:
    """Return what the mean may be, and how to name it: nothing at all in exact mode."""
    if config.engine.exact:
        return 0.0, "0 (engine.exact)"
    limit = config.guard.mismatch
    if parts.loaded.model.head_weight.dtype == torch.bfloat16:
        said = f"guard.mismatch = {limit:g}, {HALF_FACTOR} times it in bfloat16"
        return HALF_FACTOR * limit, said
    return limit, f"guard.mismatch = {limit:g}"


def explained_gap(config: Config, parts: Parts[Any]) -> dict[str, float]:
    """Return the mean |learner − sampler| that precision explains; dropout and lag explain any."""
    if config.recipe.scores:
        return {}  # there is no sampler
    any_gap = config.adapter.dropout or config.train.lag
    limit = 1.0 if any_gap else mismatch_limit(config, parts)[0]
    return {"mismatch/limit": limit}


def note_memory(progress: Progress, parts: Parts[Any], reporter: Reporter) -> None:
    """Keep how large micro-batches are, and say so if they became smaller."""
    before, progress.micro_tokens = progress.micro_tokens, parts.learner.micro_tokens
    if progress.micro_tokens < before:
        reporter.event(
            "memory",
            f"out of memory: micro-batches of {progress.micro_tokens} tokens instead of "
            f"{before} from here on; the batch and the update stay the same.",
        )


def check_delivery(progress: Progress, parts: Parts[Any]) -> str:
    """Make sure that the sampler has the weights it should; return the learner's fingerprint.

    That is what a sampler made from the learner just now would have, or would have had as many
    updates ago as engine.weights says. Parameters that are the learner's own need no second look.
    Of an engine that does not show its weights, log-probabilities tell (mismatch/ in the metrics).
    """
    learner, engine = parts.loaded.model, parts.engine
    weights = engine.capabilities.weights
    mine = fingerprint(parts.learner.weights())
    _check_gathered(parts.learner, mine, progress.step)
    if engine.source is None:
        return mine
    fresh = make_source(weights, learner, progress.version).model

    def digest(model: PolicyModel) -> str:
        return mine if model is learner else fingerprint(model.named_parameters())

    known = progress.delivered | {progress.version: digest(fresh)}
    kind, _, number = weights.partition(":")
    lag = int(number) if kind == "stale" else 0
    wanted = max(
        (version for version in known if version <= progress.version - lag), default=min(known)
    )
    progress.delivered = {version: x for version, x in known.items() if version >= wanted}
    held, source = engine.source.version, engine.source.model
    if held == wanted and digest(source) == known[wanted]:
        return mine
    if held != wanted:
        why = f"it says that it has version {held} instead of version {wanted}"
    else:
        differing = same_weights(fresh.named_parameters(), source.named_parameters())
        why = f"{differing}" if lag == 0 else "their fingerprints differ"
    raise RunError(
        f"After step {progress.step} the engine does not sample from version {wanted} of the "
        f"weights: {why}. They did not arrive, and rollouts would come from another policy than "
        f"the learner's. The engine's sync ({weights}) is at fault. The last checkpoint is "
        "sound; the same command goes on from it once that is mended."
    )


def _check_gathered(learner: Learner, mine: str, step: int) -> None:
    """Make sure that every rank's copy for sampling is what the ranks have learned.

    Each holds its own part against it, and all copies are the same: so all parts are right.
    """
    world = learner.world
    wrong = world.merge({world.rank: (mine, learner.undelivered())})
    for rank, (other, parameter) in enumerate(wrong):
        if parameter is not None or other != wrong[0][0]:
            what = parameter or "a parameter of another rank"
            raise RunError(
                f"After step {step} the weights that rank {rank} samples from are not those that "
                f"were learned: {what} differs. They were not gathered, or arrived damaged. The "
                "last checkpoint is sound; the same command goes on from it once that is mended."
            )


def check_rewards(
    config: Config, progress: Progress, collected: Collected, reporter: Reporter
) -> GroupwiseError | None:
    """Count rewards that failed or are missing, and say when they are too many.

    What is learned from the rest would then be another task.
    """
    groups = collected.drawn + collected.greedy + collected.branches
    rows = [rollout for group in groups for rollout in group]
    bad = [rollout for rollout in rows if failed(rollout.grade)]
    if bad:
        reasons = "; ".join(dict.fromkeys(r.grade.reason for r in bad[:3]))
        reporter.event(
            "reward",
            f"{len(bad)} of {len(rows)} rewards failed and count as ungraded, not as 0: {reasons}",
        )
    failing = too_many_failed([r.grade for r in rows], config.reward.max_failed_share)
    return failing or _check_any_reward(config, progress, rows, reporter)


def _check_any_reward(
    config: Config, progress: Progress, rows: Sequence[Rollout], reporter: Reporter
) -> GroupwiseError | None:
    """Say when there has been nothing to learn from for several steps."""
    if not rows or not config.recipe.reads_rewards:
        return None
    missing = all(r.grade.reward is None for r in rows)
    progress.unrewarded = progress.unrewarded + 1 if missing else 0
    if not progress.unrewarded:
        return None
    reasons = [r.grade.reason for r in rows if r.grade.reason]
    often = max(dict.fromkeys(reasons), key=reasons.count) if reasons else "no part gave a value"
    reporter.event(
        "reward",
        f"none of the {len(rows)} answers of this step has a reward: {often}. Nothing can be "
        f"learned from them; the run stops after {UNREWARDED_STEPS} such steps in a row.",
    )
    if progress.unrewarded < UNREWARDED_STEPS:
        return None
    return RewardError(
        f"No answer has had a reward for {progress.unrewarded} steps in a row, so nothing was "
        f"learned. Most often: {often}. {MEND if config.recipe.verified else TEACH}; the run is "
        f"saved as it was after step {progress.step}, and the same command goes on with it."
    )


def check_updates(
    config: Config,
    progress: Progress,
    updates: StepUpdates,
    reporter: Reporter,
    *,
    leads: bool = True,
) -> GroupwiseError | None:
    """Count skipped updates, keep the batch for inspection, and say when it is enough.

    Files are those of the rank that `leads`.
    """
    for outcome in updates.outcomes:
        progress.skipped = progress.skipped + 1 if outcome.skipped else 0
    bad = next((outcome.bad for outcome in updates.outcomes if outcome.skipped), None)
    if bad is None:
        return None
    file = f"rollouts/step_{progress.step}.parquet"
    if updates.batch is not None and leads:
        file = dump(reporter.folder, progress.step, updates.batch)
    reporter.event(
        "not finite", f"update skipped at step {progress.step}: {bad}. Batch kept in {file}."
    )
    if progress.skipped < config.guard.max_skipped:
        return None
    return RunError(
        f"{progress.skipped} updates in a row were not finite, last: {bad}. The weights are those "
        f"before them. Look at {file}; lower optim.learning_rate, or take an earlier checkpoint."
    )


def dump(folder: RunFolder, step: int, batch: TokenBatch) -> str:
    """Write every tensor of a batch, by name, for looking at later."""
    file = folder.path / "dumps" / f"step_{step}.safetensors"
    named = {item.name: getattr(batch, item.name) for item in fields(batch)}
    named.update(batch.of_roles)
    # Copies: two streams may be one tensor, which the format refuses.
    tensors = {k: x.detach().cpu().clone() for k, x in named.items() if isinstance(x, Tensor)}
    name = str(file.relative_to(folder.path))
    with folder.writing(name):
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, save({k: x.contiguous() for k, x in tensors.items()}))
    return name
