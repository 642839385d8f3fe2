"""The work of a step on prompts that are sampled ahead of it; next to nothing without any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.stages.stage import StepUpdates
from groupwise.training.run import Run
from groupwise.watch.clock import Clock


def not_begun(run: Run, cursor: Mapping[str, Any]) -> None:
    """Leave a step as if it had not begun; `cursor` is where its prompts came from."""
    if run.parts.ahead is None:
        run.progress.cursor.restore(cursor)
    else:
        run.parts.ahead.give_back()  # what was admitted stays so


def before_update(run: Run, clock: Clock) -> None:
    """Finish what the weights that are about to change are writing, if it must be."""
    if run.parts.ahead is not None:
        run.parts.ahead.before_update(clock)


def deliver(run: Run, clock: Clock) -> None:
    """Give the sampler the new weights, and free the slots of what they were learned from."""
    ahead, version = run.parts.ahead, run.progress.version
    if ahead is not None:
        ahead.before_sync(clock)
    run.parts.engine.sync(version)
    if ahead is not None:
        ahead.after_sync(version)


def rest(run: Run) -> None:
    """Leave the engine with nothing to do: others want to ask it."""
    if run.parts.ahead is not None:
        run.parts.ahead.rest()


def admit(run: Run) -> None:
    """Fill the free slots, so that the sampler has work while the step ends."""
    if run.parts.ahead is not None:
        run.parts.ahead.admit()


def lag_metrics(run: Run, updates: StepUpdates) -> dict[str, float]:
    """Measure how old a step's answers were, and what they still count for."""
    if run.parts.ahead is None:
        return {}
    return run.parts.ahead.measures() | effective_size(updates)


def effective_size(updates: StepUpdates) -> dict[str, float]:
    """Return (sum w)^2 / (n sum w^2) of w = learner/sampler over tokens: 1 where all are alike."""
    batch, learner_NT = updates.batch, updates.streams.get("learner_logp")
    if batch is None or batch.sampler_logp_NT is None or learner_NT is None:
        return {}
    log_NT = (learner_NT - batch.sampler_logp_NT.to(learner_NT.device)).double()
    weight = log_NT[batch.mask_NT.to(log_NT.device) & ~log_NT.isnan()].exp()
    if not len(weight):
        return {}
    return {"lag/effective_share": float(weight.sum() ** 2 / (weight**2).sum() / len(weight))}
