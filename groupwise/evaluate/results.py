"""Results of evaluations as files, and the differences between them.

The schema is in docs/eval.md. Tasks go by a key of prompt and answer, so results of other files,
orders and runs can be paired with them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from groupwise.data.tasks import normalised
from groupwise.errors import ConfigError, RunError
from groupwise.evaluate.scores import TaskOutcome, by_budget, grouped, metrics
from groupwise.evaluate.statistics import corrected, paired_difference
from groupwise.records import Task
from groupwise.runfiles.files import plain, to_line, to_page, write_atomic

FORMAT, KIND = 1, "groupwise eval"
NAME = "results.json"
LEAST_TASKS = 2  # that a difference can be told from


def key_of(task: Task) -> str:
    """Return a key that is the same for the same prompt and answer, wherever they are."""
    text = f"{normalised(task.prompt)}\0{json.dumps(task.answer, sort_keys=True, default=str)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Result:
    """One model on one suite."""

    model: Mapping[str, Any]  # name, path, weights (their fingerprint)
    suite: Mapping[str, Any]  # name, source, data (hash), tasks, dropped
    settings: Mapping[str, Any]  # all that the samples depend on beside model and data
    outcomes: Sequence[TaskOutcome]
    notes: Sequence[str] = ()
    time: Mapping[str, float] = field(default_factory=dict)  # depends on the clock

    @property
    def name(self) -> str:
        return str(self.model["name"])

    @property
    def samples(self) -> int:
        return int(self.settings["samples"])

    def same_as(self, model: Mapping[str, Any], data: str, settings: Mapping[str, Any]) -> bool:
        """Return whether sampling again would give the same."""
        mine = (self.model["weights"], self.suite["data"], plain(self.settings))
        return mine == (model["weights"], data, plain(settings))

    def as_dict(self) -> dict[str, Any]:
        rows = self.outcomes
        lengths = [tokens for outcome in rows for tokens in outcome.tokens]
        figures = metrics(rows, self.samples, self.settings["at"])
        return {
            "model": dict(self.model),
            "suite": dict(self.suite),
            "settings": dict(self.settings),
            "metrics": {name: asdict(each) for name, each in figures.items()},
            "by": {
                column: {value: asdict(each) for value, each in groups.items()}
                for column, groups in grouped(rows).items()
            },
            "budgets": [
                each | {"accuracy": each["accuracy"] and asdict(each["accuracy"])}
                for each in by_budget(rows)
            ],
            "tokens": sum(lengths) / len(lengths),
            "truncated_share": sum(sum(x.truncated) for x in rows) / len(lengths),
            "failed_share": sum(x.failed for x in rows) / len(lengths),
            "notes": list(self.notes),
            "time": dict(self.time),
            "tasks": [outcome.as_dict() for outcome in rows],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Result:
        return cls(
            model=stored["model"],
            suite=stored["suite"],
            settings=stored["settings"],
            outcomes=[TaskOutcome.from_dict(each) for each in stored["tasks"]],
            notes=stored["notes"],
            time=stored["time"],
        )


# --- files ------------------------------------------------------------------------------------


def page(results: Sequence[Result], against: Sequence[Result] = ()) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": KIND,
        "results": [result.as_dict() for result in results],
        "comparisons": [asdict(each) for each in compare(results, against)],
    }


def write(path: Path, content: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text(content))
    except OSError as error:
        raise RunError(f"{path} can't be written: {error}. Choose another --out.") from None


def text(content: Mapping[str, Any]) -> str:
    """Write JSON with a line for each task: a file of thousands of them can still be read."""
    short = [each | {"tasks": f"{KIND} {at}"} for at, each in enumerate(content["results"])]
    whole = to_page({**content, "results": short})
    for at, each in enumerate(content["results"]):
        rows = ",\n".join(to_line(task) for task in each["tasks"])
        whole = whole.replace(f'"tasks": "{KIND} {at}"', f'"tasks": [\n{rows}\n]', 1)
    return whole


def read(path: Path) -> list[Result]:
    """Read a file, or the folder that an evaluation wrote."""
    file = path / NAME if path.is_dir() else path
    try:
        stored = json.loads(file.read_text("utf-8"))
        if stored.get("kind") != KIND or stored.get("format") != FORMAT:
            raise ConfigError(
                f"{file} is of kind {stored.get('kind')!r} and format {stored.get('format')!r}, "
                f"not {KIND!r} and {FORMAT}. Name the {NAME} of a `groupwise eval --out`."
            )
        return [Result.from_dict(each) for each in stored["results"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{file} can't be read as results of an evaluation ({type(error).__name__}: {error}). "
            f"Name the {NAME} of a `groupwise eval --out`."
        ) from error


# --- differences ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """a − b in avg@n over the tasks that both have, paired by task."""

    suite: str
    a: str
    b: str
    tasks: int
    a_value: float
    b_value: float
    difference: float
    low: float  # 95 % interval
    high: float
    p: float  # two-sided, corrected for all comparisons of this evaluation
    p_uncorrected: float
    settings: tuple[str, ...]  # that differ: names


def compare(results: Sequence[Result], against: Sequence[Result] = ()) -> list[Comparison]:
    """Compare all pairs of models on the same suite, and each with an earlier evaluation."""
    pairs = [(a, b, b.name) for a, b in combinations(results, 2)]
    pairs += [(a, b, f"{b.name} (earlier)") for a in results for b in against]
    found = []
    for a, b, called in pairs:
        if a.suite["name"] != b.suite["name"]:
            continue
        mine, theirs = _accuracies(a.outcomes), _accuracies(b.outcomes)
        both = [(mine[key], theirs[key]) for key in mine if key in theirs]
        if len(both) < LEAST_TASKS:
            continue
        first, second = zip(*both, strict=True)
        found.append((a, b, called, first, second, paired_difference(first, second)))
    gaps = [each[-1] for each in found]
    p = corrected([gap.p for gap in gaps], [gap.spread.units for gap in gaps], len(gaps))
    return [
        Comparison(
            suite=str(a.suite["name"]),
            a=a.name,
            b=called,
            tasks=len(first),
            a_value=sum(first) / len(first),
            b_value=sum(second) / len(second),
            difference=gap.mean,
            low=gap.low,
            high=gap.high,
            p=own,
            p_uncorrected=gap.p,
            settings=differing(a.settings, b.settings),
        )
        for (a, b, called, first, second, gap), own in zip(found, p, strict=True)
    ]


def _accuracies(outcomes: Sequence[TaskOutcome]) -> dict[tuple[str, int], float]:
    """Return accuracies by key; where a set repeats a task, the first is paired with the first."""
    times: Counter[str] = Counter()
    found: dict[tuple[str, int], float] = {}
    for outcome in outcomes:
        if outcome.accuracy is not None:
            found[outcome.key, times[outcome.key]] = outcome.accuracy
        times[outcome.key] += 1
    return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that differ, without those that say what is computed from the samples.

    And but for the prompts: other tokenizers write them otherwise.
    """
    names = sorted({*one, *other} - {"at", "by", "budgets", "force", "force_tokens", "prompts"})
    return tuple(x for x in names if json.dumps(one.get(x)) != json.dumps(other.get(x)))


def check_against(stored: Sequence[Result], suites: Mapping[str, Sequence[str]]) -> list[str]:
    """Refuse results that have nothing in common with these suites (name -> keys of tasks); return
    notes on what they lack.
    """
    notes = []
    earlier: dict[str, set[str]] = {}
    for result in stored:
        own = earlier.setdefault(str(result.suite["name"]), set())
        own.update(outcome.key for outcome in result.outcomes)
    if not any(name in earlier for name in suites):
        raise ConfigError(
            f"--against has results of {', '.join(earlier) or 'nothing'}, and none of "
            f"{', '.join(suites)}. Name results of the same suites."
        )
    for name, keys in suites.items():
        if name not in earlier:
            notes.append(f"--against has no results of {name}: there is nothing to compare.")
            continue
        common = len(earlier[name].intersection(keys))
        if common < LEAST_TASKS:
            raise ConfigError(
                f"--against has other tasks of {name}: {common} of {len(keys)} are in both. Name "
                "results of the same data."
            )
        if common < len(keys) or common < len(earlier[name]):
            notes.append(
                f"--against has {len(earlier[name])} tasks of {name}, here are {len(keys)}: the "
                f"{common} that are in both are compared."
            )
    return notes
