"""The seam of where environments run: answers come in any order, and slow ones hold nobody."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.envs.environment import Observation


@dataclass(frozen=True)
class Answered:
    """The answer of an environment, and what it says of itself now."""

    observation: Observation
    state: str | None = None  # `Environment.state`
    outcome: float | None = None  # `Environment.outcome`, asked for by `finish` alone
    seconds: float = 0.0  # that the call took, by the clock


@dataclass(frozen=True)
class Fault:
    """How a call of an environment failed: its episode is over."""

    kind: Literal["error", "timeout", "branched"]
    reason: str
    seconds: float = 0.0


class Worlds(ABC):
    """The environments of all open episodes. Only `answers` waits.

    An episode has one call under way at most, and one answer for each of `begin`, `step` and
    `finish`; behind a fault nothing of it is known any more.
    """

    tools: tuple[Mapping[str, Any], ...] = ()  # schemas that a chat template shows the policy
    claimed = False  # episodes begin when others claim them: one may wait for the end of another

    @abstractmethod
    def begin(self, episode: int, row: Mapping[str, Any]) -> None:
        """Make an environment and reset it with a row of the data."""

    @abstractmethod
    def step(self, episode: int, text: str) -> None:
        """Hand over a turn of the policy."""

    @abstractmethod
    def finish(self, episode: int) -> None:
        """Ask for the outcome, then give back what the episode holds."""

    @abstractmethod
    def drop(self, episode: int) -> None:
        """Give back what the episode holds; nothing of it is answered any more."""

    @abstractmethod
    def answers(self, wait: float) -> list[tuple[int, Answered | Fault]]:
        """Return answers that have come, waiting for one that long, in seconds, where none has."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything."""
