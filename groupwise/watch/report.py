"""summary.json and report.html: a run for people, from its folder alone.

The page holds no script and loads nothing. Whatever a model or a data set wrote is escaped: it is
hostile text until shown otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from groupwise.common.progress import clock
from groupwise.common.sizes import size
from groupwise.errors import RunError
from groupwise.runfiles import schemas
from groupwise.runfiles.catalogue import REWARD, find
from groupwise.runfiles.files import to_page, write_atomic
from groupwise.runfiles.folder import RunFolder
from groupwise.runfiles.naming import run_name
from groupwise.runfiles.partial import PartialReader
from groupwise.runfiles.rollouts import read_answers
from groupwise.runfiles.starts import Start, change_words, read_starts
from groupwise.watch.chart import Curve, Point, description, number, svg
from groupwise.watch.display import visible
from groupwise.watch.vital_signs import percent, useful_share, waits

SAMPLES, EVENTS, TEXT_LIMIT = 6, 200, 4000  # shown at most; the files have all of it
USEFUL = "above 50 % while much is wrong; it falls as the data is mastered"

UNREAD = "<p>It can't be read.</p>"

# title, metrics of which the first that there is is shown, whether it is a share
CURVES = (
    ("Held-out accuracy", ("eval/accuracy",), True),
    ("Training reward", REWARD, False),
    ("Useful groups", ("groups/dead_share",), True),
    ("Length in tokens", ("length/mean",), False),
    ("Entropy in nats", ("entropy/mean",), False),
    ("Gradient norm", ("optim/grad_norm",), False),
    ("Sampler–learner mismatch in nats", ("mismatch/abs_mean",), False),
)
# Of what only some runs have: no empty picture without it.
FURTHER_CURVES = (
    ("Explained variance of the critic", "critic/explained_variance", False),
    ("Pairs ranked as preferred", "pairs/accuracy", True),
    ("Comparisons scored right", "scores/accuracy", True),
    ("Held-out −log p a token", "eval/nll", False),
    ("Held-out tokens foreseen", "eval/token_accuracy", True),
    ("−log p a token of the step's rows", "supervised/nll", False),
)


def curves_of(measured: Container[str]) -> list[tuple[str, str, bool]]:
    """Return title, metric and whether it is a share of the curves to judge a run by."""
    usual = [
        (title, next((name for name in names if name in measured), names[-1]), share)
        for title, names, share in CURVES
    ]
    return usual + [curve for curve in FURTHER_CURVES if curve[1] in measured]


# --- summary.json -----------------------------------------------------------------------------


def write_summary(
    folder: RunFolder,
    *,
    steps: int,
    seconds: float,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    budget: Mapping[str, float] | None = None,
    until: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Write the run in a few numbers. `before` and `after` are evaluations of the same tasks, as
    dicts.

    They hold accuracy, stderr and reward (None where not measured), scores by task and examples.
    `budget` is what ended it, where it was not its steps; `until` the gate that it passed.
    """
    summary: dict[str, Any] = {"steps": steps, "seconds": seconds}
    if budget is not None:
        summary["budget"] = budget
    if until is not None:
        summary["until"] = until
    for name in ("accuracy", "stderr", "reward"):
        summary[f"{name}_before"] = before.get(name)
        summary[f"{name}_after"] = after.get(name)
    for name in ("nll", "token_accuracy"):  # of rows that are learned as they stand
        sides = [found.get("others", {}).get(f"eval/{name}") for found in (before, after)]
        if any(x is not None for x in sides):
            summary[f"{name}_before"], summary[f"{name}_after"] = sides
    for side, found in (("before", before), ("after", after)):
        if found.get("parts"):
            summary[f"parts_{side}"] = dict(found["parts"])
        summary[f"scores_{side}"] = list(found.get("scores", ()))
    pairs = zip(before.get("examples", ()), after.get("examples", ()), strict=False)
    summary["samples"] = [
        {
            "prompt": old["prompt"],
            "answer": old.get("answer"),
            "before": old["completion"],
            "after": new["completion"],
            "correct_before": old.get("correct"),
            "correct_after": new.get("correct"),
        }
        for old, new in pairs
    ]
    with folder.writing("summary.json"):
        write_atomic(folder.summary, to_page(summary))
    return summary


# --- report.html ------------------------------------------------------------------------------


def write_report(path: str | os.PathLike[str]) -> Path:
    """Make report.html from what the run folder holds now; the run may be unfinished."""
    folder = RunFolder(path)
    page = report_page(folder)
    with folder.writing("report.html"):
        write_atomic(folder.report, page)
    return folder.report


def report_page(folder: RunFolder) -> str:
    seen = PartialReader()
    metrics = seen.lines(folder.metrics, schemas.metrics)
    config = seen.get(folder.read_config)
    if not metrics and config is None and not seen.damage:
        raise RunError(
            f"{folder.path} is not a run folder: it has neither config.toml nor metrics.jsonl. "
            "Give the folder that `groupwise train` wrote to, for example runs/demo."
        )
    summary: dict[str, Any] = seen.get(folder.read_summary) or {}
    manifest: dict[str, Any] = seen.get(folder.read_manifest) or {}
    events = seen.lines(folder.events, schemas.events)
    settings = (seen.get(folder.read_settings) if config else None) or {}
    samples = _samples(folder, summary, seen)
    starts = seen.get(read_starts, folder)
    name = run_name(folder.path)
    parts = [
        f"<h1>{text(name)}</h1>",
        _state(metrics, summary, settings),
        _damage(seen.damage),
        _tiles(metrics, summary, manifest),
        section("Health", _health([event for event in events if is_health(event)])),
        section("Curves", f'<div class="curves">{"".join(_figures(metrics, events))}</div>'),
        section("Samples before and after", samples),
        section("Changed on the way", _changes(starts)),
        section("Events", _events([event for event in events if not is_health(event)])),
        section("Cost and machine", _machine(manifest, metrics)),
        section("Configuration", f"<pre>{text(config or 'none', limit=None)}</pre>"),
    ]
    title = f"<title>{text(name)}: groupwise run</title>"
    body = "\n".join(parts)
    return (
        f"{HEAD}{title}\n<style>{STYLE}</style>\n</head>\n"
        f"<body><main>\n{body}\n</main></body>\n</html>\n"
    )


def text(value: object, limit: int | None = TEXT_LIMIT) -> str:
    """Return anything as HTML text: escaped, control characters spelled out, cut if very long."""
    shown = str(value)
    cut = max(0, len(shown) - limit) if limit is not None else 0
    kept = escape(visible(shown[: len(shown) - cut]), quote=True)
    return f"{kept} … ({cut:,} characters more)" if cut else kept


def section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>\n{body}\n</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    top = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    inside = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{inside}</div>'


def _state(
    metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    step = metrics[-1]["step"] if metrics else 0
    alone = sum(map(waits, metrics))
    taught = f" In {alone:,} of them a critic learned alone, and the policy waited." * bool(alone)
    if summary and summary.get("steps") == step:
        return f"<p>Finished after {step:,} steps.{taught}</p>"
    total = None if settings.get("epochs") else settings.get("steps")
    of = f" of {total:,}" if isinstance(total, int) else ""
    return f"<p><strong>Unfinished:</strong> step {step:,}{of} so far.{taught}</p>"


def _damage(found: Sequence[str]) -> str:
    """List what the page lacks, and why."""
    if not found:
        return ""
    rows = "".join(f"<li>{text(each)}</li>" for each in found)
    return section("Damaged files", f"<p>The page has what could be read.</p><ul>{rows}</ul>")


def _tiles(
    metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], manifest: Mapping[str, Any]
) -> str:
    """Return the few numbers to read first."""
    found = []
    for title, name, is_share in curves_of(_measured(metrics))[:3]:
        points = _points(metrics, name)
        if points:
            ends = (points[0].value, points[-1].value)
            shown = [percent(x, 1) if is_share else f"{x:.3f}" for x in ends]
            found.append((title, " → ".join(shown)))
    recorded = sum(line.get("time/step") or 0.0 for line in metrics)
    spent = manifest.get("cost", {}).get("seconds") or 0.0
    found.append(("Time", clock(summary.get("seconds") or max(spent, recorded))))
    tokens = next((m["cost/tokens"] for m in reversed(metrics) if "cost/tokens" in m), None)
    if tokens is not None:
        found.append(("Tokens sampled", f"{tokens:,.0f}"))
    tiles = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>" for k, v in found)
    return f'<dl class="tiles">{tiles}</dl>'


def _measured(metrics: Sequence[Mapping[str, Any]]) -> set[str]:
    return {name for line in metrics for name, value in line.items() if value is not None}


def _points(metrics: Sequence[Mapping[str, Any]], name: str) -> list[Point]:
    found = []
    for line in metrics:
        value = useful_share(line) if name == "groups/dead_share" else line.get(name)
        if value is not None:
            found.append(Point(line["step"], value, line.get(f"{name}_stderr")))
    return found


def curves(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Iterable[tuple[str, Curve]]:
    """Yield the curves to judge a run by: the metric's name and its curve, with findings."""
    steps = sorted({event["step"] for event in events if is_health(event)})
    for title, name, is_share in curves_of(_measured(metrics)):
        points = _points(metrics, name)
        yield name, Curve(title, points, is_share, name.startswith("eval/"), steps)


def is_health(event: Mapping[str, Any]) -> bool:
    """Return whether a health rule wrote the event."""
    return event.get("kind") == "health"


def _figures(
    metrics: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]
) -> Iterable[str]:
    for name, curve in curves(metrics, events):
        entry = find(name)
        healthy = USEFUL if name == "groups/dead_share" else entry.healthy if entry else ""
        bars = " Bars: ± one standard error." if any(point.error for point in curve.points) else ""
        fired = " Dotted: a health rule fired." if curve.events else ""
        caption = f"{description(curve, curve.points)} Healthy: {healthy}.{bars}{fired}"
        yield (
            f"<figure><h3>{text(curve.title)}</h3>{svg(curve)}"
            f"<figcaption>{text(caption)}</figcaption></figure>"
        )


# --- samples ----------------------------------------------------------------------------------


def _samples(folder: RunFolder, summary: Mapping[str, Any], seen: PartialReader) -> str:
    """Show the same held-out tasks before and after; until there are any, training's samples."""
    pairs = summary.get("samples") or []
    if pairs:
        return "".join(_pair(sample) for sample in pairs[:SAMPLES])
    steps = seen.get(folder.rollout_steps)
    if not steps:
        return "<p>No rollouts yet.</p>"
    first, last = steps[0], steps[-1]
    sides = [f"<div><h3>Step {step:,}</h3>{seen.get(_step_samples, folder, step) or UNREAD}</div>"
             for step in dict.fromkeys((first, last))]  # fmt: skip
    return f'<p>From the training rollouts.</p><div class="sides">{"".join(sides)}</div>'


def _pair(sample: Mapping[str, Any]) -> str:
    answer = sample.get("answer")
    known = "" if answer is None else f" <span>answer: <code>{text(answer)}</code></span>"
    sides = "".join(
        f"<div><h4>{side.capitalize()} {_verdict(sample.get(f'correct_{side}'))}</h4>"
        f'<pre dir="auto">{text(sample[side])}</pre></div>'
        for side in ("before", "after")
    )
    return (
        f'<article><pre class="prompt" dir="auto">{text(sample["prompt"])}</pre>{known}'
        f'<div class="sides">{sides}</div></article>'
    )


def _verdict(correct: bool | None) -> str:
    if correct is None:
        return ""
    return (
        '<span class="right">✓ correct</span>' if correct else '<span class="wrong">✗ wrong</span>'
    )


def _step_samples(folder: RunFolder, step: int) -> str:
    columns = ("prompt_id", "sample", "prompt_text", "text", "reward", "correct")
    rows = read_answers(folder.rollout(step), columns)[0].to_pylist()
    firsts = [row for row in rows if row["sample"] == 0] or rows
    return "".join(
        f'<article><pre class="prompt" dir="auto">{text(row["prompt_text"] or "")}</pre>'
        f'<pre dir="auto">{text(row["text"] or "")}</pre>'
        f"<p>reward {text(row['reward'])} {_verdict(row['correct'])}</p></article>"
        for row in firsts[:SAMPLES]
    )


# --- events, cost, machine --------------------------------------------------------------------


def _health(found: Sequence[Mapping[str, Any]]) -> str:
    if not found:
        return "<p>No rule has fired.</p>"
    rows = [(e.get("step"), e.get("first_bad_step"), e.get("text")) for e in found[:EVENTS]]
    return table(("step", "bad since", "what, and what to try"), rows)


def _changes(starts: Sequence[Start] | None) -> str:
    """Show what later starts changed, and from which step on."""
    if starts is None:
        return UNREAD
    rows = [(start.step + 1, "; ".join(map(change_words, start.changed)))
            for start in starts if start.changed]  # fmt: skip
    if not starts or any(start.inferred for start in starts):
        known = (
            "<p>Changes of earlier starts are not known: the groupwise that began this run did not "
            "write them down.</p>"
        )
        return known + (table(("from step", "what"), rows) if rows else "")
    if rows:
        return table(("from step", "what"), rows)
    times = f" It was started {len(starts)} times, alike." if len(starts) > 1 else ""
    return f"<p>Nothing was changed on the way.{times}</p>"


def _events(events: Sequence[Mapping[str, Any]]) -> str:
    if not events:
        return "<p>None.</p>"
    shown = events[-EVENTS:]
    note = f"<p>The last {EVENTS} of {len(events):,}.</p>" if len(events) > EVENTS else ""
    rows = [(e.get("step"), e.get("kind"), e.get("text"), e.get("time/at", "")) for e in shown]
    return note + table(("step", "kind", "what", "when"), rows)


def _spent(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
    """Show money where its price is known, the cost of a point, and the wasted tokens."""
    last: dict[str, Any] = {}
    for line in metrics:
        last |= line
    forms = {
        "time/money": ("money", "{:,.2f}"),
        "time/money_per_point": ("money for a point of held-out accuracy", "{:,.4g}"),
        "time/device_hours_per_point": ("hours of the device for a point", "{:,.4g}"),
        "cost/flops": ("operations of the models", "{:.3g} FLOP"),
    }
    rows: list[tuple[str, object]] = [
        (title, form.format(last[name])) for name, (title, form) in forms.items() if last.get(name)
    ]
    for name in sorted(name for name in last if name.startswith("cost/wasted/")):
        shares = [line[name] for line in metrics if line.get(name) is not None]
        rows.append((f"tokens {name.rpartition('/')[2]}, mean of the steps",
                     number(sum(shares) / len(shares), share=True)))  # fmt: skip
    return rows


def _machine(manifest: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    rows: list[tuple[str, object]] = []
    cost = manifest.get("cost", {})
    if cost:
        rows.append(("cost so far", f"{clock(cost['seconds'])}, {cost['tokens']:,} tokens"))
    rows += _spent(metrics)
    for phase in ("rollout", "grade", "score", "update", "eval", "checkpoint"):
        spent = sum(line.get(f"time/{phase}") or 0.0 for line in metrics)
        if spent:
            rows.append((f"time in {phase}", f"{spent:,.1f} s"))
    peak = max((line.get("memory/peak_bytes") or 0 for line in metrics), default=0)
    if peak:
        rows.append(("peak memory", size(int(peak))))
    for part in ("versions", "hardware", "git", "origin"):
        for key, value in (manifest.get(part) or {}).items():
            if value not in (None, []):
                rows.append((key if part != "origin" else f"hash of {key}", value))
    if manifest.get("earlier"):
        rows.append(("earlier starts on something else", len(manifest["earlier"])))
    if manifest.get("threads") is not None:
        rows.append(("threads", manifest["threads"]))
    return table(("what", "value"), rows) if rows else "<p>No manifest yet.</p>"


HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff;
  --card: #f6f8fa; --edge: #d0d7de; --accent: #0b62c4; --good: #17692f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --page: #0f1318;
  --card: #181e25; --edge: #313a44; --accent: #6cb2ff; --good: #5ed17f; --bad: #ff8f87; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 1120px; color: var(--ink);
  background: var(--page); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3, h4 { font-size: .95rem; margin: 0 0 .35rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 0; }
.tiles div, figure, article { background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px; padding: .75rem 1rem; margin: 0; }
dt, figcaption, .tick { color: var(--soft); }
dt, figcaption { font-size: .85rem; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.curves { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(320px, 1fr)); }
svg { width: 100%; height: auto; display: block; }
.tick { font-size: 10.5px; fill: var(--soft); }
.grid { stroke: var(--edge); stroke-width: 1; }
.line, .raw { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
.raw { stroke-width: 1; opacity: .35; }
.dot { fill: var(--accent); }
.event { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 2; }
.error { stroke: var(--accent); stroke-width: 1.5; opacity: .6; }
article { margin: 0 0 .75rem; }
article p { margin: 0; }
article .sides { margin-top: .5rem; }
.sides { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); }
pre { margin: .25rem 0; padding: .6rem .75rem; background: var(--page); border-radius: 6px;
  border: 1px solid var(--edge); white-space: pre-wrap; overflow-wrap: anywhere; max-height: 24rem;
  overflow: auto; unicode-bidi: isolate; font: 13px/1.45 ui-monospace, monospace; }
.prompt { border-style: dashed; }
.right { color: var(--good); } .wrong { color: var(--bad); }
.right, .wrong { font-weight: 600; font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--edge);
  vertical-align: top; overflow-wrap: anywhere; }
td:first-child { white-space: nowrap; font-variant-numeric: tabular-nums; }
"""
