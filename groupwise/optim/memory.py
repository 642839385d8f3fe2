"""Memory: whether an error means that there was too little of it, and how much was used."""

from __future__ import annotations

import resource
import sys

import torch

# How the CPU allocator and the CUDA libraries say it, where the error's type does not.
SAYINGS = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed on any device: less at a time may work."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAYINGS)


def peak_bytes(device: torch.device | str) -> int:
    """The most memory in use so far: tensors on CUDA, all of the process on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
