"""Experts in files: each by itself, as models are published, or all of a layer in one tensor.

In memory, and in what newer versions of transformers may write, a layer has `experts.gate_up_proj`
[E, 2F, D] and `experts.down_proj` [E, D, F]. Published folders have three matrices for each expert,
which all versions and vLLM read: so that is what is written. Mixtral has names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.config import Mixture, ModelConfig

PLACE, MIXTRAL = "mlp", "block_sparse_moe"  # of a layer's router and experts, in names
PIECE = re.compile(r"(model\.layers\.\d+)\.(mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
WORDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
MIXTRAL_WORDS = {"w1": "gate", "w3": "up", "w2": "down"}


class ExpertPlace(NamedTuple):
    """The place of one expert's matrix in a layer's tensor."""

    whole: str  # the tensor's name
    rows: slice


def joined(
    config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors as they lie in memory: experts that come one by one are laid together."""
    if config.experts is None:
        yield from tensors
        return
    wholes: dict[str, Tensor] = {}
    left: dict[str, set[tuple[int, int]]] = {}  # expert and first row of what has not come yet
    for name, tensor in tensors:
        found = PIECE.fullmatch(name)
        if found is None:
            yield name.replace(f".{MIXTRAL}.", f".{PLACE}."), tensor
            continue
        layer, _, expert, word = found.groups()
        place = _place(config.experts, f"{layer}.{PLACE}.experts", name, int(expert), word)
        whole = wholes.get(place.whole)
        if whole is None:
            whole = wholes[place.whole] = _empty(config, place.whole, tensor)
            left[place.whole] = _all_places(config.experts, place.whole)
        part = whole[int(expert), place.rows]
        _check_piece(name, tensor, part)
        part.copy_(tensor)
        left[place.whole].discard((int(expert), place.rows.start))
        if not left[place.whole]:
            yield place.whole, wholes.pop(place.whole)
    for name in wholes:
        expert, _ = min(left[name])
        raise ModelError(
            f"The checkpoint lacks experts of {name}, expert {expert} for one: config.json asks "
            f"for {config.experts.count} a layer. It is incomplete, or of a model with another "
            "number of experts; fetch both again."
        )


def apart(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as files have them, experts one by one; views, where they can be."""
    experts = config.experts
    if experts is None:
        return dict(tensors)
    mixtral = config.family == "mixtral"
    words = MIXTRAL_WORDS if mixtral else WORDS
    names = {kind: word for word, kind in words.items()}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        outer = stem.replace(f".{PLACE}", f".{MIXTRAL}") if mixtral else stem
        if last == "gate_up_proj":
            parts = {"gate": slice(0, experts.width), "up": slice(experts.width, None)}
        elif last == "down_proj" and stem.endswith(".experts"):
            parts = {"down": slice(None)}
        else:
            found[f"{outer}.{last}"] = tensor
            continue
        for expert in range(experts.count):
            for kind, rows in parts.items():
                found[f"{outer}.{expert}.{names[kind]}.weight"] = tensor[expert, rows]
    return found


def _place(experts: Mixture, outer: str, name: str, expert: int, word: str) -> ExpertPlace:
    kind = (WORDS | MIXTRAL_WORDS).get(word)
    if kind is None:
        raise ModelError(
            f"The checkpoint holds {name!r}, which is no matrix of an expert: it would be ignored "
            "in silence. Check model_type and the other fields of config.json."
        )
    if expert >= experts.count:
        raise ModelError(
            f"The checkpoint holds {name!r}, and config.json asks for {experts.count} experts a "
            "layer: they belong to models with different numbers of experts. Fetch both again."
        )
    if kind == "down":
        return ExpertPlace(f"{outer}.down_proj", slice(0, None))
    rows = slice(0, experts.width) if kind == "gate" else slice(experts.width, 2 * experts.width)
    return ExpertPlace(f"{outer}.gate_up_proj", rows)


def _empty(config: ModelConfig, name: str, like: Tensor) -> Tensor:
    experts = config.experts
    assert experts is not None
    shape = (2 * experts.width, config.hidden_size)
    if name.endswith("down_proj"):
        shape = (config.hidden_size, experts.width)
    return torch.empty((experts.count, *shape), dtype=like.dtype)


def _all_places(experts: Mixture, name: str) -> set[tuple[int, int]]:
    starts = (0,) if name.endswith("down_proj") else (0, experts.width)
    return {(expert, start) for expert in range(experts.count) for start in starts}


def _check_piece(name: str, tensor: Tensor, part: Tensor) -> None:
    if tensor.shape != part.shape or tensor.dtype != part.dtype:
        raise ModelError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}; by config.json and the other experts "
            f"it is {part.dtype} {tuple(part.shape)}. Weights and config.json belong to different "
            "models; fetch both again."
        )
