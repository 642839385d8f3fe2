"""Wordle: find a word of five letters; each guess is told which of its letters stand where.

A row has `word`. The answer to a guess has a sign for each letter: G, the letter stands here; Y, it
stands elsewhere; -, it is not in the word (or not as often).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import AsyncEnvironment
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError

WORD = re.compile(r"(?<![A-Za-z])[A-Za-z]{5}(?![A-Za-z])")


class Wordle(AsyncEnvironment):
    """A turn's last word of five letters is the guess. A turn without one costs a guess, too."""

    concurrent = True

    def __init__(self, guesses: int = 6, partial: bool = False):
        """Set up the game. `partial`: a lost one is worth a tenth for each letter in place."""
        if guesses < 1:
            raise WorldError(f"wordle: guesses = {guesses} is no game. Allow at least one.")
        self.guesses, self.partial = guesses, partial

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        word = row.get("word")
        if not isinstance(word, str) or not WORD.fullmatch(word):
            raise WorldError(
                f"wordle: the row's column `word` is {word!r}, no word of five letters. The "
                "generator `wordle` makes such rows."
            )
        self.word, self.left, self.best, self.told = word.lower(), self.guesses, 0, ""
        return Observation()

    async def step(self, text: str) -> Observation:
        found = WORD.findall(text)
        self.left -= 1
        if not found:
            words = "no word of five letters"
        else:
            signs = compared(found[-1].lower(), self.word)
            self.best = max(self.best, signs.count("G"))
            words = f"{found[-1].lower()}: {signs}"
            self.told += f"{words}\n"
        if self.best == len(self.word) or not self.left:
            return Observation(done=True)
        return Observation(({"role": "user", "content": f"{words}, {self.left} left"},))

    async def outcome(self) -> float | None:
        if self.best == len(self.word):
            return 1.0
        return self.best / (2 * len(self.word)) if self.partial else 0.0

    def state(self) -> str | None:
        return f"{self.told}{self.left}"


def compared(guess: str, word: str) -> str:
    """Return a sign for each letter of the guess, told no more often than it is in the word."""
    left = Counter(w for g, w in zip(guess, word, strict=True) if g != w)
    signs = []
    for mine, right in zip(guess, word, strict=True):
        if mine == right:
            signs.append("G")
        elif left[mine]:
            left[mine] -= 1
            signs.append("Y")
        else:
            signs.append("-")
    return "".join(signs)
