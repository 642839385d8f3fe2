"""The pages do not rot: links lead somewhere, and the files and settings that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from groupwise.config.page import settings_with
from groupwise.config.values import FIELDS, TABLES
from groupwise.explain.explain import families
from groupwise.runfiles.catalogue import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
every_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)


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


def test_the_readme_counts_recipes_right() -> None:
    """By the families, which have every recipe of the package once."""
    every = [name for each in families().values() for name in each["recipes"]]
    dialects = [name for name in every if "@" in name]
    readme = (ROOT / "README.md").read_text("utf-8")
    told = [
        tuple(map(int, x)) for x in re.findall(r"(\d+) recipes, (\d+) of them dialects", readme)
    ]
    assert told == [(len(every), len(dialects))]
    assert not re.findall(r"\d+ (?:methods|variants|dialects|algorithms)\b", readme)


def test_what_a_metric_or_a_setting_is_can_be_read_alone() -> None:
    """Whoever looks one up has not read the row above it."""
    told = {name: metric.meaning for name, metric in CATALOGUE.items()}
    told |= {each.name: each.purpose for each in settings_with([])}
    refers = re.compile(r"(the same|its|their|those|they|it)\b(?! as )|.*\bof these\b")
    assert len(told) > 300
    assert {name: said for name, said in told.items() if refers.match(said)} == {}


# Words that pages, metrics and settings use without saying each time what they mean.
NEEDED = """
    prompt completion token policy reward grader environment turn episode rollout group baseline
    advantage step batch update on-policy off-policy ratio anchor clip reference KL entropy recipe
    slot filter shaping aggregation gate correction penalty schedule stream idle dialect role critic
    teacher source stage adapter sampler learner engine mismatch lag pack rank checkpoint
"""


def test_the_glossary_has_the_words_that_pages_use() -> None:
    page = (ROOT / "docs" / "words.md").read_text("utf-8")
    told = dict(re.findall(r"^### (.+)\n\n(.+)\n", page, re.MULTILINE))
    assert set(NEEDED.split()) <= set(told)
    assert len(told) == page.count("\n### ") >= 60, "a word twice, or one in several paragraphs"
    for word, said in told.items():
        plain = re.sub(r" ?\(\[[^)]*\)(?:, \[[^)]*\))*\)", "", said)
        assert plain.endswith(".") and len(re.findall(r"[.?!](?=\s|$)", plain)) <= 2, word
        assert 6 <= len(said.split()) <= 55, word


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
