"""`groupwise report`: a run as one page, with pictures."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from groupwise.commands import pipeline
from groupwise.common.extras import install
from groupwise.common.progress import phase
from groupwise.errors import ConfigError
from groupwise.runfiles.stages import is_pipeline


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write report.html and PNG plots of a run",
        example="groupwise report runs/tiny",
    )
    parser.add_argument("folder", metavar="RUN", help="a run folder")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if not folder.is_dir():
        raise ConfigError(f"There is no run folder {args.folder!r}.")
    if is_pipeline(folder):
        return pipeline.report(folder)
    from groupwise.watch.plots import can_plot, write_plots
    from groupwise.watch.report import write_report

    with phase("writing the report"):
        page = write_report(folder)
    print(f"wrote {page}")
    if can_plot():
        with phase("drawing plots"):
            plots = write_plots(folder)
        if plots:
            print(f"wrote {len(plots)} plots to {folder / 'plots'}")
    else:
        print(f"No PNG plots: they need matplotlib, `{install('view')}`", file=sys.stderr)
    return 0
