"""A configuration of another tool, read from its file: settings by their dotted names.

Nothing in it is run: Python is parsed, and a shell script's commands are taken apart.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.common.extras import install
from groupwise.errors import RecipeError
from groupwise.explain.peers.pythons import constructed
from groupwise.explain.peers.rows import Rows
from groupwise.explain.peers.scripts import Handed, handed
from groupwise.explain.peers.shells import Command, commands, scalar

TRL_METHODS = {"grpo": "GRPOConfig", "rloo": "RLOOConfig", "sft": "SFTConfig", "dpo": "DPOConfig"}
TRL_CLASSES = tuple(TRL_METHODS.values())
MOST_BYTES = 2**20  # of a file: no configuration is larger
KNOWN = (
    "a Python file with TRL's GRPOConfig(...), RLOOConfig(...), SFTConfig(...) or DPOConfig(...), "
    "verl's YAML, prime-rl's TOML, or a shell script that starts one of them or OpenRLHF"
)
# Of a YAML file for `trl`, which does not say for which of its commands it is.
GRPO_ALONE = ("num_generations", "max_completion_length", "reward_funcs", "scale_rewards")
SFT_ALONE = ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field")
DPO_ALONE = ("label_smoothing", "precompute_ref_log_probs", "f_divergence_type", "loss_weights")
# Of verl and OpenRLHF: commands that are no reinforcement learning.
OTHER_COMMANDS = re.compile(
    r"sft_trainer|main_generation|main_eval|openrlhf\.cli\.(?!train_ppo)\w+|openrlhf\.datasets"
)
FROM_OUTSIDE = ("TrlParser", "HfArgumentParser")  # read their settings from the command line


@dataclass(frozen=True)
class PeerConfig:
    """The settings that a file has for one tool."""

    tool: str  # "trl", "verl", "openrlhf" or "prime-rl"
    where: str  # in words: file, line, class
    values: Mapping[str, Any]
    unread: Mapping[str, str] = field(default_factory=dict)  # what only a run could know
    method: str = ""  # of tools with a class or command a method
    rows: Mapping[str, Rows] = field(default_factory=dict)  # what a script says of its data sets


def read(path: Path) -> list[PeerConfig]:
    """Return every configuration in a file, in order; refuse a file without any."""
    text = _text(path)
    kinds = {".py": _python, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    found = list(kinds.get(path.suffix, _shell)(path, text))
    if not found:
        outside = path.suffix == ".py" and any(parser in text for parser in FROM_OUTSIDE)
        why = " It reads its settings from the command line." if outside else ""
        raise RecipeError(f"{path} has no configuration that is known here.{why} Give {KNOWN}.")
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
    """Return each configuration with what the trainer that takes it is given beside it."""
    calls = constructed(text, TRL_CLASSES, str(path))
    trainers = handed(text, path)
    for call in calls:
        alike = [each for each in trainers if each.method == call.name]
        own = [each for each in alike if each.configured == call.line]
        guess = alike if len(alike) == len(calls) == 1 and alike[0].configured is None else []
        where = f"{call.name}(...) in {path}, line {call.line}"
        yield _given(where, call.name, call.values, call.unread, next(iter(own or guess), None))
    for each in trainers:
        if not each.args and all(call.name != each.method for call in calls):
            name = each.method.replace("Config", "Trainer")
            yield _given(f"{name}(...) in {path}, line {each.line}", each.method, {}, {}, each)


def _given(
    where: str,
    method: str,
    values: Mapping[str, Any],
    unread: Mapping[str, str],
    trainer: Handed | None,
) -> PeerConfig:
    if trainer is None:
        return PeerConfig("trl", where, values, unread, method)
    return PeerConfig(
        "trl",
        where,
        {**trainer.values, **values},
        {**trainer.unread, **unread},
        method,
        trainer.rows,
    )


def _toml(path: Path, text: str) -> Iterator[PeerConfig]:
    try:
        values = flat(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is no TOML: {error}.") from error
    if any(name.startswith(("orchestrator.", "trainer.")) for name in values):
        yield PeerConfig("prime-rl", str(path), values)


def _yaml(path: Path, text: str, method: str = "") -> Iterator[PeerConfig]:
    """Read verl's YAML, or TRL's: for the class that its command names."""
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
    elif method := method or _trl_method(known) or "":
        yield PeerConfig("trl", str(path), known, unread, method)


def _trl_method(values: Mapping[str, Any]) -> str | None:
    """Return the class that a file of flat settings is for, by those that no other one has."""
    for names, method in ((GRPO_ALONE, "grpo"), (SFT_ALONE, "sft"), (DPO_ALONE, "dpo")):
        if any(name in values for name in names):
            return TRL_METHODS[method]
    return TRL_METHODS["grpo"] if "loss_type" in values else None


def _number(value: Any) -> Any:
    """Read 1e-6 as the number that it is: YAML 1.1 asks for a point."""
    return scalar(value) if isinstance(value, str) and value[:1].isdigit() else value


def _shell(path: Path, text: str) -> Iterator[PeerConfig]:
    nothing, others = True, list[str]()
    for command in commands(text, str(path)):
        where = f"the command in {path}, line {command.line}"
        for found in _command(path, where, command):
            nothing = False
            yield found
        others += [word for word in command.words if OTHER_COMMANDS.search(word)]
    if nothing and others:
        raise RecipeError(
            f"{path} starts {others[0]}, which is not read. Of verl main_ppo and main_dapo are, of "
            "OpenRLHF train_ppo_ray; for rows that are learned as they stand see docs/sft.md and "
            "docs/preferences.md."
        )


def _command(path: Path, where: str, command: Command) -> Iterator[PeerConfig]:
    """Return the configuration of a command that is known; nothing for any other."""
    words = " ".join(command.words)
    flags = command.flags()
    script = next((x for x in command.words if x.endswith(".py") and _trains(path, x)), None)
    if OTHER_COMMANDS.search(words):
        return
    if "verl.trainer" in words or "main_ppo" in words or "main_dapo" in words:
        yield PeerConfig("verl", where, command.pairs(), command.unread)
    elif "openrlhf" in words:
        yield PeerConfig("openrlhf", where, flags, command.unread)
    elif "trl" in command.words or "num_generations" in flags or script:
        yield _trl(path, where, command, script)
    elif "rl" in command.words and "@" in command.words:
        yield _prime_rl(path, where, command)


def _trains(path: Path, name: str) -> bool:
    """Tell whether a command's script lies beside it and makes one of TRL's trainers."""
    script = path.parent / name
    return script.is_file() and bool(handed(_text(script), script))


def _trl(path: Path, where: str, command: Command, script: str | None) -> PeerConfig:
    """Return the flags of TRL's command line, over the file that --config names.

    Of a script beside it, what it hands to its trainer stands below both.
    """
    flags = command.flags()
    named = next((m for m in TRL_METHODS if m in command.words), None)
    values: dict[str, Any] = {}
    unread = dict(command.unread)
    if isinstance(file := flags.pop("config", None), str):
        config = _beside(path, file)
        for each in _yaml(config, _text(config), TRL_METHODS[named or "grpo"]):
            values, unread = dict(each.values), {**each.unread, **unread}
    values |= flags
    if script is not None:
        beside = path.parent / script
        trainer = handed(_text(beside), beside)[0]
        return _given(f"{where}, of {script}", trainer.method, values, unread, trainer)
    method = TRL_METHODS[named] if named else _trl_method(values) or TRL_METHODS["grpo"]
    return PeerConfig("trl", where, values, unread, method)


def _beside(path: Path, name: str) -> Path:
    named = next((x for x in (path.parent / name, Path(name)) if x.is_file()), None)
    if named is None:
        raise RecipeError(f"{path} names {name}, which is neither beside it nor here.")
    return named


def _prime_rl(path: Path, where: str, command: Command) -> PeerConfig:
    """Return the files that a command names behind @, in order, and its flags on top."""
    values: dict[str, Any] = {}
    for sign, name in zip(command.words, command.words[1:], strict=False):
        if sign == "@":
            named = _beside(path, name)
            for each in _toml(named, _text(named)):
                values |= each.values
    given = {name.replace("-", "_"): value for name, value in command.flags().items()}
    return PeerConfig("prime-rl", where, {**values, **given}, command.unread)
