"""Weights on their way to samplers: checkpoint names and tensors, one layer at a time.

One generator feeds every carrier. All ranks run it: a layer that is sharded is gathered when it is
asked for, and gone when the next one is, so that no rank ever holds a second whole model. An
adapter is folded in on the way, in float32 and rounded once, as export does it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from groupwise.model.adapters import peft_files
from groupwise.model.adapters.lora import Adapter, adapters
from groupwise.model.adapters.quantized import QuantizedLinear
from groupwise.model.borrowed.policy import Borrowed
from groupwise.model.formats.checkpoint import (
    SHARD_BYTES,
    Loaded,
    contents,
    new_folder,
    write_tensors,
)
from groupwise.model.formats.expert_files import apart
from groupwise.model.layers.experts import Experts
from groupwise.model.layers.linear import is_turned, linear_layers
from groupwise.model.layers.transformer import Policy, Transformer
from groupwise.model.probe import Ids, logp_of_ids, probe_of
from groupwise.parallel.sharding import gathered, stored_dtype

Named = Iterator[tuple[str, Tensor]]
LAYER = re.compile(r"(.*\.\d+)\.")  # what a tensor's name has before its place in a layer


# --- tensors ----------------------------------------------------------------------------------


@torch.no_grad()
def named_tensors(
    model: Policy, *, fold: bool = True, head: bool = False, dtype: torch.dtype | None = None
) -> Named:
    """Yield every tensor of a checkpoint under the name that it has there, layer by layer.

    Each in the precision that it is stored in, or another `dtype`. Without `fold`, an adapter is
    left out. With `head`, the map to the vocabulary comes also where it is tied to the embedding.
    All ranks run it to the end, in step.
    """
    outer: nn.Module = model.lender if isinstance(model, Borrowed) else model
    layers = linear_layers(outer)
    wanted = _wanted(model, outer)
    for names in by_layer(wanted):
        made: dict[str, Tensor] = {}
        for name in names:
            tensor = _tensor(outer, layers, name, fold)
            made[name] = tensor if dtype is None else tensor.to(dtype)
        yield from _as_in_files(model, made)
    if head and not isinstance(model, Borrowed) and model.config.tied:
        whole = gathered(model.head_weight.detach())
        yield "lm_head.weight", whole.to(dtype or stored_dtype(model.head_weight))


def by_layer(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield names that belong together, in their order: those of a layer, or one alone."""
    held: list[str] = []
    before: str | None = None
    for name in names:
        found = LAYER.match(name)
        layer = found[1] if found else None
        if held and (layer is None or layer != before):
            yield held
            held = []
        held.append(name)
        before = layer
    if held:
        yield held


def _wanted(model: Policy, outer: nn.Module) -> list[str]:
    """Return the names of what a checkpoint of the model holds, in the order of its layers."""
    if isinstance(model, Borrowed):
        tied = model.lender.all_tied_weights_keys
        own = [name for name in outer.state_dict() if name not in tied]
        return [name for name in own if ".adapter." not in name]
    with torch.device("meta"):
        return list(Transformer(model.config).state_dict())


def _tensor(outer: nn.Module, layers: dict[str, nn.Module], name: str, fold: bool) -> Tensor:
    """Return one tensor whole, with what an adapter adds to it."""
    place, _, last = name.rpartition(".")
    parent, layer = outer.get_submodule(place), layers.get(place)
    if isinstance(layer, QuantizedLinear) and last == "weight":
        dtype = next(p.dtype for p in outer.parameters() if p.is_floating_point())
        found = layer.dequantised(dtype)
    else:
        held = getattr(parent, last)
        found = gathered(held.detach()).to(stored_dtype(held))
    if not fold:
        return found
    if isinstance(parent, Experts):
        return _with_adapters(parent, last, found)
    adapter = getattr(layer, "adapter", None)
    if layer is None or last != "weight" or not isinstance(adapter, Adapter):
        return found
    delta = gathered(adapter.delta())
    return (found.float() + (delta.T if is_turned(layer) else delta)).to(found.dtype)


def _with_adapters(experts: Experts, last: str, found: Tensor) -> Tensor:
    """Add what adapters add to the matrices of all experts, which lie in one tensor."""
    each, width = experts.each, experts.width
    parts = [(each.down_proj, slice(None))]
    if last == "gate_up_proj":
        parts = [(each.gate_proj, slice(0, width)), (each.up_proj, slice(width, None))]
    made = found.clone() if experts.adapted else found
    for layer, rows in parts:
        if isinstance(layer.adapter, Adapter):
            made[:, rows] = made[:, rows].float() + gathered(layer.adapter.delta())
    return made


def _as_in_files(model: Policy, made: dict[str, Tensor]) -> Named:
    """Yield a layer's tensors as files have them, experts one by one."""
    if not isinstance(model, Borrowed):
        yield from apart(model.config, made).items()
        return
    from transformers.core_model_loading import revert_weight_conversion

    revert = cast(Callable[..., dict[str, Tensor]], revert_weight_conversion)
    yield from revert(model.lender, made).items()


# --- the policy, for engines in other processes -------------------------------------------------


class Publisher:
    """The policy as it is now: its tensors, folders of it, and the probe's scores."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._probe = probe_of(loaded.tokenizer, loaded.model.config.vocab_size)

    @property
    def rank(self) -> int:
        """Return the rank of an adapter that is all that learns, beside a plain base; else 0."""
        model = self.loaded.model
        if any(isinstance(module, QuantizedLinear) for module in model.modules()):
            return 0  # its base is in no folder as it computes here
        return max((each.lora_A.shape[-2] for each in adapters(model).values()), default=0)

    def tensors(self) -> Named:
        """Yield what a checkpoint holds, an adapter folded in; a tied head comes, too."""
        return named_tensors(self.loaded.model, head=True)

    def folder(self, place: Path, *, fold: bool = True) -> None:
        """Write a whole model; without `fold` the base that an adapter sits on.

        The head has a tensor of its own there: servers that pack weights when they load them keep
        an old head where it is tied.
        """
        model = self.loaded.model
        beside = (peft_files.CONFIG, peft_files.BASE)
        files = {name: x for name, x in self.loaded.files.items() if name not in beside}
        made = contents(model, files).files
        raw = json.loads(made["config.json"])
        own = not isinstance(model, Borrowed)
        if own:
            raw["tie_word_embeddings"] = False
        with new_folder(place, replace=True) as beside_it:
            named = named_tensors(model, fold=fold, head=own)
            state = {name: x.cpu().contiguous() for name, x in named}
            if own and model.config.tied:
                state["lm_head.weight"] = state["lm_head.weight"].clone()  # files share nothing
            write_tensors(beside_it, state, shard_bytes=SHARD_BYTES)
            for name, content in {
                **made,
                "config.json": json.dumps(raw, indent=2).encode(),
            }.items():
                (beside_it / name).write_bytes(content)

    def adapter(self, place: Path) -> None:
        """Write the adapter alone, as PEFT does."""
        with new_folder(place, replace=True) as beside:
            peft_files.contents(self.loaded.model, self.loaded.files).fill(beside)

    def probe(self) -> tuple[Ids, ...]:
        """Return the sequences that engine and learner score after every sync."""
        return self._probe

    def scored(self, sequences: Sequence[Ids], temperature: float = 1.0) -> list[Tensor]:
        """Return the learner's log-probability of every token but each sequence's first."""
        return [logp_of_ids(self.loaded.model, ids, temperature) for ids in sequences]
