"""A configuration of another tool, read from its file: settings by their dotted names.

Nothing in it is run: Python is parsed, and a shell script's commands are taken apart.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.common.extras import install
from groupwise.errors import RecipeError
from groupwise.explain.peers.pythons import constructed
from groupwise.explain.peers.shells import Command, commands, scalar

TRL_CLASSES = ("GRPOConfig", "RLOOConfig")
MOST_BYTES = 2**20  # of a file: no configuration is larger
KNOWN = (
    "a Python file with TRL's GRPOConfig(...) or RLOOConfig(...), verl's YAML, prime-rl's TOML, or "
    "a shell script that starts one of them or OpenRLHF"
)


@dataclass(frozen=True)
class PeerConfig:
    """The settings that a file has for one tool."""

    tool: str  # "trl", "verl", "openrlhf" or "prime-rl"
    where: str  # in words: file, line, class
    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)  # what only a run could know
    method: str = ""  # of tools with a class or command a method


def read(path: Path) -> list[PeerConfig]:
    """Return every configuration in a file, in order; refuse a file without any."""
    text = _text(path)
    kinds = {".py": _python, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    found = list(kinds.get(path.suffix, _shell)(path, text))
    if not found:
        raise RecipeError(f"{path} has no configuration that is known here. Give {KNOWN}.")
    return found


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of nested tables by their dotted names."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{above}{key}"
        leaves |= flat(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return leaves


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RecipeError(f"{path} has over {MOST_BYTES:,} bytes: it is no configuration.")
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} can't be read: {error}. Give {KNOWN}.") from error


def _python(path: Path, text: str) -> Iterator[PeerConfig]:
    for call in constructed(text, TRL_CLASSES, str(path)):
        where = f"{call.name}(...) in {path}, line {call.line}"
        yield PeerConfig("trl", where, call.values, call.unread, call.name)


def _toml(path: Path, text: str) -> Iterator[PeerConfig]:
    try:
        values = flat(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is no TOML: {error}.") from error
    if any(name.startswith(("orchestrator.", "trainer.")) for name in values):
        yield PeerConfig("prime-rl", str(path), values)


def _yaml(path: Path, text: str) -> Iterator[PeerConfig]:
    try:
        import yaml
    except ImportError as error:
        raise RecipeError(f"{path}: YAML needs the package PyYAML: `{install('yaml')}`") from error
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise RecipeError(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, Mapping):
        return
    values = {name: _number(value) for name, value in flat(tree).items()}
    unread = {k: v for k, v in values.items() if isinstance(v, str) and "${" in v}
    known = {name: value for name, value in values.items() if name not in unread}
    if any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in values):
        yield PeerConfig("verl", str(path), known, unread)
    elif "num_generations" in known or "loss_type" in known:
        yield PeerConfig("trl", str(path), known, unread, "GRPOConfig")


def _number(value: Any) -> Any:
    """Read 1e-6 as the number that it is: YAML 1.1 asks for a point."""
    return scalar(value) if isinstance(value, str) and value[:1].isdigit() else value


def _shell(path: Path, text: str) -> Iterator[PeerConfig]:
    for command in commands(text, str(path)):
        words = " ".join(command.words)
        where = f"the command in {path}, line {command.line}"
        if "verl.trainer" in words or "main_ppo" in words or "main_dapo" in words:
            yield PeerConfig("verl", where, command.pairs(), command.unread)
        elif "openrlhf" in words:
            yield PeerConfig("openrlhf", where, command.flags(), command.unread)
        elif "trl" in command.words or "num_generations" in command.flags():
            method = "RLOOConfig" if "rloo" in command.words else "GRPOConfig"
            yield PeerConfig("trl", where, command.flags(), command.unread, method)
        elif "rl" in command.words and "@" in command.words:
            yield _prime_rl(path, where, command)


def _prime_rl(path: Path, where: str, command: Command) -> PeerConfig:
    """Return the files that a command names behind @, in order, and its flags on top."""
    values: dict[str, Any] = {}
    for sign, name in zip(command.words, command.words[1:], strict=False):
        if sign == "@":
            named = next((x for x in (path.parent / name, Path(name)) if x.is_file()), None)
            if named is None:
                raise RecipeError(f"{path} names {name}, which is neither beside it nor here.")
            for each in _toml(named, _text(named)):
                values |= each.values
    given = {name.replace("-", "_"): value for name, value in command.flags().items()}
    return PeerConfig("prime-rl", where, {**values, **given}, command.unread)
