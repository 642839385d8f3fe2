"""Templates, the filters that make text safe to read, and plotly's script."""

from __future__ import annotations

import functools
import importlib.resources
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
from markupsafe import Markup

from groupwise.common.extras import install
from groupwise.errors import ConfigError
from groupwise.view.chat import own_words
from groupwise.watch.chart import number
from groupwise.watch.display import visible

TEXT_SHOWN, EXCERPT = 20_000, 1_200  # characters of a text, and of one beside others
BEFORE = 24  # characters that are shown before words that were looked for


def need_plotly() -> None:
    if find_spec("plotly") is None:
        raise ConfigError(
            "The viewer draws its charts with plotly, which is not installed: "
            f"`{install('view')}`. A report needs no more than groupwise: "
            "groupwise report RUN"
        )


@functools.cache
def plotly() -> bytes:
    return (importlib.resources.files("plotly") / "package_data/plotly.min.js").read_bytes()


@functools.cache
def plotly_styles() -> list[str]:
    """Return ids of style sheets that plotly's script adds to a page unless it has such an element.

    They are of maps, which no page has, and the policy stops them with an error on the console.
    """
    return sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly().decode())))


def shown(value: float | None, share: bool = False) -> str:
    return "–" if value is None else number(value, share)


def cut(text: str, limit: int) -> str:
    """Return as much as is shown, control characters spelled out."""
    return visible(text[:limit])


def marked(text: str, words: str, limit: int) -> Markup:
    """Return the part of a text where some words are, and mark them; else how it begins."""
    wanted = re.compile(f"({re.escape(words)})", re.IGNORECASE)
    found = wanted.search(text)
    start = max(found.start() - BEFORE, 0) if found else 0
    parts = [Markup("<mark>{}</mark>").format(visible(part)) if at % 2 else visible(part)
             for at, part in enumerate(wanted.split(text[start : start + limit]))]  # fmt: skip
    return Markup("").join([*(["… "] if start else []), *parts])


def quoted(name: str) -> str:
    """Return a name as a part of an address; bytes of a file's name that are no UTF-8 come back."""
    return quote(name, safe="", errors="surrogateescape")


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        cut=cut,
        visible=lambda value: visible(str(value)),
        number=shown,
        own_words=lambda prompt: own_words([prompt])[0],
        query=urlencode,
        quoted=quoted,
        marked=marked,
    )
    return made


def render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)


def count(text: str, default: int) -> int:
    """Return a number that stands in an address; the default where it is none."""
    return int(text) if text.isdecimal() and len(text) < 10 else default
