"""Rollout files read back as rollouts, and what else a run folder says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import torch

from groupwise import config as configuration
from groupwise.config import Config
from groupwise.errors import RunError
from groupwise.model.formats.checkpoint import read_companions
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.optim.assemble import Group
from groupwise.prepare.episodes import Conversations
from groupwise.records import (
    Branch,
    CalledTool,
    Completion,
    Episode,
    Grade,
    Message,
    Rollout,
    Task,
    Turn,
    TurnFacts,
)
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import read

SCALARS = ("prompt_id", "draw", "group", "sample", "prompt_token_ids", "token_ids", "turns",
           "episode", "turn_seconds",
           "branch", "reward", "reward_steps", "correct", "finish", "weight_version", "weights",
           "text", "prompt", "answer", "reward_parts", "grader_status",
           "grader_reason")  # fmt: skip


def read_config(folder: RunFolder) -> Config:
    """Read the configuration that the run was last started with."""
    if not folder.path.is_dir():
        raise RunError(f"There is no run folder {str(folder.path)!r}.")
    if not folder.config.is_file():
        raise RunError(
            f"{folder.path} is not a run folder: it has no config.toml. Give the folder that "
            "`groupwise train` wrote to, for example runs/demo."
        )
    return configuration.load(folder.config)


def tokenizer_of(folder: RunFolder) -> Tokenizer | None:
    """Load the tokenizer that the run saved with its first checkpoint."""
    for place in (folder.checkpoints / "latest", folder.path / "cold_start", folder.path):
        if (place / "tokenizer.json").is_file():
            return Tokenizer.from_files(read_companions(place))
    return None


def groups_of(table: pa.Table) -> list[Group]:
    """Return rollouts as they went into the batch; of the task only what was recorded."""
    table = table.combine_chunks()
    names = [name for name in SCALARS if name in table.column_names]
    logp_N = lists_of(table, "sampler_logp") if table.num_rows else []
    own_N = lists_of(table, "mask") if table.num_rows else []
    routes_N = _routes_of(table)
    made: dict[int, Group] = {}
    rows = table.select(names).to_pylist()
    for row, logp_T, own_T, routes_TLK in zip(rows, logp_N, own_N, routes_N, strict=True):
        task = Task(
            row["prompt_id"],
            _prompt(row.get("prompt")),
            row.get("answer"),
            token_ids=tuple(row["prompt_token_ids"]),
        )
        turns = tuple(Turn(**turn) for turn in row["turns"])
        done = Completion(
            tuple(row["token_ids"]),
            torch.from_numpy(logp_T.copy()),
            row["finish"],
            row["weight_version"],
            row["weights"],
            mask_T=None if own_T.all() and len(turns) == 1 else torch.from_numpy(own_T.copy()),
            turns=turns,
            routes_TLK=routes_TLK,
            episode=_episode(row),
        )
        steps = tuple((each["end"], each["reward"]) for each in row.get("reward_steps") or ())
        grade = Grade(
            row["reward"],
            dict(row.get("reward_parts") or ()),
            row["correct"],
            row.get("grader_status") or "ok",
            row.get("grader_reason") or "",
            steps,
        )
        branch = None if row["branch"] is None else Branch(**row["branch"])
        rollout = Rollout(task, row["draw"], row["sample"], done, row["text"], grade, branch=branch)
        made.setdefault(row["group"], []).append(rollout)
    return list(made.values())


def episodes_of(folder: RunFolder) -> Conversations:
    """Return all episodes that a run has recorded, by place, with their prompts."""
    columns = ("prompt_id", "draw", "sample", "prompt_token_ids", "episode", "turn_seconds")
    return {
        (row["prompt_id"], row["draw"], row["sample"]): (tuple(row["prompt_token_ids"]), episode)
        for step in folder.rollout_steps()
        for row in read(folder.rollout(step), columns).to_pylist()
        if (episode := _episode(row)) is not None
    }


def _episode(row: Mapping[str, Any]) -> Episode | None:
    """Return how an environment answered; None where none did, or in a file from before."""
    found = row.get("episode")
    if found is None:
        return None
    turns = [
        TurnFacts(**{**turn, "calls": tuple(CalledTool(**call) for call in turn["calls"])},
                  seconds=seconds)
        for turn, seconds in zip(found["turns"], row["turn_seconds"], strict=True)
    ]  # fmt: skip
    messages = tuple(json.loads(found["messages"]))
    return Episode(**{**found, "turns": tuple(turns), "messages": messages})


def _routes_of(table: pa.Table) -> list[torch.Tensor | None]:
    """Return the experts of each row's tokens; None where they were not recorded."""
    if "routes" not in table.column_names or not table.num_rows:
        return [None] * table.num_rows
    routes = column_of(table, "routes")
    found: list[torch.Tensor | None] = []
    for row in routes:
        if not row.is_valid:
            found.append(None)
            continue
        flat = row["experts"].values.to_numpy(zero_copy_only=False)
        sizes = (row["layers"].as_py(), row["chosen"].as_py())
        found.append(torch.from_numpy(flat.copy()).view(-1, *sizes))
    return found


def _prompt(text: str | None) -> str | tuple[Message, ...]:
    """Return the prompt as the data have it; "" where an older file does not say."""
    found = "" if text is None else json.loads(text)
    return found if isinstance(found, str) else tuple(found)


def lists_of(table: pa.Table, name: str) -> list[Any]:
    """Return a list per row, as arrays without a Python object for each number."""
    column = column_of(table, name)
    flat = column.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    return [flat[a:b] for a, b in pairwise(ends.tolist())]


def column_of(table: pa.Table, name: str) -> Any:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
