"""Random numbers as a pure function of what they are for, never of what else is in the batch.

A key of 128 bits is hashed from run seed, stream, prompt id, draw and sample index; position (and
for noise the token id) count within it. The generator is Philox-4x32 with 10 rounds (Salmon et
al. 2011), in integers, so that every device gives the same bits.
"""

from __future__ import annotations

import hashlib
import struct

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
LOW = 0xFFFFFFFF

Key = tuple[int, int, int, int]  # of 32 bits each


def key(
    seed: int, stream: str, prompt_id: int, draw: int, sample: int, purpose: str = "token"
) -> Key:
    """Return the key of a sample's random numbers: what it is for, and nothing else, decides it."""
    text = f"{purpose} {seed} {stream} {prompt_id} {draw} {sample}"
    words: Key = struct.unpack("<4I", hashlib.blake2b(text.encode(), digest_size=16).digest())
    return words


def uniforms(key_N4: Tensor, positions: int) -> Tensor:
    """Return [N, positions] in [0, 1), of 53 bits each, two from every call of the generator."""
    call_C = torch.arange(-(-positions // 2), device=key_N4.device)
    word_4NC = _words(key_N4, call_C, torch.zeros_like(call_C))
    pair_NC2 = torch.stack([_fraction(*word_4NC[:2]), _fraction(*word_4NC[2:])], dim=-1)
    return pair_NC2.flatten(1)[:, :positions]


def normals(key_N4: Tensor, position_N: Tensor, width: int) -> Tensor:
    """Return [N, width] normal numbers in float32: four by Box and Muller from every call."""
    call_C = torch.arange(-(-width // 4), device=key_N4.device)
    word_4NC = _words(key_N4, call_C, position_N[:, None])
    uniform = [(word.double() + 0.5) * 2.0**-32 for word in word_4NC]
    parts = []
    for radius, angle in (uniform[:2], uniform[2:]):
        size_NC, turn_NC = (-2 * radius.log()).sqrt(), 2 * torch.pi * angle
        parts += [size_NC * turn_NC.cos(), size_NC * turn_NC.sin()]
    return torch.stack(parts, dim=-1).flatten(1)[:, :width].float()


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 bits from a counter of four and a key of two, all in int64 tensors."""
    a, b, c, d = counter
    left, right = key
    for _ in range(ROUNDS):
        # Products wrap at 64 bits, which keeps both halves right once the sign is masked off.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (
            ((second >> 32) & LOW) ^ b ^ left,
            second & LOW,
            ((first >> 32) & LOW) ^ d ^ right,
            first & LOW,
        )
        left, right = (left + WEYL[0]) & LOW, (right + WEYL[1]) & LOW
    return a, b, c, d


def _words(key_N4: Tensor, first_C: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Half of the key is the generator's, the other half stands in the counter."""
    key_0, key_1, key_2, key_3 = key_N4[:, :, None].unbind(1)
    return philox((first_C, second, key_2, key_3), (key_0, key_1))


def _fraction(high: Tensor, low: Tensor) -> Tensor:
    return ((high >> 5).double() * 2.0**26 + (low >> 6).double()) * 2.0**-53
