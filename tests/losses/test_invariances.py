"""What must not change a step or its measures: how a batch is cut, padded, ordered, spread.

Every policy recipe is held to it, in float64. The parameters are those of the table learner in
batches.py, so a gradient has one entry per row and token and can be compared place by place.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from batches import POLICY_RECIPES, Leaves, Sample, learner_outputs, leaves, random_sample
from torch import Tensor

from groupwise import Memory, Recipe, TokenBatch, batch_phase, merge, passes, recipe, token_phase
from groupwise.groups.filters import overlong
from groupwise.records import Visit

every_recipe = pytest.mark.parametrize("name", POLICY_RECIPES)
# A role's baseline is what its earlier rows earned: see tests/groups/test_comparisons.py.
ORDERED = [
    name
    for name in POLICY_RECIPES
    if any(link.definition.traits.ordered for link in recipe(name).advantage)
]
assert ORDERED == ["rae"]
every_unordered = pytest.mark.parametrize("name", [n for n in POLICY_RECIPES if n not in ORDERED])
# Where a row without a grade counts on purpose: an expert's, or one of a mean over all rows.
COUNTS_UNGRADED = ("chord", "sdpo")
# Recipes whose advantage looks at rewards only, so that a truncated row's tokens are in nothing.
OUTCOME_ONLY = ("grpo", "dapo", "dapo_group", "cispo", "gspo", "gmpo", "dr_grpo", "lite_ppo",
                "lambda_grpo", "reinforce_pp_baseline", "rloo", "dcpo", "grpo@areal")  # fmt: skip

Outputs = dict[str, Tensor]
Hook = Callable[[Outputs, Tensor], Outputs]


@dataclass(frozen=True)
class Outcome:
    """All that a step leaves: to be the same however the batch was cut."""

    loss: float
    gradients: list[Tensor]
    measures: dict[str, float]
    metrics: dict[str, float]
    refill: tuple[int, ...]
    memory: Memory


def build(made: Recipe, sample: Sample, leaf: Leaves, **extra: Any) -> TokenBatch:
    if made.aggregation.name == "learned_length_weight":
        extra["length_exponent"] = leaf.exponent
    return sample.build(**extra)


def step(
    made: Recipe,
    sample: Sample,
    parts: Sequence[Sequence[int]] | None = None,
    built_from: Sample | None = None,
    hook: Hook | None = None,
    **extra: Any,
) -> Outcome:
    """Both phases; `built_from` and `hook` may dress up streams and outputs, not the leaves."""
    leaf = leaves(sample)
    done = batch_phase(made, build(made, built_from or sample, leaf, **extra))
    total, tallies = torch.zeros((), dtype=torch.float64), []
    for one_pass in passes(made, done.batch):
        for part in parts or [range(sample.rows)]:
            rows = torch.as_tensor(list(part))
            outputs = learner_outputs(made, sample, leaf, rows)
            outputs = hook(outputs, rows) if hook else outputs
            result = token_phase(made, one_pass.select(rows), **outputs)
            total, tallies = total + result.loss, [*tallies, result.tally]
    found = torch.autograd.grad(total, leaf.all(), allow_unused=True)
    gradients = [
        torch.zeros_like(x) if grad is None else grad
        for x, grad in zip(leaf.all(), found, strict=True)
    ]
    return Outcome(
        float(total.detach()),
        gradients,
        merge(tallies).read(),
        done.metrics,
        done.refill,
        done.memory,
    )


@functools.cache
def the_sample() -> Sample:
    """Three groups of unequal size; every filter keeps something and drops something."""
    return random_sample(1, groups=(4, 5, 3))


@functools.cache
def whole(name: str) -> Outcome:
    """The step without any cut. Something is learned, so that comparisons mean something."""
    found = step(recipe(name), the_sample())
    assert found.gradients[0].abs().max() > 1e-6
    return found


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def same_step(found: Outcome, expected: Outcome, rows: Sequence[int] | None = None) -> None:
    """Equal outcomes; `rows` says which row of `expected` stands where in `found`."""
    same(found.loss, expected.loss)
    for mine, other in zip(found.gradients, expected.gradients, strict=True):
        same(mine, other if rows is None or other.dim() == 0 else other[torch.as_tensor(rows)])
    same(found.measures, expected.measures)
    same(found.metrics, expected.metrics)


# --- micro-batches ----------------------------------------------------------------------------


def shuffled(rows: int, seed: int) -> list[int]:
    order = list(range(rows))
    random.Random(seed).shuffle(order)
    return order


SPLITS = {
    "5/5/2": [range(5), range(5, 10), range(10, 12)],
    "one row each": [[row] for row in range(12)],
    "random": [shuffled(12, 0)[:1], shuffled(12, 0)[1:8], shuffled(12, 0)[8:]],
}


@every_recipe
@pytest.mark.parametrize("split", SPLITS)
def test_any_micro_batch_split_gives_the_whole_batchs_step(name: str, split: str) -> None:
    same_step(step(recipe(name), the_sample(), SPLITS[split]), whole(name))


def test_rows_may_be_selected_by_a_mask() -> None:
    made, sample = recipe("ppo"), the_sample()
    done = batch_phase(made, sample.build()).batch
    chosen_N = torch.arange(12) % 3 == 0
    outputs = learner_outputs(made, sample, leaves(sample), chosen_N.nonzero()[:, 0])
    by_mask = token_phase(made, done.select(chosen_N), **outputs).loss
    by_index = token_phase(made, done.select(torch.tensor([0, 3, 6, 9])), **outputs).loss
    assert float(by_mask.detach()) == float(by_index.detach()) != 0.0


# --- padding and holes ------------------------------------------------------------------------

JUNK = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "junk": -3.7e30}


def junk_like(x: Tensor, junk: float) -> Tensor:
    """A tensor of that shape full of what padding may hold."""
    if x.dtype == torch.bool:
        return torch.ones_like(x)
    return torch.full_like(x, junk if x.is_floating_point() else -999_999)


def spoil(x: Tensor, mask_NT: Tensor, junk: float, more: int) -> Tensor:
    """Junk wherever the mask is 0, and `more` columns of it on the right."""
    if x.shape[:2] != mask_NT.shape:
        return x
    inner = mask_NT.reshape(*mask_NT.shape, *[1] * (x.dim() - 2))
    spoiled = torch.where(inner, x, junk_like(x, junk))
    return torch.cat([spoiled, junk_like(x[:, :1].expand(-1, more, *x.shape[2:]), junk)], 1)


def spoiled_sample(sample: Sample, junk: float, more: int) -> Sample:
    mask_NT = sample.streams["mask_NT"]
    streams = {
        name: spoil(x, mask_NT, junk, more) if x.dim() > 1 else x
        for name, x in sample.streams.items()
    }
    streams["mask_NT"] = torch.nn.functional.pad(mask_NT, (0, more))
    return replace(sample, streams=streams)


def spoil_outputs(sample: Sample, junk: float, more: int) -> Hook:
    def hook(outputs: Outputs, rows: Tensor) -> Outputs:
        mask_NT = sample.streams["mask_NT"][rows]
        return {k: spoil(x, mask_NT, junk, more) if x.dim() else x for k, x in outputs.items()}

    return hook


@every_recipe
@pytest.mark.parametrize("junk", JUNK)
def test_padding_and_what_it_holds_change_nothing(name: str, junk: str) -> None:
    sample, value = the_sample(), JUNK[junk]
    found = step(
        recipe(name),
        sample,
        SPLITS["5/5/2"],
        built_from=spoiled_sample(sample, value, 3),
        hook=spoil_outputs(sample, value, 3),
    )
    same_step(found, whole(name))


@functools.cache
def sample_with_holes() -> Sample:
    """Tool tokens between policy tokens, before the first one and after the last one."""
    sample = random_sample(3, groups=(4, 5, 3), width=9)
    g = torch.Generator().manual_seed(0)
    mask_NT = torch.rand(sample.rows, 9, generator=g) < 0.55
    mask_NT[0] = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0]).bool()
    mask_NT[1] = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1]).bool()
    assert mask_NT.any(1).all() and not mask_NT.all(1).any()
    reward_N = sample.streams["reward_N"].clone()
    reward_N[2] = 1.25  # one answer is better than all others of its group
    streams = {**sample.streams, "mask_NT": mask_NT, "reward_N": reward_N}
    return replace(sample, streams=streams)


@every_recipe
def test_what_stands_in_the_holes_of_a_mask_changes_nothing(name: str) -> None:
    sample = sample_with_holes()
    plain = step(recipe(name), sample)
    for junk in (float("nan"), -3.7e30):
        found = step(
            recipe(name),
            sample,
            built_from=spoiled_sample(sample, junk, 0),
            hook=spoil_outputs(sample, junk, 0),
        )
        same_step(found, plain)
    held = sample.streams["mask_NT"][..., None].expand_as(plain.gradients[0])
    assert plain.gradients[0][held].abs().max() > 1e-6
    assert plain.gradients[0][~held].abs().max() == 0.0


@every_recipe
def test_a_row_with_holes_equals_the_row_with_its_tokens_moved_together(name: str) -> None:
    sample = sample_with_holes()
    order_NT = sample.streams["mask_NT"].long().argsort(dim=1, descending=True, stable=True)

    def pack(x: Tensor) -> Tensor:
        inner = order_NT.reshape(*order_NT.shape, *[1] * (x.dim() - 2))
        return x.gather(1, inner.expand(*order_NT.shape, *x.shape[2:]))

    packed = Sample(
        {k: pack(x) if x.shape[:2] == order_NT.shape else x for k, x in sample.streams.items()},
        *map(
            pack,
            (
                sample.logits_NTV,
                sample.value_NT,
                sample.prm_logp_NT,
                sample.router_NTLK,
                sample.teacher_NTV,
            ),
        ),
    )
    found, expected = step(recipe(name), packed), step(recipe(name), sample)
    moved = [pack(x) if x.dim() > 1 else x for x in expected.gradients]
    same_step(found, replace(expected, gradients=moved))


# --- order and names --------------------------------------------------------------------------


@every_unordered
def test_the_order_of_rows_changes_nothing(name: str) -> None:
    order = shuffled(12, 4)
    same_step(step(recipe(name), the_sample().take(order)), whole(name), order)


@every_unordered
def test_the_order_of_groups_changes_nothing(name: str) -> None:
    order = [9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8]
    same_step(step(recipe(name), the_sample().take(order)), whole(name), order)


@every_recipe
@pytest.mark.parametrize(
    "ids",
    [(2, 1, 0), (-1, -(2**62), -7), (2**62, 2**62 - 1, 2**53 + 1), (17, 4, 100_000)],
    ids=["renamed", "negative", "huge", "with gaps"],
)
def test_the_names_of_groups_change_nothing(name: str, ids: tuple[int, ...]) -> None:
    sample = the_sample()
    renamed = replace(
        sample,
        streams={**sample.streams, "group_N": torch.tensor(ids)[sample.streams["group_N"]]},
    )
    found = step(recipe(name), renamed)
    same_step(found, whole(name))
    assert sorted(found.refill) == sorted(ids[g] for g in whole(name).refill)


# --- ranks ------------------------------------------------------------------------------------


class ThreadWorld:
    """`World` among threads: everybody puts its rows on the table, then all read."""

    def __init__(self, rank: int, sizes: Sequence[int], table: list[Any], barrier: Any) -> None:
        self.rank, self.table, self.barrier = rank, table, barrier
        self.start, self.rows = sum(sizes[:rank]), sizes[rank]

    def gather(self, x_N: Tensor) -> Tensor:
        assert len(x_N) == self.rows
        self.table[self.rank] = x_N
        self.barrier.wait()
        gathered = torch.cat(self.table)
        self.barrier.wait()
        return gathered

    def own(self, x_M: Tensor) -> Tensor:
        return x_M[self.start : self.start + self.rows]


WORLDS = {
    "1": [shuffled(12, 8)],
    "2, groups split": [[0, 4, 5, 9, 11], [1, 2, 3, 6, 7, 8, 10]],
    "3, one row alone": [[4], [8, 2, 11], [0, 9, 5, 3, 10, 1, 7, 6]],
    "3, groups split": [[0, 4, 9], [11, 1, 5, 6, 10], [8, 7, 3, 2]],
}
WORLDS["3, one row alone"] = [
    [4],
    *([r for r in part if r != 4] for part in WORLDS["3, one row alone"][1:]),
]


def step_on_ranks(
    made: Recipe, sample: Sample, ranks: list[list[int]], **extra: Any
) -> list[Outcome]:
    """Every rank runs both phases on its own rows, in micro-batches of two."""
    table: list[Any] = [None] * len(ranks)
    barrier = threading.Barrier(len(ranks), timeout=120)
    sizes = [len(rows) for rows in ranks]

    def work(rank: int) -> Outcome:
        try:
            world = ThreadWorld(rank, sizes, table, barrier)
            pairs = [range(i, min(i + 2, sizes[rank])) for i in range(0, sizes[rank], 2)]
            return step(made, sample.take(ranks[rank]), pairs, world=world, **extra)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(work, range(len(ranks))))


@every_unordered
@pytest.mark.parametrize("ranks", WORLDS)
def test_spreading_rows_over_ranks_changes_nothing(name: str, ranks: str) -> None:
    spread, expected = WORLDS[ranks], whole(name)
    found = step_on_ranks(recipe(name), the_sample(), spread)
    same(sum(one.loss for one in found), expected.loss)
    same(sum(one.gradients[3] for one in found), expected.gradients[3])
    for rows, one in zip(spread, found, strict=True):
        for mine, other in zip(one.gradients[:3], expected.gradients[:3], strict=True):
            same(mine, other[torch.tensor(rows)])
        same(one.metrics, expected.metrics)
        assert one.refill == expected.refill


def test_measures_of_ranks_merge_into_those_of_the_whole_batch() -> None:
    made, sample = recipe("simko"), the_sample()
    done = batch_phase(made, sample.build()).batch
    tallies = []
    for rows in WORLDS["3, groups split"]:
        index = torch.tensor(rows)
        outputs = learner_outputs(made, sample, leaves(sample), index)
        tallies.append(token_phase(made, done.select(index), **outputs).tally)
    same(merge(tallies).read(), whole("simko").measures)
    means = [t.read()["entropy/mean"] for t in tallies]
    assert abs(sum(means) / 3 - whole("simko").measures["entropy/mean"]) > 1e-6  # parts differ


def test_every_rank_remembers_all_visits() -> None:
    before = Memory(visits={1: (Visit(4, 0.5, 0.25),)})
    made = recipe("dcpo")
    expected = step(made, the_sample(), memory=before)
    assert abs(expected.loss - whole("dcpo").loss) > 1e-3  # the memory matters
    found = step_on_ranks(made, the_sample(), WORLDS["3, groups split"], memory=before)
    same(sum(one.loss for one in found), expected.loss)
    for one in found:
        assert one.memory.visits.keys() == expected.memory.visits.keys()
        for group, visits in expected.memory.visits.items():
            for mine, other in zip(one.memory.visits[group], visits, strict=True):
                same((mine.mean, mine.var), (other.mean, other.var))
                assert mine.size == other.size


# --- rows that are not learned from -----------------------------------------------------------


def ungraded(sample: Sample, rows: Sequence[int]) -> Sample:
    reward_N = sample.streams["reward_N"].clone()
    reward_N[list(rows)] = float("nan")
    return replace(sample, streams={**sample.streams, "reward_N": reward_N})


@pytest.mark.parametrize("name", [n for n in POLICY_RECIPES if n not in COUNTS_UNGRADED])
@pytest.mark.parametrize(
    "gone", [(1, 6), (0, 5, 9), (9, 10, 11)], ids=["two", "three", "a whole group"]
)
def test_an_ungraded_row_equals_an_absent_row(name: str, gone: tuple[int, ...]) -> None:
    sample = the_sample()
    kept = [row for row in range(12) if row not in gone]
    found = step(recipe(name), ungraded(sample, gone))
    expected = step(recipe(name), sample.take(kept))
    same(found.loss, expected.loss)
    same(found.measures, expected.measures)
    for mine, other in zip(found.gradients, expected.gradients, strict=True):
        if mine.dim() == 0:
            same(mine, other)
        else:
            same(mine[kept], other)
            assert mine[list(gone)].abs().max() == 0.0


def truncated(sample: Sample, rows: Sequence[int], keep_tokens: bool) -> Sample:
    cut_N = torch.zeros(sample.rows, dtype=torch.bool)
    cut_N[list(rows)] = True
    mask_NT = sample.streams["mask_NT"]
    mask_NT = mask_NT if keep_tokens else mask_NT & ~cut_N[:, None]
    return replace(sample, streams={**sample.streams, "truncated_N": cut_N, "mask_NT": mask_NT})


def with_overlong(name: str) -> Recipe:
    made = recipe(name)
    if "overlong" in {slot.name for slot in made.filter}:
        return made
    if name == "grpo@areal":  # z-scores twice, which is said again when it is changed
        with pytest.warns(UserWarning):
            return made.replace(filter=(*made.filter, overlong()))
    return made.replace(filter=(*made.filter, overlong()))


@pytest.mark.parametrize("name", OUTCOME_ONLY)
@pytest.mark.parametrize("cut", [(0,), (2, 7), (9, 10, 11)], ids=["one", "two", "a whole group"])
def test_removing_the_tokens_of_a_truncated_row_changes_nothing(
    name: str, cut: tuple[int, ...]
) -> None:
    made = with_overlong(name)
    if made.shaping and made.shaping[0].name == "kl_per_sequence":
        made = made.replace(shaping=())  # KL in the reward is a reading of the tokens
    found = step(made, truncated(the_sample(), cut, keep_tokens=True))
    expected = step(made, truncated(the_sample(), cut, keep_tokens=False))
    same(found.loss, expected.loss)
    same(found.gradients, expected.gradients)
    assert found.gradients[0][list(cut)].abs().max() == 0.0
    assert found.gradients[0].abs().max() > 1e-6


@pytest.mark.parametrize("name", ["dapo", "cispo", "gspo", "gmpo", "dppo"])
def test_a_truncated_row_leaves_the_measures_too(name: str) -> None:
    made = with_overlong(name)
    sample, cut = random_sample(1, groups=(4, 5, 3), spread=1.5), (0, 2, 7, 8)
    found = step(made, truncated(sample, cut, keep_tokens=True))
    plain = step(made, truncated(sample, (), keep_tokens=True)).measures
    assert plain["clip/high"] + plain["clip/low"] > 0 or name == "cispo"
    same(found.measures, step(made, truncated(sample, cut, keep_tokens=False)).measures)


def test_a_truncated_rows_reward_stays_in_its_groups_baseline() -> None:
    made, sample = with_overlong("dr_grpo"), the_sample()
    found = step(made, truncated(sample, (0,), keep_tokens=True))
    absent = step(made, truncated(sample, (), keep_tokens=True).take(range(1, 12)))
    assert (found.gradients[0][1:4] - absent.gradients[0][:3]).abs().max() > 1e-6
