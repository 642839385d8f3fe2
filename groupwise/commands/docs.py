"""`groupwise docs`: the pages of docs/ that are made from the code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from groupwise.errors import RecipeError

PAGES = "docs/algorithms.md, metrics.md, rules.md and settings.md"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "docs", help=f"write {PAGES} from the code", example="groupwise docs --check"
    )
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    parser.add_argument("--folder", default="docs", help="default: docs")
    parser.set_defaults(run_command=run)


def run(args: argparse.Namespace) -> int:
    from groupwise.config.page import settings_page
    from groupwise.explain.explain import markdown, undocumented
    from groupwise.explain.tree import with_tree
    from groupwise.runfiles.catalogue import metrics_page
    from groupwise.watch.rules import rules_page

    missing = undocumented()
    if missing:
        raise RecipeError(
            f"No notes for {', '.join(missing)}: add their pitfalls to "
            "groupwise/explain/notes.toml."
        )
    folder, current = Path(args.folder), True
    if not args.check and not folder.is_dir():
        raise RecipeError(f"There is no folder {args.folder!r}: run this at the root.")
    architecture = folder / "architecture.md"
    pages = {
        "algorithms.md": markdown(),
        "architecture.md": with_tree(
            architecture.read_text("utf-8") if architecture.is_file() else ""
        ),
        "metrics.md": metrics_page(),
        "rules.md": rules_page(),
        "settings.md": settings_page(),
    }
    for name, page in pages.items():
        path = folder / name
        if not args.check:
            path.write_text(page, "utf-8")
            print(f"wrote {path}")
        elif not path.is_file() or path.read_text("utf-8") != page:
            print(f"{path} is not what the code says: run `make docs`.", file=sys.stderr)
            current = False
    return 0 if current else 1
