"""One task led in three ways: by an environment, by a program, and by a program outside."""

from __future__ import annotations

import random
import time
from typing import Any

from toy_worlds import ask

ENOUGH = 3  # turns at most
FIRST = "go"


def answer_to(text: str, turn: int) -> str:
    """What the policy is told; "" where the episode is over."""
    return "" if turn == ENOUGH or "1" in text else f"{len(text) % 10}"


def reward_of(turns: int) -> float:
    return turns / ENOUGH


class Counts:
    """As an environment."""

    def reset(self, prompt: str) -> str:
        self.turn = 0
        self.worth: float | None = None
        return FIRST

    def step(self, text: str) -> Any:
        self.turn += 1
        said = answer_to(text, self.turn)
        if not said:
            self.worth = reward_of(self.turn)
        return {"text": said, "done": not said}

    def get_reward(self) -> float | None:
        return self.worth


def leads(endpoint: Any, prompt: str) -> float:
    """As a program."""
    messages = [{"role": "user", "content": prompt}, {"role": "user", "content": FIRST}]
    turn, said = 0, FIRST
    while said:
        messages.append(ask(endpoint, messages))
        turn += 1
        said = answer_to(messages[-1]["content"], turn)
        messages.append({"role": "user", "content": said})
    return reward_of(turn)


def late(endpoint: Any, prompt: str) -> float:
    """The same, at a speed of its own."""
    time.sleep(random.SystemRandom().random() / 20)
    return leads(endpoint, prompt)


def branches(endpoint: Any, prompt: str) -> float:
    """Forgets what was said in every second episode that gets as far."""
    messages = [{"role": "user", "content": prompt}]
    said = ask(endpoint, messages)["content"]
    if len(said) % 2:
        ask(endpoint, [*messages, {"role": "user", "content": "again"}])
    return 1.0
