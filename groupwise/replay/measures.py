"""Differences of methods on the same tokens: counts, angles between gradients, and rare tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.losses.measuring import RARE
from groupwise.optim.assemble import sequences_of
from groupwise.replay.recorded import Record, rows_of
from groupwise.replay.token_weights import MethodWeights
from groupwise.watch.samples import REFLECTION

CHUNK = 2**20  # numbers of each gradient at a time: all in float64 would be many times a model
Gram = list[list[float]]  # inner products of the methods' gradients, in their order


@dataclass(frozen=True)
class Angle:
    """One gradient beside another."""

    cosine: float | None  # None where one of them is 0
    norms: float | None  # |this| / |the other|


def gram(gradients: Sequence[Tensor]) -> Gram:
    """Return the inner products of all pairs, summed in float64."""
    total = torch.zeros(len(gradients), len(gradients), dtype=torch.float64)
    for parts in zip(*(torch.split(x.flatten(), CHUNK) for x in gradients), strict=True):
        part = torch.stack(parts).double()
        total += part @ part.T
    found: Gram = total.tolist()
    return found


def summed(grams: Sequence[Gram]) -> Gram:
    """Sum over several steps: the batches one after the other."""
    size = range(len(grams[0]))
    return [[math.fsum(each[i][j] for each in grams) for j in size] for i in size]


def angle(products: Gram, one: int, other: int) -> Angle:
    mine, theirs = math.sqrt(products[one][one]), math.sqrt(products[other][other])
    if not math.isfinite(mine * theirs):  # a gradient that overflowed has no direction
        return Angle(None, None)
    if not theirs or not mine:
        return Angle(None, mine / theirs if theirs else None)
    cosine = products[one][other] / (mine * theirs)
    return Angle(1.0 if one == other else max(-1.0, min(1.0, cosine)), mine / theirs)


def counts(mine: MethodWeights, run: MethodWeights, record: Record) -> dict[str, float]:
    """Count tokens by what the method does with them, and those that the run treats differently.

    Silent: without a weight, whatever the reason.
    """
    rare_NT = record.old_NT.exp() < RARE
    above_NT = mine.ratio_NT > 1
    clipped_NT = mine.clipped_NT & mine.learned_NT
    other_NT = run.clipped_NT & run.learned_NT
    silent_NT, other_silent_NT = mine.weight_NT == 0, run.weight_NT == 0
    every_NT = record.mask_NT
    found = {
        "tokens": every_NT,
        "learned": mine.learned_NT,
        "clipped": clipped_NT,
        "clipped_high": clipped_NT & above_NT,
        "clipped_low": clipped_NT & ~above_NT,
        "clipped_rare": clipped_NT & rare_NT,
        "rare": mine.learned_NT & rare_NT,
        "newly_clipped": clipped_NT & ~other_NT,
        "newly_clipped_rare": clipped_NT & ~other_NT & rare_NT,
        "no_longer_clipped": other_NT & ~clipped_NT,
        "no_longer_clipped_rare": other_NT & ~clipped_NT & rare_NT,
        "silent": every_NT & silent_NT,
        "newly_silent": every_NT & silent_NT & ~other_silent_NT,
        "no_longer_silent": every_NT & ~silent_NT & other_silent_NT,
        "reversed": mine.weight_NT * run.weight_NT < 0,
    }
    totals = {name: float(x_NT.sum()) for name, x_NT in found.items()}
    size_NT = mine.weight_NT.abs()
    return totals | {
        "weight": float(size_NT.sum()),
        "weight_rare": float((size_NT * rare_NT).sum()),
        "groups": float(len(mine.batched.groups)),
        "groups_sent_away": float(mine.batched.wanted),
        "groups_taken_back": float(mine.batched.kept_of_dropped),
    }


def reproduction(run: MethodWeights, record: Record) -> dict[str, float]:
    """Return how far the run's own recipe, replayed, is from the record: 0 if it repeats."""
    wrote = record.streams
    own_NT = record.mask_NT
    gap = {
        name: float((mine_NT - wrote[name]).abs()[own_NT].max())
        for name, mine_NT in (
            ("advantage", run.advantage_NT), ("coefficient", run.coefficient_NT),
        )
    }  # fmt: skip
    if run.target_NT is not None and "return" in wrote:
        gap["return"] = float((run.target_NT - wrote["return"]).abs()[own_NT].max())
    return gap | {"clipped": float((run.clipped_NT != wrote["clipped"])[own_NT].sum())}


def rare_tokens(
    methods: Sequence[MethodWeights],
    record: Record,
    piece: Callable[[int], str],
    most: int,
) -> list[dict[str, Any]]:
    """Return improbable tokens that some methods clip and others learn from first, then words of
    second thoughts, then what any of them learns from.

    `piece` gives the text of a token.
    """
    rare_NT = (record.old_NT.exp() < RARE) & record.mask_NT
    some_clip_NT = torch.stack([each.clipped_NT for each in methods]).any(0)
    some_learn_NT = torch.stack([each.weight_NT != 0 for each in methods]).any(0)
    differs_NT = some_clip_NT & some_learn_NT
    rollouts = rows_of(record.groups)
    ids_NT = sequences_of(record.groups).tokens()
    text = {number: piece(number) for number in sorted(set(ids_NT[rare_NT].tolist()))}
    reflecting = torch.tensor([number for number, x in text.items() if REFLECTION.search(x)])
    reflects_NT = torch.isin(ids_NT, reflecting.long())
    number = [n for n, group in enumerate(record.groups) for _ in group]
    # As `rank` has it, most of the tokens being none that will be shown.
    score_NT = 4.0 * differs_NT + 2.0 * reflects_NT + some_learn_NT - record.old_NT.exp()
    places = rare_NT.nonzero()
    order = score_NT[rare_NT].argsort(descending=True, stable=True)[:most]
    return [
        {
            "step": record.step,
            "group": number[row],
            "sample": rollouts[row].sample,
            "token": at,
            "id": int(ids_NT[row, at]),
            "text": text[int(ids_NT[row, at])],
            "probability": math.exp(float(record.old_NT[row, at])),
            "differs": bool(differs_NT[row, at]),
            "reflects": bool(reflects_NT[row, at]),
            "learned": bool(some_learn_NT[row, at]),
            "methods": {each.method.name: _token(each, row, at) for each in methods},
        }
        for row, at in places[order].tolist()
    ]


def rank(token: Mapping[str, Any]) -> tuple[bool, bool, bool, float]:
    """Return the sort key of what to show first."""
    differs, reflects, learned = (not token[name] for name in ("differs", "reflects", "learned"))
    return (differs, reflects, learned, token["probability"])


def _token(method: MethodWeights, row: int, at: int) -> Mapping[str, Any]:
    return {
        "advantage": float(method.advantage_NT[row, at]),
        "ratio": float(method.ratio_NT[row, at]),
        "weight": float(method.weight_NT[row, at]),
        "clipped": bool(method.clipped_NT[row, at]),
    }
