"""Routes of mixtures of experts: replayed (R2, R3), compared and counted.

Axes: `_L` layer, `_E` expert, `_K` experts of a token. -1 stands where no expert is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

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


def other_experts(now_TLK: Tensor, before_TLK: Tensor) -> tuple[Tensor, Tensor]:
    """Tell in which layers the set of a token's experts is another one, and where both are known.

    Both [T, L], bool; in what order experts stand does not matter.
    """
    known_TL = (now_TLK >= 0).all(-1) & (before_TLK >= 0).all(-1)
    other_TL = (now_TLK.sort(-1).values != before_TLK.sort(-1).values).any(-1)
    return other_TL & known_TL, known_TL


def visits(expert_TLK: Tensor, experts: int) -> Tensor:
    """Count the tokens that visit each expert of each layer, [L, E]."""
    layers = expert_TLK.shape[1]
    row_L1 = torch.arange(layers, device=expert_TLK.device)[:, None]
    place_TLK = expert_TLK.long() + row_L1 * experts
    place = place_TLK[expert_TLK >= 0]
    return torch.bincount(place, minlength=layers * experts).view(layers, experts)


@dataclass(frozen=True)
class RouteCounts:
    """Counts of what happened to routes in some passes, in layers with experts. They add up."""

    visits_LE: Tensor  # of the policy's tokens, by the router as it is
    changed_L: Tensor  # of these tokens: others than when they were sampled
    compared_L: Tensor  # those of which both are known
    asked: Tensor  # layers of all tokens that were read, where they were to take recorded experts
    replayed: Tensor  # of these, that did: the others had no record


MOST_LOADS = 512  # experts of all layers; the loads of more are told in summary alone


def route_metrics(counts: Sequence[RouteCounts]) -> dict[str, float]:
    """Return the measures of all passes together."""
    if not counts:
        return {}
    total = {f.name: sum(getattr(each, f.name).cpu() for each in counts) for f in fields(counts[0])}
    changed_L, compared_L = total["changed_L"].double(), total["compared_L"].double()
    found = load_metrics(total["visits_LE"].double())
    if compared_L.sum() > 0:
        found["router/changed_share"] = float(changed_L.sum() / compared_L.sum())
        shares = (changed_L / compared_L.clamp(min=1)).tolist()
        found |= {f"router/changed_share/{at}": share for at, share in enumerate(shares)}
    if total["asked"] > 0:
        found["router/replayed_share"] = float(total["replayed"] / total["asked"])
        found["router/missing_share"] = 1.0 - found["router/replayed_share"]
    return found


def load_metrics(visits_LE: Tensor) -> dict[str, float]:
    """Return how evenly tokens spread over the experts of a layer, from counts."""
    layers, experts = visits_LE.shape
    share_LE = visits_LE / visits_LE.sum(1, keepdim=True).clamp(min=1)
    load_LE = share_LE * experts  # 1: as many tokens as all others
    found = {
        "router/load_max": float(load_LE.max()),
        "router/dead_share": float((visits_LE == 0).double().mean()),
    }
    if experts > 1:
        entropy_L = -torch.xlogy(share_LE, share_LE).sum(1) / math.log(experts)
        found["router/load_entropy"] = float(entropy_L.mean())
    if layers * experts <= MOST_LOADS:
        found |= {
            f"router/load/{layer}/{expert}": load
            for layer, loads in enumerate(load_LE.tolist())
            for expert, load in enumerate(loads)
        }
    return found
