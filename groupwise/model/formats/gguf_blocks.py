"""The block formats of GGUF tensors, unpacked to float32 exactly as llama.cpp's reference does.

A tensor is a run of blocks: a scale (and perhaps an offset) in half precision, and the small
integers of 32 or 256 weights. Axes: `_B` block, the rest within it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# GGUF's number of a type -> its name, weights in a block, bytes in a block
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


def unpack(kind: int, data: Bytes) -> Floats:
    """Return the weights of a tensor's bytes, flat."""
    name, _, size = TYPES[kind]
    return _UNPACK[name](data.reshape(-1, size)).reshape(-1)


def _f32(block: Bytes) -> Floats:
    return block.view("<f4").astype(np.float32)


def _f16(block: Bytes) -> Floats:
    return block.view("<f2").astype(np.float32)


def _bf16(block: Bytes) -> Floats:
    return (block.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(block: Bytes) -> Floats:
    scale_B1, number_B = _f16(block[:, :2]), block[:, 2:].view(np.int8)
    return scale_B1 * number_B.astype(np.float32)


def _q4_0(block: Bytes) -> Floats:
    number_B = _halves(block[:, 2:], 16).astype(np.int8) - np.int8(8)
    return _f16(block[:, :2]) * number_B.astype(np.float32)


def _q4_1(block: Bytes) -> Floats:
    number_B = _halves(block[:, 4:], 16).astype(np.float32)
    return _f16(block[:, :2]) * number_B + _f16(block[:, 2:4])


def _q5_0(block: Bytes) -> Floats:
    number_B = _halves(block[:, 6:], 16) | _fifth_bits(block[:, 2:6])
    return _f16(block[:, :2]) * (number_B.astype(np.int8) - np.int8(16)).astype(np.float32)


def _q5_1(block: Bytes) -> Floats:
    number_B = _halves(block[:, 8:], 16) | _fifth_bits(block[:, 4:8])
    return _f16(block[:, :2]) * number_B.astype(np.float32) + _f16(block[:, 2:4])


def _q4_k(block: Bytes) -> Floats:
    number_B = _halves(block[:, 16:], 32).reshape(-1, 8, 32)
    return _scaled_in_eighths(block, number_B)


def _q5_k(block: Bytes) -> Floats:
    low_B = _halves(block[:, 48:], 32).reshape(-1, 8, 32)
    high_B = (block[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & np.uint8(1)
    return _scaled_in_eighths(block, low_B | (high_B << np.uint8(4)))


def _q6_k(block: Bytes) -> Floats:
    low_B = _halves(block[:, :128], 64).reshape(-1, 8, 32)
    shift = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high_B = (block[:, 128:192].reshape(-1, 2, 1, 32) >> shift) & np.uint8(3)
    number_B = (low_B | (high_B.reshape(-1, 8, 32) << np.uint8(4))).astype(np.int8) - np.int8(32)
    scale_B = _f16(block[:, 208:210]) * block[:, 192:208].view(np.int8).astype(np.float32)
    return scale_B[:, :, None] * number_B.reshape(-1, 16, 16).astype(np.float32)


def _halves(packed: Bytes, run: int) -> Bytes:
    """Split runs of bytes into their low halves, then their high halves."""
    runs = packed.reshape(len(packed), -1, 1, run)
    both = (runs >> np.array([0, 4], dtype=np.uint8)[:, None]) & np.uint8(15)
    return both.reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    word_B1 = np.ascontiguousarray(packed).view("<u4")
    bit = (word_B1 >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    return bit.astype(np.uint8) << np.uint8(4)


def _scaled_in_eighths(block: Bytes, number_B: Bytes) -> Floats:
    """Return scale · q − offset, with a 6-bit scale and offset for every eighth of the block.

    The twelve bytes hold four scales, four offsets (six bits each), then the low halves of the
    other four of both; their upper two bits sit on top of the first eight bytes.
    """
    first, second, third = (block[:, 4 + i : 8 + i] for i in (0, 4, 8))
    scale = [first & 0x3F, (third & 0x0F) | ((first >> 2) & 0x30)]
    offset = [second & 0x3F, (third >> 4) | ((second >> 2) & 0x30)]
    scale_B8 = _f16(block[:, :2]) * np.concatenate(scale, axis=1).astype(np.float32)
    offset_B8 = _f16(block[:, 2:4]) * np.concatenate(offset, axis=1).astype(np.float32)
    return scale_B8[:, :, None] * number_B.astype(np.float32) - offset_B8[:, :, None]


_UNPACK: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
