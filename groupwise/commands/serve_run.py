"""`groupwise serve CONFIG.toml`: a training run whose episodes are led by programs outside."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from groupwise.commands import train
from groupwise.commands.shared import say
from groupwise.envs.endpoint import HOST
from groupwise.errors import ConfigError

OUTSIDE = "outside"  # the environment that waits for programs


def is_training(path: str) -> bool:
    """Tell whether a configuration is served, not a model."""
    return path.endswith(".toml") and Path(path).is_file()


def run(args: argparse.Namespace) -> int:
    """Train with the environment `outside`, and say where programs find its episodes."""
    if args.host != HOST:
        raise ConfigError(
            f"--host {args.host}: episodes are handed to programs of this machine alone, since who "
            f"leads them decides what is learned. Leave it out, or forward the port to {HOST}."
        )
    port = _free(args.port)
    named = [
        item for item in args.items if item.startswith(("turns.environment=", "turns.options"))
    ]
    if named:
        raise ConfigError(f"{named[0]}: programs outside are the environment here. Leave it out.")
    settings = [f"turns.environment={OUTSIDE}", f"turns.options={{port = {port}}}"]
    say(f"episodes at http://{HOST}:{port}/v1/episodes, once the first step begins")
    asked = argparse.Namespace(
        items=[args.path, *args.items, *settings], run=args.run, again=None, dry_run=False
    )
    return train.run(asked)


def _free(port: int) -> int:
    """Return the port, or a free one for 0; refuse one that is taken."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"Port {port} can't be listened at ({error}). Choose another: --port 0 takes a "
                "free one."
            ) from None
        return int(tried.getsockname()[1])
