"""The seam of environments: what answers the policy between its turns, one instance an episode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # processes of environments come up faster without what it loads
    from groupwise.records import Message

# "refused": a call that does not parse, names no tool, or is one too many: the policy is told.
CallStatus = Literal["ok", "failed", "timeout", "refused"]


@dataclass(frozen=True)
class Call:
    """A tool call of the policy, and how it went."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    status: CallStatus = "ok"
    seconds: float = 0.0


@dataclass(frozen=True)
class Observation:
    """The answer of an environment to a turn of the policy, or its first words."""

    messages: tuple[Message, ...] = ()  # read next by the policy: {"role": "tool", "content": "4"}
    reward: float | None = None  # of the turn that it answers; None: nothing is said of this turn
    done: bool = False  # the episode ends here: no message of it is read any more
    calls: tuple[Call, ...] = ()  # what the turn called, in its order
    # Of a program that asks the policy itself: its first words are the whole prompt, and these are
    # the tools that it shows. None: they stand behind the row's prompt.
    tools: tuple[Mapping[str, Any], ...] | None = None


class Environment(ABC):
    """The world of one episode.

    Whatever shape users write theirs in is wrapped into this one, and nothing else is known to
    those who run episodes. All of it is called in one process, which may be killed when a call
    takes too long.
    """

    tools: tuple[Mapping[str, Any], ...] = ()  # schemas that a chat template shows the policy

    @abstractmethod
    def reset(self, row: Mapping[str, Any]) -> Observation:
        """Begin an episode with a row of the data; its messages stand behind the row's prompt."""

    @abstractmethod
    def step(self, text: str) -> Observation:
        """Answer a turn of the policy, given as its words without the token that ended it."""

    def outcome(self) -> float | None:
        """Return a reward of the whole episode, beside those of turns; None: there is none."""
        return None

    def state(self) -> str | None:
        """Return a name of the present state, for methods that group turns by it; None: no name."""
        return None

    def close(self) -> None:
        """Give back what the episode holds; called once, whatever happened."""
        return None
