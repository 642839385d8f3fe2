"""A step's rollout file read back: the rollouts, and the learner's numbers for their tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import torch
from torch import Tensor

from groupwise.config import Config
from groupwise.errors import RunError
from groupwise.methods.composition import Recipe
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group, sequences_of
from groupwise.prepare.recorded import column_of, groups_of, read_config, tokenizer_of
from groupwise.records import Rollout
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read
from groupwise.stages.consequences import anchored

NEEDED = ("prompt_id", "draw", "group", "sample", "prompt_token_ids", "token_ids", "turns",
          "branch", "reward", "correct", "finish", "weight_version", "weights", "text",
          "used")  # fmt: skip
TINY = 1e-30  # a ratio of 0 is one that float32 could not hold
LEARNED = ("advantage", "coefficient")  # of every row that was learned from
UPDATED = ("ratio", "clipped")  # and of those that an update of the policy read


class NothingLearned(RunError):
    """A step that no update was made on."""


@dataclass(frozen=True)
class Record:
    """One step. Streams are of the rows that were learned from, in the order of the batch."""

    step: int
    path: Path
    groups: list[Group]
    dropped: list[Group]  # sampled, and sent away by dynamic sampling
    greedy: Mapping[tuple[int, int], float | None]  # by prompt and draw: rewards of baselines
    branches: Mapping[tuple[int, int], Group]  # by prompt and draw: those of its answers
    place_N: list[int]  # where each row stands in the file
    length_N: list[int]  # tokens of each row, whoever wrote them
    mask_NT: Tensor  # those that the policy wrote
    streams: Mapping[str, Tensor]  # by column of the file, float32, as far as they are there
    policy_NT: Tensor  # float64: log-probabilities in the update that read the row last
    moved: bool  # whether that policy is not the one that sampled
    spread: bool  # one ratio an answer (or a piece) was recorded: the tokens share it
    filled: int  # rows whose old log-probabilities are the sampler's
    waited: bool = False  # whether the policy waited in this step, while a critic learned

    @property
    def old_NT(self) -> Tensor:
        """Return the learner's log-probabilities before the first update."""
        return self.streams["learner_logp"]


@dataclass(frozen=True)
class Recorded:
    """A run folder, as far as replaying its batches needs it."""

    folder: RunFolder
    config: Config
    recipe: Any  # as it ran: one that weighs tokens
    tokenizer: Tokenizer | None
    steps: list[int]

    def step(self, number: int) -> Record:
        return read_step(self.folder, number, self.recipe)


def open_recorded(path: str | Path) -> Recorded:
    """Open the run at this path; refuses what holds no batches of groups."""
    folder = RunFolder(path)
    config = read_config(folder)
    if not config.recipe.weighs_tokens:
        raise RunError(
            f"{folder.path} was trained with {config.recipe.name}, which learns from "
            f"{config.recipe.learns_from}: there are no advantages, ratios or clips of samples to "
            "replay. Give a run of a group recipe."
        )
    durable = {int(line["step"]) for line in folder.read_metrics()}
    steps = [step for step in folder.rollout_steps() if step in durable]
    if not steps:
        raise RunError(
            f"{folder.path} has no finished step with rollouts. Give the folder of a run that has "
            "made a step, with its rollouts/ in it."
        )
    recipe = anchored(config, config.recipe)
    return Recorded(folder, config, recipe, tokenizer_of(folder), steps)


def read_step(folder: RunFolder, step: int, recipe: Recipe) -> Record:
    """Read a step, and the policy that its last update saw."""
    path = folder.rollout(step)
    table = read(path)
    absent = [name for name in NEEDED if name not in table.column_names]
    if absent:
        raise RunError(
            f"{path} has no column {absent[0]}, which every step's rollouts have: it was changed "
            "since it was written. Put it back, or remove it to do without this step."
        )
    answers = pc.is_null(table.column("branch"))
    sampled = pc.and_(answers, pc.greater_equal(table.column("sample"), 0))
    used = pc.and_(sampled, table.column("used"))
    learned = table.filter(used).combine_chunks()
    groups = groups_of(learned)
    if not groups:
        raise NothingLearned(
            f"Step {step} of {folder.path} has no rollouts that were learned from."
        )
    sequences = sequences_of(groups)
    mask_NT, layout_NT = sequences.mask(), sequences.layout()
    streams = {name: found for name in table.column_names if _per_token(table, name)
               and (found := _padded(learned, name, layout_NT)) is not None}  # fmt: skip
    missing = [name for name in LEARNED if name not in streams]
    if missing:
        raise NothingLearned(
            f"{path} has rollouts without {', '.join(missing)}: no update was made on them, as "
            "their log-probabilities were not finite. Choose another step."
        )
    waited = all(name not in streams for name in UPDATED)
    if waited:
        streams["ratio"] = mask_NT.float()
        streams["clipped"] = torch.zeros_like(mask_NT)
    filled = _fill_old(streams, mask_NT)
    policy_NT, moved, spread = streams["learner_logp"].double(), False, False
    if not waited:
        policy_NT, moved, spread = _policy(streams, recipe, mask_NT)
    greedy = table.filter(pc.less(table.column("sample"), 0)).select(
        ["prompt_id", "draw", "reward"]
    )
    return Record(
        step=step,
        path=path,
        groups=groups,
        dropped=groups_of(table.filter(pc.and_(sampled, pc.invert(table.column("used"))))),
        greedy={(row["prompt_id"], row["draw"]): row["reward"] for row in greedy.to_pylist()},
        branches={
            (group[0].task.id, group[0].draw): group
            for group in groups_of(table.filter(pc.invert(answers)))
        },
        place_N=np.flatnonzero(used.to_numpy()).tolist(),
        length_N=sequences.length_N.tolist(),
        mask_NT=mask_NT,
        streams=streams,
        policy_NT=policy_NT,
        moved=moved,
        spread=spread,
        filled=filled,
        waited=waited,
    )


def _per_token(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    numeric = pa.types.is_list(kind) and (
        pa.types.is_floating(kind.value_type) or pa.types.is_boolean(kind.value_type)
    )
    return bool(numeric) and name not in ("mask", "turn_seconds")


def _padded(table: pa.Table, name: str, layout_NT: Tensor) -> Tensor | None:
    """Return [N, T], 0 after the end and NaN in rows without a value; None if no row has one."""
    column = column_of(table, name)
    known_N = torch.from_numpy(column.is_valid().to_numpy(zero_copy_only=False).astype(bool))
    if not known_N.any():
        return None
    flat = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
    out_NT = torch.zeros(layout_NT.shape, dtype=flat.dtype)
    if flat.dtype.is_floating_point:
        out_NT[~known_N] = float("nan")
    out_NT[layout_NT & known_N[:, None]] = flat
    return out_NT


def _fill_old(streams: dict[str, Tensor], mask_NT: Tensor) -> int:
    """Fill old log-probabilities of rows that only a moved policy read with those of the sampler,
    which had the same weights; return the number of such rows.
    """
    sampler_NT = streams["sampler_logp"]
    old_NT = streams.get("learner_logp", torch.full_like(sampler_NT, float("nan")))
    lacking_NT = old_NT.isnan() & mask_NT
    streams["learner_logp"] = torch.where(lacking_NT | ~mask_NT, sampler_NT, old_NT)
    return int(lacking_NT.any(1).sum())


def _policy(
    streams: Mapping[str, Tensor], recipe: Recipe, mask_NT: Tensor
) -> tuple[Tensor, bool, bool]:
    """Return log-probabilities under the last update's policy, from its ratio to the anchor."""
    old_NT = streams["learner_logp"].double()
    level = recipe.ratio.definition.traits.level
    anchor = recipe.ratio.get("anchor")
    still = recipe.schedule["updates"] * recipe.schedule.definition.traits.passes == 1
    if level == "none" or still:
        return old_NT, False, False
    anchor_NT = streams["sampler_logp"].double() if anchor == "sampler" else old_NT
    log_ratio_NT = torch.where(mask_NT, streams["ratio"].double(), 1.0).clamp(TINY, 1 / TINY).log()
    return torch.where(mask_NT, anchor_NT + log_ratio_NT, 0.0), True, level != "token"


def rows_of(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group]
