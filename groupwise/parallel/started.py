"""How this process was started: as one of several ranks, or alone. Known before PyTorch is."""

from __future__ import annotations

import os


def ranks_here() -> int:
    """Return how many ranks this process was started with, by torchrun or SLURM; 1: alone."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def leads_here() -> bool:
    """Tell whether this process is the first rank, or the only one: people read what it says."""
    return os.environ.get("RANK", "0") == "0"
