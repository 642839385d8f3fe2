"""Keys and values of prompts whose conversations go on, kept while tools answer, if there is room.

What is kept is what the prompt's own pass has computed. A later turn's prompt is computed in the
parts that it has grown by, kept or not, so that no bit depends on what there was room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engine.protocol import Request
from groupwise.model.layers.cache import KeyValueCache
from groupwise.model.memory import device_bytes

SHARE = 0.1  # of the device's memory


@dataclass
class KeptPrompt:
    """A prompt's keys and values, and how many requests may go on from it."""

    key_LJUW: Tensor
    value_LJUW: Tensor
    uses: int

    @property
    def bytes(self) -> int:
        return self.key_LJUW.nbytes + self.value_LJUW.nbytes


class KeptPrompts:
    """The prompts of open conversations; the oldest go first."""

    def __init__(self, device: torch.device, room: int | None = None) -> None:
        self.room = int(SHARE * device_bytes(device)) if room is None else room  # bytes
        self.known: dict[tuple[int, ...], KeptPrompt] = {}
        self.bytes = 0
        self.given, self.read = 0, 0  # tokens of prompts that were kept, and that were computed

    def take(self, request: Request, cache: KeyValueCache, slot: int) -> None:
        """Keep the prompt that a slot holds, if others will go on from it."""
        if not request.goes_on:
            return
        length = len(request.prompt)
        made = KeptPrompt(
            cache.key_LSJUW[:, slot, :, :length].clone(),
            cache.value_LSJUW[:, slot, :, :length].clone(),
            request.samples,
        )
        self._drop(request.prompt)
        self.known[request.prompt] = made
        self.bytes += made.bytes
        while self.bytes > self.room:
            self._drop(next(iter(self.known)))

    def give(self, request: Request, cache: KeyValueCache, slot: int) -> int:
        """Fill a slot with the longest part of a prompt that is kept; return its tokens."""
        for length in reversed(request.grown):
            kept = self.known.get(request.prompt[:length])
            if kept is None:
                continue
            cache.key_LSJUW[:, slot, :, :length] = kept.key_LJUW
            cache.value_LSJUW[:, slot, :, :length] = kept.value_LJUW
            kept.uses -= 1
            if not kept.uses:
                self._drop(request.prompt[:length])
            self.given += length
            return length
        return 0

    def clear(self) -> None:
        """Forget all: the weights have changed, or memory has run out."""
        self.known.clear()
        self.bytes = 0

    def _drop(self, prompt: tuple[int, ...]) -> None:
        gone = self.known.pop(prompt, None)
        if gone is not None:
            self.bytes -= gone.bytes
