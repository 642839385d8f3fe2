"""The overview that `groupwise --help` prints; the answer to a misspelt command."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

ABOUT = "Post-train language models by reinforcement learning on answers that can be checked."
MORE = (
    "`groupwise COMMAND --help` has a command's options and an example that runs;\n"
    "`groupwise` alone says what to do next in this folder."
)


@dataclass
class Commands:
    """The commands as they are added: each with its line of the overview and its example."""

    whole: Overview
    parsers: Any  # of argparse: those of the commands
    lines: dict[str, str] = field(default_factory=dict)

    def add_parser(
        self, name: str, *, help: str, example: str, **options: Any
    ) -> argparse.ArgumentParser:
        """Add a command; an option of argparse's own goes through."""
        self.lines[name] = help
        parser: argparse.ArgumentParser = self.parsers.add_parser(
            name,
            help=help,  # of no use to `format_help`: completion offers commands that have one
            epilog=f"example: {example}",
            **{"description": f"{help[0].upper()}{help[1:]}.", **options},
        )
        return parser


class Overview(argparse.ArgumentParser):
    """The parser of the whole line, whose help lists the commands by what they are for."""

    def __init__(self, groups: Mapping[str, Sequence[ModuleType]]) -> None:
        super().__init__(prog="groupwise", add_help=True)
        self.add_argument("--version", action="store_true", help="print the version and stop")
        self._groups: dict[str, dict[str, str]] = {}
        parsers = self.add_subparsers(
            dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser
        )
        for title, modules in groups.items():
            added = Commands(self, parsers)
            for module in modules:
                module.add_parser(added)
            self._groups[title] = added.lines

    def listed(self) -> Mapping[str, Mapping[str, str]]:
        """Return the commands of each group, with their lines."""
        return self._groups

    def format_help(self) -> str:
        wide = max(len(name) for lines in self._groups.values() for name in lines)
        parts = ["usage: groupwise COMMAND ...", ABOUT]
        for title, lines in self._groups.items():
            listed = [f"  {name.ljust(wide)}  {line}" for name, line in lines.items()]
            parts.append("\n".join([f"{title}:", *listed]))
        return "\n\n".join([*parts, MORE]) + "\n"

    def check_command(self, argv: Sequence[str]) -> None:
        """Answer a command that does not exist with those that are spelt alike."""
        first = next((word for word in argv if not word.startswith("-")), None)
        known = [name for lines in self._groups.values() for name in lines]
        if first is None or first in known:
            return
        near = difflib.get_close_matches(first, known, n=2, cutoff=0.6)
        meant = f" Did you mean {' or '.join(near)}?" if near else ""
        self.error(f"there is no command {first!r}.{meant} `groupwise --help` lists all of them.")
