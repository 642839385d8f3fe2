"""The pages do not rot: links lead somewhere, and the files and settings that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.config.values import FIELDS, TABLES

ROOT = Path(__file__).resolve().parents[2]
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_settings_that_are_named_exist(page: Path) -> None:
    """In backquotes, alone or with a value. Names of other tools are in migrate.md."""
    if page.name == "migrate.md":
        pytest.skip("half of its names are those of TRL and verl")
    tables = "|".join(sorted(TABLES))
    named = re.findall(rf"`((?:{tables})\.[a-z_]+)(?:`| ?=)", page.read_text("utf-8"))
    others = (".py", ".md", ".json", ".ops", "_truth")  # the last: a column of verl's data
    settings = {name for name in named if not name.endswith(others)}
    assert settings <= set(FIELDS), settings - set(FIELDS)


def test_the_readme_can_be_read_to_the_end() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 1_200


def test_every_page_is_reached_from_the_readme() -> None:
    """By its links and those of the pages that they lead to."""
    found, new = set[Path](), {ROOT / "README.md"}
    while new:
        page = new.pop()
        found.add(page)
        linked = re.findall(r"\]\((?!https?:)([^)\s#]+\.md)", page.read_text("utf-8"))
        new |= {(page.parent / link).resolve() for link in linked} - found
    assert set(DOCS) <= found, set(DOCS) - found


def test_every_folder_is_in_the_tree() -> None:
    """So are the files in them: `make docs` writes the tree, `make check` compares it."""
    tree = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    for path in (ROOT / "groupwise").rglob("__init__.py"):
        name = path.parent.relative_to(ROOT / "groupwise").as_posix()
        assert name == "." or f"**`{name}/`**" in tree, name
