"""The documentation site: every page in it once, no broken link, and nothing from elsewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from browsing import CHROMIUM, chromium, sound_page

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
CONTENTS = tomllib.loads((SITE / "contents.toml").read_text("utf-8"))
BESIDE = {ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "examples").rglob("*.md")}
ELSEWHERE = re.compile(r"(?:https?:)?//")
# Attributes that a browser loads something for, not only when it is clicked on.
SRC = ("audio", "embed", "iframe", "img", "script", "source", "video")
LOADED = dict.fromkeys(SRC, "src") | {"link": "href", "object": "data", "use": "href"}
FAULTS = {  # and what is said of each
    "[gone](gone.md)": "gone.md",
    "[there, but not this](other.md#nowhere)": "'nowhere'",
    "[here, but not this](#not-here)": "not-here",
    "![no picture](gone.png)": "gone.png",
    "[no file](../examples/gone.py)": "gone.py",
}


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("sphinx", reason="no Sphinx: pip install -e '.[docs]'")
    arguments = ["-q", "-W", "--keep-going", "-c", "docs/site", "-b", "html"]
    folders = ["-d", str(out / "doctrees"), ".", str(out / "html")]
    command = [sys.executable, "-m", "sphinx", *arguments, *folders]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    done = build(ROOT, out)
    assert (done.returncode, done.stderr) == (0, "")
    return out / "html"


# --- what is in it --------------------------------------------------------------------------------


def test_every_page_is_in_the_contents_once() -> None:
    listed = [part["pages"] for part in CONTENTS["part"]] + list(CONTENTS["under"].values())
    named = Counter(page for pages in listed for each in pages for page in ROOT.glob(each))
    pages = {*(ROOT / "docs").rglob("*.md"), *BESIDE} - {ROOT / "docs" / "index.md"}
    assert pages - set(named) == set(), "not in docs/site/contents.toml"
    assert [page for page, times in named.items() if times > 1] == []
    empty = [each for pages in listed for each in pages if not list(ROOT.glob(each))]
    assert empty == [], "named in docs/site/contents.toml, and not there"
    assert all((ROOT / page) in named for page in CONTENTS["under"])


def test_the_make_target_builds_it_as_the_tests_do() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "-m sphinx -q -W --keep-going -c docs/site -d build/doctrees -b html ." in makefile
    assert "build/" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def test_pictures_are_drawn_from_the_numbers_of_their_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(SITE)
    import pictures  # type: ignore[import-not-found]

    drawn = pictures.pictures()
    folder = ROOT / "docs" / "pictures"
    assert {path.name for path in folder.glob("*.svg")} == set(drawn)
    for name, picture in drawn.items():
        assert (folder / name).read_text("utf-8") == picture, "run docs/site/pictures.py"
    figures = (ROOT / "docs" / "performance.md").read_text("utf-8")
    measured = (ROOT / "docs" / "one_forward_pass.md").read_text("utf-8")
    for values in pictures.MISMATCH.values():
        for value in values:
            assert f"{value:g}" in figures and f"{value:g}" in measured


# --- the build ------------------------------------------------------------------------------------


def test_it_is_built_without_a_warning_and_has_every_page(site: Path) -> None:
    """Of links, anchors, pictures and pages that are not there."""
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    assert 'url=docs/index.html"' in (site / "index.html").read_text("utf-8")


def test_what_is_not_there_fails_the_build(tmp_path: Path) -> None:
    root = small(tmp_path, "\n\n".join(FAULTS))
    done = build(root, tmp_path / "out")
    assert done.returncode != 0
    for said in FAULTS.values():
        assert said in done.stderr
    assert done.stderr.count("index.md:") == len(FAULTS), done.stderr


def test_a_page_in_no_contents_fails_the_build_and_a_sound_one_does_not(tmp_path: Path) -> None:
    root = small(tmp_path, "[other.md](other.md#here), [all](../README.md)")
    done = build(root, tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "out" / "html" / "docs" / "index.html").read_text("utf-8")
    assert '<span class="std std-ref">Here</span>' in page, "a file's name gives way to its title"
    (root / "docs" / "lost.md").write_text("# Lost\n")
    done = build(root, tmp_path / "again")
    assert done.returncode != 0 and "lost.md" in done.stderr


def small(tmp_path: Path, text: str) -> Path:
    """A site of two pages with this one's configuration."""
    root = tmp_path / "root"
    shutil.copytree(SITE, root / "docs" / "site", ignore=shutil.ignore_patterns("__pycache__"))
    assets = Path("groupwise") / "view" / "assets"
    shutil.copytree(ROOT / assets, root / assets)
    contents = '[[part]]\ntitle = "All"\npages = ["docs/other.md"]\n[under]\n'
    (root / "docs" / "site" / "contents.toml").write_text(contents)
    (root / "docs" / "index.md").write_text(f"# Index\n\n{text}\n")
    (root / "docs" / "other.md").write_text("# Other\n\n## Here\n")
    return root


# --- nothing from elsewhere -----------------------------------------------------------------------


class Loads(HTMLParser):
    """The addresses that a browser loads for a page without being asked."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("next", "prev", "search", "index", "canonical"):
            return
        self.found += [
            value for name in (LOADED.get(tag), "srcset") if (value := given.get(name or ""))
        ]


def test_it_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text("utf-8")
        assert not [each for each in Loads(text).found if ELSEWHERE.match(each)], page
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", text), page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", sheet.read_text("utf-8")), sheet


def test_addresses_that_would_be_loaded_are_found() -> None:
    text = '<script src="https://a/b.js"></script><img srcset="//a/b.png"><a href="https://c">'
    assert Loads(text).found == ["https://a/b.js", "//a/b.png"]


# --- in a browser ---------------------------------------------------------------------------------


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install playwright"
    )
    with chromium(sync_api, tmp_path_factory.mktemp("home")) as made:
        yield made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_fit_the_screen(browser: Any, address: str, width: int, scheme: str) -> None:
    """With pictures, wide tables and code, and in the colours that the reader's system has."""
    with sound_page(browser, (address, "data:"), color_scheme=scheme) as page:
        page.set_viewport_size({"width": width, "height": 900})
        for name in ("index", "what_happens", "reading_a_run", "settings", "performance"):
            page.goto(f"{address}/docs/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            broken = "[...document.images].filter(x => !x.complete || !x.naturalWidth).length"
            page.wait_for_load_state("load")
            assert page.evaluate(broken) == 0, name
        light = page.evaluate("getComputedStyle(document.body).colorScheme")
        assert light == scheme


@pytest.mark.parametrize("served", [True, False], ids=["served", "from the disk"])
def test_the_search_works(browser: Any, address: str, site: Path, served: bool) -> None:
    """Without any server, too: then without excerpts, which would have to be fetched."""
    at = address if served else site.as_uri()
    with sound_page(browser, (at, "data:")) as page:
        page.goto(f"{at}/docs/index.html")
        page.locator("input[name=q]").first.fill("advantage")
        page.keyboard.press("Enter")
        page.locator(
            "ul.search li a", has_text="What happens in one training step"
        ).first.wait_for()
        if served:
            page.locator("ul.search p.context").first.wait_for()
        page.locator("ul.search li a").first.click()
        page.locator("article h1").wait_for()
