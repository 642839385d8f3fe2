"""`groupwise collect`: answers of a model to every prompt of the data, to learn from later."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.commands.shared import (
    SETTINGS,
    config_of,
    print_json,
    read_placed,
    say,
    split_models,
    start_pytorch,
)
from groupwise.errors import ConfigError

SAMPLES = 8


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "collect",
        help="graded answers of a model to every prompt, for recipe.source=run to learn from",
        usage="groupwise collect MODEL_OR_RUN_OR_CHECKPOINT [CONFIG.toml] [KEY=VALUE ...] "
        "[--data DATA] [--samples N] --out DIR [--json]",
        example="groupwise collect runs/tiny --samples 4 --out answers",
    )
    parser.add_argument("path", metavar="MODEL", help="of a model, a run or a checkpoint")
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument(
        "--data", default="", metavar="DATA",
        help="prompts, as in data.train; default: data.train of the settings or the run",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N",
        help=f"answers to each prompt; default: {SAMPLES}",
    )  # fmt: skip
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a new folder, or one to go on with"
    )
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Check, collect, and say what there is."""
    paths, source, overrides = split_models(args.path, args.items)
    if len(paths) > 1:
        raise ConfigError(f"{paths[1]}: one MODEL at a time.")
    if args.samples < 1:
        raise ConfigError(f"--samples {args.samples} is too few. Take 1 or more.")
    given = {item.partition("=")[0].strip() for item in overrides}
    for name, option in (("data.train", "--data"), ("group_size", "--samples"),
                         ("model.path", "MODEL")):  # fmt: skip
        if name in given:
            raise ConfigError(f"{name} is said with {option} here. Leave it out of the settings.")
    source = source or config_of(Path(args.path))
    if not args.data and source is None:
        raise ConfigError("No prompts are named. Write --data FILE, or a CONFIG.toml that does.")
    start_pytorch()
    from groupwise.evaluate.request import candidates
    from groupwise.probing.collecting import collect, config_for

    config = read_placed(source, overrides, args.path)
    [candidate] = candidates(paths)
    out = Path(args.out)
    found = collect(config_for(config, candidate, args.data, args.samples), candidate, out, say)
    if args.json:
        print_json({"out": str(out), **asdict(found)})
        return 0
    print(
        f"{out}: {found.answers:,} answers to {found.prompts:,} prompts, {found.correct:,} of them "
        f"correct, {found.failed:,} not graded; {found.tokens:,} tokens"
    )
    print(f'learn from them: recipe=sft recipe.source=run data.runs=["{out}"]')
    return 0
