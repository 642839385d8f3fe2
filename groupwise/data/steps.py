"""Steps of an answer: where they end in its text, and which token is the last of each."""

from __future__ import annotations

from collections.abc import Sequence

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
    behind = [end + len(separator) for end in ends]
    return [max(at for at, start in enumerate(starts) if start < end) for end in behind]
