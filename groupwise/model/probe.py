"""A fixed probe: what a policy says of the same tokens, on both sides of a transfer of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.errors import ModelError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.model.layers.attention import packed, packed_positions
from groupwise.model.layers.head import HeadQuery
from groupwise.model.layers.transformer import PolicyModel

Ids = tuple[int, ...]
# Words, and tokens drawn by a fixed seed, which reach the whole vocabulary.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "What is 12 + 30? Think step by step, then give the answer.",
)
DRAWN, DRAWN_TOKENS, MOST_TOKENS = 2, 48, 64


def probe_of(tokenizer: Tokenizer, vocabulary: int) -> tuple[Ids, ...]:
    """Return the probe of a vocabulary: always the same."""
    found = []
    for text in TEXTS:
        try:
            ids = tuple(tokenizer.encode(text))[:MOST_TOKENS]
        except ModelError:  # an alphabet without these characters
            continue
        found += [ids] if len(ids) > 1 else []
    generator = torch.Generator().manual_seed(0)
    drawn_NT = torch.randint(vocabulary, (DRAWN, DRAWN_TOKENS), generator=generator)
    return (*found, *(tuple(row) for row in drawn_NT.tolist()))


@torch.no_grad()
def logp_of_ids(model: PolicyModel, ids: Ids, temperature: float = 1.0) -> Tensor:
    """Return the log-probability of every token but the first, on the CPU."""
    device = model.head_weight.device
    token_T = torch.tensor(ids, device=device)
    query = HeadQuery(
        torch.arange(len(ids) - 1, device=device), token_T[1:], temperature=temperature
    )
    position_T, attend = packed_positions([len(ids)], device), packed([len(ids)], device)
    return model.predict(token_T, position_T, attend, query).logp_T.float().cpu()


def gap_of(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Return |Δ log p| of every token that was scored; 0 where both have the same, or none."""
    a_T, b_T = torch.cat(list(one)), torch.cat(list(other))
    same_T = (a_T == b_T) | (a_T.isnan() & b_T.isnan())
    return torch.where(same_T, 0.0, (a_T - b_T).abs())
