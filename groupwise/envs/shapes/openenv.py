"""Clients of OpenEnv: `reset`, `step(action)` and `state`, with results that have an observation,
a reward and done.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any

from groupwise.envs.answering import (
    AsyncEnvironment,
    as_text,
    class_names,
    has,
    messages_of,
    reward_of,
    settle,
    waits,
)
from groupwise.envs.environment import Observation
from groupwise.errors import WorldError

BESIDE = ("done", "reward", "metadata")  # of an observation: nothing that a policy reads


class OpenEnv(AsyncEnvironment):
    """A client, or an environment without a server, whose actions are records.

    A turn is the one field that its action needs; of one with several, a JSON object.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.action = action_of(inner)
        asynchronous = waits(*(getattr(inner, name, None) for name in ("reset", "step")))
        self.concurrent = asynchronous or "EnvClient" in class_names(inner)

    async def reset(self, row: Mapping[str, Any]) -> Observation:
        return Observation(self._read(await settle(self.inner.reset())).messages)

    async def step(self, text: str) -> Observation:
        try:
            action = made(self.action, text)
        except ValueError as error:
            said = f"Error: this is no {self.action.__name__}: {error}"
            return Observation(messages_of(said))
        return self._read(await settle(self.inner.step(action)))

    def _read(self, found: Any) -> Observation:
        """Read a result around an observation, or an observation with reward and done itself."""
        said = getattr(found, "observation", found)
        if not hasattr(found, "done") or not hasattr(found, "reward"):
            raise WorldError(
                f"{type(self.inner).__name__} returned {str(found)[:80]!r}. With `state`, it is "
                "one of OpenEnv's, and returns something with observation, reward and done."
            )
        reward = reward_of(found.reward, "step")
        return Observation(messages_of(observed(said)), reward, bool(found.done))

    async def close(self) -> None:
        if has(self.inner, "close"):
            await settle(self.inner.close())


def is_openenv(thing: Any) -> bool:
    kind = thing if isinstance(thing, type) else type(thing)
    return has(kind, "reset", "step") and hasattr(kind, "state") and action_of(kind) is not dict


def action_of(thing: Any) -> Any:
    """Return the class of a client's actions, by its parameters or the types of `step`.

    `dict` where nothing says one.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    for each in kind.__mro__:
        for base in getattr(each, "__orig_bases__", ()):
            inner = typing.get_args(base)
            if len(inner) == 3 and _names(inner[0]):
                return inner[0]
    try:
        hints = typing.get_type_hints(getattr(kind, "step", None))
    except (NameError, TypeError):
        return dict
    found = hints.get("action")
    return found if found is not None and _names(found) else dict


def _names(kind: Any) -> dict[str, bool]:
    """Return the fields of a record, and whether each must be given."""
    if hasattr(kind, "model_fields"):
        return {key: each.is_required() for key, each in kind.model_fields.items()}
    if is_dataclass(kind):
        return {
            each.name: each.default is MISSING and each.default_factory is MISSING
            for each in fields(kind)
        }
    return {}


def made(action: Any, text: str) -> Any:
    """Make an action of a turn. Raises ValueError where it is none."""
    needed = [key for key, required in _names(action).items() if required]
    if len(needed) == 1:
        hints = typing.get_type_hints(action)
        kind = hints.get(needed[0], str)
        value = kind(text.strip()) if kind in (int, float) else text
        return action(**{needed[0]: value})
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError("write a JSON object")
    try:
        return action(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None


def observed(said: Any) -> Any:
    """Return what an observation says: its one text, or all its fields but reward and done."""
    if said is None or isinstance(said, (str, list)):
        return said
    if hasattr(said, "model_dump"):
        known = said.model_dump()
    elif is_dataclass(said) and not isinstance(said, type):
        known = asdict(said)
    else:
        known = said if isinstance(said, Mapping) else {"observation": said}
    told = {key: each for key, each in known.items() if key not in BESIDE and each is not None}
    values = list(told.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else as_text(told)
