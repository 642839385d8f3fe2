"""Measures that add up: sums and counts, so that micro-batches and ranks merge without bias.

A mean of means is wrong as soon as parts differ in size; a `Tally` keeps numerator and denominator
apart until the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tally:
    """Named totals with weights (means), and named peaks (maxima). Tensors stay on their device."""

    totals: dict[str, tuple[Tensor, Tensor]]
    peaks: dict[str, Tensor]

    def read(self) -> dict[str, float]:
        """Means, maxima and what follows from them, as numbers."""
        values = {}
        for name, (total, weight) in self.totals.items():
            if float(weight) > 0:
                values[name] = float(total) / float(weight)
        values.update({name: float(peak) for name, peak in self.peaks.items()})
        for kind in ("ratio", "mismatch"):
            second = values.pop(f"{kind}/second_moment", None)
            if second:  # (Σw)² / (n·Σw²)
                values[f"{kind}/effective_sample_share"] = values[f"{kind}/mean"] ** 2 / second
        return values


def merge(tallies: Iterable[Tally]) -> Tally:
    """The tally of all parts together, whatever their sizes."""
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
