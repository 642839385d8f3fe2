"""Parameters of which a process holds a part only: who can't work with such a part says so."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from groupwise.errors import ModelError


def is_shard(tensor: Tensor) -> bool:
    """Tell whether a tensor is spread over processes, and this one holds a part of it."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # nothing has made one without it
    return module is not None and isinstance(tensor, module.DTensor)


def refuse_shards(named: Iterable[tuple[str, Tensor]], use: str) -> None:
    """Refuse parameters that are sharded over processes, where only whole ones will do."""
    for name, tensor in named:
        if is_shard(tensor):
            held: Any = tensor
            raise ModelError(
                f"{use} needs whole parameters, and {name} {tuple(tensor.shape)} is sharded: this "
                f"process holds {tuple(held.to_local().shape)} of it. Do it before the model is "
                "sharded, or with a model that is not."
            )
