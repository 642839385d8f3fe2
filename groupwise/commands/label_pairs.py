"""`groupwise label-pairs`: two answers of a model to each prompt, and which a judge prefers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from groupwise.commands.shared import (
    SETTINGS,
    check_one_turn,
    config_or_run,
    new_rows_file,
    print_json,
    say,
    warn,
)
from groupwise.errors import ConfigError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "label-pairs",
        help="pairs of a model's answers, chosen by a judge, to train a preference on",
        usage="groupwise label-pairs CONFIG.toml|RUN [KEY=VALUE ...] --out FILE.jsonl "
        "[--judge PART] [--compare] [--prompts N] [--json]",
        example="groupwise label-pairs runs/tiny --prompts 8 --out pairs.jsonl",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--out", required=True, metavar="FILE", help="a new .jsonl file")
    parser.add_argument(
        "--judge", default="", metavar="PART",
        help="a part of a reward, as \"judge(url='...', model='...')\" or \"rm(path='...')\"; "
        "default: reward.parts",
    )  # fmt: skip
    parser.add_argument(
        "--compare", action="store_true",
        help="the judge sees both answers, in both orders: for judge(form='pairwise', ...)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Sample and judge, write the rows, and say what was left out."""
    with new_rows_file(args.out) as out:
        return label(args, out)


def label(args: argparse.Namespace, out: Path) -> int:
    config, checkpoint = config_or_run(args.items)
    if args.judge:
        from dataclasses import replace

        config = replace(config, reward=replace(config.reward, parts={args.judge: 1.0}))
    if args.compare and not all("pairwise" in part for part in config.reward.parts):
        raise ConfigError(
            "--compare is for a judge that is shown two answers. Write --judge "
            "\"judge(form='pairwise', url='...', model='...')\", or leave --compare out."
        )
    if not args.compare and any("pairwise" in part for part in config.reward.parts):
        raise ConfigError("judge(form='pairwise') compares two answers: add --compare.")
    check_one_turn(config, "label-pairs")
    from groupwise.probing.pair_labels import PairRequest, prepare_pairs
    from groupwise.stages.checks import check_config

    for doubt in check_config(config):
        warn(doubt)
    prepared = prepare_pairs(config, PairRequest(args.prompts, args.compare), checkpoint=checkpoint)
    for note in prepared.setup.notes:
        say(note)
    made = prepared.run(out)
    reasons = [f"left out {number:,}: {why}" for why, number in made.left_out.most_common()]
    if not made.rows:
        raise ConfigError(f"No pair could be made; {out} was not written. {'; '.join(reasons)}.")
    if args.json:
        print_json({"rows": len(made.rows), "left_out": dict(made.left_out)})
    else:
        print("\n".join([f"wrote {len(made.rows):,} pairs to {out}", *reasons]))
    return 0
