"""Environments for the tests, a template in plain words, and worlds that answer in any order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from inline_worlds import InlineWorlds

from groupwise.config import Config
from groupwise.envs.environment import Call, Environment, Observation
from groupwise.envs.worlds import Answered, Fault
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.prepare.episodes import Turns
from groupwise.records import Message


class Words:
    """Turns in plain words: "[user: 3]" is what a user says; an end token ends the policy's own."""

    name, calls = "words", "tags"

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, stop
        self.end_ids = tokenizer.eos_ids

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        first, *rest = messages
        return (*self.tokenizer.encode(str(first["content"])), *(self.bridge(rest) if rest else ()))

    def bridge(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode("".join(f"[{x['content']}]" for x in messages)))

    def closing(self) -> tuple[int, ...]:
        return (self.end_ids[0],)


def says(text: str, **rest: Any) -> Observation:
    return Observation(({"role": "tool", "content": text},), **rest)


class Quiet(Environment):
    """Says nothing: an answer is one turn."""

    def reset(self, row: Mapping[str, Any]) -> Observation:
        return Observation()

    def step(self, text: str) -> Observation:
        return Observation()


class Adder(Environment):
    """Says how many characters it has heard in all, and ends when there were enough."""

    enough = 6

    def reset(self, row: Mapping[str, Any]) -> Observation:
        self.heard, self.turns = 0, 0
        return Observation()

    def step(self, text: str) -> Observation:
        self.heard += len(text)
        self.turns += 1
        call = Call("count", {"text": text}, "ok" if text else "failed")
        done = self.heard >= self.enough
        return says(str(self.heard % 10), reward=self.heard / 8, done=done, calls=(call,))

    def outcome(self) -> float | None:
        return 0.25

    def state(self) -> str | None:
        return f"heard {self.heard}"


class Shuffled(InlineWorlds):
    """Hands answers in late, and in an order of its own: as environments of any speed would."""

    def __init__(self, make: Callable[[], Environment], seed: int, hold: float = 0.5) -> None:
        super().__init__(make)
        self.random, self.hold = random.Random(seed), hold

    def answers(self, wait: float) -> list[tuple[int, Answered | Fault]]:
        self.random.shuffle(self.ready)
        kept = [each for each in self.ready if self.random.random() < self.hold]
        found = [each for each in self.ready if each not in kept]
        self.ready = kept
        return found


def answering(
    patch: pytest.MonkeyPatch, make: Callable[[], Environment], worlds: type = InlineWorlds
) -> None:
    """Let runs with turns.environment be answered by an environment in this process."""

    def turns_of(
        config: Config, tasks: Any, tokenizer: Tokenizer, context: int, tools: Any
    ) -> Turns | None:
        if not config.turns.used:
            return None
        return Turns(config, tokenizer, context, Words(tokenizer), lambda: worlds(make))

    patch.setattr("groupwise.prepare.setup.tools_of", lambda config: ())
    patch.setattr("groupwise.prepare.setup.turns_of", turns_of)
