"""Environments of tinker's cookbook: coroutines `initial_observation` and `step`.

Those that speak token ids do so through a renderer, which they are given. Here it is one that
keeps messages as they are, so that nothing is encoded twice: by the environment and by us.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.envs.answering import (
    AsyncEnvironment,
    chosen,
    has,
    messages_of,
    reward_of,
    settle,
    waits,
)
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError


class SaidTurn(list[Any]):
    """A turn in the place of its token ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class ShownMessages(list[Any]):
    """Messages in the place of a prompt's token ids."""


class KeepsMessages:
    """A renderer that renders nothing."""

    tokenizer = None

    def build_generation_prompt(self, messages: Sequence[Any], *_: Any, **__: Any) -> ShownMessages:
        return ShownMessages(messages)

    def get_stop_sequences(self) -> list[str]:
        return []

    def parse_response(self, action: Any) -> tuple[dict[str, str], bool]:
        return {"role": "assistant", "content": action.text}, True


class Tinker(AsyncEnvironment):
    """An `Env` or a `MessageEnv`, made anew for each row from the columns that it asks for."""

    def __init__(self, kind: Any, options: Mapping[str, Any]) -> None:
        self.kind, self.options = kind, options
        names = ("initial_observation", "step")
        self.concurrent = waits(*(getattr(kind, name, None) for name in names))
        self.inner: Any = None
        self.read = 0  # messages that the policy has seen, or written
        self.by_message = "message" in inspect.signature(kind.step).parameters

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        known = {**row, "renderer": KeepsMessages(), **self.options}
        self.inner = self.kind(**chosen(self.kind, known))
        found = await settle(self.inner.initial_observation())
        return self._new(found[0] if isinstance(found, tuple) else found)

    async def step(self, text: str) -> Observation:
        given = {"role": "assistant", "content": text} if self.by_message else SaidTurn(text)
        found = await settle(self.inner.step(given))
        said = found.next_messages if self.by_message else found.next_observation
        self.read += 1  # its own turn, which comes back with the rest
        new = () if found.episode_done else self._new(said).messages
        return Observation(new, reward_of(found.reward, "step"), bool(found.episode_done))

    def _new(self, said: Any) -> Observation:
        if not isinstance(said, list):
            raise WorldError(
                f"{type(self.inner).__name__} shows {type(said).__name__}, not what the renderer "
                "that it was given has made. Take `renderer` in __init__ and build prompts with "
                "it, or write a MessageEnv."
            )
        new, self.read = said[self.read :], len(said)
        return Observation(messages_of(list(new)))


def is_tinker(thing: Any) -> bool:
    return has(thing, "initial_observation", "step")
