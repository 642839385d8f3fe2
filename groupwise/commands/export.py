"""`groupwise export`: a run's policy as a plain Hugging Face folder, checked by reading it back."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.commands.pipeline import last_stage
from groupwise.commands.shared import print_json, start_pytorch
from groupwise.errors import ConfigError, RunError
from groupwise.runfiles.stages import is_pipeline

DTYPES = ("bfloat16", "float32", "float16")


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="a plain Hugging Face folder of a run or checkpoint, checked",
        example="groupwise export runs/tiny model",
    )
    parser.add_argument("path", metavar="RUN_OR_CHECKPOINT", help="what to export")
    parser.add_argument("out", metavar="OUT", help="the folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="default: as it is stored")
    parser.add_argument(
        "--which", metavar="NAME", help="best, latest or step_N of a run; default: best, or latest"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA, PEFT's folder; default: merged"
    )
    parser.add_argument(
        "--critic", action="store_true", help="of a run with a critic, that one; a token classifier"
    )
    parser.add_argument("--base", metavar="FOLDER", help="where the adapter's base lies now")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    start_pytorch()
    import torch

    from groupwise.sync.export import checkpoint_in, export
    from groupwise.sync.export_scorer import export_critic

    if is_pipeline(args.path):
        args.path = str(last_stage(Path(args.path)))
    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    if args.critic:
        _check_critic_alone(args)
        found = export_critic(Path(args.path), Path(args.out), dtype)
    else:
        source = Path(checkpoint_in(args.path, args.which))
        base = None if args.base is None else Path(args.base)
        found = export(source, Path(args.out), dtype, adapter=args.adapter, base=base)
    if args.json:
        print_json(asdict(found))
        return 0
    print(f"wrote {found.folder} from {found.source}, {found.dtype}")
    for note in found.notes:
        print(note)
    print(
        f"read back: {found.compared} of {found.tokens} tokens differ by at most {found.max:.2g} "
        f"(mean {found.mean:.2g}; allowed {found.limit:g})"
    )
    return 0


def _check_critic_alone(args: argparse.Namespace) -> None:
    """Refuse what says something about a policy's export, and a folder that is no run."""
    for name in ("which", "adapter", "base"):
        if getattr(args, name):
            raise ConfigError(
                f"--{name} is for the policy: a critic is exported whole, from the latest "
                "checkpoint, the only one that has it. Leave one of the two out."
            )
    if not (Path(args.path) / "config.toml").is_file():
        raise RunError(f"{args.path} is no run folder: it has no config.toml. Give a run's.")
