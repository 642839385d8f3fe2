"""A pipeline for people: a table of its stages, and report.html of the folder as a whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from groupwise.common.progress import clock
from groupwise.errors import RunError
from groupwise.runfiles.files import write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.stages import StageFigures, figures, read_stages
from groupwise.watch.report import HEAD, STYLE, section, table, text

COLUMNS = ("stage", "recipe", "from", "state", "steps", "tokens", "time", "accuracy", "gain")
PARTS = ("stage", "part of the reward", "before", "after")


def rows_of(found: Sequence[StageFigures]) -> list[list[str]]:
    """Return the stages as rows of a table, and what they come to in all."""
    rows = [
        [
            each.record.name,
            each.record.recipe,
            each.record.start,
            each.record.state,
            _count(each.steps),
            _count(each.tokens),
            "" if each.seconds is None else clock(each.seconds),
            _accuracy(each),
            "" if each.gain is None else f"{100 * each.gain:+.1f}",
        ]
        for each in found
    ]
    seconds = sum(each.seconds or 0.0 for each in found)
    measured = [each for each in found if each.gain is not None]
    whole = ["in all", "", "", "", _count(sum(x.steps or 0 for x in found)),
             _count(sum(x.tokens or 0 for x in found)), clock(seconds), "", ""]  # fmt: skip
    if measured and measured[0].held_out == measured[-1].held_out:  # else of different things
        first, last = measured[0].before, measured[-1].after
        assert first is not None and last is not None
        whole[-2:] = [f"{100 * first:.1f} -> {100 * last:.1f}", f"{100 * (last - first):+.1f}"]
    return [*rows, whole]


def parts_of(found: Sequence[StageFigures]) -> list[list[str]]:
    """Return parts of rewards as rows of a table: learned or only shown, on held-out tasks."""
    return [
        [each.record.name, part.name, *("" if x is None else f"{x:.3f}" for x in part[1:])]
        for each in found
        for part in each.parts
    ]


def _count(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _accuracy(each: StageFigures) -> str:
    if each.before is None or each.after is None:
        return ""
    return f"{100 * each.before:.1f} -> {100 * each.after:.1f}"


def write_page(path: str | os.PathLike[str]) -> Path:
    """Make report.html of a pipeline's folder: its stages in order, with links to their own."""
    folder = RunFolder(path)
    record = read_stages(folder.path)
    if record is None:
        raise RunError(f"{path} is no pipeline: it has no stages.json.")
    found = figures(folder.path, record)
    lines = [
        f'<p><a href="{text(each.record.folder)}/report.html">{text(each.record.name)}</a>: '
        f"{text(_origin(each))}</p>"
        for each in found
    ]
    parts = parts_of(found)
    title = text(record.name)
    page = (
        f"{HEAD}<title>{title}: groupwise pipeline</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body><main>\n<h1>{title}</h1>\n"
        + section("Stages", table(COLUMNS, rows_of(found)))
        + (section("Held-out rewards, by part", table(PARTS, parts)) if parts else "")
        + section("Where each came from", "".join(lines))
        + "\n</main></body>\n</html>\n"
    )
    with folder.writing("report.html"):
        write_atomic(folder.report, page)
    return folder.report


def _origin(each: StageFigures) -> str:
    if each.parent is None:
        return f"from {each.record.start}"
    weights = str(each.parent.get("weights", ""))[:12]
    return f"from {each.parent['folder']}, step {each.parent['step']}, weights {weights}"
