"""The command line: reads arguments, calls, prints. All that is said comes from other modules."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from groupwise.errors import GroupwiseError, RecipeError, RecipeWarning

PAGE = "docs/algorithms.md"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="groupwise", description="Policy optimisation of the GRPO family, method by method."
    )
    parser.add_argument("--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    recipes = commands.add_parser("recipes", help="list all methods, or find the one you need")
    recipes.add_argument("--choose", action="store_true", help="answer questions, get advice")
    recipes.add_argument(
        "--answer",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="answer a question of --choose beforehand; repeatable",
    )
    recipes.add_argument("--json", action="store_true", help="data instead of text")
    recipes.set_defaults(run=_recipes)

    explain = commands.add_parser("explain", help="one method, or what differs between two")
    explain.add_argument("names", nargs="+", metavar="NAME", help="a recipe, or file.py:recipe")
    explain.add_argument("--json", action="store_true", help="data instead of text")
    explain.set_defaults(run=_explain)

    docs = commands.add_parser("docs", help=f"write {PAGE} from the code")
    docs.add_argument("--check", action="store_true", help="only say whether it is current")
    docs.add_argument("--file", default=PAGE, help=f"default: {PAGE}")
    docs.set_defaults(run=_docs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 is success, 1 a failed check, 2 a wrong request."""
    parser = _parser()
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # an ASCII terminal shows ? for Σ, no traceback
        sys.stdout.reconfigure(errors="replace")
    try:
        if args.version:
            return _version()
        if args.command is None:
            parser.print_help()
            return 2
        status: int = args.run(args)
        sys.stdout.flush()
        return status
    except GroupwiseError as error:
        print(f"groupwise: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `groupwise recipes | head`: nobody reads on, nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _version() -> int:
    from importlib.metadata import version

    print(f"groupwise {version('groupwise')}")
    return 0


def _width() -> int:
    return min(max(shutil.get_terminal_size((100, 24)).columns, 60), 120)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False, default=str))


# --- recipes ----------------------------------------------------------------------------------


def _recipes(args: argparse.Namespace) -> int:
    if args.choose:
        return _choose(args)
    if args.answer:
        raise RecipeError("--answer belongs to --choose: groupwise recipes --choose --answer ...")
    from groupwise.tell.explain import table
    from groupwise.tell.render import recipes_text

    rows = table()
    if args.json:
        _print_json(rows)
    else:
        print(recipes_text(rows, _width()))
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
    from groupwise.tell import choose
    from groupwise.tell.render import choice_text

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
        _print_json({"answers": full, "assumed": assumed, "recommendations": found})
    else:
        print(choice_text(full, assumed, found, _width()))
    return 0


def _ask(answers: dict[str, str]) -> dict[str, str]:
    """Ask what is open, on stderr, so that stdout stays the answer alone. Enter is the default."""
    from groupwise.tell.choose import next_question

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


# --- explain ----------------------------------------------------------------------------------


def _explain(args: argparse.Namespace) -> int:
    if len(args.names) > 2:
        raise RecipeError(f"explain takes one recipe or two, got {len(args.names)}.")
    from groupwise.tell.explain import difference, explain
    from groupwise.tell.render import difference_text, explain_text

    one = len(args.names) == 1
    with warnings.catch_warnings():  # doubts are part of the explanation
        warnings.simplefilter("ignore", RecipeWarning)
        data = explain(args.names[0]) if one else difference(*args.names)
    if args.json:
        _print_json(data)
    else:
        print((explain_text if one else difference_text)(data, _width()))
    return 0


# --- docs -------------------------------------------------------------------------------------


def _docs(args: argparse.Namespace) -> int:
    from groupwise.tell.explain import markdown, undocumented

    missing = undocumented()
    if missing:
        raise RecipeError(
            f"No notes for {', '.join(missing)}: add their pitfalls to groupwise/tell/notes.toml."
        )
    page, path = markdown(), Path(args.file)
    if args.check:
        current = path.is_file() and path.read_text("utf-8") == page
        if not current:
            print(f"{path} is not what the code says: run `make docs`.", file=sys.stderr)
        return 0 if current else 1
    if not path.parent.is_dir():
        raise RecipeError(f"There is no folder {str(path.parent)!r}: run this at the root.")
    path.write_text(page, "utf-8")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
