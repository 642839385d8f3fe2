"""`groupwise migrate`: the configuration of another tool, or its script, as a TOML of ours."""

from __future__ import annotations

import argparse
import tomllib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands.shared import warn
from groupwise.common.progress import phase
from groupwise.errors import ConfigError, GroupwiseError, RecipeWarning

if TYPE_CHECKING:
    from groupwise.explain.peers.migration import Migrated


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "migrate",
        help="another tool's script or configuration as a TOML of ours",
        description="Write the TOML for a script of TRL, a YAML or shell script of verl, a script "
        "that starts OpenRLHF, or a TOML of prime-rl. The file is read and never run.",
        example="groupwise migrate train_grpo.py mine.toml",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the other tool's file")
    parser.add_argument(
        "path",
        nargs="?",
        type=Path,
        metavar="MINE.toml",
        help="default: FILE's name, in this folder",
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    first = args.path or Path(args.file.stem).with_suffix(".toml")
    with phase("starting PyTorch"):
        from groupwise.explain.peers.migration import migrated, reward_module
    with warnings.catch_warnings():  # a peer's loss may be doubtful: training says so
        warnings.simplefilter("ignore", RecipeWarning)
        rewards = first.with_name(f"{first.stem}_rewards.py")
        found = migrated(args.file, rewards.name)
    paths = [first, *(first.with_stem(f"{first.stem}_{n}") for n in range(2, len(found) + 1))]
    texts = {path: each.text for path, each in zip(paths, found, strict=True)}
    if functions := reward_module(args.file, found):
        texts[rewards] = functions
    for path in texts:
        if path.exists():
            raise ConfigError(
                f"{path} exists already, and nothing is overwritten. Name another place: "
                f"groupwise migrate {args.file} OTHER.toml"
            )
    for path, text in texts.items():
        _write(path, text)
    for path, each in zip(paths, found, strict=True):
        _tell(path, each, rewards)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:  # never over another
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error}. Choose another place.") from None


def _tell(path: Path, each: Migrated, rewards: Path) -> None:
    """Say what was written, what is missing, and what comes next."""
    loss = "the same loss" if each.exact else "not all of its loss: the file says what is missing"
    print(f"wrote {path}, from {each.where}: {loss}")
    if each.functions:
        print(f"wrote {rewards}: the script's reward functions, with what they use")
    for name, what in each.fill_in.items():
        print(f"  fill in {name}: {what}")
    if refused := _refused(each.text):
        warn(f"training would refuse it as it stands: {refused}")
    graded = "" if "[reward.parts]" not in each.text else f"\n  groupwise check-reward {path}"
    print(f"next:\n  groupwise train {path} --dry-run{graded}\n  groupwise train {path}")


def _refused(text: str) -> str:
    """Return why training would refuse a configuration before it looks at any file."""
    from groupwise.config import load
    from groupwise.stages.checks import check_config

    try:
        check_config(load(tomllib.loads(text)))
    except GroupwiseError as error:
        return str(error)
    return ""
