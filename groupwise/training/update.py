"""What a step learns: advantages, loss and updates, from rewards or from pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from groupwise.groups.phase import batch_phase
from groupwise.losses.measures import quantile
from groupwise.model.cost import Parts, add, forward_cost, update_cost
from groupwise.optim.assemble import assemble, group_numbers, sequences_of
from groupwise.optim.learner import PolicyLearner
from groupwise.optim.pairs import PairLearner, labelled_pairs, sampled_pairs
from groupwise.optim.step import StepOutcome, first_bad
from groupwise.records import Memory, TokenBatch
from groupwise.training.collect import Collected, as_batch
from groupwise.training.rows import token_streams
from groupwise.watch.clock import Clock

if TYPE_CHECKING:
    from groupwise.training.run import Run


@dataclass(frozen=True)
class Taught:
    """The updates of one step and what they leave."""

    outcomes: list[StepOutcome]
    metrics: dict[str, float]
    memory: Memory
    batch: TokenBatch | None = None
    streams: dict[str, Tensor | None] = field(default_factory=dict)  # per token, for the files
    work: dict[str, Parts] = field(default_factory=dict)  # what the phases had to compute


def teach(run: Run, collected: Collected, rate: float, clock: Clock) -> Taught:
    """All updates that the recipe makes on these rollouts."""
    room = run.learner.micro_tokens
    if isinstance(run.learner, PairLearner):
        taught = from_pairs(run, run.learner, collected, rate, clock)
    else:
        taught = from_rewards(run, run.learner, collected, rate, clock)
    run.note_memory(room)
    snr = run.learner.optimizer.signal_to_noise()
    return (
        taught if snr is None else replace(taught, metrics=taught.metrics | {"optim/grad_snr": snr})
    )


def from_rewards(
    run: Run, learner: PolicyLearner, collected: Collected, rate: float, clock: Clock
) -> Taught:
    """Score the rollouts, run the batch phase over all groups, make the updates."""
    recipe, groups = learner.recipe, collected.groups
    sequences = sequences_of(groups)
    parts = learner.parts(group_numbers(recipe, groups))
    streams = learner.batch_streams()
    models = {}
    if "old_logp_NT" in recipe.streams:
        models["old_logp_NT"] = learner.model
    if run.reference is not None:
        models["ref_logp_NT"] = run.reference.model
    if models:
        with clock("score"):
            for name, model in models.items():
                streams[name] = learner.score(model, sequences, parts)
    bad = first_bad(streams.items())
    if bad is not None:  # no batch can be made of it: the rollout file has what was sampled
        outcome = StepOutcome(grad_norm=float("nan"), clipped=False, skipped=True, bad=bad)
        return Taught([outcome], {"updates/count": 1.0, "optim/skipped": 1.0}, run.memory)
    batch = assemble(
        recipe,
        groups,
        as_batch(run, groups) if collected.batch is None else collected.batch,
        greedy=[group[0].grade.reward for group in collected.greedy] or None,
        memory=run.memory,
        device=learner.device,
        world=learner.world,
        **streams,
    )
    result = batch_phase(recipe, batch)
    if not result.metrics["tokens/learned_share"]:
        run.event(
            "nothing learned",
            "no answer of this step counts (without a reward, or cut off and left out): look at "
            "grader_reason and finish in its rollout file.",
        )
    with clock("update"):
        learned = learner.learn(result.batch, sequences, parts, rate)
    shape, sizes = learner.model.config, sequences.sizes()
    passes = len(learned.outcomes) // len(parts)
    frozen = run.config.adapter.used
    streams_NT = token_streams(result.batch, learned.trace)
    return Taught(
        outcomes=learned.outcomes,
        metrics=result.metrics | learned.metrics() | mismatch_tail(result.batch, streams_NT),
        memory=result.memory,
        batch=result.batch,
        streams=streams_NT,
        work={
            "score": add(*[forward_cost(shape, sizes)] * len(models)),
            "update": update_cost(shape, sizes, passes=passes, frozen=frozen),
        },
    )


def from_pairs(
    run: Run, learner: PairLearner, collected: Collected, rate: float, clock: Clock
) -> Taught:
    """One update on the pairs that the data or the samples give; none if there are none."""
    assert run.reference is not None, "a preference recipe holds a reference"
    if collected.tasks:
        pairs = labelled_pairs(collected.tasks, run.loaded.tokenizer)
    else:
        pairs = sampled_pairs(learner.recipe, collected.groups, run.loaded.tokenizer)
    if not pairs.completions:
        run.event("pairs", "no group of this step has two answers of different reward: no update.")
        return Taught([], {"pairs/count": 0.0, "updates/count": 0.0}, run.memory)
    with clock("update"):
        outcome, metrics = learner.learn_pairs(pairs, run.reference.model, rate)
    metrics |= {"updates/count": 1.0, "optim/skipped": float(outcome.skipped)}
    if not outcome.skipped:
        metrics["optim/grad_norm"] = outcome.grad_norm
    shape, sizes = learner.model.config, pairs.sizes()
    update = update_cost(shape, sizes, frozen=run.config.adapter.used)
    work = add(update, forward_cost(shape, sizes))  # the reference's
    return Taught([outcome], metrics, run.memory, work={"update": work})


def mismatch_tail(batch: TokenBatch, streams: dict[str, Tensor | None]) -> dict[str, float]:
    """The 99th percentile of |learner − sampler|, of the whole batch: quantiles do not add up."""
    learner_NT = streams["learner_logp"]
    if learner_NT is None or batch.sampler_logp_NT is None or batch.learn_N is None:
        return {}
    own_NT = batch.mask_NT & batch.learn_N[:, None] & ~learner_NT.isnan()
    gap = (learner_NT - batch.sampler_logp_NT)[own_NT].abs()
    return {"mismatch/abs_p99": float(quantile(gap, 0.99))} if len(gap) else {}
