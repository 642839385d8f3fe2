"""`groupwise docs`: the pages of docs/ that are made from the code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import RecipeError

if TYPE_CHECKING:
    from groupwise.commands.overview import Overview


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "docs",
        help="write the pages of docs/ that are made from the code",
        example="groupwise docs --check",
    )
    parser.add_argument("--check", action="store_true", help="only say whether they are current")
    parser.add_argument("--folder", default="docs", help="default: docs")
    parser.set_defaults(run_command=partial(run, commands.whole))


def run(whole: Overview, args: argparse.Namespace) -> int:
    from groupwise.explain.explain import undocumented

    missing = undocumented()
    if missing:
        raise RecipeError(
            f"No notes for {', '.join(missing)}: add their pitfalls to "
            "groupwise/explain/notes.toml, and a sentence to families.toml beside it."
        )
    folder = Path(args.folder)
    if not args.check and not folder.is_dir():
        raise RecipeError(f"There is no folder {args.folder!r}: run this at the root.")
    pages = _pages(folder, whole)
    stale = [path for path in sorted(folder.glob("algorithms/*.md")) if path not in pages]
    if args.check:
        return _compared(pages, stale)
    for path, page in pages.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(page, "utf-8")
        print(f"wrote {path}")
    for path in stale:
        path.unlink()
        print(f"removed {path}: no recipes belong there")
    return 0


def _pages(folder: Path, whole: Overview) -> dict[Path, str]:
    """Return all pages that are made from the code, as they should be."""
    from groupwise.commands.api_page import api_page
    from groupwise.commands.commands_page import commands_page
    from groupwise.config.page import settings_page
    from groupwise.explain.explain import algorithm_pages
    from groupwise.explain.tree import with_tree
    from groupwise.runfiles.catalogue import metrics_page
    from groupwise.watch.rules import rules_page

    architecture = folder / "architecture.md"
    made = {
        **algorithm_pages(),
        "api.md": api_page(),
        "architecture.md": with_tree(
            architecture.read_text("utf-8") if architecture.is_file() else ""
        ),
        "commands.md": commands_page(whole),
        "metrics.md": metrics_page(),
        "rules.md": rules_page(),
        "settings.md": settings_page(),
    }
    return {folder / name: page for name, page in made.items()}


def _compared(pages: Mapping[Path, str], stale: Sequence[Path]) -> int:
    """Say which pages are not what the code says, or not of it; 1 if any."""
    old = [p for p, text in pages.items() if not p.is_file() or p.read_text("utf-8") != text]
    for path in old:
        print(f"{path} is not what the code says: run `make docs`.", file=sys.stderr)
    for path in stale:
        print(f"{path} is no page of the code any more: run `make docs`.", file=sys.stderr)
    return 1 if old or stale else 0
