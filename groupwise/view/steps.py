"""A step's groups and samples, by columns of its Parquet file: nothing else is read."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]

from groupwise.errors import RunError
from groupwise.runfiles.rollouts import read_answers, read_older

# What a list of groups shows; lists per token are not among them, but for the length.
OF_GROUPS = ("group", "prompt_id", "draw", "sample", "reward", "correct", "grader_status",
             "finish", "used", "prompt_text", "token_ids", "mask")  # fmt: skip
SEARCHED = ("prompt_text", "text", "answer", "grader_reason")
OF_SAMPLES = (*OF_GROUPS, "reward_parts", "reward_steps", "grader_reason", "weight_version",
              "weights", "text", "answer", "advantage", "clipped", "rerouted", "turns")  # fmt: skip
BARS = 16  # of a histogram at most
FAILED = ("error", "timeout")  # of grader_status

FILTERS = {
    "fail": "all fail",
    "pass": "all pass",
    "mixed": "mixed",
    "truncated": "truncated",
    "error": "grader error",
    "dropped": "not learned from",
}


@dataclass(frozen=True)
class PromptGroup:
    """One prompt of a step and the results of its samples. The greedy completion does not count."""

    number: int
    prompt_id: int
    draw: int
    prompt: str
    rewards: Sequence[float | None]
    marks: Sequence[str]  # right, wrong or open, in the order of the samples
    lengths: Sequence[int]
    truncated: int
    errors: int
    used: bool

    @property
    def known(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    @property
    def spread(self) -> float:
        return statistics.pstdev(self.known) if self.known else 0.0

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.known) if self.known else None

    @property
    def length(self) -> float:
        return statistics.fmean(self.lengths) if self.lengths else 0.0

    def fits(self, name: str) -> bool:
        """Return whether a filter of `FILTERS` lets it through."""
        right, wrong = ("right" in self.marks), ("wrong" in self.marks)
        return {
            "fail": wrong and not right,
            "pass": right and not wrong,
            "mixed": self.spread > 0,
            "truncated": self.truncated > 0,
            "error": self.errors > 0,
            "dropped": not self.used,
        }[name]


def mark(correct: bool | None, reward: float | None) -> str:
    """Return the grader's verdict; where it has none, a positive reward is a success."""
    if correct is None:
        correct = None if reward is None else reward > 0
    return "open" if correct is None else "right" if correct else "wrong"


def groups_of(table: pa.Table) -> list[PromptGroup]:
    """Make groups from the columns `OF_GROUPS`, in the order of their numbers."""
    lengths = own_lengths(table)
    rows = table.drop_columns(["token_ids", "mask"]).to_pylist()
    by_number: dict[int, list[tuple[dict[str, Any], int]]] = {}
    for row, length in zip(rows, lengths, strict=True):
        by_number.setdefault(row["group"] or 0, []).append((row, length))
    return [_group(number, by_number[number]) for number in sorted(by_number)]


def _group(number: int, members: Sequence[tuple[Mapping[str, Any], int]]) -> PromptGroup:
    sampled = [(row, length) for row, length in members if (row["sample"] or 0) >= 0] or members
    first = members[0][0]
    rewards = [finite(row["reward"]) for row, _ in sampled]
    return PromptGroup(
        number=number,
        prompt_id=-1 if first["prompt_id"] is None else first["prompt_id"],
        draw=first["draw"] or 0,
        prompt=first["prompt_text"] or "",
        rewards=rewards,
        marks=[
            mark(row["correct"], reward) for (row, _), reward in zip(sampled, rewards, strict=True)
        ],
        lengths=[length for _, length in sampled],
        truncated=sum(row["finish"] == "length" for row, _ in sampled),
        errors=sum(row["grader_status"] in FAILED for row, _ in sampled),
        used=first["used"] is not False,
    )


def finite(reward: float | None) -> float | None:
    """Return a finite reward or None: a file that was tampered with may hold another."""
    return reward if reward is not None and math.isfinite(reward) else None


def own_lengths(table: pa.Table) -> list[int]:
    """Count the tokens of each row that the policy wrote; all where the file does not tell."""
    every, mask = _lengths(table.column("token_ids")), table.column("mask")
    told = np.array(_lengths(mask), dtype=np.int64)
    if pa.types.is_null(mask.type):
        return every
    flags = pc.list_flatten(mask).to_numpy(zero_copy_only=False)
    before = np.concatenate([[0], np.cumsum(flags, dtype=np.int64)])
    ends = np.cumsum(told)
    own = (before[ends] - before[ends - told]).tolist()
    known = mask.is_valid().to_pylist()
    return [mine if knows else all_ for mine, knows, all_ in zip(own, known, every, strict=True)]


def _lengths(column: pa.ChunkedArray) -> list[int]:
    if pa.types.is_null(column.type):
        return [0] * len(column)
    return [length or 0 for length in pc.list_value_length(column).to_pylist()]


def found_in(path: Path, words: str) -> set[int]:
    """Return the groups with the words in a prompt, completion, answer or reason, in any case."""
    table, _ = read_answers(path, ("group", *SEARCHED))
    hits = pa.chunked_array([pa.array([False] * table.num_rows, pa.bool_())])
    for name in SEARCHED:
        column = table.column(name).cast(pa.string())
        seen = pc.match_substring(column, words, ignore_case=True)
        hits = pc.or_(hits, pc.fill_null(seen, False))
    return set(table.filter(hits).column("group").to_pylist())


def rows_of_group(path: Path, group: int, columns: Sequence[str]) -> tuple[pa.Table, int]:
    """Return the samples of a group, the greedy completion first, and the file's version."""
    table, version = read_answers(path, columns)
    if any(table.column(name).null_count for name in ("group", "sample")):
        raise RunError(
            f"{path} has rows without the number of their group or sample: its schema is too old "
            "to be shown sample by sample, or the file is damaged."
        )
    rows = table.filter(pc.equal(table.column("group"), group)).combine_chunks()
    if not rows.num_rows:
        raise RunError(f"There is no group {group} in {path.name}.")
    return rows.sort_by("sample"), version


def group_numbers(path: Path) -> list[int]:
    column = read_older(path, ("group",))[0].column("group")
    return sorted(pc.unique(column.drop_null()).to_pylist())


def histogram(rewards: Sequence[float]) -> list[tuple[float, float, int]]:
    """Return bars from lowest to highest: where each begins and ends, and how many fall in it."""
    values = sorted(set(rewards))
    if len(values) <= BARS:
        return [(value, value, rewards.count(value)) for value in values]
    counts, edges = np.histogram(rewards, BARS)
    return [(float(a), float(b), int(n)) for a, b, n in
            zip(edges[:-1], edges[1:], counts, strict=True)]  # fmt: skip


def branch_rewards(path: Path, group: int, sample: int) -> dict[int, list[float | None]]:
    """Return the rewards of the branches of a sample, by the position that they go on from."""
    table, _ = read_older(path, ("group", "sample", "branch", "reward"))
    rows = table.filter(pc.is_valid(table.column("branch"))).to_pylist()
    found: dict[int, list[float | None]] = {}
    for row in rows:
        if (row["group"], row["sample"]) == (group, sample):
            found.setdefault(row["branch"]["at"], []).append(finite(row["reward"]))
    return dict(sorted(found.items()))


def place_of(rows: pa.Table, sample: int) -> int:
    """Return the place of a sample among the rows of its group."""
    numbers = rows.column("sample").to_pylist()
    if sample not in numbers:
        raise RunError(f"The group has no sample {sample}: it has {numbers[0]} to {numbers[-1]}.")
    return numbers.index(sample)


def values_of(rows: pa.Table, name: str, at: int) -> Any:
    """Return a list per token as an array; None where there is none."""
    value = rows.column(name)[at]
    return value.values.to_numpy(zero_copy_only=False) if value.is_valid else None
