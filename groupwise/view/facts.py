"""A run in a few facts: what it is, how far it came, and whether it is well."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from groupwise.common.progress import duration
from groupwise.view.runs import USEFUL, RunFacts, ViewedRun
from groupwise.watch.chart import Point, number, thin
from groupwise.watch.diagnose import GUARDS
from groupwise.watch.report import CURVES, curves_of, is_health
from groupwise.watch.rules import RULES

RECENT = 20  # steps that the time left is estimated from
QUIET = 120.0  # seconds without a line after which a run is not going on, or ten steps if longer
SPARK = 40  # points of a small curve
LEVELS = {"good": "healthy", "warn": "look at it", "bad": "sick", "none": "nothing yet"}


@dataclass(frozen=True)
class RunVerdict:
    """A judgement of a run in one sentence."""

    level: str  # of `LEVELS`
    words: str

    @property
    def badge(self) -> str:
        return LEVELS[self.level]


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run: steps, time, and whether it goes on."""

    step: int
    total: int | None
    finished: bool
    live: bool  # it wrote a moment ago
    seconds: float | None  # that it took so far
    left: float | None  # seconds, while it goes on
    each: float | None  # seconds a step, lately

    @property
    def share(self) -> float | None:
        if self.finished:
            return 1.0
        return min(self.step / self.total, 1.0) if self.total else None


def progress_of(run: ViewedRun, about: RunFacts) -> RunProgress:
    step = run.steps[-1] if run.steps else 0
    total = about.settings.get("steps")
    total = total if isinstance(total, int) and not about.settings.get("epochs") else None
    finished = bool(run.steps) and about.summary.get("steps") == step
    steps = [point.value for point in run.points("time/step")[-RECENT:]]
    each = sum(steps) / len(steps) if steps else None
    live = not finished and about.written is not None
    live = live and time.time() - (about.written or 0.0) < max(QUIET, 10 * (each or 0.0))
    left = None
    if live and each is not None and total is not None:
        left = max(total - step, 0) * each
    return RunProgress(step, total, finished, live, _seconds(run, about), left, each)


def _seconds(run: ViewedRun, about: RunFacts) -> float | None:
    known = about.summary.get("seconds")
    if isinstance(known, int | float):
        return float(known)
    spent = (about.manifest.get("cost") or {}).get("seconds")
    sides = [x for x in (spent, run.last.get("time/run")) if isinstance(x, int | float)]
    return max(sides) if sides else None


def verdict_of(run: ViewedRun, about: RunFacts, progress: RunProgress) -> RunVerdict:
    """Judge by what the health rules wrote, by what went wrong, and by whether it goes on."""
    grave = {rule.name: rule.grave for rule in RULES}
    found = [event for event in run.events if is_health(event)]
    sick = [e for e in found if e.get("grave", grave.get(str(e.get("rule")), True))]
    for level, events in (("bad", sick), ("warn", found)):
        if events:
            more = f" (and {len(events) - 1} more)" if len(events) > 1 else ""
            head = "Sick" if level == "bad" else "To be looked at"
            said = str(events[0].get("text", "")).partition(". ")[0].rstrip(".")
            return RunVerdict(level, f"{head} since step {events[0]['step']}: {said}{more}.")
    guarded = [event for event in run.events if event.get("kind") in GUARDS]
    if guarded:
        return RunVerdict("warn", f"In step {guarded[-1]['step']}: {guarded[-1].get('text', '')}")
    if about.damage:
        return RunVerdict("warn", "Some of its files can't be read; the page shows the rest.")
    if not run.steps:
        return RunVerdict("none", "Nothing measured yet.")
    if not progress.finished and not progress.live:
        of = f" of {progress.total:,}" if progress.total else ""
        return RunVerdict(
            "warn", f"It stopped at step {progress.step:,}{of}; the same command goes on."
        )
    if not progress.step:
        return RunVerdict("none", "Only the start is measured so far.")
    return RunVerdict("good", f"Healthy: no rule has fired in {progress.step:,} steps{_gain(run)}.")


def _gain(run: ViewedRun) -> str:
    title, name, share = curves_of(run.columns)[0]
    points = run.points(name)
    if len(points) < 2:
        return ""
    return f", and {title[:1].lower()}{title[1:]} went {change(points, share)}"


def change(points: Sequence[Point], share: bool) -> str:
    """Return the first and the last value as a text; "–" where there is none."""
    if not points:
        return "–"
    return " → ".join(number(point.value, share) for point in (points[0], points[-1]))


# --- what it is -------------------------------------------------------------------------------


def recipe_of(settings: Mapping[str, Any]) -> str:
    found = settings.get("recipe")
    found = found.get("name") if isinstance(found, Mapping) else found
    return found if isinstance(found, str) and found else "–"


def model_of(settings: Mapping[str, Any]) -> str:
    found = settings.get("model")
    path = found.get("path") if isinstance(found, Mapping) else None
    parts = [part for part in path.split("/") if part] if isinstance(path, str) else []
    if parts[-2:-1] == ["checkpoints"] and len(parts) > 2:  # of another run
        return "/".join((parts[-3], parts[-1]))
    return parts[-1] if parts else "–"


def device_of(about: RunFacts) -> str:
    model = about.settings.get("model")
    device = str(model.get("device", "")) if isinstance(model, Mapping) else ""
    hardware = about.manifest.get("hardware")
    gpus = hardware.get("gpus") if isinstance(hardware, Mapping) else None
    if device.startswith("cpu") or not isinstance(gpus, list) or not gpus:
        return device if device and device != "auto" else "cpu" if hardware else "–"
    return str(gpus[0])


# --- for the pages ----------------------------------------------------------------------------


class KeyFigure(NamedTuple):
    """A number to read first, and a few words under it."""

    title: str
    value: str
    words: str = ""


def tiles_of(run: ViewedRun, about: RunFacts, progress: RunProgress) -> list[KeyFigure]:
    """Return what to read first: how well it does, how far it is, what it is."""
    usual = [(title, USEFUL if name == "groups/dead_share" else name, share)
             for title, name, share in curves_of(run.columns)]  # fmt: skip
    # Of a run that learns from rows there is no reward, but a likelihood.
    judged = [usual[0], *(x for x in (*usual[1:3], *usual[len(CURVES) :]) if run.points(x[1]))]
    shown = [*dict.fromkeys((*judged, *usual[1:3]))][:3]
    seconds, recipe = progress.seconds, recipe_of(about.settings)
    sampled, device = run.points("cost/tokens"), device_of(about)
    changed = recipe.endswith("*")  # as methods/method.py marks it
    return [
        *(_end(title, run.points(name), share) for title, name, share in shown),
        KeyFigure(
            "Time", in_words(seconds), f"{in_words(progress.each)} a step" if progress.each else ""
        ),
        KeyFigure("Time left", in_words(progress.left), _standing(progress)),
        KeyFigure("Tokens sampled", f"{sampled[-1].value:,.0f}" if sampled else "–"),
        KeyFigure("Recipe", recipe.removesuffix("*"), "with changes" if changed else ""),
        KeyFigure("Model", model_of(about.settings), "" if device == "–" else f"on {device}"),
    ]


def _end(title: str, points: Sequence[Point], share: bool) -> KeyFigure:
    if not points:
        return KeyFigure(title, "–")
    words = f"{number(points[0].value, share)} at step {points[0].step}" if points[1:] else ""
    return KeyFigure(title, number(points[-1].value, share), words)


def _standing(progress: RunProgress) -> str:
    if progress.finished:
        return "finished"
    return "" if progress.live or not progress.step else "stopped"


def in_words(seconds: float | None) -> str:
    return "–" if seconds is None else duration(seconds)


def row_of(run: ViewedRun, about: RunFacts) -> dict[str, Any]:
    """Return a line of the list of runs: texts to show, and the values that it is sorted by."""
    progress = progress_of(run, about)
    verdict = verdict_of(run, about, progress)
    accuracy, reward = (run.points(name) for _, name, _ in curves_of(run.columns)[:2])
    return {
        "name": run.name,
        "state": about.state,
        "level": verdict.level,
        "badge": verdict.badge,
        "verdict": verdict.words,
        "kind": "finished" if progress.finished else "going" if progress.live else "stopped",
        "share": progress.share,
        "recipe": recipe_of(about.settings),
        "model": model_of(about.settings),
        "device": device_of(about),
        "date": about.begun,
        "seconds": progress.seconds,
        "duration": in_words(progress.seconds),
        "accuracy": change(accuracy, True),
        "accuracy_now": accuracy[-1].value if accuracy else None,
        "reward": change(reward, False),
        "reward_now": reward[-1].value if reward else None,
        "spark": spark(accuracy),
    }


def spark(points: Sequence[Point]) -> str:
    """Return the corners of a small curve, 80 wide and 20 high; "" where it would be a point."""
    kept = thin(points, SPARK)
    if len(kept) < 2:
        return ""
    low, high = min(p.value for p in kept), max(p.value for p in kept)
    first, wide = kept[0].step, kept[-1].step - kept[0].step or 1
    tall = high - low or 1.0
    return " ".join(
        f"{1 + 78 * (p.step - first) / wide:.1f},{18 - 16 * (p.value - low) / tall:.1f}"
        for p in kept
    )
