"""`groupwise view`: run folders as web pages on this machine, live or finished."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from groupwise.common.callers import is_loopback, shown
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
    parser.add_argument("--port", type=int, default=7007, help="default: 7007; 0: a free one")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.view.runs import Runs
    from groupwise.view.server import Viewer

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
