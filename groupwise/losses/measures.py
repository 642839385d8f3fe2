"""Measures that add up: sums and counts, so that micro-batches and ranks merge without bias.

A mean of means is wrong as soon as parts differ in size; a `Tally` keeps numerator and denominator
apart until the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Named totals with weights (means), and named peaks (maxima). Tensors stay on their device."""

    totals: dict[str, tuple[Tensor, Tensor]]
    peaks: dict[str, Tensor]

    def read(self) -> dict[str, float]:
        """Return means, maxima and what follows from them, as numbers."""
        both = [x for pair in self.totals.values() for x in pair]
        numbers = values([*both, *self.peaks.values()])
        totals, weights = numbers[0 : len(both) : 2], numbers[1 : len(both) : 2]
        found = {
            name: total / weight
            for name, total, weight in zip(self.totals, totals, weights, strict=True)
            if weight > 0
        }
        found.update(zip(self.peaks, numbers[len(both) :], strict=True))
        for kind in ("ratio", "mismatch"):
            second = found.pop(f"{kind}/second_moment", None)
            if second:  # (Σw)² / (n·Σw²)
                found[f"{kind}/effective_sample_share"] = found[f"{kind}/mean"] ** 2 / second
            square_off = found.pop(f"{kind}/square_off", None)
            if square_off is not None:  # not E r² − (E r)²: near 1 nothing but rounding is left
                found[f"{kind}/off"] = math.sqrt(square_off)
        rare = found.get("tokens/rare_share", 0.0)
        for side in ("high", "low"):
            clipped = found.get(f"clip/{side}_rare_share")
            if rare and clipped is not None:
                found[f"clip/{side}_rarity"] = clipped / rare
        return found


def values(tensors: Sequence[Tensor]) -> list[float]:
    """Return scalars as numbers; wait for the device once."""
    return torch.stack([x.detach().double() for x in tensors]).tolist() if tensors else []


def merge(tallies: Iterable[Tally]) -> Tally:
    """Return the tally of all parts together, whatever their sizes."""
    totals: dict[str, tuple[Tensor, Tensor]] = {}
    peaks: dict[str, Tensor] = {}
    for tally in tallies:
        for name, (total, weight) in tally.totals.items():
            before = totals.get(name)
            totals[name] = (
                (total, weight) if before is None else (before[0] + total, before[1] + weight)
            )
        for name, peak in tally.peaks.items():
            peaks[name] = peak if name not in peaks else torch.maximum(peaks[name], peak)
    return Tally(totals, peaks)


def quantile(x: Tensor, share: float) -> Tensor:
    """Return the value that so large a share of them does not exceed; any number of values."""
    return x.kthvalue(max(math.ceil(share * len(x)), 1)).values
