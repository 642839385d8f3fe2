"""Memory: whether an error means too little of it, how much was used, and how much there is."""

from __future__ import annotations

import os
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
    "Triton Error [CUDA]: out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an allocation failed, on any device: less at a time may work."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAYINGS)


def give_back() -> None:
    """Free what PyTorch keeps for later use: kernels that are loaded get theirs from the device."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device | str) -> int:
    """Return the most memory in use so far: tensors on CUDA, all of the process on the CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def device_bytes(device: torch.device | str) -> int:
    """Return what PyTorch holds of a GPU or could get; elsewhere all of a machine's memory."""
    if torch.device(device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
