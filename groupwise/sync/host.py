"""A run's tensors copied to the host at one moment, while training goes on.

On a GPU the copy runs beside what is computed next, into memory that the driver knows (pinned), and
nothing waits for it but the next change of these tensors. That memory is made once and kept: making
it takes longer than filling it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

PAGE = 4096  # bytes: where a tensor may begin, as the driver takes memory by pages
CHUNK = 2**28  # bytes, or one tensor: what the driver takes at a time; it does nothing meanwhile


class HostCopy:
    """Host memory for one snapshot at a time: `take`, then `ready` before reading it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._rooms: list[int] = []  # bytes of each tensor that it was made for
        self._pinned: list[int] = []  # addresses
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def holds(self, count: int) -> bool:
        """Tell whether there is memory for so many bytes already."""
        return sum(self._rooms) >= count

    def reserve(self, tensors: Sequence[Tensor]) -> None:
        """Make the memory for a GPU's tensors beforehand; takes seconds for tens of gigabytes."""
        rooms = [_room(x) for x in tensors]
        if self._rooms[: len(rooms)] == rooms:  # the weights alone come first in all there is
            return
        self.release()
        self._rooms = rooms
        memory = torch.empty(sum(self._rooms) + PAGE, dtype=torch.uint8)
        self._memory = memory[-memory.data_ptr() % PAGE :]
        self._pin(self._memory)

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies on the host. They are whole once `ready` has returned.

        What was taken before is overwritten.
        """
        if not any(x.is_cuda for x in tensors):
            return [x.detach().clone() for x in tensors]
        self.reserve(tensors)
        memory, start = self._memory, 0
        assert memory is not None
        device = next(x.device for x in tensors if x.is_cuda)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        made = []
        with torch.cuda.stream(self._stream):
            for x in tensors:
                place = memory[start : start + x.nbytes].view(x.dtype).view(x.shape)
                place.copy_(x.detach(), non_blocking=True)
                if x.is_cuda:
                    x.record_stream(self._stream)
                made.append(place)
                start += _room(x)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(self._stream)
        return made

    def hold_changes(self) -> None:
        """Make what the GPU is told from now on wait until the copy is done; the host does not."""
        if self._done is not None:
            torch.cuda.current_stream(self._done.device).wait_event(self._done)

    def ready(self) -> None:
        """Wait until the copy is done."""
        if self._done is not None:
            self._done.synchronize()

    def release(self) -> None:
        """Give the memory back."""
        for address in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
        self._pinned, self._rooms, self._memory = [], [], None

    def _pin(self, memory: Tensor) -> None:
        """Tell the driver of the memory; without that copies work as well, slower.

        A copy must not reach over two of the pieces that it was told of, so none ends in a tensor.
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        start, length = memory.data_ptr(), 0
        for number, room in enumerate(self._rooms, start=1):
            length += room
            if length < CHUNK and number < len(self._rooms):
                continue
            if int(runtime.cudaHostRegister(start, length, 0)) != 0:
                return
            self._pinned.append(start)
            start, length = start + length, 0


def _room(tensor: Tensor) -> int:
    return -(-max(tensor.nbytes, 1) // PAGE) * PAGE


def free_memory() -> int:
    """Return the bytes of host memory that a process can still get."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
