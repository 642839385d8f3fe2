"""The seam of templates: token ids around the turns of the policy, never rendered anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from groupwise.records import Message


class TurnTemplate(Protocol):
    """Where an episode's own words stop and those of others begin, in token ids.

    The ids of an episode are opening, turn, bridge, turn, bridge, ..., turn: each part is encoded
    alone, and what stands before it is never encoded again.
    """

    name: str  # of the template, for errors
    end_ids: tuple[int, ...]  # each ends a turn of the policy and is the turn's last token
    stop: tuple[str, ...]  # texts that end a turn where no token does
    calls: str  # how calls of tools are written: a name of `tool_calls.reader`

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the first prompt, which ends where the policy's first turn begins."""
        ...

    def bridge(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return what stands between a turn's end and the beginning of the next.

        The turn has its end token or stop text; the messages are what was said to the policy.
        """
        ...

    def closing(self) -> tuple[int, ...]:
        """Return the tokens that end a turn which a limit has cut; no policy wrote them."""
        ...
