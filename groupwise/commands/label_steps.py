"""`groupwise label-steps`: answers split into steps, with a label for each, by sampling on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from groupwise.probing.step_labels import KINDS

if TYPE_CHECKING:
    from groupwise.probing.labelling import Labelled


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "label-steps",
        help="steps of answers with labels, to train a process reward model on",
        usage="groupwise label-steps CONFIG.toml|RUN [KEY=VALUE ...] --out FILE.jsonl "
        "[--labels hard|soft|first-error] [--branches N] [--split line|sentence] [--prompts N] "
        "[--answers COLUMN | --samples N] [--json]",
        example="groupwise label-steps runs/tiny --prompts 8 --out steps.jsonl",
    )
    parser.add_argument("items", nargs="*", metavar="KEY=VALUE", help=SETTINGS)
    parser.add_argument("--out", required=True, metavar="FILE", help="a new .jsonl file")
    parser.add_argument(
        "--labels", choices=KINDS, default="hard",
        help="whether any answer behind a step is right, the share that is, or all steps up to the "
        "first behind which none is, found by bisection; default: hard",
    )  # fmt: skip
    parser.add_argument(
        "--branches", type=int, default=8, metavar="N",
        help="answers sampled behind a step; default: 8",
    )  # fmt: skip
    parser.add_argument(
        "--split", choices=("line", "sentence"), default="line", help="where steps end"
    )
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--answers", default="", metavar="COLUMN",
        help="of the data, with the answers to label; default: the model writes them",
    )  # fmt: skip
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="of the model to each prompt; default: 1",
    )
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    """Label, write the rows, and say what was left out."""
    with new_rows_file(args.out) as out:
        return label(args, out)


def label(args: argparse.Namespace, out: Path) -> int:
    config, checkpoint = config_or_run(args.items)
    check_one_turn(config, "label-steps")
    from groupwise.probing.labelling import LabelRequest, prepare_labels
    from groupwise.runfiles.files import write_atomic
    from groupwise.stages.checks import check_config

    for doubt in check_config(config):
        warn(doubt)
    asked = LabelRequest(
        kind=args.labels,
        branches=args.branches,
        split=args.split,
        prompts=args.prompts,
        column=args.answers,
        samples=args.samples,
    )
    prepared = prepare_labels(config, asked, checkpoint=checkpoint)
    for note in prepared.setup.notes:
        say(note)
    made = prepared.run()
    if not made.rows:
        reasons = "; ".join(f"{why} ({number})" for why, number in made.left_out.most_common())
        raise ConfigError(f"No answer could be labelled: {reasons}. {out} was not written.")
    lines = [json.dumps(row.as_dict(), ensure_ascii=False, default=str) for row in made.rows]
    try:
        write_atomic(out, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise ConfigError(f"{out} can't be written: {error}. Choose another --out.") from None
    if args.json:
        print_json(facts(made))
    else:
        print(text(made, out))
    return 0


def facts(made: Labelled) -> dict[str, Any]:
    """Return what was made in numbers."""
    labels = [float(label) for row in made.rows for label in row.labels]
    return {
        "rows": len(made.rows),
        "steps": len(labels),
        "mean_label": sum(labels) / len(labels),
        "left_out": dict(made.left_out),
        "branches": made.branches,
        "branch_tokens": made.tokens,
    }


def text(made: Labelled, out: Path) -> str:
    found = facts(made)
    lines = [
        f"wrote {found['rows']:,} rows with {found['steps']:,} steps to {out}; mean label "
        f"{found['mean_label']:.3f}",
        f"sampled {found['branches']:,} answers behind steps, {found['branch_tokens']:,} tokens",
    ]
    lines += [f"left out {number:,}: {why}" for why, number in made.left_out.most_common()]
    return "\n".join(lines)
