"""The batch phase: all groups, no gradient -> advantage and coefficient per token.

Everything that depends on more than one sequence happens here, so that the token phase can be split
into any micro-batches. Call it once per batch on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.errors import BatchError, RecipeError
from groupwise.groups.advantages import moving_average, per_token
from groupwise.groups.aggregation import current_exponent
from groupwise.groups.comparisons import beta_after, role_walk
from groupwise.groups.statistics import dead_groups, group_stats
from groupwise.methods.composition import Recipe
from groupwise.methods.slots import Slot
from groupwise.methods.traits import nothing
from groupwise.records import Memory, TokenBatch, Visit
from groupwise.streams import STREAMS

PREPARING = ("gate", "correction", "penalty", "auxiliary")  # of a whole update
EDGE = 0.25  # of the rewards' range, from its middle: beyond are the outer quarters


@dataclass(frozen=True)
class BatchResult:
    """Streams, memory and measures that the batch phase hands on."""

    batch: TokenBatch  # with advantage_NT and coefficient_NT: feed it to the token phase
    refill: tuple[int, ...]  # ids of groups that a filter dropped and wants others for
    memory: Memory  # give it to the next batch, and to the checkpoint
    metrics: dict[str, float]


@dataclass(frozen=True)
class Selection:
    """The verdict of a recipe's filters, row by row."""

    learn_N: Tensor  # the row's tokens are in the loss
    count_N: Tensor  # the row's advantage counts (else it is 0, tokens staying in denominators)
    refill: tuple[int, ...]


def batch_slots(recipe: Recipe) -> tuple[Slot, ...]:
    """Return what makes the advantages and coefficients of a batch; the token phase must agree."""
    kinds = ("filter", "shaping", "advantage", "aggregation")
    return tuple(slot for kind in kinds for slot in recipe.of(kind))


def returned(slot: Slot, value: Tensor, like: Tensor) -> Tensor:
    """Return what a slot returned, checked for the shape that its signature promises."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise RecipeError(
            f"{slot.kind} {slot.name} returned {shape}, its signature promises a tensor "
            f"{tuple(like.shape)}. See the table of slots in CONTRIBUTING.md."
        )
    return value


@torch.no_grad()
def select(recipe: Recipe, batch: TokenBatch) -> Selection:
    """Run the filters. The trainer calls this first, drops what `refill` names and tops up."""
    learn_N = batch.learn_N  # said where rewards are not read; else what has one
    learn_N = ~batch.task_reward_N.isnan() if learn_N is None else learn_N
    count_N = learn_N.clone()
    wanted: set[int] = set()
    for chosen in recipe.filter:
        keep_N = returned(chosen, chosen(batch), batch.task_reward_N)
        action = chosen.definition.traits.action
        if action == "mask":
            learn_N = learn_N & keep_N
            continue
        count_N = count_N & keep_N
        if action == "refill":
            ids_M, keep_M = batch.world.gather(batch.group_N), batch.world.gather(keep_N)
            wanted |= set(ids_M[~keep_M].tolist())
    return Selection(learn_N, count_N, tuple(sorted(wanted)))


def shape(recipe: Recipe, batch: TokenBatch) -> TokenBatch:
    """Run reward shaping: fills reward_N and adds to token_reward_NT."""
    reward_N, token_reward_NT = batch.task_reward_N, batch.token_reward_NT
    for shaping in recipe.shaping:
        reward_N, extra_NT = shaping(reward_N, batch)
        returned(shaping, reward_N, batch.task_reward_N)
        if extra_NT is not None:
            token_reward_NT = extra_NT if token_reward_NT is None else token_reward_NT + extra_NT
    return replace(batch, reward_N=reward_N, token_reward_NT=token_reward_NT)


def advantages(recipe: Recipe, batch: TokenBatch, selection: Selection) -> Tensor:
    """Run the advantage chain on a shaped batch: [N] or [N, T], 0 for rows that do not count."""
    x = batch.stream("reward_N")
    for link in recipe.advantage:
        x = link(x, batch)
        returned(link, x, batch.task_reward_N if x.dim() == 1 else batch.mask_NT)
    if x.dim() == 1:
        return torch.where(selection.count_N, x, 0.0)
    return x if selection.count_N.all() else torch.where(selection.count_N[:, None], x, 0.0)


@torch.no_grad()
def batch_phase(recipe: Recipe, batch: TokenBatch) -> BatchResult:
    """Turn rewards, groups, masks and log-probabilities into advantage and coefficient streams."""
    if batch.advantage_NT is not None:
        raise BatchError("This batch has been through a batch phase. Start from TokenBatch.build.")
    if not len(batch.groups):
        raise BatchError("The batch has no rows on any rank: nothing is left to learn from.")
    _check_needs(recipe, batch)
    selection = select(recipe, batch)
    batch = shape(recipe, batch)
    batch = replace(batch, learn_N=selection.learn_N)
    advantage_NT = per_token(advantages(recipe, batch, selection), batch)
    batch = replace(batch, advantage_NT=advantage_NT)
    weighed = replace(_weigh(recipe, batch), made_by=batch_slots(recipe))
    metrics = _metrics(batch) | edge_share(weighed)
    memory = _remember(recipe, batch)
    # What slots computed alike is not needed any more, and would stay in memory with the batch.
    return BatchResult(replace(weighed, scratch={}), selection.refill, memory, metrics)


def _weigh(recipe: Recipe, batch: TokenBatch) -> TokenBatch:
    """Add coefficients and auxiliary targets, their denominators over these rows of all ranks."""
    looking = (slot for kind in PREPARING for slot in recipe.of(kind))
    prepared = {
        slot.name: slot.definition.traits.prepare(batch, dict(slot.params))
        for slot in looking
        if slot.kind == "auxiliary" or slot.definition.traits.prepare is not nothing
    }
    found = recipe.aggregation(batch)
    returned(recipe.aggregation, found[0] if isinstance(found, tuple) else found, batch.mask_NT)
    if not isinstance(found, tuple):
        return replace(batch, coefficient_NT=found, prepared=prepared)
    coefficient_NT, slope_NT = found
    return replace(
        batch,
        coefficient_NT=coefficient_NT,
        coefficient_slope_NT=slope_NT,
        weighed_exponent=current_exponent(batch, recipe.aggregation["exponent"]),
        prepared=prepared,
    )


@torch.no_grad()
def updates(recipe: Recipe, batch: TokenBatch, parts: Sequence[Tensor]) -> list[TokenBatch]:
    """Split a batch from the batch phase by rows into one optimizer step each.

    Advantages stay those of the whole batch; denominators become those of each step, so that a
    step's size does not depend on how many there are. Every rank gives as many parts, in order.
    """
    _check_parts(recipe, batch, parts)
    steps = []
    for rows in parts:
        part = batch.select(rows)
        part = _weigh(recipe, replace(part, world=batch.world.for_rows(part.rows)))
        if part.pass_NT is not None:
            part = _restrict(part, part.pass_NT, part.pass_number)
        steps.append(part)
    return steps


def _check_parts(recipe: Recipe, batch: TokenBatch, parts: Sequence[Tensor]) -> None:
    every = torch.arange(batch.rows, device=batch.mask_NT.device)
    seen = torch.cat([every[rows] for rows in parts]) if len(parts) else every[:0]
    if not torch.equal(seen.sort().values, every):
        raise BatchError("The parts must hold every row exactly once.")
    if len(parts) > 1 and recipe.ratio.get("anchor") == "old" and batch.old_logp_NT is None:
        raise BatchError(
            f"{len(parts)} updates on one batch need old_logp_NT ({STREAMS['old_logp_NT']}): from "
            "the second on the policy is no longer its own anchor. Pass it to TokenBatch.build."
        )


def passes(recipe: Recipe, batch: TokenBatch) -> list[TokenBatch]:
    """Return the batches for the token phase, one after the other, by the recipe's schedule.

    Outside a pass, advantage and coefficient are 0; denominators stay those of the whole batch.
    """
    selections = recipe.schedule(batch)
    if len(selections) == 1:
        return [batch]
    return [_restrict(batch, select_NT, number) for number, select_NT in enumerate(selections)]


def _restrict(batch: TokenBatch, select_NT: Tensor, number: int) -> TokenBatch:
    """Keep one pass: its tokens of streams that weigh; terms per row count in the first pass."""
    slope_NT = batch.coefficient_slope_NT
    first = 1.0 if number == 0 else 0.0
    factor: dict[str, Tensor | float] = {"coefficient_NT": select_NT, "coefficient_N": first}
    return replace(
        batch,
        advantage_NT=select_NT * batch.stream("advantage_NT"),
        coefficient_NT=select_NT * batch.stream("coefficient_NT"),
        coefficient_slope_NT=None if slope_NT is None else select_NT * slope_NT,
        pass_NT=select_NT,
        pass_number=number,
        prepared={
            name: {key: x * factor.get(key, 1.0) for key, x in parts.items()}
            for name, parts in batch.prepared.items()
        },
    )


def _check_needs(recipe: Recipe, batch: TokenBatch) -> None:
    for name in recipe.streams:
        if batch.find(name) is not None or name in recipe.outputs:
            continue
        readers = [slot for slot in recipe.slots() if name in slot.needs] or [recipe.ratio]
        raise BatchError(
            f"Recipe {recipe.name!r} needs {name} ({STREAMS[name]}) for {readers[0].kind} "
            f"{readers[0]}. Pass {name}=... to TokenBatch.build, or take the slot out: "
            f"recipe.replace({readers[0].kind}=...)."
        )


def _remember(recipe: Recipe, batch: TokenBatch) -> Memory:
    """Return what later batches need of this one."""
    memory = batch.memory
    reward_N = batch.stream("reward_N")
    for link in recipe.advantage:
        remembers = link.definition.traits.remembers
        if remembers == "reward_average":
            average = moving_average(batch, reward_N, link["decay"])
            memory = replace(memory, reward_average=average)
        elif remembers == "visits":
            memory = replace(memory, visits=add_visits(batch, reward_N, link["ddof"]))
        elif remembers == "role_average":
            _, means = role_walk(reward_N, batch, link["decay"])
            memory = replace(memory, role_average=means)
        elif remembers == "prompt_beta":
            memory = replace(memory, prompt_beta=add_beta(batch, reward_N, link))
    return memory


def add_beta(batch: TokenBatch, reward_N: Tensor, link: Slot) -> dict[int, tuple[float, float]]:
    """Return α and β of all prompts behind this step; several answers to one add up."""
    settings = (link["half_life"], link["low"], link["high"])
    rho_N, _, _ = beta_after(reward_N, batch, *settings)
    columns = (batch.group_N, reward_N, rho_N)
    known = dict(batch.memory.prompt_beta)
    faded: set[int] = set()
    for group, reward, rho in zip(*(batch.world.gather(x).tolist() for x in columns), strict=True):
        if math.isnan(reward):
            continue
        alpha, beta = known.get(group, (0.5, 0.5))
        if group not in faded:
            alpha, beta = rho * alpha, rho * beta
            faded.add(group)
        known[group] = (alpha + reward, beta + 1.0 - reward)
    return known


def add_visits(batch: TokenBatch, reward_N: Tensor, ddof: int) -> dict[int, tuple[Visit, ...]]:
    stats = group_stats(reward_N, batch)
    columns = (stats.count_N, stats.mean_N, stats.std_N(ddof).square())
    size_M, mean_M, var_M = (batch.world.gather(x).tolist() for x in columns)
    seen = dict(
        zip(
            batch.world.gather(batch.group_N).tolist(),
            zip(size_M, mean_M, var_M, strict=True),
            strict=True,
        )
    )
    visits = dict(batch.memory.visits)
    for group, (size, mean, var) in seen.items():
        if size > 0:
            visits[group] = (*visits.get(group, ()), Visit(int(size), mean, var))
    return visits


def edge_share(batch: TokenBatch) -> dict[str, float]:
    """Return the share of Σ u·|A| that groups near all or nothing have: hard and easy prompts."""
    gather = batch.world.gather
    weight_NT = (batch.stream("coefficient_NT") * batch.stream("advantage_NT")).abs_()
    weight_M = gather(weight_NT.sum(1)).double()
    reward_M = gather(batch.task_reward_N).double()
    known_M = reward_M[~reward_M.isnan()]
    if not weight_M.sum() or not len(known_M) or known_M.min() == known_M.max():
        return {}
    low, high = known_M.min(), known_M.max()
    mean_M = gather(group_stats(batch.task_reward_N, batch).mean_N)
    edge_M = ((mean_M - low) / (high - low) - 0.5).abs() >= EDGE
    return {"advantage/edge_share": float(weight_M[edge_M].sum() / weight_M.sum())}


def _metrics(batch: TokenBatch) -> dict[str, float]:
    """Measure the whole batch, all ranks; rewards before and after shaping."""
    gather = batch.world.gather
    task_M, shaped_M = gather(batch.task_reward_N), gather(batch.stream("reward_N"))
    graded_M = ~task_M.isnan()
    length_M = gather(batch.length_N).double()
    tokens_M = gather(batch.length_N * batch.stream("learn_N")).double()
    found, graded = dead_groups(batch), int(graded_M.sum())
    rewards: dict[str, float] = {}
    if graded:  # else there is no mean, which is not a mean of 0
        rewards = {
            "reward/mean": float(task_M[graded_M].double().sum()) / graded,
            "reward/shaped_mean": float(shaped_M[graded_M].double().sum()) / graded,
        }
    if graded and len(task_M) > len(batch.groups):  # a group of one has nothing to be equal to
        rewards |= {
            "groups/dead_share": found.dead / found.groups,
            "groups/all_pass_share": (found.dead - found.failed) / found.groups,
            "groups/all_fail_share": found.failed / found.groups,
        }
    return rewards | {
        "reward/ungraded_share": 1.0 - float(graded_M.double().mean()),
        "groups/count": float(found.groups),
        "tokens/count": float(length_M.sum()),
        "tokens/learned_share": float(tokens_M.sum() / length_M.sum().clamp(min=1)),
        "length/mean": float(length_M.mean()),
    }
