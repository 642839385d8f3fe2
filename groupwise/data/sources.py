"""The sources that `data.train` and `data.eval` name: generators, files, named sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from groupwise import config
from groupwise.common.sizes import size
from groupwise.config.fields import GYM, SourceSettings, is_generator
from groupwise.data import gym
from groupwise.data.files import KNOWN, files_of, saved_shards
from groupwise.data.generators import GENERATORS, generate, split
from groupwise.data.mixing import interleaved, keys_of, renumber, repeats, split_by_hash
from groupwise.data.named_sets import GRADERS, SETS
from groupwise.data.on_disk import DiskTasks, store_tasks, tasks_at
from groupwise.data.selection import KeptAnswers
from groupwise.data.tasks import Scan, prompt_text
from groupwise.data.templates import check_template, filled
from groupwise.errors import DataError, nearest
from groupwise.records import Task

NeedsAnswer = bool | Callable[[str], bool]  # of all rows, or of those with a grader of that name


@dataclass(frozen=True)
class LoadedTasks:
    train: Sequence[Task]
    eval: Sequence[Task]
    notes: list[str]  # what a person should know about them
    weights: dict[str, float] = field(default_factory=dict)  # by a task's source, of a mixture
    dropped: dict[str, int] = field(default_factory=dict)  # malformed rows left out, by file
    selection: KeptAnswers | None = None  # of answers of earlier runs, where they are learned from


def load(
    data: config.Data,
    *,
    seed: int,
    held_out: int,
    require_answers: NeedsAnswer = False,
    conversations: bool = False,
) -> LoadedTasks:
    """Load the tasks that the configuration names.

    Held out are the tasks of `data.eval`; else a share of the prompts (`data.holdout_share`); else
    `held_out` tasks of a generator. `conversations`: rows without a prompt may be whole ones.
    """
    _check_settings(data)
    gather = SourceReader(data, seed, require_answers, conversations)
    streaming = "never" if data.holds_out else data.streaming  # a generator makes them in memory
    train = store_tasks(gather.all(data.details, data.size), streaming)
    firsts, notes = gather.firsts, gather.notes
    held: Sequence[Task] = []
    if data.eval and not data.holds_out:
        held = interleaved(
            store_tasks(gather.all(data.eval_details, held_out, held_out=True), streaming)
        )
    train = _without_repeats(data, train, held, notes)
    if data.holdout_share:
        train, held = split_by_hash(train, data.holdout_share)
        notes.append(f"{len(held)} of {len(held) + len(train)} tasks are held out by their prompt.")
    elif data.holds_out:
        train, held = split(train, held_out, seed)
    if len(firsts) > 1:
        notes.append(_summary(train, firsts))
    if isinstance(train, DiskTasks):
        notes.append(
            f"streaming: {len(train):,} tasks are read from a temporary file of "
            f"{size(train.bytes)} as they are drawn; memory holds their places."
        )
    labels = _labels(data.sources)
    weights = {labels[name]: weight for name, weight in data.weights.items()}
    return LoadedTasks(train, held, notes, weights, gather.dropped)


@dataclass
class SourceReader:
    """The tasks of sources, one after the other, with notes on them."""

    data: config.Data
    seed: int
    require_answers: NeedsAnswer
    conversations: bool = False
    notes: list[str] = field(default_factory=list)
    firsts: dict[str, int] = field(default_factory=dict)  # of the last call: by label, in order
    dropped: dict[str, int] = field(default_factory=dict)  # malformed rows left out, by file

    def all(
        self, sources: Mapping[str, SourceSettings], size: int, *, held_out: bool = False
    ) -> Iterator[Task]:
        """Yield each task of several sources with its source, no two with the same number."""
        labels, following = _labels(tuple(sources)), 0
        self.firsts = firsts = {}
        for name, source in sources.items():
            first = firsts[labels[name]] = following
            for task in self._one(name, source, source.size or size):
                following = first + task.id + 1
                task = self._written(task, held_out)
                yield renumber(task, first, labels[name]) if len(sources) > 1 else task

    def _written(self, task: Task, held_out: bool) -> Task:
        """Return the task with what is learned of it, where data.completion says how to write it.

        A held-out row that lacks a column of it stays as it is: there may be an answer to grade by.
        """
        asked = self.data.completion
        if not asked:
            return task
        try:
            text = filled("data.completion", asked, task, prompt_text(task.prompt))
        except DataError:
            if held_out:
                return task
            raise
        return replace(task, columns={**task.columns, "completion": text})

    def _one(self, name: str, source: SourceSettings, size: int) -> Iterator[Task]:
        if is_generator(name):
            trained = name in self.data.sources  # evaluation of another one has its own options
            options = source.options or (self.data.options if trained else {})
            tasks = self._generated(name, size, options)
            if tasks[0].grader == GYM and not source.grader:
                gym.check_scorers(tasks)
            for task in tasks:
                yield replace(task, grader=source.grader) if source.grader else task
            return
        word, _, path = name.partition(":")
        own = word in SETS
        scan = Scan(
            "" if own else self.data.prompt_key,
            "" if own else self.data.answer_key,
            self.data.grader_key,
            source.grader or (GRADERS[word] if own else ""),
            self.require_answers,
            SETS[word] if own else None,
            self.data.drop_bad,
            self.notes,
            self.dropped,
            conversations=self.conversations,
        )
        rows = scan.of(path if own else name)
        yield from (
            gym.without_fooled(rows, self.notes) if word == GYM and not source.grader else rows
        )

    def _generated(self, name: str, size: int, options: Mapping[str, Any]) -> list[Task]:
        word, colon, task = name.partition(":")
        if colon and word == GYM:
            tasks, notes = gym.generate(task, size, self.seed, options)
        else:
            tasks, notes = generate(name, size, self.seed, options), []
        if len(tasks) < size != config.Data().size:  # the default is for those that have so many
            fewer = f"{name} has only {len(tasks)} different prompts, {size} were asked for."
            notes = [*notes, fewer]
        self.notes += notes
        return tasks


def files_read(data: config.Data) -> list[Path]:
    """Return the files that sources are read from; what a hub has is pinned by its commit."""
    names = [name for name in (*data.sources, *data.eval_sources) if not is_generator(name)]
    found: list[Path] = []
    for name in names:
        word, _, path = name.partition(":")
        place = path if word in SETS else name
        found += [] if place.startswith("hub:") else files_of(place)
    return [each for path in found for each in (saved_shards(path) if path.is_dir() else [path])]


def _check_settings(data: config.Data) -> None:
    """Refuse settings that nothing would use, or that contradict each other."""
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
    for name, source in {**data.details, **data.eval_details}.items():
        if (source.options or source.size) and not is_generator(name):
            raise DataError(f"{name} has options or a size, which are a generator's. Remove them.")
    for name, source in data.eval_details.items():
        if source.weight != 1:
            raise DataError(f"data.eval: {name} has a weight, and all tasks are used. Remove it.")


def _without_repeats(
    data: config.Data, train: Sequence[Task], held: Sequence[Task], notes: list[str]
) -> Sequence[Task]:
    """Return the training tasks; repeated prompts are reported, and dropped if asked."""
    keys = keys_of(train)
    both = np.intersect1d(keys, keys_of(held))
    later, conflicts = repeats(train, keys)
    drop = data.duplicates == "drop"
    if len(both):
        so = "accuracy on them says nothing about new ones (data.duplicates=drop leaves them out)"
        notes.append(
            f"{len(both)} of the {len(held)} evaluation prompts are also trained on: "
            f"{'they were dropped from training' if drop else so}."
        )
    if len(later):
        differ = f", {conflicts} of them with another answer" if conflicts else ""
        done = "they were dropped" if drop else "data.duplicates=drop leaves them out"
        notes.append(f"{len(later)} of {len(train)} prompts repeat an earlier one{differ}: {done}.")
    if not drop or not (len(later) or len(both)):
        return train
    wanted = ~np.isin(keys, both)
    wanted[later] = False
    if not wanted.any():
        raise DataError("Every prompt of data.train is one of data.eval too. Name another file.")
    return tasks_at(train, np.flatnonzero(wanted))


def _summary(train: Sequence[Task], firsts: Mapping[str, int]) -> str:
    """Return how many tasks each source has, and their numbers: messages name tasks by them."""
    counts = dict.fromkeys(firsts, 0)
    for task in train:
        counts[task.source] += 1
    for label, count in counts.items():
        if not count:
            raise DataError(
                f"No task of {label} is left to train on. Remove it from data.train, or lower "
                "data.holdout_share."
            )
    told = [f"{label} {n:,} tasks (rows from {firsts[label]})" for label, n in counts.items()]
    return f"training data: {', '.join(told)}."


def _kind(name: str) -> str:
    """Return generator, set or file; raise if it is none."""
    if is_generator(name):
        return "generator"
    word, colon, _ = name.partition(":")
    if colon and word in SETS:
        return "set"
    if word == "hub" and colon:
        return "file"
    if colon and re.fullmatch(r"\w{2,}", word) and not Path(name).exists():
        raise DataError(f"There is no named set {word!r}. {nearest(word, SETS)}")
    if "/" not in name and "." not in name and not Path(name).exists():
        hint = f"Write {name}:FILE." if name in SETS else nearest(name, {*GENERATORS, *SETS})
        hint = f"Write {GYM}:TASK, such as {GYM}:chain_sum, or {GYM}:FILE." if name == GYM else hint
        raise DataError(f"{name!r} is no generator and no file ({KNOWN}). {hint}")
    return "file"


def _labels(names: Sequence[str]) -> dict[str, str]:
    """Return a short name for each source, for metrics: no two alike."""
    labels: dict[str, str] = {}
    for name in names:
        word, colon, path = name.partition(":")
        stem = re.split(r"[.*?\[]", Path(name).name)[0] or Path(name).parent.name
        label = word if colon and word in SETS else stem or name
        label = path if colon and is_generator(name) else label
        taken = sum(each == label or each.startswith(f"{label}_") for each in labels.values())
        labels[name] = f"{label}_{taken + 1}" if taken else label
    return labels
