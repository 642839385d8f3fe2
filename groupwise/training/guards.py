"""When not to go on: sampler against learner, weights that were delivered, rewards, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save
from torch import Tensor

from groupwise.engine.native.copies import make_source
from groupwise.errors import GroupwiseError, RewardError, RunError
from groupwise.graders.rubric import too_many_failed
from groupwise.model.fingerprint import fingerprint, same_weights
from groupwise.model.layers.transformer import PolicyModel
from groupwise.optim.assemble import Group
from groupwise.optim.packs import Sequences
from groupwise.optim.step import StepOutcome
from groupwise.prepare.rollouts import failed, write
from groupwise.prepare.setup import sampling_of
from groupwise.records import Rollout, TokenBatch
from groupwise.runfiles.files import write_atomic

if TYPE_CHECKING:
    from groupwise.training.run import Run

PROBES, PROBE_SAMPLES, PROBE_TOKENS = 8, 2, 32  # of the comparison before the first step
UNREWARDED_STEPS = 3  # in a row without any reward, after which a run stops
HALF_FACTOR = 50  # what bfloat16 may differ more than float32: it has 16 bits less


def check_agreement(run: Run) -> dict[str, float]:
    """Sampler and learner on identical weights: the same log-probabilities, or no training.

    The reference starts as the policy, so at step 0 their difference is exactly 0.
    """
    room, tasks = run.learner.micro_tokens, run.tasks[:PROBES]
    sampling = sampling_of(  # the whole distribution: whether the engines agree is the question
        run.config,
        max_tokens=min(PROBE_TOKENS, run.config.engine.max_tokens),
        min_tokens=0,
        top_p=1.0,
        top_k=0,
    )
    groups = write(run.engine, [(task, 0) for task in tasks], PROBE_SAMPLES, sampling, "probe")
    rows = [(group.task.token_ids, done) for group in groups for done in group.completions]
    sequences = Sequences([prompt for prompt, _ in rows], [done.token_ids for _, done in rows])
    parts = [list(range(len(rows)))]
    learner_NT = run.learner.score(run.loaded.model, sequences, parts)
    if run.reference is not None and run.step == 0:
        _check_reference(learner_NT, run.learner.score(run.reference.model, sequences, parts))
    run.note_memory(room)
    sampler = torch.cat([done.logp_T for _, done in rows])
    gap = (learner_NT.cpu()[sequences.mask()] - sampler).abs()
    found = {
        "gate/mismatch_mean": float(gap.mean()),
        "gate/mismatch_p99": float(gap.quantile(0.99)),
        "gate/mismatch_max": float(gap.max()),
    }
    shown = ", ".join(f"{name.rpartition('_')[2]} {value:.1e}" for name, value in found.items())
    can = run.engine.capabilities
    if not can.shares_weights:
        run.display.note(f"the sampler is a copy ({can.weights}): |Δ log p| {shown}")
        return found
    limit, said = mismatch_limit(run)
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


def mismatch_limit(run: Run) -> tuple[float, str]:
    """What the mean may be, and how to name it: nothing at all in exact mode."""
    if run.config.engine.exact:
        return 0.0, "0 (engine.exact)"
    limit = run.config.guard.mismatch
    if run.loaded.model.head_weight.dtype == torch.bfloat16:
        said = f"guard.mismatch = {limit:g}, {HALF_FACTOR} times it in bfloat16"
        return HALF_FACTOR * limit, said
    return limit, f"guard.mismatch = {limit:g}"


def explained_gap(run: Run) -> float:
    """The mean |learner − sampler| of a step that precision explains; dropout explains any."""
    return 1.0 if run.config.adapter.dropout else mismatch_limit(run)[0]


def _check_reference(policy_NT: Tensor, reference_NT: Tensor) -> None:
    if not torch.equal(policy_NT, reference_NT):
        worst = float((policy_NT - reference_NT).abs().max())
        raise RunError(
            f"The reference is not the starting policy: log-probabilities differ by up to "
            f"{worst:.1e} before the first update, where the KL must be exactly 0. It was loaded "
            "from other weights or in another precision."
        )


def check_delivery(run: Run) -> str:
    """The learner's fingerprint, after making sure that the sampler has the weights it should.

    That is what a sampler made from the learner just now would have, or would have had as many
    updates ago as engine.weights says. Parameters that are the learner's own need no second look.
    Of an engine that does not show its weights, log-probabilities tell (mismatch/ in the metrics).
    """
    learner, engine = run.loaded.model, run.engine
    weights = engine.capabilities.weights
    mine = fingerprint(learner.named_parameters())
    if engine.source is None:
        return mine
    fresh = make_source(weights, learner, run.version).model

    def digest(model: PolicyModel) -> str:
        return mine if model is learner else fingerprint(model.named_parameters())

    known = run.delivered | {run.version: digest(fresh)}
    kind, _, number = weights.partition(":")
    lag = int(number) if kind == "stale" else 0
    wanted = max((version for version in known if version <= run.version - lag), default=min(known))
    run.delivered = {version: x for version, x in known.items() if version >= wanted}
    held, source = engine.source.version, engine.source.model
    if held == wanted and digest(source) == known[wanted]:
        return mine
    if held != wanted:
        why = f"it says that it has version {held} instead of version {wanted}"
    else:
        differing = same_weights(fresh.named_parameters(), source.named_parameters())
        why = f"{differing}" if lag == 0 else "their fingerprints differ"
    raise RunError(
        f"After step {run.step} the engine does not sample from version {wanted} of the weights: "
        f"{why}. They did not arrive, and rollouts would come from another policy than the "
        f"learner's. The engine's sync ({weights}) is at fault. The last checkpoint is "
        "sound; the same command goes on from it once that is mended."
    )


def check_rewards(run: Run, groups: Sequence[Group]) -> GroupwiseError | None:
    """Count rewards that failed or are missing, and say when they are too many.

    What is learned from the rest would then be another task.
    """
    rows = [rollout for group in groups for rollout in group]
    bad = [rollout for rollout in rows if failed(rollout.grade)]
    if bad:
        reasons = "; ".join(dict.fromkeys(r.grade.reason for r in bad[:3]))
        run.event(
            "reward",
            f"{len(bad)} of {len(rows)} rewards failed and count as ungraded, not as 0: {reasons}",
        )
    failing = too_many_failed([r.grade for r in rows], run.config.reward.max_failed_share)
    return failing or _check_any_reward(run, rows)


def _check_any_reward(run: Run, rows: Sequence[Rollout]) -> GroupwiseError | None:
    """Say when there has been nothing to learn from for several steps."""
    if not rows or not run.learns_from_rewards:
        return None
    run.unrewarded = run.unrewarded + 1 if all(r.grade.reward is None for r in rows) else 0
    if not run.unrewarded:
        return None
    reasons = [r.grade.reason for r in rows if r.grade.reason]
    often = max(dict.fromkeys(reasons), key=reasons.count) if reasons else "no part gave a value"
    run.event(
        "reward",
        f"none of the {len(rows)} answers of this step has a reward: {often}. Nothing can be "
        f"learned from them; the run stops after {UNREWARDED_STEPS} such steps in a row.",
    )
    if run.unrewarded < UNREWARDED_STEPS:
        return None
    return RewardError(
        f"No answer has had a reward for {run.unrewarded} steps in a row, so nothing was learned. "
        f"Most often: {often}. A function that ends without `return` returns None: did you forget "
        "return? Mend the reward (`groupwise check-reward` tries it); the run is saved as it was "
        f"after step {run.step}, and the same command goes on with it."
    )


def check_updates(
    run: Run, outcomes: Sequence[StepOutcome], batch: TokenBatch | None
) -> GroupwiseError | None:
    """Count skipped updates, keep the batch for inspection, and say when it is enough."""
    for outcome in outcomes:
        run.skipped = run.skipped + 1 if outcome.skipped else 0
    bad = next((outcome.bad for outcome in outcomes if outcome.skipped), None)
    if bad is None:
        return None
    file = f"rollouts/step_{run.step}.parquet" if batch is None else dump(run, batch)
    run.event("not finite", f"update skipped at step {run.step}: {bad}. Batch kept in {file}.")
    if run.skipped < run.config.guard.max_skipped:
        return None
    return RunError(
        f"{run.skipped} updates in a row were not finite, last: {bad}. The weights are those "
        f"before them. Look at {file}; lower optim.learning_rate, or take an earlier checkpoint."
    )


def dump(run: Run, batch: TokenBatch) -> str:
    """Every tensor of a batch, by name, for looking at later."""
    file = run.folder.path / "dumps" / f"step_{run.step}.safetensors"
    named = {item.name: getattr(batch, item.name) for item in fields(batch)}
    # Copies: two streams may be one tensor, which the format refuses.
    tensors = {k: x.detach().cpu().clone() for k, x in named.items() if isinstance(x, Tensor)}
    name = str(file.relative_to(run.folder.path))
    with run.folder.writing(name):
        file.parent.mkdir(exist_ok=True)
        write_atomic(file, save({k: x.contiguous() for k, x in tensors.items()}))
    return name
