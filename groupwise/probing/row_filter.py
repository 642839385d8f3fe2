"""Rows of a file that are worth training on, and the reasons against the others.

In this order, the first reason counts: copies of earlier rows, copies of evaluation items, rows
that a blind guesser gets, rows that a model always or never gets. Rows are read one after the
other; in memory are hashes, and what is removed.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from groupwise.config.fields import Data, is_generator
from groupwise.data import guessing
from groupwise.data.files import FileRow, files_of, rows
from groupwise.data.named_sets import SETS
from groupwise.data.overlap import Copies, Evaluations
from groupwise.data.sources import SourceReader
from groupwise.data.words import whole, words
from groupwise.errors import ConfigError
from groupwise.evaluate.estimates import PassCount, Rates
from groupwise.evaluate.suites import GENERATED, HELD_OUT, find
from groupwise.prepare.setup import TASKS_SEED
from groupwise.records import Task

SHOWN = 3  # examples of each reason
START = 160  # characters of a prompt
SURE = 0.5  # that a row is in the band: more likely than not
REPEATED, NEARLY, CONTAMINATED = "repeated", "nearly repeated", "in an evaluation set"
GUESSABLE, TOO_HARD, TOO_EASY, UNREAD = "guessable", "too hard", "too easy", "not judged"
REASONS = (REPEATED, NEARLY, CONTAMINATED, GUESSABLE, TOO_HARD, TOO_EASY, UNREAD)

Show = Callable[[int], None]


@dataclass(frozen=True)
class FilterRequest:
    """The reasons to look for."""

    dedup: bool = False
    against: tuple[str, ...] = ()  # suites, or sources
    ngram: int = 13
    chance: float | None = None  # of a blind guess, from which on a row goes; None: all stay
    folder: Path | None = None  # of the suites' data


@dataclass(frozen=True)
class Removed:
    row: int
    reason: str
    why: str
    prompt: str = ""  # its start
    other: str = ""  # the start of what it is a copy of
    copy_of: int | None = None  # an earlier row


@dataclass
class FilterResult:
    """The rows that were removed so far, and the counts."""

    data: Data
    total: int = 0
    removed: dict[int, Removed] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    items: int = 0  # evaluation items that were looked for
    variants: int = 0  # rows that are such an item but for its numbers; they stay
    conflicts: int = 0  # repeated prompts with another answer

    @property
    def name(self) -> str:
        return self.data.sources[0]

    def kept(self) -> Iterator[FileRow]:
        """Yield the rows that stay, as they are in the file, in order."""
        word, _, path = self.name.partition(":")
        number = 0
        for file in files_of(path if word in SETS else self.name):
            for row in rows(file):
                if number not in self.removed:
                    yield row
                number += 1

    def counts(self) -> dict[str, int]:
        found = Counter(each.reason for each in self.removed.values())
        return {reason: found[reason] for reason in REASONS if found[reason]}

    def examples(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(self.removed):
            each = self.removed[row]
            if len(found.setdefault(each.reason, [])) < SHOWN:
                found[each.reason].append(asdict(each))
        return {reason: found[reason] for reason in REASONS if reason in found}


def check(name: str, wanted: FilterRequest) -> None:
    if is_generator(name):
        raise ConfigError(f"{name} is a generator, and a filter reads a file. Name one.")
    if wanted.ngram < 4:
        raise ConfigError(f"--ngram {wanted.ngram}: so few words stand in any two texts. Take 8+.")
    if wanted.chance is not None and not 0 < wanted.chance <= 1:
        raise ConfigError(f"--chance {wanted.chance:g} must be above 0 and at most 1.")


def tasks_of(data: Data, size: int = 1) -> tuple[Iterator[Task], list[str]]:
    """Return the tasks of a source, and a list that has notes after the last."""
    gather = SourceReader(data, TASKS_SEED, False)
    return gather.all(data.details, size), gather.notes


def asked(task: Task) -> str:
    """Return a prompt's text; of messages their contents, so that a chat and a text can be
    compared.
    """
    if isinstance(task.prompt, str):
        return task.prompt
    return "\n".join(str(message["content"]) for message in task.prompt)


def evaluations(wanted: FilterRequest) -> Evaluations:
    """Return all items of the evaluation sets."""
    found = Evaluations(wanted.ngram)
    for name in wanted.against:
        if name == HELD_OUT:
            raise ConfigError("--against held_out: name the file that is held out.")
        suite = find(name, wanted.folder)
        tasks, _ = tasks_of(Data(train=suite.source), GENERATED)
        for task in tasks:
            if suite.keep(task):
                found.add(suite.name, task.id, asked(task))
    return found


def filter_rows(data: Data, wanted: FilterRequest, show: Show = lambda rows: None) -> FilterResult:
    """Remove all rows that can be found without a model; `show` gets the number of rows so far."""
    found = FilterResult(data)
    items = evaluations(wanted)
    found.items = len(items.items)
    copies, answers = Copies(), array("Q")
    tasks, notes = tasks_of(data)
    for task in tasks:
        text = asked(task)
        own = words(text)
        found.total += 1
        show(found.total)
        answer = guessing.plain(task.answer)
        answers.append(whole([answer]) if answer else 0)
        gone = _copy(found, copies, task, own, answers) if wanted.dedup else None
        gone = gone or _contamination(found, items, task, own)
        if wanted.chance is not None and gone is None:
            guess = guessing.by_form(task)
            if guess is not None and guess.chance >= wanted.chance:
                why = f"{guess.how}: a guess is right in {guess.chance:.0%}"
                gone = Removed(task.id, GUESSABLE, why, _start(text))
        if gone is not None:
            found.removed[task.id] = gone
    found.notes += notes
    if wanted.dedup:
        _near(found, copies)
    if wanted.chance is not None:
        _frequent(found, answers, wanted.chance)
    return found


def _copy(
    found: FilterResult, copies: Copies, task: Task, own: Sequence[str], answers: Sequence[int]
) -> Removed | None:
    earlier = copies.add(task.id, own, guessing.plain(task.answer))
    if earlier is None:
        return None
    differs = answers[earlier] != answers[task.id]
    found.conflicts += differs
    why = f"the same words as row {earlier}{', with another answer' if differs else ''}"
    return Removed(task.id, REPEATED, why, copy_of=earlier)


def _contamination(
    found: FilterResult, items: Evaluations, task: Task, own: Sequence[str]
) -> Removed | None:
    if not items.items:
        return None
    match, variant = items.find(own)
    found.variants += variant
    if match is None:
        return None
    item = match.item
    why = f"{item.suite} row {item.row}: {match.how} ({match.share:.0%})"
    start = _start(asked(task))
    return Removed(task.id, CONTAMINATED, why, start, _start(item.text))


def _near(found: FilterResult, copies: Copies) -> None:
    for row, (earlier, share) in copies.near(found.removed).items():
        why = f"{share:.0%} of the words of row {earlier}, the same numbers and answer"
        found.removed[row] = Removed(row, NEARLY, why, copy_of=earlier)


def _frequent(found: FilterResult, answers: Sequence[int], chance: float) -> None:
    """Remove rows with a frequent answer, counted among the rows that are left."""
    left = {row: answer for row, answer in enumerate(answers) if row not in found.removed}
    counts = Counter(left.values())
    for row, answer in left.items():
        if not answer:
            continue
        guess = guessing.by_frequency(counts[answer], len(left))
        if guess is not None and guess.chance >= chance:
            why = f"{guess.how}: {guess.chance:.1%} of the others"
            found.removed[row] = Removed(row, GUESSABLE, why)


def add_prompts(found: FilterResult) -> None:
    """Add the texts of removed rows that were not known to go when they were read."""
    bare = [each for each in found.removed.values() if not each.prompt]
    if not bare:
        return
    wanted = {each.row for each in bare} | {each.copy_of for each in bare}
    tasks, _ = tasks_of(found.data)
    starts = {task.id: _start(asked(task)) for task in tasks if task.id in wanted}
    for each in bare:
        other = "" if each.copy_of is None else starts[each.copy_of]
        found.removed[each.row] = replace(each, prompt=starts[each.row], other=other)


def _start(text: str) -> str:
    shown = " ".join(text.split())
    return shown if len(shown) <= START else f"{shown[:START]}..."


# --- by a model -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """The pass rates that are worth training on, and what the counts say about the rows."""

    low: float
    high: float
    samples: int
    model: str
    inside_kept: float  # rows that stay and are in the band indeed: expected number
    inside_removed: float  # rows that go although they are in it
    histogram: dict[str, int]


def by_band(found: FilterResult, counts: Mapping[int, PassCount], band: Band) -> Band:
    """Remove rows that are more likely outside of the band than in it.

    A row's rate is not known from a few samples: what counts is how likely it is in the band, given
    its own samples and how all rows came out.
    """
    rates = Rates(counts.values())
    sure = {
        count: (rates.below(count, band.low), 1 - rates.below(count, band.high))
        for count in set(rates.counts)
    }
    kept = gone = 0.0
    for row in range(found.total):
        count = counts.get(row, PassCount(0, 0))
        if row in found.removed:
            continue
        if not count.samples:
            found.removed[row] = Removed(row, UNREAD, "too long for the model, or no verdict")
            continue
        below, above = sure[count]
        inside = 1 - below - above
        if inside >= SURE:
            kept += inside
            continue
        gone += inside
        reason = TOO_HARD if below > above else TOO_EASY
        why = f"{count.passed} of {count.samples} right; in the band with {inside:.0%}"
        found.removed[row] = Removed(row, reason, why)
    return replace(band, inside_kept=kept, inside_removed=gone, histogram=tally(counts.values()))


def tally(counts: Iterable[PassCount]) -> dict[str, int]:
    """Count rows by how many of their samples are right."""
    found = Counter(f"{count.passed} of {count.samples}" for count in counts if count.samples)
    return dict(sorted(found.items(), key=lambda item: tuple(map(int, item[0].split(" of ")))))
