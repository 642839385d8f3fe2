"""Parameters of which a process holds a part only: who can't work with such a part says so."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from groupwise.errors import ModelError


def refuse_shards(named: Iterable[tuple[str, Tensor]], use: str) -> None:
    """Refuse parameters that are sharded over processes, where only whole ones will do."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # nothing has made one without it
    if module is None:
        return
    for name, tensor in named:
        if isinstance(tensor, module.DTensor):
            raise ModelError(
                f"{use} needs whole parameters, and {name} {tuple(tensor.shape)} is sharded: this "
                f"process holds {tuple(tensor.to_local().shape)} of it. Do it before the model is "
                "sharded, or with a model that is not."
            )
