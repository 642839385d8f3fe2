"""Rotary position embeddings, in float32 until they meet the queries and keys."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from groupwise.model.config import ModelConfig, Rope


def rope_tables(config: ModelConfig, position_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of every token's angles, [T, W/2] in float32."""
    frequency_F = frequencies(config.rope, config.head_dim, position_T.device)
    angle_TF = position_T[:, None].float() * frequency_F
    return angle_TF.cos(), angle_TF.sin()


def rotate(x_THW: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Tensor:
    """Turn each pair (i, i + W/2) of a head by the token's angle i.

    In half precision the angles, both products and the sum are rounded, as transformers does.
    """
    first, second = x_THW.chunk(2, dim=-1)
    cos_T1F, sin_T1F = (x_TF.to(x_THW.dtype)[:, None] for x_TF in (cos_TF, sin_TF))
    turned = (first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F)
    return torch.cat(turned, dim=-1)


@functools.cache
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position for each pair. Made on the CPU: the same bits on every device.

    Kept for good: captured decoding steps read them where they lie.
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency_F = 1.0 / (rope.theta**exponent_F)
    if rope.kind == "linear":
        frequency_F = frequency_F / rope.factor
    elif rope.kind == "llama3":
        frequency_F = _stretch_slow_ones(frequency_F, rope)
    return frequency_F.to(device)


def _stretch_slow_ones(frequency_F: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: slow frequencies by the factor, fast ones not, a ramp between."""
    wavelength_F = 2 * math.pi / frequency_F
    turns_F = rope.original_positions / wavelength_F
    ramp_F = (turns_F - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp_F = ramp_F.clamp(0, 1)
    return (1 - ramp_F) * frequency_F / rope.factor + ramp_F * frequency_F
