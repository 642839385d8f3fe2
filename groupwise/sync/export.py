"""A policy as a plain Hugging Face folder in a chosen precision, checked before it appears.

An adapter is folded into its base, or written alone as PEFT's folder.

What was written is read back and compared with what it was made from, log-probability by
log-probability, in float32 on both sides: a difference is what rounding the weights costs, or a
mistake, and too large a one is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from groupwise.errors import ModelError, RunError, nearest
from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import merge, tensors_of
from groupwise.model.adapters.peft_files import BASE, CONFIG, is_adapter
from groupwise.model.adapters.quantized import QuantizedLinear
from groupwise.model.formats.checkpoint import contents, load, new_folder
from groupwise.model.formats.classifier import is_classifier
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.transformer import Policy
from groupwise.model.policy import base_of, load_policy
from groupwise.model.probe import logp_of_ids
from groupwise.runfiles.rollouts import read
from groupwise.sync.checkpoints import best, newest

# The largest difference of a log-probability that rounding the weights may make: several times
# what it made for SmolLM2-135M (0.01 and 0.07).
LIMITS = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.5}
PROBES, PROBE_TOKENS = 8, 256
# Where there is no run to take sequences from.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "What is 12 + 30? Think step by step, then give the answer.",
    "def add(a, b):\n    return a + b\n",
    "0 1 2 3 4 5 6 7 8 9",
)

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Exported:
    """The files written, and how far they are from what they were made from."""

    source: Path
    folder: Path
    dtype: str
    tokens: int  # compared
    mean: float  # of |Δ log p|
    max: float
    limit: float
    notes: tuple[str, ...] = ()
    compared: str = "log-probabilities"


def checkpoint_in(path: str | Path, which: str | None = None) -> str | Path:
    """Find the checkpoint of a run: its best, else its latest, or the one asked for.

    What is no run comes back as it was given: a text may be a model's id on a hub.
    """
    parent = Path(path) / "checkpoints"
    if not parent.is_dir():
        if which is not None:
            raise RunError(f"{path} is no run, so there is no {which!r} in it. Leave --which out.")
        return path
    names = sorted(each.name for each in parent.iterdir() if not each.name.startswith("."))
    wanted = [which] if which else ["best", "latest"]
    # A kill may have left the links behind; the checkpoints themselves say which is which.
    meant = {"best": best(parent), "latest": newest(parent)}
    for name in wanted:
        place = meant.get(name) or parent / name
        if place.exists():
            return place.resolve()
    if not names:
        raise RunError(f"{path} has no checkpoint yet.")
    raise RunError(f"{path} has no checkpoint {wanted[0]!r}. {nearest(wanted[0], names)}")


def export(
    source: Path,
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    adapter: bool = False,
    base: Path | None = None,
) -> Exported:
    """Write `folder` from a checkpoint; in the precision that it has if none is given.

    Of a run with LoRA the whole model, or the `adapter` alone. `base` is where its base lies now.
    """
    if folder.exists():
        raise ModelError(f"{folder} exists already, and nothing is overwritten. Choose another.")
    if folder.suffix == ".gguf":
        raise ModelError(
            f"{folder}: a folder is written, and no GGUF file. Choose another name; llama.cpp's "
            "convert_hf_to_gguf.py makes a file of the folder."
        )
    adapted = is_adapter(source)
    if is_classifier(source):
        if adapter:
            raise ModelError(
                f"{source} scores texts: its adapter alone is the checkpoint itself. Leave "
                "--adapter out to export the whole classifier, which rm(...) and prm(...) read."
            )
        from groupwise.sync.export_scorer import export_scorer

        return export_scorer(source, folder, dtype, base=base)
    if adapter:
        _check_alone(source, base)
    policy = load_policy(source, base=base)
    stored = policy.model.head_weight.dtype
    dtype = dtype or stored
    sequences = sequences_for(source, policy.tokenizer)
    before = logp_of(policy.model, sequences)
    notes: list[str] = []
    with new_folder(folder) as beside:
        if adapter:
            _check_range(tensors_of(policy.model), dtype)
            peft_files.contents(policy.model, policy.files, dtype).fill(beside)
        else:
            notes = _fold(policy.model) if adapted else []
            _check_range(policy.model.state_dict(), dtype)
            contents(policy.model, _whole(policy.files), dtype).fill(beside)
        del policy  # one model in memory at a time
        again = load_policy(beside, stored, base=base) if adapter else load(beside)
        gap = (logp_of(again.model, sequences) - before).abs()
        exact = torch.promote_types(stored, dtype) == dtype and (adapter or not adapted)
        limit = 0.0 if exact else LIMITS[dtype]
        name = str(dtype).removeprefix("torch.")
        mean, most = float(gap.mean()), float(gap.max())
        found = Exported(source, folder, name, len(gap), mean, most, limit, tuple(notes))
        _check_gap(found)
    return found


def _check_alone(source: Path, base: Path | None) -> None:
    """Refuse an adapter whose base has no folder of its own: it is of no use to anybody."""
    if not is_adapter(source):
        raise ModelError(f"{source} is a whole model, and has no adapter. Leave --adapter out.")
    found = base_of(source, base)
    if found.adapters:
        raise ModelError(
            f"{source} was trained beside a base with {', '.join(found.adapters)} folded in: on "
            "the base alone it would be another policy. Leave --adapter out to export the whole "
            "model."
        )
    if Path(found.path).suffix == ".gguf":
        precision = f" --dtype {found.dtype}" if found.dtype else ""
        raise ModelError(
            f"The base of {source} is a GGUF file, {found.path}, and PEFT loads folders alone. "
            f"Make a folder of it, `groupwise export {quote(str(found.path))} BASE{precision}`, "
            f"and name that: `groupwise export {quote(str(source))} OUT --adapter --base BASE`. Or "
            "leave --adapter out to "
            "export the whole model."
        )


def _fold(model: Policy) -> list[str]:
    """Fold the whole policy into plain weights; return what a person should know about them."""
    kinds = {each.kind for each in model.modules() if isinstance(each, QuantizedLinear)}
    merge(model)
    said = ["the adapter is folded into its base"]
    return said + [
        f"the base was trained beside as {kind}: what was written are those numbers, not the "
        "weights that they were rounded from"
        for kind in kinds
    ]


def _whole(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: x for name, x in files.items() if name not in (CONFIG, BASE)}


def sequences_for(source: Path, tokenizer: Tokenizer) -> list[Ids]:
    """Return prompts with answers from the run's last rollouts, or texts where it has none."""
    folders = source.resolve().parents[:2]
    files = [file for each in folders for file in each.glob("rollouts/step_*.parquet")]
    if not files:
        return [tuple(tokenizer.encode(text)) for text in TEXTS if _encodes(tokenizer, text)]
    last = max(files, key=lambda file: int(file.stem.partition("_")[2]))
    columns = ["prompt_token_ids", "token_ids"]
    rows = read(last, columns).to_pylist()
    by_prompt = {tuple(row[columns[0]]): tuple(row[columns[1]]) for row in rows}
    return [(*prompt, *answer)[:PROBE_TOKENS] for prompt, answer in by_prompt.items()][:PROBES]


def _encodes(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return len(tokenizer.encode(text)) > 1
    except ModelError:  # an alphabet without these characters
        return False


@torch.no_grad()
def logp_of(model: Policy, sequences: Sequence[Ids]) -> Tensor:
    """Return logp of every token but each sequence's first, in float32 for any weights."""
    model = model.to("cpu", torch.float32)
    asked = sequences or [tuple(range(min(16, model.config.vocab_size)))]
    found = [logp_of_ids(model, ids) for ids in asked]
    return torch.cat(found)


def _check_range(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse weights beyond float16's end, 65504: they would become infinite."""
    most = torch.finfo(dtype).max
    for name, tensor in tensors.items():
        largest = float(tensor.abs().max())
        if not largest <= most:
            raise ModelError(
                f"{name} has a weight of {largest:g}, and {str(dtype).removeprefix('torch.')} ends "
                f"at {most:g}. Take --dtype bfloat16 or float32."
                if math.isfinite(largest)
                else f"{name} holds weights that are not finite. Export an earlier checkpoint."
            )


def _check_gap(found: Exported) -> None:
    if found.max <= found.limit:
        return
    raise ModelError(
        f"The exported weights say something else: log-probabilities differ by up to "
        f"{found.max:.2g} (mean {found.mean:.2g}) over {found.tokens} tokens, and {found.dtype} "
        f"may make {found.limit:g}. Nothing was written. Take --dtype float32; if it fails as "
        "well, the checkpoint or the disk is damaged."
    )
