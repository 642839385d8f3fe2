"""`groupwise recipes`: all methods in a table, or the one that answers lead to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from groupwise.commands.shared import print_json, terminal_width
from groupwise.errors import RecipeError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "recipes",
        help="list all methods, or find the one you need",
        example="groupwise recipes --choose --answer critic=no",
    )
    parser.add_argument("--choose", action="store_true", help="answer questions, get advice")
    parser.add_argument(
        "--answer", action="append", default=[], metavar="KEY=VALUE",
        help="answer a question of --choose beforehand; repeatable",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="data instead of text")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    if args.choose:
        return _choose(args)
    if args.answer:
        raise RecipeError("--answer belongs to --choose: groupwise recipes --choose --answer ...")
    from groupwise.explain.explain import table
    from groupwise.explain.render import recipes_text

    rows = table()
    if args.json:
        print_json(rows)
    else:
        print(recipes_text(rows, terminal_width()))
    return 0


def _given(pairs: Sequence[str]) -> dict[str, str]:
    answers: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise RecipeError(f"--answer {pair!r} has no value. Write KEY=VALUE, e.g. moe=yes.")
        if key in answers:
            raise RecipeError(f"--answer {key} is given twice.")
        answers[key] = value
    return answers


def _choose(args: argparse.Namespace) -> int:
    from groupwise.explain import choose
    from groupwise.explain.render import choice_text

    answers = _given(args.answer)
    choose.check(answers)
    if sys.stdin.isatty():
        answers = _ask(answers)
    full = choose.complete(answers)
    assumed = [key for key in full if key not in answers]
    if assumed:
        taken = ", ".join(f"{key}={full[key]}" for key in assumed)
        print(f"Not answered, so the defaults hold: {taken}.", file=sys.stderr)
    found = choose.choose(full)
    if args.json:
        print_json({"answers": full, "assumed": assumed, "recommendations": found})
    else:
        print(choice_text(full, assumed, found, terminal_width()))
    return 0


def _ask(answers: dict[str, str]) -> dict[str, str]:
    """Ask what is open, on stderr, so that stdout stays the answer alone. Enter is the default."""
    from groupwise.explain.choose import next_question

    while (question := next_question(answers)) is not None:
        print(question.text, file=sys.stderr)
        for option, meaning in question.options.items():
            mark = " [Enter]" if option == question.default else ""
            print(f"  {option}{': ' + meaning if meaning else ''}{mark}", file=sys.stderr)
        print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:  # end of input: the rest by default
            return answers
        word = line.strip().lower() or question.default
        matching = [option for option in question.options if option.startswith(word)]
        if word in question.options or len(matching) == 1:
            answers = {**answers, question.key: word if word in question.options else matching[0]}
        else:
            print(f"Please answer one of: {', '.join(question.options)}.", file=sys.stderr)
    return answers
