"""`groupwise completion`: the script that lets a shell complete commands and options."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from groupwise.common.extras import install
from groupwise.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes commands and options in your shell",
        description="Print a script that completes commands and options. For bash: "
        "groupwise completion bash > ~/.local/share/bash-completion/completions/groupwise; "
        "for zsh, into a file _groupwise in a folder of $fpath.",
        example="groupwise completion bash",
    )
    parser.add_argument("shell", choices=SHELLS, help="yours")
    parser.set_defaults(run_command=partial(run, commands.whole))


def run(whole: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise ConfigError(
            f"The script is made by the package shtab, which is not installed: {install('shell')}"
        ) from None
    print(shtab.complete(whole, args.shell))
    return 0
