"""Sub-sentences for ratios per segment: split where a token ends with punctuation or a newline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ENDS = tuple(".,;:!?\n。，；：！？")


def split_at_punctuation(
    tokens: Sequence[Sequence[str]], width: int, mask_NT: Tensor | None = None
) -> Tensor:
    """Turn texts of tokens, row by row, into segment_NT: 0, 1, ... in order, padded with the last.

    A token that ends with punctuation (spaces aside) or contains a newline closes its segment. So
    does the last token of the policy before others write (`mask_NT`): two turns are two sentences.
    """
    segment_NT = torch.zeros(len(tokens), width, dtype=torch.long)
    for row, texts in enumerate(tokens):
        number = 0
        own_T = [True] * width if mask_NT is None else mask_NT[row].tolist()
        for t in range(width):
            segment_NT[row, t] = number
            if t >= len(texts):
                continue
            others_follow = t + 1 < len(texts) and own_T[t] and not own_T[t + 1]
            if closes_sentence(texts[t]) or others_follow:
                number += 1
    return segment_NT


def closes_sentence(text: str) -> bool:
    """Tell whether a token ends with punctuation (spaces aside) or contains a newline."""
    return "\n" in text or text.rstrip(" ").endswith(ENDS)
