"""The documentation as a site, for `make site`: the pages as they stand, and the viewer's look.

The source folder is the root, so that the links from docs/ to files beside it hold.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from palette import ASSETS, palettes  # noqa: E402

ROOT = HERE.parents[1]
CONTENTS = tomllib.loads((HERE / "contents.toml").read_text("utf-8"))

# A link whose text is its file, for readers of the files: "[data.md](data.md#mixtures)".
FILE_LINK = re.compile(r"\[(?:\w+/)*\w+\.md\]\(([\w./]+\.md)")
# What is the README to who reads files is the first page here.
README = re.compile(r"\]\((?:\.\./)*README\.md")

project = html_title = "groupwise"
extensions = ["myst_parser"]
root_doc = "docs/index"
# What is not named is not even walked through: the root also has runs and environments.
SOURCES = ("docs", "examples", "CONTRIBUTING.md", "CHANGELOG.md")
exclude_patterns = [path.name for path in ROOT.iterdir() if path.name not in SOURCES]
nitpicky = True
myst_heading_anchors = 6
highlight_language = "text"  # of blocks that do not say theirs: commands and what they print

html_theme = "furo"
html_logo = html_favicon = str(ASSETS / "logo.svg")
html_static_path = [str(HERE / "site.css"), str(HERE / "site.js")]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"priority": 900})]  # behind what it changes
html_extra_path = [str(HERE / "index.html")]  # the address of the site leads to root_doc
html_copy_source = html_use_index = False
html_show_copyright = False


def furo(of: dict[str, str]) -> dict[str, str]:
    """Return furo's names for the viewer's colours."""
    return {
        "color-brand-primary": of["accent"],
        "color-brand-content": of["accent"],
        "color-brand-visited": of["accent"],
        "color-foreground-primary": of["ink"],
        "color-foreground-secondary": of["soft"],
        "color-foreground-muted": of["soft"],
        "color-foreground-border": of["field"],
        "color-sidebar-link-text": of["soft"],
        "color-sidebar-link-text--top-level": of["ink"],
        "color-sidebar-item-background--hover": of["sunk"],
        "color-background-primary": of["card"],
        "color-background-secondary": of["page"],
        "color-background-hover": of["sunk"],
        "color-background-border": of["edge"],
        "color-inline-code-background": of["sunk"],
        "color-code-background": of["page"],
        "color-code-foreground": of["ink"],
        "color-highlight-on-target": of["tint"],
    }


LIGHT, DARK = map(furo, palettes())
html_theme_options = {"light_css_variables": LIGHT, "dark_css_variables": DARK}


def named(patterns: list[str]) -> Iterator[str]:
    """Yield the pages that patterns of contents.toml name; one that names none is an error."""
    for pattern in patterns:
        found = sorted(ROOT.glob(pattern))
        if not found:
            raise FileNotFoundError(f"contents.toml names {pattern}, and there is no such page.")
        yield from (path.relative_to(ROOT).with_suffix("").as_posix() for path in found)


def toctree(pages: list[str], *options: str) -> str:
    lines = [
        "```{toctree}",
        ":hidden:",
        *options,
        "",
        *(f"/{page}" for page in named(pages)),
        "```",
    ]
    return "\n\n" + "\n".join(lines) + "\n"


def with_contents(app: Any, name: str, source: list[str]) -> None:
    """Add the table of contents to the pages that it hangs on, and name pages by their titles."""
    source[0] = FILE_LINK.sub(r"[](\1", README.sub(f"](/{root_doc}.md", source[0]))
    if name == root_doc:
        for part in CONTENTS["part"]:
            source[0] += toctree(part["pages"], f":caption: {part['title']}")
    if below := CONTENTS["under"].get(f"{name}.md"):
        source[0] += toctree(below)


def setup(app: Any) -> None:
    app.connect("source-read", with_contents)
