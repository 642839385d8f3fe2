"""`groupwise train`: a run, or a file of stages, from its start or from where it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.commands import pipeline
from groupwise.commands.absent import absent
from groupwise.commands.shared import SETTINGS, read_config, split_settings, warn
from groupwise.common.progress import phase
from groupwise.errors import ConfigError
from groupwise.parallel.started import leads_here

if TYPE_CHECKING:
    from groupwise.config import Config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        help="train into a run folder, or go on with it",
        usage="groupwise train [CONFIG.toml] [KEY=VALUE ...] [--run DIR] [--from STAGE] "
        "[--dry-run]",
        example="groupwise train steps=20 recipe.name=dapo",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument(
        "--run",
        metavar="DIR",
        help="default: runs/<name of the configuration>; also run=DIR, for torchrun",
    )
    parser.add_argument(
        "--from", dest="again", metavar="STAGE", help="of a pipeline: do this and later ones anew"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    source, overrides = split_settings(args.items)
    if pipeline.has_stages(source):
        assert source is not None
        return pipeline.train(source, overrides, args)
    if args.again is not None:
        raise ConfigError(f"--from {args.again} is for a file with [[stage]] tables.")
    config = read_config(source, overrides)
    folder = Path(args.run) if args.run else Path("runs") / (source.stem if source else "default")
    if args.dry_run:
        return _dry_run(config, folder)
    with phase("starting PyTorch"):
        from groupwise.training import loop
        from groupwise.training.signals import Stopped
    try:
        loop.train(config, folder)
    except Stopped as stopped:
        if leads_here():
            print(stopped, file=sys.stderr)
        return 130
    return 0


def _dry_run(asked: Config, folder: Path) -> int:
    """Print the resolved configuration, in TOML that can be run; its consequences as comments."""
    from groupwise.config import text
    from groupwise.prepare.placing import place_line
    from groupwise.stages import stage_of
    from groupwise.stages.checks import check_config
    from groupwise.stages.describe import describe
    from groupwise.training.continuing import placed_for

    config = placed_for(asked, folder)
    for warning in [*check_config(config), *stage_of(config).try_slots(), *absent(config)]:
        warn(warning)
    lines = [place_line(config.model, asked.model), *describe(config)]
    print("\n".join(f"# {line}" for line in lines), end="\n\n")
    print(text(config), end="")
    return 0
