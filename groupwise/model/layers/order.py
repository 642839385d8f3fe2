"""The order in which a GPU adds numbers up: as they come, or always the same.

PyTorch has one switch for it, of the whole process. Exact mode needs it on for the update: a
prompt's last hidden state serves every completion behind it, and their gradients meet there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import deterministic

_ours = False  # whether it was switched on here: what somebody else switched on is left alone


def fix_order(on: bool) -> None:
    """Fix the order of sums from now on in this process.

    An operation that knows no fixed order warns and goes on: such as a plug-in may bring.
    """
    global _ours
    if on and not torch.are_deterministic_algorithms_enabled():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first product
        _fill_fresh_memory(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        _ours = True
    elif not on and _ours:
        _fill_fresh_memory(True)
        torch.use_deterministic_algorithms(False)
        _ours = False


def _fill_fresh_memory(on: bool) -> None:
    """Switch a help in finding bugs that goes with it, and writes all memory once more."""
    deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]


@contextmanager
def order(*, fixed: bool) -> Iterator[None]:
    """Fix the order within a block, then leave it as it was.

    Fixed here is strict: flash attention takes a mere warning for leave to add as it comes.
    """
    on = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    if on == fixed and not warns:
        yield
        return
    torch.use_deterministic_algorithms(fixed)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warns)
