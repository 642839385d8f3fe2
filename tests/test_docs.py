"""The pages do not rot: links lead somewhere, and the files and settings that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.config.values import FIELDS, TABLES

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
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
    settings = {name for name in named if not name.endswith((".py", ".md", ".json", ".ops"))}
    assert settings <= set(FIELDS), settings - set(FIELDS)


def test_the_tree_of_the_readme_is_the_tree() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    tree = readme.partition("## The tree")[2].split("```")[1]
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    there = {
        path.name
        for folder in ("groupwise", "benchmarks", "experiments", "examples")
        for path in (ROOT / folder).rglob("*.py")
    }
    assert named <= there, named - there
    # Those folders are spelled out, file by file.
    for folder in ("data", "engine", "graders", "groups", "losses", "optim", "sync", "replay"):
        own = {path.name for path in (ROOT / "groupwise" / folder).glob("[!_]*.py")}
        assert own <= named, f"not in the README's tree: {own - named}"
    top = {path.name for path in (ROOT / "groupwise").glob("[!_]*.py")}
    assert top <= named, f"not in the README's tree: {top - named}"


def test_every_page_is_named_in_the_readme() -> None:
    tree = (ROOT / "README.md").read_text("utf-8").partition("## The tree")[2]
    assert {page.name for page in DOCS} <= set(re.findall(r"\b(\w+\.md)\b", tree))
