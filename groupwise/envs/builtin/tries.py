"""Several tries at a question with a known answer: each is told right or wrong.

A row has `answer`, a number or a text. The reward is 1 for a right answer at the first try, and
less by `cost` for each wrong one before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from groupwise.envs.answering import AsyncEnvironment
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError
from groupwise.graders import answers
from groupwise.graders.mathematics import numbers


class Tries(AsyncEnvironment):
    """Numbers are compared exactly where the answer is one, texts as they stand elsewhere."""

    concurrent = True

    def __init__(self, tries: int = 5, cost: float = 0.0):
        if tries < 1 or not 0 <= cost * (tries - 1) <= 1:
            raise WorldError(
                f"tries: tries = {tries} and cost = {cost:g} leave no reward in 0 to 1 for the "
                "last try. Take at least one try, and a smaller cost."
            )
        self.tries, self.cost = tries, cost

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        if row.get("answer") in (None, ""):
            raise WorldError(
                "tries: the row has no answer to compare with. Name its column (data.answer_key)."
            )
        self.answer, self.used, self.won = str(row["answer"]), 0, False
        return Observation()

    async def step(self, text: str) -> Observation:
        self.used += 1
        if right(text, self.answer):
            self.won = True
            return Observation(done=True)
        if self.used == self.tries:
            return Observation(done=True)
        left = self.tries - self.used
        said = f"That is wrong. Tries left: {left}. Think again and answer."
        return Observation(({"role": "user", "content": said},))

    async def outcome(self) -> float | None:
        return 1.0 - self.cost * (self.used - 1) if self.won else 0.0


def right(text: str, answer: str) -> bool:
    """Return whether a turn gives the answer, thoughts cut off."""
    said = answers.final(text)
    gold = numbers.gold_number(answer)
    if gold is None:
        return bool(answers.exact(said, answer))
    return bool(numbers.number(said, gold))
