"""Steps of an answer: where they end in its text, and which token is the last of each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from groupwise.errors import DataError

SEPARATOR = "\n\n"  # between two steps, unless another is named


def step_ends(text: str, separator: str) -> list[int]:
    """Return where each step ends, in characters, without its separator; blank ones are none."""
    ends, start = [], 0
    for piece in text.split(separator):
        if piece.strip():
            ends.append(start + len(piece))
        start += len(piece) + len(separator)
    return ends


def last_tokens(starts: Sequence[int], ends: Sequence[int], separator: str) -> list[int]:
    """Return the last token of each step, its separator included; `starts` are those of tokens."""
    # Sorted, as tokens without a text begin nowhere: one search for each step, however many.
    order = sorted(range(len(starts)), key=starts.__getitem__)
    begins = [starts[at] for at in order]
    last = list(accumulate(order, max))
    found = [bisect_left(begins, end + len(separator)) for end in ends]
    if 0 in found:
        raise DataError(
            "A step of the text has no token of its own: the tokenizer leaves all of it out. Take "
            "the text out, or a model whose tokenizer reads it."
        )
    return [last[number - 1] for number in found]
