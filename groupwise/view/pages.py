"""The pages as HTML: the data of the templates, which escape all of it."""

from __future__ import annotations

import functools
import importlib.resources
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import jinja2
import pyarrow as pa  # type: ignore[import-untyped]
from markupsafe import Markup
from tokenizers import Tokenizer

from groupwise.errors import RunError
from groupwise.runfiles.catalogue import SECTIONS, find
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import VERSION, read_answers
from groupwise.view import chat
from groupwise.view.prompts import PromptIndex
from groupwise.view.ranks import ranks_of
from groupwise.view.runs import USEFUL, ViewedRun
from groupwise.view.steps import (
    FILTERS,
    OF_GROUPS,
    OF_SAMPLES,
    PromptGroup,
    branch_rewards,
    found_in,
    groups_of,
    mark,
    own_lengths,
    place_of,
    rows_of_group,
    values_of,
)
from groupwise.view.tokens import pieces, tokenizer_of
from groupwise.watch.chart import Curve, number, svg, thin
from groupwise.watch.display import visible
from groupwise.watch.report import curves_of, is_health

MOST_POINTS = 2000  # of a curve: each can be clicked
MOST_EVENTS = 1000  # of a run on its page, the latest
GROUPS_SHOWN = 50  # on one page
TEXT_SHOWN, EXCERPT = 20_000, 1_200  # characters of a text, and of one beside others
SORTS = {"spread": "spread", "mean": "reward", "length": "length", "number": "number"}


# --- curves -----------------------------------------------------------------------------------


def charts(names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the charts of a page by section: those to judge a run by, then all others."""
    first = [(title, USEFUL if name == "groups/dead_share" else name, share)
             for title, name, share in curves_of(names)]  # fmt: skip
    found = {"Judge by these": [_chart(name, title, share) for title, name, share in first
                                if name in names]}  # fmt: skip
    for section, entries in SECTIONS.items():
        fitting = [n for n in names if any(find(n) is entry for entry in entries.values())]
        found[section] = [_chart(name, name, _is_share(name)) for name in fitting]
    other = [name for name in names if name != USEFUL and find(name) is None]
    found["Other"] = [_chart(name, name, False) for name in other]
    return {section: entries for section, entries in found.items() if entries}


def _is_share(name: str) -> bool:
    entry = find(name)
    return entry is not None and entry.unit == "share"


def _chart(name: str, title: str, share: bool) -> dict[str, Any]:
    entry = find(name)
    about = f"{entry.meaning}. Healthy: {entry.healthy}." if entry else ""
    if name == USEFUL:
        about = "groups with different rewards, of all that were sampled. Healthy: above 50 %."
    return {"name": name, "title": title, "share": share, "about": about, "picture": ""}


def _drawn(run: ViewedRun, chart: dict[str, Any]) -> dict[str, Any]:
    """Return a chart with a picture that is shown until the interactive one is there."""
    name, at = chart["name"], sorted({event["step"] for event in run.events if is_health(event)})
    curve = Curve(chart["title"], run.points(name), share=chart["share"],
                  sparse=name.startswith("eval/"), events=at)  # fmt: skip
    return {**chart, "picture": Markup(svg(curve))}  # markup of our own, its words escaped


def trends(run: ViewedRun, names: Sequence[str]) -> dict[str, Any]:
    """Return curves and events as data for the charts."""
    about = run.about()
    curves = {}
    for name in names:
        points = thin(run.points(name), MOST_POINTS)
        curves[name] = {
            "step": [point.step for point in points],
            "value": [float(f"{point.value:.6g}") for point in points],
            "error": [point.error for point in points] if any(p.error for p in points) else None,
        }
    return {
        "version": run.version(),
        "state": about.state,
        "last": about.rollouts[-1] if about.rollouts else None,
        "metrics": len(run.columns),
        "curves": curves,
        "events": [_event(event) for event in run.events[-MOST_EVENTS:]],
        "events_before": max(0, len(run.events) - MOST_EVENTS),
    }


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    kind, words = event.get("kind", ""), event.get("text", "")
    return {
        "step": event["step"],
        "kind": _cut(kind, EXCERPT),
        "text": _cut(words, EXCERPT) + (" …" if len(words) > EXCERPT else ""),
        "health": is_health(event),
    }


# --- pages ------------------------------------------------------------------------------------


def home(runs: Mapping[str, ViewedRun], places: Sequence[Path]) -> str:
    rows = []
    for run in runs.values():
        entry: dict[str, Any] = {"run": run, "about": run.about()}
        for title, name, _ in curves_of(run.columns)[:2]:
            points = run.points(name)
            entry[title] = (points[0].value, points[-1].value) if points else None
        entry["parent"] = _run_at(runs, entry["about"].parent)
        rows.append(entry)
    # Runs of a comparison or a pipeline stand together, behind those of none.
    heads = sorted({row["run"].group for row in rows})
    tables = {head: [row for row in rows if row["run"].group == head] for head in heads}
    return _render("home.html", tables=tables, places=[str(place) for place in places])


def _run_at(runs: Mapping[str, ViewedRun], path: Path | None) -> ViewedRun | None:
    return next((run for run in runs.values() if path and run.folder.path == path), None)


def run_page(run: ViewedRun, runs: Mapping[str, ViewedRun]) -> str:
    about, others = run.about(), [name for name in runs if name != run.name]
    sections = charts(list(run.columns))
    for name in list(sections)[:1]:  # the one that is open
        sections[name] = [_drawn(run, chart) for chart in sections[name]]
    return _render(
        "run.html",
        run=run,
        others=others,
        sections=sections,
        about=about,
        parent=_run_at(runs, about.parent),
        last=about.rollouts[-1] if about.rollouts else None,
        styles=plotly_styles(),
        ranks=ranks_of(run),
    )


def compare_page(one: ViewedRun, two: ViewedRun) -> str:
    from groupwise.config import difference  # heavy: it knows every recipe

    known = [(run, run.about()) for run in (one, two)]
    texts = [about.config for _, about in known]
    changes: list[Any] | None = None
    trouble = ""
    if all(texts):
        try:
            changes = difference(texts[0] or "", texts[1] or "")
        except (ValueError, RecursionError) as error:
            trouble = f"The configurations can't be compared: {error}"
    else:
        trouble = "One of the runs has no config.toml that can be read."
    names = [name for name in one.columns if name in two.columns]
    return _render("compare.html", one=one, two=two, changes=changes, trouble=trouble,
                   known=known, sections=charts(names),
                   styles=plotly_styles())  # fmt: skip


def step_page(run: ViewedRun, step: int, asked: Mapping[str, str]) -> str:
    path = run.folder.rollout(step)
    table, version = read_answers(path, OF_GROUPS)
    everything = groups_of(table)
    words, kind = asked.get("search", ""), asked.get("only", "")
    kind = kind if kind in FILTERS else ""
    sort = asked.get("sort", "spread")
    sort = sort if sort in SORTS else "spread"
    groups = [group for group in everything if not kind or group.fits(kind)]
    if words:
        hits = found_in(path, words)
        groups = [group for group in groups if group.number in hits]
    groups.sort(key=lambda group: _sort_key(group, sort))
    pages = max(1, -(-len(groups) // GROUPS_SHOWN))
    page = min(max(_number(asked.get("page", "1"), 1), 1), pages)
    counts = {name: sum(group.fits(name) for group in everything) for name in FILTERS}
    return _render(
        "step.html",
        run=run,
        step=step,
        groups=groups[(page - 1) * GROUPS_SHOWN : page * GROUPS_SHOWN],
        found=len(groups),
        total=len(everything),
        samples=table.num_rows,
        filters=FILTERS,
        counts=counts,
        sorts=SORTS,
        asked={"search": words, "only": kind, "sort": sort},
        page=page,
        pages=pages,
        older=_older(version),
        **_neighbours(run, step),
    )


def _sort_key(group: PromptGroup, sort: str) -> tuple[float, int]:
    keys = {
        "spread": -group.spread,
        "mean": -(group.mean if group.mean is not None else float("-inf")),
        "length": -group.length,
        "number": 0.0,
    }
    return keys[sort], group.number


def group_page(run: ViewedRun, step: int, group: int) -> str:
    rows, version = rows_of_group(run.folder.rollout(step), group, OF_SAMPLES)
    samples = _samples(rows)
    return _render("group.html", run=run, step=step, group=group, samples=samples,
                   turns=chat.turns(samples[0]["prompt_text"]), older=_older(version),
                   excerpt=EXCERPT)  # fmt: skip


def sample_page(run: ViewedRun, step: int, group: int, sample: int) -> str:
    rows, version = rows_of_group(run.folder.rollout(step), group, OF_SAMPLES)
    samples = _samples(rows)
    ids = values_of(rows, "token_ids", place_of(rows, sample))
    numbers, at = [each["sample"] for each in samples], place_of(rows, sample)
    thought, answer = chat.thought_and_answer(samples[at]["text"])
    return _render(
        "sample.html",
        run=run,
        step=step,
        group=group,
        sample=samples[at],
        turns=chat.turns(samples[at]["prompt_text"]),
        thought=thought,
        reply=answer,
        written=written_by(samples[at]["turns"] or (), ids, tokenizer_of(run.folder)),
        judged=judged_pieces(samples[at]["text"], samples[at]["reward_steps"] or ()),
        valued=valued_pieces(
            branch_rewards(run.folder.rollout(step), group, sample), ids, tokenizer_of(run.folder)
        ),
        limit=TEXT_SHOWN,
        before=numbers[at - 1] if at else None,
        after=numbers[at + 1] if at + 1 < len(numbers) else None,
        older=_older(version),
    )


def written_by(
    turns: Sequence[Mapping[str, Any]], ids: Any, tokenizer: Tokenizer | None
) -> list[chat.Said]:
    """Return the turns of a completion in which others wrote; none if the policy wrote all."""
    if len(turns) < 2 or ids is None:
        return []
    texts = pieces(ids.tolist(), tokenizer)
    return [chat.Said(turn["role"], "".join(texts[turn["start"] : turn["end"]])) for turn in turns]


def judged_pieces(text: str, steps: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the pieces of a completion that have a process reward each, and that reward."""
    starts = [0, *(step["end"] for step in steps)]
    return [(text[start : step["end"]], step["reward"])
            for start, step in zip(starts, steps, strict=False)]  # fmt: skip


def valued_pieces(
    rewards: Mapping[int, Sequence[float | None]], ids: Any, tokenizer: Tokenizer | None
) -> list[tuple[str, float | None, int]]:
    """Return the pieces of a completion between positions that branches go on from, the mean reward
    of those behind each, and their number; nothing where there are none.
    """
    if not rewards or ids is None:
        return []
    texts, places = pieces(ids.tolist(), tokenizer), list(rewards)
    made = []
    for start, end in pairwise([0, *places]):
        known = [x for x in rewards[end] if x is not None]
        mean = sum(known) / len(known) if known else None
        made.append(("".join(texts[start:end]), mean, len(rewards[end])))
    return [*made, ("".join(texts[places[-1] :]), None, 0)]


def sample_text(run: ViewedRun, step: int, group: int, sample: int) -> str:
    """Return prompt and completion as they are, for a text viewer."""
    columns = ("group", "sample", "prompt_text", "text")
    rows, _ = rows_of_group(run.folder.rollout(step), group, columns)
    row = rows.slice(place_of(rows, sample), 1).to_pylist()[0]
    return f"{row['prompt_text'] or ''}{row['text'] or ''}"


def _samples(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows with derived values. Lists per token stay arrays: they may be very long."""
    lists = ("token_ids", "mask", "advantage", "clipped", "rerouted")
    made, own = [], own_lengths(rows)
    for at, row in enumerate(rows.drop_columns(list(lists)).to_pylist()):
        ids, mask, advantage, clipped, rerouted = (values_of(rows, name, at) for name in lists)
        learned = None if advantage is None else advantage[advantage != 0]
        made.append(
            {
                **row,
                "prompt_text": row["prompt_text"] or "",
                "text": row["text"] or "",
                "mark": mark(row["correct"], row["reward"]),
                "length": own[at],
                "foreign": 0 if ids is None else len(ids) - own[at],  # tokens of others
                "parts": dict(row["reward_parts"] or ()),
                # Of tokens that are learned from; a range where they differ.
                "advantage": None
                if learned is None or not len(learned)
                else (float(learned.min()), float(learned.max())),
                "clipped": None if clipped is None else int(clipped.sum()),
                # Of its own tokens and their layers: visited by other experts than at sampling.
                "rerouted": None
                if rerouted is None or mask is None or not mask.any()
                else float(rerouted[mask].mean()),
            }
        )
    return made


def prompt_page(run: ViewedRun, prompt_id: int, index: PromptIndex) -> str:
    seen = PartialReader()
    draws = index.draws(prompt_id, seen)
    if not draws:
        unread = f" {seen.damage[0]}" if seen.damage else ""
        raise RunError(f"No step of {run.name} has drawn prompt {prompt_id}.{unread}")
    return _render("prompt.html", run=run, prompt_id=prompt_id, draws=draws, damage=seen.damage,
                   turns=chat.turns(draws[0][1].prompt), excerpt=EXCERPT // 3)  # fmt: skip


def trouble_page(title: str, words: str) -> str:
    return _render("trouble.html", title=title, words=words)


# --- helpers ----------------------------------------------------------------------------------


def _neighbours(run: ViewedRun, step: int) -> dict[str, int | None]:
    steps = run.folder.rollout_steps()
    return {
        "before": max((s for s in steps if s < step), default=None),
        "after": min((s for s in steps if s > step), default=None),
    }


def _older(version: int) -> str:
    if version == VERSION:
        return ""
    return (
        f"Written by an older groupwise (rollout schema {version or 'unknown'}, this one has "
        f"{VERSION}): what it did not record is left out."
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


def _number(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else default


def _shown(value: float | None, share: bool = False) -> str:
    return "–" if value is None else number(value, share)


def _cut(text: str, limit: int) -> str:
    """Return as much as is shown, control characters spelled out."""
    return visible(text[:limit])


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
        cut=_cut,
        visible=lambda value: visible(str(value)),
        number=_shown,
        query=urlencode,
        # A file's name may be bytes that are no UTF-8: it comes back as the same bytes.
        quoted=lambda name: quote(name, safe="", errors="surrogateescape"),
    )
    return made


def _render(template: str, **values: Any) -> str:
    return _environment().get_template(template).render(**values)
