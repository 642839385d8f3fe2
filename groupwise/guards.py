"""When not to go on: sampler against learner before the first step, rewards, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from groupwise.errors import GroupwiseError, RunError
from groupwise.graders.rubric import stop_if_failing
from groupwise.groups.assemble import Group
from groupwise.optim.packs import Sequences
from groupwise.optim.step import StepOutcome
from groupwise.records import TokenBatch
from groupwise.rollouts import failed, write
from groupwise.setup import sampling_of

if TYPE_CHECKING:
    from groupwise.run import Run

PROBES, PROBE_SAMPLES, PROBE_TOKENS = 8, 2, 32  # of the comparison before the first step


def check_agreement(run: Run) -> dict[str, float]:
    """Sampler and learner on identical weights: the same log-probabilities, or no training.

    The reference starts as the policy, so at step 0 their difference is exactly 0.
    """
    tasks = run.tasks[:PROBES]
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
    sampler = torch.cat([done.logp_T for _, done in rows])
    gap = (learner_NT.cpu()[sequences.mask()] - sampler).abs()
    found = {
        "gate/mismatch_mean": float(gap.mean()),
        "gate/mismatch_p99": float(gap.quantile(0.99)),
        "gate/mismatch_max": float(gap.max()),
    }
    shown = ", ".join(f"{name.rpartition('_')[2]} {value:.1e}" for name, value in found.items())
    if run.engine.weights != "shared":
        run.display.note(f"the sampler is a copy ({run.engine.weights}): |Δ log p| {shown}")
    elif not found["gate/mismatch_mean"] <= run.config.guard.mismatch:
        raise RunError(
            f"Sampler and learner disagree on identical weights: |Δ log p| {shown}, limit "
            f"guard.mismatch = {run.config.guard.mismatch:g}. Every update would be off-policy. "
            "Likely causes: a temperature, top-p or top-k on one side only; weights that did not "
            "reach the sampler; another precision or chat template; an engine that computes "
            "another model. Raise the limit only if you correct for it (recipe tis)."
        )
    return found


def _check_reference(policy_NT: Tensor, reference_NT: Tensor) -> None:
    if not torch.equal(policy_NT, reference_NT):
        worst = float((policy_NT - reference_NT).abs().max())
        raise RunError(
            f"The reference is not the starting policy: log-probabilities differ by up to "
            f"{worst:.1e} before the first update, where the KL must be exactly 0. It was loaded "
            "from other weights or in another precision."
        )


def check_rewards(run: Run, groups: Sequence[Group]) -> None:
    """Stop when rewards fail too often: what is learned from the rest would be another task."""
    rows = [rollout for group in groups for rollout in group]
    bad = [rollout for rollout in rows if failed(rollout.grade)]
    if not bad:
        return
    reasons = "; ".join(dict.fromkeys(r.grade.reason for r in bad[:3]))
    run.event(
        "reward",
        f"{len(bad)} of {len(rows)} rewards failed and count as ungraded, not as 0: {reasons}",
    )
    stop_if_failing([rollout.grade for rollout in rows], run.config.reward.max_failed_share)


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
    place = run.folder.path / "dumps"
    place.mkdir(exist_ok=True)
    file = place / f"step_{run.step}.safetensors"
    named = {item.name: getattr(batch, item.name) for item in fields(batch)}
    tensors = {k: x.detach().contiguous() for k, x in named.items() if isinstance(x, Tensor)}
    save_file(tensors, file)
    return str(file.relative_to(run.folder.path))
