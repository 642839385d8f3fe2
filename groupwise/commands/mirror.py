"""`groupwise mirror`: copy a run to a tracker, finished or live."""

from __future__ import annotations

import argparse
import os
from typing import Any

from groupwise.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "mirror",
        help="send a run to TensorBoard, Weights & Biases, Trackio or MLflow",
        description="Sends what the tracker does not have yet, and goes on while the run does.",
        example="groupwise mirror runs/tiny --to tensorboard",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--to", required=True, metavar="NAME", help="tensorboard, wandb, trackio or mlflow"
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.runfiles.folder import RunFolder
    from groupwise.watch.mirrors import check
    from groupwise.watch.mirrors.tail import mirror

    check([args.to])
    folder = RunFolder(args.folder)
    if not (folder.config.is_file() or folder.metrics.is_file()):
        raise ConfigError(f"There is no run in {args.folder!r}: it has no config.toml.")
    os.nice(10)  # training on the same machine goes first
    step = mirror(folder, args.to)
    print(
        f"{args.to} has {args.folder} " + (f"up to step {step}" if step >= 0 else "without steps")
    )
    return 0
