"""Curves and events as a page and its script need them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from groupwise.runfiles.catalogue import SECTIONS, find
from groupwise.view.facts import progress_of, tiles_of, verdict_of
from groupwise.view.render import EXCERPT, cut
from groupwise.view.runs import USEFUL, ViewedRun
from groupwise.watch.chart import Curve, svg, thin
from groupwise.watch.report import curves_of, is_health

MOST_POINTS = 2000  # of a curve: each can be clicked
MOST_EVENTS = 1000  # of a run on its page, the latest
FEW = 3  # events of one kind that are told one by one
CONSTANT_FROM = 5  # values of a metric that never changed: before, who knows
FIRST = "Judge by these"
USEFUL_HEALTHY = "above 50 %"
_RANGE = re.compile(r"(above|below) (-?\d+(?:\.\d+)?(?:e-?\d+)?)( %)?(?=$|[;,(]| \()")


def charts(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of a page by section: those to judge a run by, then all others."""
    first = [(title, USEFUL if name == "groups/dead_share" else name, share)
             for title, name, share in curves_of(names)]  # fmt: skip
    found = {FIRST: [_chart(name, title, share) for title, name, share in first
                     if name in names]}  # fmt: skip
    known = {name: find(name) for name in names}
    for section, entries in SECTIONS.items():
        own = {id(entry) for entry in entries.values()}
        fitting = [name for name in names if id(known[name]) in own]
        found[section] = [_chart(name, name, _is_share(name)) for name in fitting]
    other = [name for name in names if name != USEFUL and known[name] is None]
    found["Other"] = [_chart(name, name, False) for name in other]
    return {section: entries for section, entries in found.items() if entries}


def _is_share(name: str) -> bool:
    entry = find(name)
    return entry is not None and entry.unit == "share"


def _chart(name: str, title: str, share: bool) -> dict[str, Any]:
    entry = find(name)
    about = f"{_upper(entry.meaning)}. Healthy: {entry.healthy}." if entry else ""
    healthy = healthy_range(entry.healthy) if entry else None
    if name == USEFUL:
        about = (
            f"Groups with different rewards, of all that were sampled. Healthy: {USEFUL_HEALTHY}."
        )
        healthy = healthy_range(USEFUL_HEALTHY)
    return {"name": name, "title": title, "share": share, "about": about, "picture": "",
            "healthy": healthy, "constant": False}  # fmt: skip


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def healthy_range(words: str) -> tuple[float | None, float | None] | None:
    """Return lowest and highest healthy value, where the catalogue begins with a plain limit."""
    found = _RANGE.match(words)
    if found is None:
        return None
    limit = float(found[2]) / (100 if found[3] else 1)
    return (limit, None) if found[1] == "above" else (None, limit)


def constant(run: ViewedRun, name: str) -> bool:
    """Return whether a metric was measured several times and never changed."""
    values = np.frombuffer(run.columns[name])
    known = values[np.isfinite(values)]
    return len(known) >= CONSTANT_FROM and bool((known == known[0]).all())


def drawn(run: ViewedRun, chart: dict[str, Any]) -> dict[str, Any]:
    """Return a chart with a picture that is shown until the interactive one is there."""
    name, at = chart["name"], sorted({event["step"] for event in run.events if is_health(event)})
    curve = Curve(chart["title"], run.points(name), share=chart["share"],
                  sparse=name.startswith("eval/"), events=at)  # fmt: skip
    return {**chart, "picture": Markup(svg(curve))}  # markup of our own, its words escaped


def sections_of(run: ViewedRun) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of a run's page; those of the section that is open have their picture."""
    found = charts(list(run.columns))
    for name, entries in found.items():
        if name == FIRST:
            found[name] = [drawn(run, chart) for chart in entries]
        else:
            found[name] = [{**c, "constant": constant(run, c["name"])} for c in entries]
    return found


def trends(run: ViewedRun, names: Sequence[str]) -> dict[str, Any]:
    """Return curves and events as data for the charts."""
    about = run.about()
    progress = progress_of(run, about)
    verdict = verdict_of(run, about, progress)
    return {
        "version": run.version(),
        "state": about.state,
        "share": progress.share,
        "level": verdict.level,
        "verdict": cut(verdict.words, EXCERPT),
        "tiles": [
            [cut(each.value, EXCERPT), each.words] for each in tiles_of(run, about, progress)
        ],
        "last": about.rollouts[-1] if about.rollouts else None,
        "metrics": len(run.columns),
        "curves": {name: curve_data(run, name) for name in names},
        "events": [_event(event) for event in run.events[-MOST_EVENTS:]],
        "told": told(run.events),
    }


def curve_data(run: ViewedRun, name: str) -> dict[str, Any]:
    points = thin(run.points(name), MOST_POINTS)
    return {
        "step": [point.step for point in points],
        "value": [float(f"{point.value:.6g}") for point in points],
        "error": [point.error for point in points] if any(p.error for p in points) else None,
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    kind, words = event.get("kind", ""), event.get("text", "")
    return {
        "step": event["step"],
        "kind": cut(kind, EXCERPT),
        "text": cut(words, EXCERPT) + (" …" if len(words) > EXCERPT else ""),
        "health": is_health(event),
    }


def told(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return events for people, the latest first: those that differ by numbers alone as one."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for event in events:
        words = re.sub(r"[\d.,]+", "0", event.get("text", ""))
        alike.setdefault((event.get("kind", ""), words), []).append(event)
    found: list[dict[str, Any]] = []
    for some in alike.values():
        if len(some) < FEW or is_health(some[0]):
            found += [{**_event(event), "times": ""} for event in some]
        else:
            times = (
                f"{len(some):,} times, steps {some[0]['step']} to {some[-1]['step']}; the last: "
            )
            found.append({**_event(some[-1]), "times": times})
    return sorted(found, key=lambda event: -event["step"])[:MOST_EVENTS]
