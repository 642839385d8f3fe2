"""`groupwise serve`: a model as an OpenAI-compatible endpoint, for judges and for a quick look; or
a training run, for programs that lead its episodes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from groupwise.commands import serve_run
from groupwise.commands.shared import say, start_pytorch, warn
from groupwise.common.callers import is_loopback, shown
from groupwise.errors import ConfigError

KEY = "GROUPWISE_SERVE_KEY"  # a variable: what stands in a command line, all users can read
DTYPES = ("auto", "bfloat16", "float32", "float16")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="a model, or a training run, as an OpenAI-compatible endpoint on this machine",
        usage="groupwise serve MODEL [--host HOST] [--port PORT] [--name NAME] [--device DEVICE] "
        "[--dtype DTYPE] [--slots N]\n       groupwise serve CONFIG.toml [KEY=VALUE ...] "
        "[--port PORT] [--run DIR]",
        example="groupwise serve runs/tiny --port 8000",
    )
    parser.add_argument(
        "path",
        metavar="MODEL",
        help="a folder, a .gguf file, an id, an adapter or a run; a configuration (.toml) trains, "
        "and programs lead its episodes (docs/turns.md)",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help="settings of a training run")
    parser.add_argument("--run", metavar="DIR", help="of a training run; default as in `train`")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="default: this machine alone; any other, for callers with the key",
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    parser.add_argument("--name", help="what the model is called; default: its folder's name")
    parser.add_argument("--device", default="auto", help="default: auto, a GPU if there is one")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="default: auto, bfloat16 on a GPU"
    )
    parser.add_argument("--slots", type=int, default=64, help="answers that are written at a time")
    parser.set_defaults(run_command=run)


def _key() -> str:
    """Return the key that clients must send; "" where nobody set it."""
    key = os.environ.get(KEY, "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"The key in {KEY} has characters that no header can hold.")
    return key


def run(args: argparse.Namespace) -> int:
    if serve_run.is_training(args.path):
        return serve_run.run(args)
    if args.items or args.run:
        raise ConfigError(
            f"{(args.items or ['--run'])[0]} is for a training run, and {args.path} is no "
            "configuration (.toml). Leave it out."
        )
    start_pytorch()
    import torch

    from groupwise.config import Model, load
    from groupwise.config.values import FIELDS, checked
    from groupwise.engine.server import Server
    from groupwise.model.policy import load_policy
    from groupwise.prepare.engines import judge_of
    from groupwise.prepare.placing import check_device, place, place_line
    from groupwise.sync.export import checkpoint_in

    device = checked("--device", FIELDS["model.device"], args.device)
    asked = Model(path=args.path, device=device, dtype=args.dtype)
    model = place(asked)
    check_device(model.device)
    say(place_line(model, asked))
    path = checkpoint_in(args.path)
    loaded = load_policy(path, getattr(torch, model.dtype), model.device)
    engine = judge_of(load(engine={"slots": args.slots}), loaded)
    name = args.name or Path(args.path).resolve().name
    try:
        address = (args.host, args.port)
        made = Server(engine, loaded.tokenizer, loaded.model.config, name, address, _key())
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The server can't listen at {args.host}:{args.port} ({error}). Choose another port: "
            "--port 0 takes a free one."
        ) from error
    with made as server:
        host, port = str(server.server_address[0]), server.server_address[1]
        if not is_loopback(host):
            warn(
                "everyone who reaches this machine and has the key can ask this model; key and "
                "texts are sent unencrypted."
            )
        if server.key and not _key():
            print(f"key: {server.key}  (a new one each time; {KEY} sets it)")
        print(f"{name} at http://{shown(host, port)}/v1; end it with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
