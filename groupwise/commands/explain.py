"""`groupwise explain`: a method in words, two beside each other, another tool's file."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

from groupwise.commands.shared import print_json, terminal_width
from groupwise.errors import RecipeError, RecipeWarning


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="one method, or what differs between two",
        example="groupwise explain dapo grpo@trl",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a recipe, or file.py:recipe")
    parser.add_argument(
        "--from", dest="file", type=Path, metavar="FILE",
        help="a configuration of TRL, verl, OpenRLHF or prime-rl: what computes the same here",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        return _explain_file(args)
    if not 1 <= len(args.names) <= 2:
        raise RecipeError(
            f"explain takes one recipe or two, got {len(args.names)}; or --from FILE, a "
            "configuration of another tool."
        )
    from groupwise.explain.explain import difference, explain
    from groupwise.explain.render import difference_text, explain_text

    one = len(args.names) == 1
    with warnings.catch_warnings():  # doubts are part of the explanation
        warnings.simplefilter("ignore", RecipeWarning)
        data = explain(args.names[0]) if one else difference(*args.names)
    if args.json:
        print_json(data)
    else:
        print((explain_text if one else difference_text)(data, terminal_width()))
    return 0


def _explain_file(args: argparse.Namespace) -> int:
    if args.names:
        raise RecipeError(f"explain takes a recipe or --from FILE, not both: {args.names[0]!r}.")
    from groupwise.explain.peers.translate import translated, translation_text

    answers = translated(args.file)
    if args.json:
        print_json(answers)
    else:
        print("\n\n".join(translation_text(answer, terminal_width()) for answer in answers))
    return 0
