"""Environments and tools that a configuration names: checked before a model loads, opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.envs.builtin import ENVIRONMENTS, TOOLS
from groupwise.envs.shapes.mcp import PREFIX
from groupwise.envs.workers import ProcessWorlds
from groupwise.envs.worlds import Worlds
from groupwise.errors import WorldError, nearest


@dataclass(frozen=True)
class WorldSetup:
    """The parts of an episode's world, and how long they may take."""

    environment: str = ""  # "guess", "mine.py:Env", "package.module:Env"; "": tools alone
    tools: tuple[str, ...] = ()  # "calculator", "python", "mine.py:search", "mcp:COMMAND"
    options: Mapping[str, Any] = field(default_factory=dict)  # of the environment's constructor
    reader: str = ""  # how calls are written: a name of `tool_calls.reader`, or "mine.py:read"
    timeout: float = 30.0  # seconds that a call may take
    workers: int = 0  # processes that work at the same time; 0: one per core
    parallel_calls: int = 4  # that one turn may have


def open_worlds(setup: WorldSetup) -> Worlds:
    """Open what the setup names. Raises `WorldError` where it can't be used as it is."""
    worlds = ProcessWorlds(found(setup))
    if worlds.tools and not setup.reader:
        worlds.close()
        raise WorldError(
            "There are tools, and nothing says how calls of them are written. Name a reader."
        )
    return worlds


def check_worlds(setup: WorldSetup) -> tuple[Mapping[str, Any], ...]:
    """Load and make all of it once, and return the schemas of its tools.

    How calls are written need not be known yet.
    """
    worlds = ProcessWorlds(found(setup))
    worlds.close()
    return worlds.tools


def found(setup: WorldSetup) -> WorldSetup:
    """Return the setup with the places of its files. Refuses names of nothing."""
    if not setup.environment and not setup.tools:
        raise WorldError(
            "There is neither an environment nor a tool, so nothing would answer the policy. Name "
            "an environment, such as guess or mine.py:Env, or tools, such as calculator."
        )
    if not setup.timeout > 0:
        raise WorldError(f"A call can't take {setup.timeout!r} seconds. Make the limit positive.")
    if setup.parallel_calls < 1:
        raise WorldError("A turn needs room for a call: make parallel_calls at least 1.")
    environment = placed(setup.environment, "environment", ENVIRONMENTS)
    tools = tuple(placed(each, "tool", TOOLS) for each in setup.tools)
    reader = placed(setup.reader, "", ()) if ":" in setup.reader else setup.reader
    if setup.options and not environment:
        raise WorldError(
            f"The options {dict(setup.options)} are an environment's, and there are tools alone. "
            "Write a tool's own behind its name: search(folder='docs')."
        )
    return replace(setup, environment=environment, tools=tools, reader=reader)


def placed(text: str, kind: str, known: Any) -> str:
    """Return a name with the whole path of its file."""
    if not text or (kind == "tool" and text.startswith(PREFIX)):
        return text
    whole, bracket, options = text.partition("(")
    place, colon, name = whole.rpartition(":")
    if not colon:
        if whole not in known:
            raise WorldError(
                f"There is no built-in {kind} {whole!r}. {nearest(whole, known)} One of your own "
                "is FILE.py:NAME, or package.module:NAME."
            )
        return text
    if not name.isidentifier():
        raise WorldError(f"{text!r} names nothing behind its colon. Write FILE.py:NAME.")
    if not place.endswith(".py") and os.sep not in place:
        return text
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise WorldError(
            f"There is no file {place!r} to take {name} from. Paths are relative to {Path.cwd()}."
        )
    return f"{file}:{name}{bracket}{options}"
