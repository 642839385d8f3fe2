"""A digest of all weights, cheap enough for every step, and the same on every device.

Bytes are read as rows of 64-bit words, and a row becomes two weighted sums modulo 2⁶⁴: of its
words, and of their upper halves. Weights are odd, so no change of one word goes unseen; they differ
in their lower bits, so no swap within a row does. The upper halves need a sum of their own because
a product modulo 2⁶⁴ keeps next to nothing of the top bits, such as the sign of every second
float32. Integer sums do not depend on the order in which a device adds. They are one 500th of the
weights, and SHA-256 reads them in order.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

ROW = 1024  # words
BLOCK = 4096  # rows at a time: 32 MiB
CACHED = 128  # rows that stay in a core's cache while they are summed twice
WEIGHTS = np.frombuffer(hashlib.shake_256(b"groupwise").digest(8 * ROW), "<i8") | 1

Named = Iterable[tuple[str, Tensor]]


class Scratch(threading.local):
    """A place for upper halves, once a thread: fresh pages cost more than the sums."""

    def __init__(self) -> None:
        self.upper_RC = np.empty((CACHED, ROW), np.int64)


SCRATCH = Scratch()


@torch.no_grad()
def fingerprint(named_parameters: Named) -> str:
    """Return 64 hexadecimal digits that change with any bit, name, shape or dtype."""
    named = sorted(named_parameters, key=lambda item: item[0])
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    blocks = [block for _, tensor in named for block in _blocks(tensor)]
    on_cpu = [block for block in blocks if not block.is_cuda]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        done = pool.map(_sums, on_cpu)
        sums = [_sums_on_device(block) if block.is_cuda else next(done) for block in blocks]
    if sums:
        digest.update(torch.cat([x.to(sums[0].device) for x in sums]).cpu().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def same_weights(a: Named, b: Named) -> str | None:
    """Return None if both hold the same bits under the same names; else the first difference.

    A NaN equals itself here, and 0 is not −0.
    """
    first, second = dict(a), dict(b)
    for name in sorted(first.keys() | second.keys()):
        if name not in first or name not in second:
            return f"{name} is on one side alone"
        x, y = first[name], second[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"{name} is {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}"
        if not torch.equal(_bytes(x), _bytes(y).to(x.device)):
            return f"{name} has other values"
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _blocks(tensor: Tensor) -> Iterable[Tensor]:
    """Cut the tensor's bytes into pieces of whole rows of words, the last filled up with zeros."""
    raw = _bytes(tensor)
    for piece in torch.split(raw, 8 * ROW * BLOCK) if len(raw) else ():
        missing = -len(piece) % (8 * ROW)
        if missing or piece.storage_offset() % 8:
            piece = torch.cat([piece, piece.new_zeros(missing)])
        yield piece.view(torch.int64).view(-1, ROW)


def _sums(words_RC: Tensor) -> Tensor:
    """Sum each row's words, and their upper halves: [R, 2]."""
    # numpy multiplies and adds in one go; PyTorch would write every product to memory.
    array = words_RC.numpy()
    sums_R2 = np.empty((len(array), 2), np.int64)
    for at in range(0, len(array), CACHED):
        rows, sums = array[at : at + CACHED], sums_R2[at : at + CACHED]
        np.einsum("rc,c->r", rows, WEIGHTS, out=sums[:, 0])
        upper = np.right_shift(rows, 32, out=SCRATCH.upper_RC[: len(rows)])
        np.einsum("rc,c->r", upper, WEIGHTS, out=sums[:, 1])
    return torch.from_numpy(sums_R2)


def _sums_on_device(words_RC: Tensor) -> Tensor:
    weight_C = _weights_on(words_RC.device)
    return torch.stack([(x * weight_C).sum(1) for x in (words_RC, words_RC >> 32)], 1)


@cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(WEIGHTS).to(device)
