"""Stop strings, found in the text as it grows, across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from groupwise.model.formats.tokenizer import Tokenizer

INCOMPLETE = "\ufffd"  # what a character decodes to while some of its bytes are missing


class StopWatch:
    """Reads one completion token by token and says when a stop string is whole.

    Only the last tokens are decoded again at each step: those since a point where the text was
    known to be whole, and those before it up to the previous such point, because some tokenizers
    write a token differently at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.ids: list[int] = []
        self.context = self.settled = 0  # token counts: decoding starts here; the text holds these
        self.tail = ""  # the settled text's last characters, as many as a stop string may need

    def push(self, token: int) -> bool:
        """Add a token; tell whether a stop string ends in what it added."""
        self.ids.append(token)
        before = self.tokenizer.decode(self.ids[self.context : self.settled])
        fresh = self.tokenizer.decode(self.ids[self.context :])[len(before) :]
        text = self.tail + fresh
        found = any(end in text[-(len(fresh) + len(end) - 1) :] for end in self.stop if fresh)
        if not fresh.endswith(INCOMPLETE):
            self.context, self.settled = self.settled, len(self.ids)
            self.tail = text[-max(map(len, self.stop)) :]
        return found


def watch_of(tokenizer: Tokenizer, stop: Sequence[str], begun: Sequence[int]) -> StopWatch | None:
    """Return the watch of an answer that has begun with these tokens; None without stop strings."""
    if not stop:
        return None
    watch = StopWatch(tokenizer, stop)
    for token in begun:
        watch.push(token)
    return watch


def without_ends(text: str, ends: Sequence[str]) -> str:
    """Return the text without end tokens and white space behind it."""
    text = text.rstrip()
    while end := next((end for end in ends if end and text.endswith(end)), ""):
        text = text.removesuffix(end).rstrip()
    return text
