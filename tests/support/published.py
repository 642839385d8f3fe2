"""What ranks find when each runs the generator of published tensors, for tests of teams."""

from __future__ import annotations

from typing import Any

import torch
from model_zoo import make

from groupwise.model.adapters.lora import adapters, attach
from groupwise.model.adapters.targets import Spec
from groupwise.model.layers.transformer import Transformer
from groupwise.parallel.world import World
from groupwise.sync.publish import named_tensors


def moved(name: str, dtype: torch.dtype = torch.float32, *, adapted: bool = False) -> Transformer:
    """A model whose adapters, if it has any, have learned something."""
    model = make(name, dtype=dtype)
    if adapted:
        attach(model, Spec(rank=2, alpha=4.0, targets="all", rslora=False), seed=1)
        generator = torch.Generator().manual_seed(2)
        for adapter in adapters(model).values():
            torch.nn.init.normal_(adapter.lora_B, generator=generator)
    return model


def of_ranks(world: World, name: str, dtype: torch.dtype, adapted: bool) -> list[Any]:
    """Return names and tensors of a sharded model, in the order in which they came."""
    model = world.shard(moved(name, dtype, adapted=adapted))
    return [(key, tensor.clone()) for key, tensor in named_tensors(model)]
