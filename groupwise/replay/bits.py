"""Two recordings of a step, compared bit by bit: rollouts, metrics, the weights in a checkpoint."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.fingerprint import fingerprint, same_weights
from groupwise.model.formats import checkpoint
from groupwise.model.formats.checkpoint import Contents
from groupwise.runfiles.rollouts import read
from groupwise.watch.display import visible

# What a step makes, in the order in which it makes it: the first that differs is nearest the cause.
ORDER = ("prompt_id", "draw", "group", "sample", "branch", "prompt", "prompt_text", "answer",
         "prompt_token_ids", "token_ids", "mask", "turns", "episode", "sampler_logp", "routes",
         "finish", "weights", "text", "reward", "correct", "grader_status", "reward_parts",
         "reward_steps", "used", "learner_logp", "ref_logp", "teacher_logp", "value",
         "process_reward", "advantage", "return", "coefficient", "entropy", "ratio", "clipped",
         "rerouted", "weight_version")  # fmt: skip
WEIGHTS = "weights/fingerprint"
OF_THE_MACHINE = ("time/", "memory/")  # metrics that are not promised to repeat


@dataclass(frozen=True)
class FirstDifference:
    """The first value that differs."""

    step: int
    what: str  # a column of the rollouts, a metric, or "the run" where it stopped
    recorded: Any
    now: Any
    group: int | None = None
    sample: int | None = None
    token: int | None = None

    def __str__(self) -> str:
        place = [f"step {self.step}"]
        place += [f"group {self.group}, sample {self.sample}"] if self.group is not None else []
        place += [f"token {self.token}"] if self.token is not None else []
        return f"{', '.join(place)}: {self.what} was {short(self.recorded)}, is {short(self.now)}"


def compare_rollouts(step: int, recorded: Path, now: Path) -> FirstDifference | None:
    """Return the first value that differs in its bits, in the order in which a step makes them."""
    then, here = read(recorded), read(now)
    if not then.num_rows and set(here.column("weights").to_pylist()) == {"data"}:
        return None  # an older groupwise did not record answers of the data
    if then.num_rows != here.num_rows:
        return FirstDifference(step, "the number of samples", then.num_rows, here.num_rows)
    place = then.select(["group", "sample"]).to_pylist()
    for name in ORDER:
        if name not in then.column_names or name not in here.column_names:
            continue  # a column that an older groupwise did not write
        old, new = then.column(name), here.column(name)
        if _equal(old, new):
            continue
        for row, (a, b) in enumerate(zip(old.to_pylist(), new.to_pylist(), strict=True)):
            if same_bits(a, b):
                continue
            where = (place[row]["group"], place[row]["sample"])
            token = first_unequal(a, b) if isinstance(a, list) and isinstance(b, list) else None
            if token is None or name in ("reward_parts", "reward_steps", "turns"):
                return FirstDifference(step, name, a, b, *where)
            return FirstDifference(step, name, _at(a, token), _at(b, token), *where, token)
    return None


def _equal(old: pa.ChunkedArray, new: pa.ChunkedArray) -> bool:
    """Return whether a column has the same bits: to Arrow 0 is −0. False also where only rows can
    tell.
    """
    kind = old.type
    inner = kind.value_type if pa.types.is_list(kind) else kind
    if kind != new.type or pa.types.is_nested(inner):
        return False
    if not pa.types.is_floating(inner):
        return bool(old.equals(new))
    number = pa.int32() if pa.types.is_float32(inner) else pa.int64()
    bits = pa.list_(number) if pa.types.is_list(kind) else number
    return bool(old.combine_chunks().view(bits).equals(new.combine_chunks().view(bits)))


def compare_metrics(
    step: int,
    recorded: Mapping[str, Any],
    now: Mapping[str, Any],
    left_out: Sequence[str] = (),
) -> FirstDifference | None:
    """Compare the weights, then the others by name; not what depends on clock or machine."""
    names = sorted({*recorded, *now}, key=lambda name: (name != WEIGHTS, name))
    for name in names:
        if name.startswith((*OF_THE_MACHINE, *left_out)):
            continue
        if not same_bits(recorded.get(name), now.get(name)):
            return FirstDifference(step, name, recorded.get(name), now.get(name))
    return None


def compare_weights(step: int, name: str, recorded: Path, now: Contents) -> FirstDifference | None:
    """Compare a checkpoint with what the second run would write there."""
    try:
        then = _tensors(recorded)  # first: a run that goes on may clear it away meanwhile
    except ModelError as error:
        return FirstDifference(step, f"the weights in {name}", str(error), "whole")
    with tempfile.TemporaryDirectory(prefix="groupwise_verify_") as place:
        again = Path(place) / recorded.name
        with checkpoint.new_folder(again) as beside:
            now.fill(beside)
        here = _tensors(again)
    why = same_weights(then.items(), here.items())
    if why is None:
        return None
    before, after = (fingerprint(side.items()) for side in (then, here))
    return FirstDifference(step, f"the weights in {name} ({why})", before, after)


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in checkpoint.tensors_in(file)}


def same_bits(a: Any, b: Any) -> bool:
    """Return whether two values are equal, where a NaN equals itself and 0 is not −0."""
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def first_unequal(a: Sequence[Any], b: Sequence[Any]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if not same_bits(x, y)), min(len(a), len(b)))


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else "nothing"


def short(value: Any) -> str:
    shown = visible(repr(value)) if not isinstance(value, str) else visible(value)
    return shown if len(shown) <= 200 else f"{shown[:199]}…"
