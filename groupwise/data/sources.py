"""What `data.train` and `data.eval` name: generators, files, named sets, several of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from groupwise import config
from groupwise.data.files import KNOWN
from groupwise.data.generators import GENERATORS, generate, split
from groupwise.data.mixing import interleaved, joined, repeats, split_by_hash
from groupwise.data.named import SETS
from groupwise.data.tasks import normalised, read
from groupwise.data.templates import check_template
from groupwise.errors import DataError, nearest
from groupwise.records import Task


@dataclass(frozen=True)
class Loaded:
    train: list[Task]
    eval: list[Task]
    notes: list[str]  # what a person should know about them
    weights: dict[str, float] = field(default_factory=dict)  # by a task's source, of a mixture


def load(data: config.Data, *, seed: int, held_out: int, require_answers: bool = False) -> Loaded:
    """The tasks that the configuration names.

    Held out are the tasks of `data.eval`; else a share of the prompts (`data.holdout_share`); else
    `held_out` tasks of a generator.
    """
    names = data.sources
    _check_settings(data)
    labels = dict(zip(names, _labels(names), strict=True))
    parts: dict[str, list[Task]] = {}
    notes: list[str] = []
    for name, label in labels.items():
        parts[label], more = _source(data, name, seed, data.size, require_answers)
        notes += more
    train, held = joined(parts), _named_for_evaluation(data, seed, held_out, require_answers, notes)
    train = _without_repeats(data, train, held, notes)
    if data.holdout_share:
        train, held = split_by_hash(train, data.holdout_share)
        notes.append(f"{len(held)} of {len(held) + len(train)} tasks are held out by their prompt.")
    elif data.holds_out:
        train, held = split(train, held_out, seed)
    if len(parts) > 1:
        notes.append(_summary(train, parts))
    weights = data.train if isinstance(data.train, Mapping) else {}
    return Loaded(train, held, notes, {labels[name]: x for name, x in weights.items()})


def _check_settings(data: config.Data) -> None:
    """Settings that nothing would use, or that say two things."""
    kinds = {name: _kind(name) for name in data.sources}
    check_template(data.template)
    if not kinds:
        raise DataError("data.train names nothing. Write a file, or a generator.")
    for name in kinds:
        if data.sources.count(name) > 1:
            raise DataError(f"data.train names {name!r} twice. Remove one, or give it a weight.")
    if data.options and "generator" not in kinds.values():
        raise DataError(
            f"data.options = {data.options} are a generator's, and data.train = {data.train!r} is "
            "none. Remove them."
        )
    keys = [key for key in ("prompt_key", "answer_key") if getattr(data, key)]
    if keys and "file" not in {*kinds.values(), *map(_kind, data.eval_sources)}:
        raise DataError(
            f"data.{keys[0]} = {getattr(data, keys[0])!r} is for files, and no source is one: "
            "generators and named sets know their columns. Remove it."
        )
    if data.holdout_share and data.eval:
        raise DataError(
            f"data.eval = {data.eval!r} and data.holdout_share = {data.holdout_share:g} both say "
            "what is held out. Remove one of them."
        )


def _named_for_evaluation(
    data: config.Data, seed: int, held_out: int, require_answers: bool, notes: list[str]
) -> list[Task]:
    names = data.eval_sources
    if not names or data.holds_out:
        return []
    parts: dict[str, list[Task]] = {}
    for name, label in zip(names, _labels(names), strict=True):
        parts[label], more = _source(data, name, seed, held_out, require_answers)
        notes += more
    return interleaved(parts)


def _without_repeats(
    data: config.Data, train: list[Task], held: list[Task], notes: list[str]
) -> list[Task]:
    """The tasks to train on; prompts that repeat are reported, and dropped where that is asked."""
    seen = {normalised(task.prompt) for task in train}
    both = {text for task in held if (text := normalised(task.prompt)) in seen}
    later, conflicts = repeats(train)
    drop = data.duplicates == "drop"
    dropped = {task.id for task in later} if drop else set()
    if drop and both:
        dropped |= {task.id for task in train if normalised(task.prompt) in both}
    if both:
        so = "accuracy on them says nothing about new ones (data.duplicates=drop leaves them out)"
        notes.append(
            f"{len(both)} of the {len(held)} evaluation prompts are also trained on: "
            f"{'they were dropped from training' if drop else so}."
        )
    if later:
        differ = f", {conflicts} of them with another answer" if conflicts else ""
        done = "they were dropped" if drop else "data.duplicates=drop leaves them out"
        notes.append(f"{len(later)} of {len(train)} prompts repeat an earlier one{differ}: {done}.")
    kept = [task for task in train if task.id not in dropped]
    if not kept:
        raise DataError("Every prompt of data.train is one of data.eval too. Name another file.")
    return kept


def _summary(train: Sequence[Task], parts: Mapping[str, Sequence[Task]]) -> str:
    """How many tasks each source has, and their numbers: messages name tasks by them."""
    told, first = [], 0
    for label, part in parts.items():
        count = sum(task.source == label for task in train)
        if not count:
            raise DataError(
                f"No task of {label} is left to train on. Remove it from data.train, or lower "
                "data.holdout_share."
            )
        told.append(f"{label} {count:,} tasks (rows from {first})")
        first += part[-1].id + 1
    return f"training data: {', '.join(told)}."


def _kind(name: str) -> str:
    """generator, set or file; an error if it is none."""
    if name in GENERATORS:
        return "generator"
    word, colon, _ = name.partition(":")
    if colon and word in SETS:
        return "set"
    if colon and re.fullmatch(r"\w{2,}", word) and not Path(name).exists():
        raise DataError(f"There is no named set {word!r}. {nearest(word, SETS)}")
    if "/" not in name and "." not in name:
        hint = f"Write {name}:FILE." if name in SETS else nearest(name, [*GENERATORS, *SETS])
        raise DataError(f"{name!r} is no generator and no file ({KNOWN}). {hint}")
    return "file"


def _source(
    data: config.Data, name: str, seed: int, size: int, require_answers: bool
) -> tuple[list[Task], list[str]]:
    kind = _kind(name)
    if kind == "generator":
        tasks = generate(name, size, seed, data.options if name in data.sources else {})
        if len(tasks) == size:
            return tasks, []
        return tasks, [f"{name} has only {len(tasks)} different prompts, {size} were asked for."]
    if kind == "set":
        word, _, path = name.partition(":")
        found = read(path, require_answers=require_answers, convert=SETS[word])
    else:
        found = read(name, data.prompt_key, data.answer_key, require_answers=require_answers)
    return found.tasks, found.notes


def _labels(names: Sequence[str]) -> list[str]:
    """A short name for each source, for metrics: no two alike."""
    labels: list[str] = []
    for name in names:
        word, colon, path = name.partition(":")
        path = path if colon and word in SETS else name
        stem = re.split(r"[.*?\[]", Path(path).name)[0] or Path(path).parent.name
        label = word if colon and word in SETS else stem or name
        taken = sum(each == label or each.startswith(f"{label}_") for each in labels)
        labels.append(f"{label}_{taken + 1}" if taken else label)
    return labels
