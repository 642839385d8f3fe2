"""The speed of a model on this machine, by a short trial: for one that is slower than others."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from groupwise.model.layers.attention import shared_positions
from groupwise.model.layers.cache import DecodeAttention, KeyValueCache
from groupwise.model.layers.transformer import Policy

ROWS, TOKENS = 16, 16  # sequences, and tokens of each


def throughput_line(model: Policy) -> str:
    """Say in words how many tokens a second are sampled and scored."""
    sampled, scored = measure(model)
    return (
        f"{sampled:,.0f} tokens/s sampled {ROWS} at a time, {scored:,.0f} tokens/s scored, "
        "measured just now. Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, OLMoE and Mixtral run with "
        "groupwise's own, which have kernels on a GPU."
    )


@torch.no_grad()
def measure(model: Policy) -> tuple[float, float]:
    """Measure tokens a second: of steps that give every row its next, and of a pass over packs."""
    device, lengths = model.head_weight.device, [TOKENS] * ROWS
    token_T = torch.zeros(ROWS * TOKENS, dtype=torch.long, device=device)
    behind: list[list[int]] = [[] for _ in lengths]
    position_T = shared_positions(lengths, behind, device)
    cache = KeyValueCache(model.config, ROWS, 2 * TOKENS, model.head_weight.dtype, device)
    held_N = torch.full((ROWS,), TOKENS, device=device)

    def step() -> None:
        model(token_T[:ROWS], held_N, DecodeAttention(cache, held_N, TOKENS))

    def score() -> None:
        model(token_T, position_T, model.ops.attention(lengths, behind, device))

    return ROWS / _seconds(step, device), ROWS * TOKENS / _seconds(score, device)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Time the faster of two runs, after one that warms up."""
    found = []
    for _ in range(3):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])
