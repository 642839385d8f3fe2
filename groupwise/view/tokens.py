"""A completion token by token: its pieces of text and every number that is known about each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.rollouts import PER_TOKEN
from groupwise.view.steps import place_of, rows_of_group, values_of
from groupwise.watch.display import visible

PAGE = 2048  # tokens that are sent at a time
COLUMNS = ("group", "sample", "prompt_token_ids", "token_ids", "turns", "routes", *PER_TOKEN,
           "weight")  # the last in replays  # fmt: skip

# name, title, scale: high (0 is calm), low (0 is calm, far below is not), signed, ratio, flag
STREAMS = (
    ("sampler_logp", "sampler log-probability", "low"),
    ("learner_logp", "learner log-probability", "low"),
    ("ref_logp", "reference log-probability", "low"),
    ("teacher_logp", "teacher's log-probability", "low"),
    ("mismatch", "learner − sampler", "signed"),
    ("ratio", "ratio policy / anchor", "ratio"),
    ("entropy", "entropy", "high"),
    ("advantage", "advantage", "signed"),
    ("coefficient", "aggregation weight", "high"),
    ("value", "critic's value before the token", "signed"),
    ("return", "its target, the return", "signed"),
    ("process_reward", "process reward", "signed"),
    ("weight", "weight: d loss / d log-probability", "signed"),
    ("rerouted", "layers whose experts changed", "high"),
    ("clipped", "clipped", "flag"),
    ("mask", "written by the policy", "flag"),
)

# Where a colour is full on a scale that is the same for all samples.
FIXED = {"mismatch": 0.1, "ratio": 0.5, "entropy": 3.0, "advantage": 2.0, "coefficient": 0.001}
FIXED_OTHERWISE = {"low": 5.0, "signed": 1.0, "high": 1.0, "ratio": 0.5, "flag": 1.0}


def tokenizer_of(folder: RunFolder) -> Tokenizer | None:
    """Load the tokenizer that the run itself saved; None before its first checkpoint."""
    saved = [folder.checkpoints / "latest", folder.path / "cold_start", folder.path]
    for place in (*saved, *sorted(folder.checkpoints.glob("step_*"))):
        try:
            return Tokenizer.from_str((place / "tokenizer.json").read_text("utf-8"))
        except (OSError, ValueError):
            continue
        except Exception as error:  # the library raises bare Exception for a file it can't read
            if type(error) is not Exception:
                raise
    return None


def pieces(ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text that each token adds; a character in several tokens is at the last of them.

    Without a tokenizer the ids themselves, in angle brackets.
    """
    if tokenizer is None:
        return [f"⟨{number}⟩" for number in ids]
    stream, size = DecodeStream(skip_special_tokens=False), tokenizer.get_vocab_size()
    made = []
    for number in ids:
        known = 0 <= number < size
        made.append((stream.step(tokenizer, number) or "") if known else f"⟨{number}⟩")
    return made


def token_page(
    path: Path, group: int, sample: int, start: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return tokens from `start` on, with the scale of each stream over the whole completion.

    Tokens that others than the policy wrote have no numbers, and are on no scale.
    """
    rows, _ = rows_of_group(path, group, COLUMNS)
    at = place_of(rows, sample)
    ids = values_of(rows, "token_ids", at)
    ids = np.zeros(0, int) if ids is None else ids
    part = slice(start, start + PAGE)
    # Pieces depend on what stands before them, within a character: begin a few tokens earlier.
    before = min(start, 8)
    texts = pieces(ids[start - before : part.stop].tolist(), tokenizer)[before:]
    mask = values_of(rows, "mask", at)
    known = mask is not None and len(mask) == len(ids)
    foreign = ~np.asarray(mask, dtype=bool) if known else np.zeros(len(ids), dtype=bool)
    streams = []
    for name, title, scale in STREAMS:
        values = _stream(rows, name, at)
        if values is not None and len(values) == len(ids):
            values = values if name == "mask" else np.where(foreign, np.nan, values)
            high = _reach(values, scale)
            numbers = [None if not np.isfinite(x) else float(f"{x:.6g}") for x in values[part]]
            fixed = FIXED.get(name, FIXED_OTHERWISE[scale])
            streams.append({"name": name, "title": title, "scale": scale, "reach": high,
                            "fixed": fixed, "values": numbers})  # fmt: skip
    return {
        "start": start,
        "count": len(ids),
        "named": tokenizer is not None,
        "ids": ids[part].tolist(),
        "pieces": [visible(text) for text in texts],
        "streams": streams,
        "foreign": foreign[part].tolist(),
        "turns": rows.column("turns")[at].as_py() or [],
        "routes": _routes(rows, at)[part],
    }


def _routes(rows: pa.Table, at: int) -> list[list[list[int]]]:
    """Return the experts of each layer that foretold each token; none where they are not known."""
    found, prompt = rows.column("routes")[at], values_of(rows, "prompt_token_ids", at)
    if not found.is_valid or prompt is None:
        return []
    experts = found["experts"].values.to_numpy(zero_copy_only=False)
    sizes = [found[name].as_py() or 0 for name in ("layers", "chosen")]
    if not all(sizes) or len(experts) % (sizes[0] * sizes[1]):
        return []
    every: list[list[list[int]]] = experts.reshape(-1, *sizes)[max(len(prompt) - 1, 0) :].tolist()
    return every


def _stream(rows: pa.Table, name: str, at: int) -> Any:
    if name == "mismatch":
        ours, theirs = values_of(rows, "learner_logp", at), values_of(rows, "sampler_logp", at)
        known = ours is not None and theirs is not None and len(ours) == len(theirs)
        return ours - theirs if known else None
    values = values_of(rows, name, at)
    return None if values is None else np.asarray(values, dtype=np.float64)


def _reach(values: Any, scale: str) -> float:
    """Return the value at which the colour is full: the largest in the completion."""
    if scale == "flag":
        return 1.0
    finite = values[np.isfinite(values)]
    if scale == "ratio":
        finite = np.log(finite[finite > 0])
    return float(np.abs(finite).max(initial=0.0))


def as_json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
