"""Sub-sentences for ratios per segment: split where a token ends with punctuation or a newline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ENDS = tuple(".,;:!?\n。，；：！？")


def split_at_punctuation(tokens: Sequence[Sequence[str]], width: int) -> Tensor:
    """Texts of the tokens, row by row -> segment_NT: 0, 1, ... in order, padded with the last.

    A token that ends with punctuation (spaces aside) or contains a newline closes its segment.
    """
    segment_NT = torch.zeros(len(tokens), width, dtype=torch.long)
    for row, texts in enumerate(tokens):
        number = 0
        for t in range(width):
            segment_NT[row, t] = number
            if t < len(texts) and ("\n" in texts[t] or texts[t].rstrip(" ").endswith(ENDS)):
                number += 1
    return segment_NT
