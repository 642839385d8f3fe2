"""Loading of what a setup names: recognised by its shape and wrapped, in a worker."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

from groupwise.common.forked import one_process
from groupwise.common.user_files import make_importable
from groupwise.envs import builtin
from groupwise.envs.answering import AsyncEnvironment, PlainWorld, has
from groupwise.envs.environment import Environment
from groupwise.envs.shapes.by_column import ByColumn, MadeOfRow
from groupwise.envs.shapes.gymnasium import Gymnasium, TextArena, is_gymnasium, is_textarena
from groupwise.envs.shapes.mcp import PREFIX, MCPTools
from groupwise.envs.shapes.openenv import OpenEnv, is_openenv
from groupwise.envs.shapes.programs import Outside, ProgramWorld, is_program
from groupwise.envs.shapes.texts import House, SkyRL
from groupwise.envs.shapes.tinker import Tinker, is_tinker
from groupwise.envs.shapes.tools import MethodTools, WithTools, has_method_tools, methods_of
from groupwise.envs.shapes.verifiers import Verifiers, is_verifiers
from groupwise.envs.tool_calls import Asked, CallReader, Misread
from groupwise.envs.toolbox import Tool, Toolbox, tool
from groupwise.errors import WorldError, nearest

if TYPE_CHECKING:
    from groupwise.envs.opening import WorldSetup

MAKER = "load_environment"  # makes one that all episodes share: called once
PACKAGE = str(Path(__file__).resolve().parents[1])
SHAPES = """
  reset(self, **row), step(self, text) -> text | (text, reward, done) | dict
  reset(self, **row) and public methods with types and docstrings: the tools (TRL)
  init(self, prompt), step(self, action) -> observations, reward, done (skyrl-gym)
  reset(self, seed=None), step(self, action) -> five values (Gymnasium, GEM)
  reset, step, get_observation, close (TextArena)
  reset, step(self, action: Action), state (OpenEnv)
  async initial_observation, step (tinker)
  MultiTurnEnv or ToolEnv (verifiers)
  def solve(endpoint, **row) -> reward, which asks the policy at endpoint.base_url
  a subclass of groupwise.envs.environment.Environment
""".rstrip()


class Maker:
    """A setup that is loaded: it makes the world of an episode, again and again."""

    def __init__(self, setup: WorldSetup) -> None:
        self.setup = setup
        functions = [text for text in setup.tools if not text.startswith(PREFIX)]
        self.servers = [text.removeprefix(PREFIX) for text in setup.tools if text not in functions]
        self.tools = [_tool(text) for text in functions]
        self.found: Any = None
        self.options: Mapping[str, Any] = setup.options
        if setup.environment:
            name, options = with_options(setup.environment)
            self.found, self.options = _named(name), {**setup.options, **options}
        if inspect.isroutine(self.found) and self.found.__name__ == MAKER:
            self.found = _called(self.found, self.options)
        self.own_reader: CallReader | None = None
        if ":" in setup.reader:
            self.own_reader = from_place(setup.reader)

    def make(self) -> AsyncEnvironment:
        """Make a world that nobody has been in."""
        if self.found is None:
            box = self.box(self.tools)
            return MCPTools(self.servers, box) if self.servers else WithTools(box)
        world = self.wrapped(self.found)
        if (self.tools or self.servers) and not isinstance(world, MethodTools):
            raise WorldError(
                f"{self.setup.environment} answers turns itself, so the tools "
                f"{', '.join(self.setup.tools)} would never be called. Name tools without an "
                "environment, or beside one whose methods are tools."
            )
        if self.servers:
            raise WorldError("An MCP server can't stand beside an environment. Name it alone.")
        return world

    def box(self, tools: Sequence[Tool]) -> Toolbox:
        return Toolbox(tools, self.reader, self.setup.parallel_calls, self.setup.timeout)

    def reader(self, schemas: Sequence[Mapping[str, Any]]) -> CallReader:
        """Return what reads calls of tools with these schemas."""
        if self.own_reader is not None:
            return self.own_reader
        if not self.setup.reader:
            return _unread
        return importlib.import_module("groupwise.envs.tool_calls").reader(
            self.setup.reader, schemas
        )

    def wrapped(self, found: Any) -> AsyncEnvironment:
        """Recognise a class, a function that makes environments, or classes by column."""
        if isinstance(found, Mapping):
            return ByColumn({str(key): self.wrapped(each) for key, each in found.items()})
        if is_verifiers(found) and not isinstance(found, type):
            return self.verifiers(found)
        if isinstance(found, type) and is_tinker(found):
            return Tinker(found, self.options)
        if not callable(found):
            raise WorldError(
                f"{self.setup.environment} is an object of {type(found).__name__}, and each "
                "episode needs one of its own. Name its class, or a function that makes one."
            )
        if found is Outside:
            made: AsyncEnvironment = _called(
                partial(Outside, self.reader, self.setup.timeout), self.options
            )
            return made
        if is_program(found):
            return ProgramWorld(found, self.options, self.reader)
        if inspect.isroutine(found) and "row" in inspect.signature(found).parameters:
            return MadeOfRow(found, self.recognised, self.options)
        return self.recognised(_called(found, self.options))

    def verifiers(self, found: Any) -> Verifiers:
        schemas = tuple(getattr(found, "oai_tools", None) or ())
        reader = self.reader(schemas) if schemas else None
        return Verifiers(found, reader, self.setup.parallel_calls)

    def recognised(self, made: Any) -> AsyncEnvironment:
        """Wrap an environment by its shape; what fits first says how it is called."""
        if isinstance(made, AsyncEnvironment):
            return made
        if isinstance(made, Environment):
            return PlainWorld(made)
        if is_verifiers(made):
            return self.verifiers(made)
        if has(made, "init", "step"):
            return SkyRL(made)
        if is_textarena(made):
            return TextArena(made)
        if is_openenv(made):
            return OpenEnv(made)
        if is_gymnasium(made):
            return Gymnasium(made)
        if has(made, "reset", "step"):
            return House(made)
        if has_method_tools(made):
            return MethodTools(made, self.box([*methods_of(made), *self.tools]))
        raise WorldError(
            f"{type(made).__name__} has no shape of an environment that is known:{SHAPES}\n"
            "Give it the methods of one of them."
        )


def _unread(text: str) -> list[Asked | Misread]:
    """Refuse to read: a setup may be checked before it is known how calls are written."""
    raise WorldError("Nothing says how calls of tools are written. Name a reader.")


def _called(found: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Make an environment; what is wrong with the options is said."""
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        known = [key for key in inspect.signature(found).parameters if key != "self"]
        raise WorldError(
            f"{getattr(found, '__name__', found)} can't be made with the options "
            f"{dict(options)}: {error}. It takes: {', '.join(known) or 'none'}."
        ) from None
    except ValueError:  # a class without a signature
        pass
    return found(**options)


# --- names


def _tool(text: str) -> Tool:
    name, options = with_options(text)
    found = _named(name)
    if name in builtin.TOOLS:
        found = _called(found, options)
    elif options:
        raise WorldError(f"The tool {name} is a function, and {options} are options. Remove them.")
    if isinstance(found, type) or not callable(found):
        raise WorldError(f"The tool {text} is no function. Write def, types and a docstring.")
    return tool(found)


def with_options(text: str) -> tuple[str, dict[str, Any]]:
    """Split `search(folder='docs')` into the name and its options."""
    name, bracket, _ = text.partition("(")
    if not bracket:
        return text, {}
    try:
        call = ast.parse(f"f{text.removeprefix(name)}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(x.arg): ast.literal_eval(x.value) for x in call.keywords}
    except (SyntaxError, ValueError):
        raise WorldError(
            f"{text!r} can't be read. Write a name, and options in brackets: search(folder='docs')."
        ) from None


def _named(name: str) -> Any:
    return from_place(name) if ":" in name else _built_in(builtin.PLACES[name])


def _built_in(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def from_place(text: str) -> Any:
    """Return what a file or a module holds under a name: FILE.py:NAME, or package.module:NAME."""
    place, _, name = text.rpartition(":")
    module = _file(place) if place.endswith(".py") else _package(place)
    if not hasattr(module, name):
        known = [key for key, each in vars(module).items() if callable(each) and key[0] != "_"]
        tail = nearest(name, known) if known else "It defines nothing."
        raise WorldError(f"{place} has no {name!r}. {tail}")
    return getattr(module, name)


def _file(place: str) -> ModuleType:
    name = f"groupwise_world_{Path(place).stem}"
    if name in sys.modules and sys.modules[name].__file__ == place:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    if spec is None or spec.loader is None:
        raise WorldError(f"{place!r} is no Python file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    make_importable(place, shadows=True)
    try:
        with one_process():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        raise WorldError(f"Can't load {place}: {told(error)}.") from None
    return module


def _package(place: str) -> ModuleType:
    try:
        with one_process():
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise WorldError(
            f"There is no module {place!r} to import: {error}. Install its package in the "
            "environment that runs groupwise, or name a file: FILE.py:NAME."
        ) from None
    except (Exception, SystemExit) as error:  # the boundary to the user's code
        raise WorldError(f"Can't import {place}: {told(error)}.") from None


def told(error: BaseException, width: int = 1_000) -> str:
    """Return an exception with the last line of code outside of this package that led to it."""
    if isinstance(error, WorldError):
        return str(error)
    frames = [x for x in extract_tb(error.__traceback__) if not x.filename.startswith(PACKAGE)]
    own = [x for x in frames if not x.filename.startswith("<")]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError):
        place = f" (line {error.lineno})"
    return f"{type(error).__name__}: {str(error)[:width]}{place}"
