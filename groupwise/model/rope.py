"""Rotary position embeddings, in float32 until they meet the queries and keys."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from groupwise.model.config import ModelConfig, Rope


def rope_tables(
    config: ModelConfig, position_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, shaped [T, 1, W] to meet any number of heads."""
    frequency_F = frequencies(config.rope, config.head_dim, position_T.device)
    angle_TF = position_T[:, None].float() * frequency_F
    angle_TW = torch.cat((angle_TF, angle_TF), dim=-1)
    return angle_TW.cos().to(dtype)[:, None], angle_TW.sin().to(dtype)[:, None]


def rotate(x_THW: Tensor, cos_T1W: Tensor, sin_T1W: Tensor) -> Tensor:
    """Turn each pair (i, i + W/2) of a head by the token's angle i."""
    first, second = x_THW.chunk(2, dim=-1)
    return x_THW * cos_T1W + torch.cat((-second, first), dim=-1) * sin_T1W


@functools.lru_cache(maxsize=16)
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position for each pair. Made on the CPU: the same bits on every device."""
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
