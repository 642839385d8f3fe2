"""A processor whose tiles (AMX) are announced and do not work, as some virtual machines have them.

There the first bfloat16 product ends the process by an illegal instruction, without a word.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

LIMIT = "ONEDNN_MAX_CPU_ISA"  # which instructions PyTorch's products may use; read at the first one
WITHOUT_TILES = "AVX512_CORE_FP16"
# Large enough that tiles are used where they can be.
TRIAL = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.mm(x, x)"


def prepare_products(device: torch.device | str, dtype: torch.dtype) -> None:
    """Call before the first product of a model; only bfloat16 on a CPU is computed with tiles."""
    if torch.device(device).type == "cpu" and dtype == torch.bfloat16:
        avoid_broken_tiles()


def avoid_broken_tiles(flags: Path = Path("/proc/cpuinfo"), trial: str = TRIAL) -> bool:
    """Try a product in a process of its own where tiles are announced; True: do without them.

    The choice holds for this process if it has multiplied nothing yet, and for those it starts.
    """
    if LIMIT in os.environ:  # a person's choice, or ours of before
        return os.environ[LIMIT] == WITHOUT_TILES
    if not flags.is_file() or "amx_bf16" not in flags.read_text("utf-8", "replace"):
        return False
    if subprocess.run([sys.executable, "-c", trial], capture_output=True).returncode >= 0:
        return False
    os.environ[LIMIT] = WITHOUT_TILES
    return True
