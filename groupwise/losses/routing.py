"""Routing replay for mixtures of experts (R2, R3): keep the experts, train the router."""

from __future__ import annotations

import torch
from torch import Tensor

from groupwise.errors import BatchError


def replay_gates(logits_E: Tensor, replay_E: Tensor) -> Tensor:
    """Return `I·e^s / ΣI·e^s` over the recorded experts I (last axis); s keeps its gradient."""
    if logits_E.shape != replay_E.shape:
        raise BatchError(
            f"router logits {tuple(logits_E.shape)} and replay mask {tuple(replay_E.shape)} differ."
        )
    chosen_E = replay_E.bool()
    if not chosen_E.any(-1).all():
        raise BatchError("A replay mask without experts: every token was routed to at least one.")
    return torch.where(chosen_E, logits_E, -torch.inf).softmax(-1)


def topk_experts(logits_E: Tensor, k: int) -> Tensor:
    """Return the mask that a router without replay would use: its k largest logits."""
    top = logits_E.topk(k, dim=-1).indices
    return torch.zeros_like(logits_E, dtype=torch.bool).scatter(-1, top, True)
