"""Prompts by their running pass rates: those that are too easy or too hard are drawn less often.

A pass over the data still comes to every prompt; at its turn one that teaches little is passed over
now and then. So draw numbers stay numbers of passes, a sample is the same with a curriculum and
without, and a prompt that has become easy, or learnable, is found out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.config.fields import CurriculumSettings

Bucket = Literal["easy", "hard", "between"]


@dataclass
class Curriculum:
    """The running pass rates of the prompts of a source, and how often each is drawn by them."""

    rule: CurriculumSettings
    rates: dict[int, float] = field(default_factory=dict)  # by the number of the row
    passed_over: int = 0  # turns of prompts that were not drawn, so far

    def note(self, prompt: int, share: float) -> None:
        """Take in the share of a group that passed."""
        before = self.rates.get(prompt, share)
        self.rates[prompt] = before + self.rule.newest * (share - before)

    def bucket(self, prompt: int) -> Bucket | None:
        """Return where a prompt stands; None where it was never answered."""
        rate = self.rates.get(prompt)
        if rate is None:
            return None
        if rate >= self.rule.above:
            return "easy"
        return "hard" if rate <= self.rule.below else "between"

    def admits(self, prompt: int, turn: str) -> bool:
        """Tell whether a prompt is drawn at its turn: by its rate and the turn alone."""
        shares = {"easy": self.rule.easy, "hard": self.rule.hard}
        share = shares.get(self.bucket(prompt) or "", 1.0)
        if share == 1.0 or random.Random(f"curriculum/{turn}/{prompt}").random() < share:
            return True
        self.passed_over += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return what a resumed run must know, as JSON."""
        rates = {str(prompt): rate for prompt, rate in self.rates.items()}
        return {"rates": rates, "passed_over": self.passed_over}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` returned; nothing is known of a run that began without one."""
        self.rates = {int(prompt): rate for prompt, rate in state.get("rates", {}).items()}
        self.passed_over = state.get("passed_over", 0)


def measures(curricula: Sequence[Curriculum]) -> dict[str, float]:
    """Measure what is known of the prompts so far, and how many turns were passed over."""
    rates = [(each.rule, rate) for each in curricula for rate in each.rates.values()]
    if not rates:
        return {}
    return {
        "curriculum/known": float(len(rates)),
        "curriculum/easy_share": sum(rate >= rule.above for rule, rate in rates) / len(rates),
        "curriculum/hard_share": sum(rate <= rule.below for rule, rate in rates) / len(rates),
        "curriculum/passed_over": float(sum(each.passed_over for each in curricula)),
    }
