"""`groupwise view`: run folders as web pages on this machine, live or finished."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from groupwise.common.callers import VIEWER_PORT, is_loopback, shown
from groupwise.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "view",
        help="see runs in the browser, down to every token",
        example="groupwise view runs",
    )
    parser.add_argument(
        "places",
        nargs="*",
        metavar="RUN",
        default=["runs"],
        help="run folders, or folders of them; default: runs",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument(
        "--port", type=int, default=VIEWER_PORT, help=f"default: {VIEWER_PORT}; 0: a free one"
    )
    parser.add_argument(
        "--export",
        nargs=2,
        metavar=("RUN", "FILE.html"),
        help="write the page of this run as one file that opens offline, and serve nothing",
    )
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.view.runs import Runs
    from groupwise.view.server import Viewer

    if args.export:
        return _export(*args.export)
    runs = Runs(args.places)
    try:
        server = Viewer(runs, (args.host, args.port))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The viewer can't listen at {args.host}:{args.port} ({error}). Choose another port: "
            "--port 0 takes a free one."
        ) from error
    with server:
        host, port = server.server_address[:2]
        if not is_loopback(str(host)):
            print(
                "groupwise: warning: everyone who reaches this machine can read these runs; "
                "there is no password.",
                file=sys.stderr,
            )
        where = shown(str(host), port)
        print(f"{len(runs.all())} runs at http://{where}; end it with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _export(place: str, file: str) -> int:
    from groupwise.view.export import export
    from groupwise.view.runs import Runs

    found = list(Runs([place]).all().values())
    if len(found) != 1:
        names = ", ".join(run.name for run in found[:5]) or "none"
        raise ConfigError(f"{place} holds {len(found)} runs ({names}); name one run's own folder.")
    path = Path(file)
    export(found[0], path)
    print(f"{path} holds {found[0].name}: open it in any browser")
    return 0
