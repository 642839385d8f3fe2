"""What the files of a step say when it is over: agreement, sizes, and the roofline beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc  # type: ignore[import-untyped]

from groupwise.model.config import ModelConfig
from groupwise.model.cost import Group, needed, optimizer_cost, rollout_cost, update_cost
from groupwise.model.devices import Device, floor_seconds
from groupwise.model.formats.checkpoint import Loaded
from groupwise.runfiles.rollouts import read as read_rollouts

Row = dict[str, Any]


def mismatch(rollouts: Path) -> dict[str, float]:
    """|learner − sampler| log-probability over the tokens of one step."""
    table = read_rollouts(rollouts, ["used", "sampler_logp", "learner_logp"])
    table = table.filter(table["used"])
    sampler_A, learner_A = (
        table[name].combine_chunks().flatten().to_numpy()
        for name in ("sampler_logp", "learner_logp")
    )
    gap_A = np.abs(learner_A.astype(np.float64) - sampler_A)
    found = {"mean": gap_A.mean(), "p99": np.quantile(gap_A, 0.99), "max": gap_A.max()}
    return {name: float(x) for name, x in found.items()}


def groups_of(rollouts: Path, used: bool) -> list[Group]:
    """The sizes of what a step sampled, or of what it learned from alone."""
    columns = ["used", "group", "prompt_token_ids", "token_ids"]
    table = read_rollouts(rollouts, columns)
    table = table.filter(table["used"]) if used else table
    number_N = table["group"].to_numpy()
    prompt_N, length_N = (
        pc.list_value_length(table[name]).to_numpy() for name in ("prompt_token_ids", "token_ids")
    )
    return [
        Group(int(prompt_N[rows][0]), length_N[rows].tolist())
        for rows in (number_N == number for number in np.unique(number_N))
    ]


def rollout_floor(
    shape: ModelConfig, groups: list[Group], slots: int, width: int, device: Device
) -> float | None:
    """Seconds; with as many sequences in flight as were asked for, all of them without a limit."""
    every = sum(len(group.completions) for group in groups)
    return floor_seconds(rollout_cost(shape, groups, slots or every, width), device)


def update_floor(
    shape: ModelConfig, groups: list[Group], updates: int, width: int, device: Device
) -> float | None:
    """Seconds of one pass over the groups, and of the optimizer after each update."""
    work = needed(update_cost(shape, groups))
    return floor_seconds({**work, "optimizer": optimizer_cost(shape, width) * updates}, device)


def beside_roofline(
    loaded: Loaded, rollouts: Path, metrics: Row, slots: int, device: Device
) -> Row:
    """The last step's two large phases next to their floors, and how much of the peak it used."""
    shape, width = loaded.model.config, loaded.model.head_weight.element_size()
    sampled, learned = (groups_of(rollouts, used) for used in (False, True))
    updates = int(metrics["updates/count"])
    return {
        "completion_tokens": sum(sum(group.completions) for group in sampled),
        "rollout_seconds": metrics["time/rollout"],
        "rollout_roofline_seconds": rollout_floor(shape, sampled, slots, width, device),
        "update_seconds": metrics["time/update"],
        "update_roofline_seconds": update_floor(shape, learned, updates, width, device),
        "update_model_flop_utilisation": metrics.get("time/update_flops_share"),
    }
