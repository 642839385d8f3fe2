"""A run as one HTML file that opens without a server and without a network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from groupwise.errors import ConfigError
from groupwise.runfiles.disk_errors import disk_error
from groupwise.runfiles.files import write_atomic
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import read_answers
from groupwise.view import chat
from groupwise.view.curves import sections_of, trends
from groupwise.view.facts import progress_of, tiles_of, verdict_of
from groupwise.view.render import need_plotly, plotly, plotly_styles, render
from groupwise.view.runs import ViewedRun
from groupwise.view.steps import mark

ASSETS = Path(__file__).parent / "assets"
STYLES, SCRIPTS = ("style", "charts"), ("curves", "charts", "metrics", "run")
PROMPTS, ANSWERS = 12, 4  # of the first and of the latest step: these of it
COLUMNS = ("group", "sample", "prompt_text", "text", "answer", "reward", "correct")


def export(run: ViewedRun, path: Path) -> None:
    """Write the page of a run as it is now, with curves, events, some samples and configuration."""
    need_plotly()
    if path.suffix != ".html":
        raise ConfigError(
            f"A run is exported as a page: name a file that ends in .html, not {path.name!r}."
        )
    page = exported_page(run).encode("utf-8", "replace")
    try:
        write_atomic(path, page)
    except OSError as error:
        raise disk_error(path.name, path.parent, error) from error


def exported_page(run: ViewedRun) -> str:
    about, seen = run.about(), PartialReader()
    progress = progress_of(run, about)
    steps = list(dict.fromkeys((*about.rollouts[:1], *about.rollouts[-1:])))
    samples = [(step, seen.get(_some, run.folder.rollout(step)) or []) for step in steps]
    style, scripts = _style(), [*_scripts()]
    return render(
        "export.html",
        run=run,
        about=about,
        progress=progress,
        verdict=verdict_of(run, about, progress),
        tiles=tiles_of(run, about, progress),
        sections=sections_of(run),
        samples=samples,
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        damage=[*about.damage, *seen.damage],
        data=_enclosed(trends(run, list(run.columns))),
        style=Markup(style),  # files of this package
        scripts=[Markup(script) for script in scripts],
        policy=_policy([style], scripts),
        ids=plotly_styles(),
    )


def _some(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return some prompts of a step, each with some answers to it."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in read_answers(path, COLUMNS)[0].to_pylist():
        some = groups.setdefault(row["group"] or 0, [])
        if len(some) < ANSWERS and len(groups) <= PROMPTS:
            some.append({**row, "mark": mark(row["correct"], row["reward"])})
    kept = [some for some in groups.values() if some]
    prompts = chat.own_words([some[0]["prompt_text"] or "" for some in kept])
    return list(zip(prompts, kept, strict=True))


def _enclosed(data: Any) -> Markup:
    """Return data as JSON that no reader of HTML takes for anything else."""
    text = json.dumps(data, allow_nan=False)  # ASCII alone
    spelled = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
    return Markup("".join(spelled.get(letter, letter) for letter in text))


@functools.cache
def _style() -> str:
    logo = base64.b64encode((ASSETS / "logo.svg").read_bytes()).decode()
    style = "\n".join((ASSETS / f"{name}.css").read_text("utf-8") for name in STYLES)
    return style.replace('url("logo.svg")', f'url("data:image/svg+xml;base64,{logo}")')


@functools.cache
def _scripts() -> tuple[str, ...]:
    ours = [(ASSETS / f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    return tuple(x.replace("</script", "<\\/script") for x in (plotly().decode("utf-8"), *ours))


def _policy(styles: Sequence[str], scripts: Sequence[str]) -> str:
    """Return a policy that lets these run and nothing else, from here or from elsewhere."""

    def hashes(texts: Sequence[str]) -> str:
        digests = (hashlib.sha256(text.encode()).digest() for text in texts)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes(scripts)}; style-src {hashes(styles)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
