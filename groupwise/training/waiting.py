"""The end of value pre-training before its time: where a critic has stopped learning."""

from __future__ import annotations

from collections.abc import Sequence

from groupwise.config import Config
from groupwise.stages.stage import StepUpdates
from groupwise.training.progress import Progress
from groupwise.training.reporter import Reporter

KNOWN = "critic/explained_variance"
RISE = 0.01  # of it, below which nothing was learned


def end_waiting(
    config: Config, progress: Progress, updates: StepUpdates, reporter: Reporter
) -> None:
    """Note what the critic knew in a step that it learned alone; let the policy begin if enough."""
    known, patience = updates.metrics.get(KNOWN), config.critic.alone_patience
    if known is not None:  # else all returns were equal, and there was nothing to know
        progress.alone.append(known)
    if not has_stopped(progress.alone, patience):
        return
    progress.waited = progress.step
    reporter.event(
        "critic",
        f"explained variance has not risen by {RISE:g} in {patience} steps "
        f"(critic.alone_patience): the policy learns from step {progress.step + 1} on",
    )


def has_stopped(known: Sequence[float], patience: int) -> bool:
    """Tell whether the best of the last `patience` steps is no better than the best before them."""
    if not 0 < patience < len(known):
        return False
    return max(known[-patience:]) < max(known[:-patience]) + RISE
