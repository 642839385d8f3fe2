"""`groupwise serve`: a model as an OpenAI-compatible endpoint, for judges and for a quick look."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from groupwise.commands.shared import say

DTYPES = ("auto", "bfloat16", "float32", "float16")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="a model as an OpenAI-compatible endpoint, on this machine"
    )
    parser.add_argument(
        "path", metavar="MODEL", help="a folder, a .gguf file, an id, an adapter or a run"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: a free one")
    parser.add_argument("--name", help="what the model is called; default: its folder's name")
    parser.add_argument("--device", default="auto", help="default: auto, a GPU if there is one")
    parser.add_argument(
        "--dtype", default="auto", choices=DTYPES, help="default: auto, bfloat16 on a GPU"
    )
    parser.add_argument("--slots", type=int, default=64, help="answers that are written at a time")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from groupwise.config import Model
    from groupwise.config.values import FIELDS, checked
    from groupwise.engine.native import NativeEngine
    from groupwise.engine.server import Server
    from groupwise.model.policy import load_policy
    from groupwise.placing import check_device, place, place_line
    from groupwise.sync.export import checkpoint_in

    device = checked("--device", FIELDS["model.device"], args.device)
    asked = Model(path=args.path, device=device, dtype=args.dtype)
    model = place(asked)
    check_device(model.device)
    say(place_line(model, asked))
    path = checkpoint_in(args.path)
    loaded = load_policy(path, getattr(torch, model.dtype), model.device)
    engine = NativeEngine(loaded.model, loaded.tokenizer, seed=0, slots=args.slots)
    name = args.name or Path(args.path).resolve().name
    with Server(engine, name, (args.host, args.port)) as server:
        host, port = server.server_address[:2]
        print(f"{name} at http://{host!s}:{port}/v1; end it with Ctrl-C", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0
