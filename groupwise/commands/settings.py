"""`groupwise settings`: settings by a word of their name or purpose; a schema for editors."""

from __future__ import annotations

import argparse
from typing import Any

from groupwise.commands.shared import print_json, start_pytorch
from groupwise.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "settings",
        help="what can be set: by a word, or all",
        description="Print the settings whose name or purpose has all of these words.",
        example="groupwise settings learning rate",
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="default: all settings")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.add_argument(
        "--schema", action="store_true", help="a JSON schema, for editors that complete TOML"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    start_pytorch()
    from groupwise.config.page import settings_with
    from groupwise.config.schema import schema

    if args.schema:
        if args.words:
            raise ConfigError("--schema is of all settings: leave the words out.")
        print_json(schema())
        return 0
    found = settings_with(args.words)
    if not found:
        raise ConfigError(
            f"No setting has {' and '.join(map(repr, args.words))} in its name or purpose. Try "
            "another word; `groupwise settings` prints all."
        )
    if args.json:
        print_json([each._asdict() for each in found])
        return 0
    for each in found:
        print(f"{each.name} = {each.default}\n    {each.purpose}\n    may be: {each.may_be}")
    return 0
