"""Guess the number: the answer to a guess is whether the secret is higher or lower.

A row has `secret`; its prompt may say the range. The generator `guess` makes one row for each
number of the range. How often the best player wins within so many guesses is `winnable`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import AsyncEnvironment
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError

NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")
MOST = 10**9


class GuessNumber(AsyncEnvironment):
    """A turn's last number is the guess. It ends with the right one, or with the last guess."""

    concurrent = True

    def __init__(self, low: int = 0, high: int = 15, guesses: int = 4, partial: bool = False):
        """Set up the game. `partial`: a lost one is worth the share of numbers ruled out."""
        if not (0 <= low < high <= MOST) or guesses < 1:
            raise WorldError(
                f"guess: low = {low}, high = {high}, guesses = {guesses} is no game. Take whole "
                f"numbers with 0 <= low < high <= {MOST:,}, and at least one guess."
            )
        self.low, self.high, self.guesses, self.partial = low, high, guesses, partial

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        secret = row.get("secret")
        if isinstance(secret, bool) or not isinstance(secret, int):
            raise WorldError(
                f"guess: the row's column `secret` is {secret!r}, no whole number. The generator "
                "`guess` makes such rows."
            )
        if not self.low <= secret <= self.high:
            raise WorldError(
                f"guess: the row's secret is {secret}, outside of {self.low} to {self.high}. Give "
                "the environment and the rows the same range."
            )
        self.secret, self.left, self.won = secret, self.guesses, False
        self.least, self.most = self.low, self.high
        return Observation()

    async def step(self, text: str) -> Observation:
        numbers = NUMBER.findall(text)
        self.left -= 1
        if not numbers:
            return self._answer("no number")
        guess = int(numbers[-1])
        if guess == self.secret:
            self.won = True
            return Observation(done=True)
        if guess < self.secret:
            self.least = max(self.least, guess + 1)
            return self._answer("higher")
        self.most = min(self.most, guess - 1)
        return self._answer("lower")

    def _answer(self, words: str) -> Observation:
        if not self.left:
            return Observation(done=True)
        return Observation(({"role": "user", "content": words},))

    async def outcome(self) -> float | None:
        if self.won or not self.partial:
            return float(self.won)
        return (self.high - self.low - (self.most - self.least)) / (self.high - self.low + 1)

    def state(self) -> str | None:
        """Return what is known of the secret, and what is left: all that matters from here on."""
        return f"{self.least}-{self.most}/{self.left}"


def winnable(low: int, high: int, guesses: int) -> float:
    """Return the share of secrets that the best player finds: 15 of 16 with four guesses.

    Each guess tells three things apart, and all but the last leave two of them: 2^guesses - 1.
    """
    size = high - low + 1
    return min(size, 2**guesses - 1) / size
