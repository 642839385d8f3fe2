"""Tasks from files.

A file with malformed rows is refused as a whole, its lines or rows named; or these rows are left
out, and counted.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupwise.data.columns import (
    MISSING,
    PROMPTS,
    Layout,
    lookup,
    names_in,
    parse_info,
    recognise,
    with_conversation,
    with_prompt,
)
from groupwise.data.files import FileRow, files_of, format_of, rows
from groupwise.errors import DataError, nearest
from groupwise.records import Message, Task

SHOWN = 5  # malformed rows that a message lists

# From a row as a named set has it to one with `prompt` and `answer`; BadRow if it can't.
Convert = Callable[[Mapping[str, Any]], dict[str, Any]]


class BadRow(ValueError):
    """A malformed row of a named set."""


@dataclass
class Scan:
    """One pass over the files of a source, all in the layout of the first row.

    A task a row; columns other than prompt and answer reach the reward. Keys are names of columns
    or dotted paths; without them, the layout is recognised by the first row. A row without a
    usable answer is malformed where its grader needs one (`require_answers`, asked with the
    grader's name). Otherwise answers are taken where they are and None elsewhere.
    """

    prompt_key: str = ""
    answer_key: str = ""
    grader_key: str = ""
    grader: str = ""  # of rows that name none
    require_answers: bool | Callable[[str], bool] = False
    convert: Convert | None = None
    drop_bad: bool = False  # leave malformed rows out instead of refusing the file
    notes: list[str] = field(default_factory=list)  # what was recognised, behind the last row
    dropped: dict[str, int] = field(default_factory=dict)  # rows that were left out, by file
    layout: Layout | None = None
    conversations: bool = False  # whether rows may be whole conversations, or texts to learn
    rows: int = 0  # of the last file, malformed ones too
    kinds: dict[str, str] = field(default_factory=dict)  # of answers -> where the first one is

    def of(self, name: str | Path) -> Iterator[Task]:
        """Yield the tasks of all files of that name, numbered through: a row keeps its number
        whatever is left out before it.
        """
        first = 0
        for path in files_of(str(name)):
            yield from self.tasks(path, first)
            first += self.rows
        self.notes += [f"{Path(name).name}: {note}" for note in self._found()]

    def tasks(self, path: Path, first: int = 0) -> Iterator[Task]:
        """Yield the file's tasks, numbered from `first`; raise after the last if any is malformed,
        or if all are where such rows are left out.
        """
        problems: list[tuple[str, str, str]] = []  # place, what is wrong, the row
        there: dict[str, bool] = {}  # whether any row has the column of the prompt, the answer
        names: set[str] = set()
        count = bad = self.rows = 0
        for count, row in enumerate(rows(path), 1):
            self.rows = count
            if row.error is not None and not self.drop_bad:
                raise row.error
            values, why = self._converted(row)
            names.update(values if self.layout else ())
            if not why and self.layout is None:
                why, there["prompt"] = f"no column {PROMPTS[0]!r}", False
            elif not why:
                why = self._problem(values, there)
            if why:
                bad += 1
                if len(problems) < SHOWN:
                    shown = row.text or json.dumps(row.values, default=str, ensure_ascii=False)
                    problems.append((row.place, why, shown))
                    names.update(names_in(values))
            elif (
                self.drop_bad or not bad
            ):  # behind a malformed row, only more of them are looked for
                yield self._task(first + count - 1, values, row.place)
        if not count:
            raise DataError(f"{path} has no rows. Write some, or name another file.")
        if bad and self.drop_bad and bad < count:
            self.dropped[str(path)] = bad
            self.notes.append(_left_out(path, problems, bad, count))
        elif bad:
            nowhere = [which for which, found in there.items() if not found]
            raise DataError(
                self._nowhere(path, nowhere[0], names)
                if nowhere
                else _complaint(path, problems, bad, count)
            )

    def _found(self) -> list[str]:
        found = [] if self.layout is None or not self.layout.kind else [f"{self.layout}."]
        if len(self.kinds) > 1:
            kinds = ", ".join(f"{kind} ({place})" for kind, place in self.kinds.items())
            found.append(f"answers are of several kinds, first seen so: {kinds}.")
        return found

    def _converted(self, row: FileRow) -> tuple[dict[str, Any], str]:
        if row.why:
            return {}, row.why
        values = parse_info(row.values)
        if self.convert is not None:
            try:
                values = self.convert(values)
            except BadRow as error:
                return values, str(error)
        elif not self.prompt_key:
            values = with_prompt(values)
            if self.conversations:
                values = with_conversation(values)
        if self.layout is None:
            keys = ("prompt", "answer") if self.convert else (self.prompt_key, self.answer_key)
            found = recognise(values, *keys)
            # A row that will be left out must not decide how the others are read.
            if not self.drop_bad or lookup(values, found.prompt) is not MISSING:
                self.layout = found
        return values, ""

    def _problem(self, values: Mapping[str, Any], there: dict[str, bool]) -> str:
        assert self.layout is not None
        wanted: dict[str, tuple[str, Callable[[str, Any], str]]]
        wanted = {"prompt": (self.layout.prompt, _prompt_problem)}
        named, why = self._grader(values)
        if why:
            return why
        needed = self.require_answers
        if needed if isinstance(needed, bool) else needed(named):
            wanted["answer"] = (self.layout.answer, _answer_problem)
        for which, (key, problem) in wanted.items():
            value = lookup(values, key)
            there[which] = there.get(which, False) or value is not MISSING
            why = f"no column {key!r}" if value is MISSING else problem(key, value)
            if why:
                return why
        return ""

    def _grader(self, values: Mapping[str, Any]) -> tuple[str, str]:
        """Return the row's own grader, or the problem with its name."""
        named = lookup(values, self.grader_key) if self.grader_key else None
        if named is MISSING or named is None or named == "":
            return self.grader, ""
        # Data must not choose what code is run, nor with which options.
        if not isinstance(named, str) or not named.isidentifier():
            return "", f"{self.grader_key!r} is {named!r}, not the bare name of a built-in grader"
        return named, ""

    def _task(self, number: int, values: Mapping[str, Any], place: str) -> Task:
        assert self.layout is not None
        prompt, answer = self.layout.prompt, lookup(values, self.layout.answer)
        answer = None if answer is MISSING else answer
        if answer is not None:
            self.kinds.setdefault(_kind(answer), place)
        # An answer of another name stays there: reward functions of other tools ask for it.
        own = {prompt, "answer"} if self.layout.answer == "answer" else {prompt}
        columns = {key: value for key, value in values.items() if key not in own}
        return Task(
            id=number,
            prompt=_frozen(lookup(values, prompt)),
            answer=answer,
            columns=columns,
            grader=self._grader(values)[0],
        )

    def _nowhere(self, path: Path, which: str, names: set[str]) -> str:
        layout = self.layout or recognise({}, self.prompt_key, self.answer_key)
        key, need = layout.prompt, ""
        if which == "answer":
            key, need = layout.answer, ", which the reward reads"
        (only,) = names if len(names) == 1 else ("",)
        if format_of(path) == ".csv" and (other := [sign for sign in ";\t|" if sign in only]):
            return (
                f"{path} has one column, {only!r}: its columns seem to be apart by {other[0]!r}. "
                "Save it with commas, or as .tsv with tabs."
            )
        return (
            f"No row of {path} has a column {key!r}{need}. Set data.{which}_key to the right one. "
            f"{nearest(key, names)}"
        )


def prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as one string, for comparing and showing; never for the model."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def turns_of(prompt: str | Sequence[Message]) -> list[Message]:
    """Return a prompt as messages: a text is what a user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def normalised(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return texts that are equal for prompts that differ in case, white space or accents' form
    only.
    """
    return " ".join(unicodedata.normalize("NFC", prompt_text(prompt)).casefold().split())


def _frozen(prompt: Any) -> str | tuple[Message, ...]:
    """Return messages without fields that are null: tables give every message all fields."""
    if isinstance(prompt, str):
        return prompt
    return tuple({key: x for key, x in m.items() if x is not None} for m in prompt)


def _kind(answer: Any) -> str:
    if isinstance(answer, bool):
        return "true or false"
    if isinstance(answer, int | float):
        return "number"
    names: dict[type, str] = {str: "text", list: "list", dict: "object"}
    return names.get(type(answer), type(answer).__name__)


def _prompt_problem(key: str, prompt: Any) -> str:
    if isinstance(prompt, str):
        texts = [prompt]
    elif isinstance(prompt, list):
        for message in prompt:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                return f"a message in {key!r} that is no object with a role"
            if not isinstance(message.get("content"), str):
                return f"a message in {key!r} whose content is no string"
        texts = [message["content"] for message in prompt]
    else:
        kind = "null" if prompt is None else f"of type {type(prompt).__name__}"
        return f"{key!r} is {kind}, not a string or a list of messages"
    if not any(text.strip() for text in texts):
        return f"{key!r} is empty"
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return f"half of a surrogate pair in {key!r}, which is no character"
    return ""


def _answer_problem(key: str, answer: Any) -> str:
    if answer is None:
        return f"{key!r} is empty (null)"
    if (isinstance(answer, str) and not answer.strip()) or answer in ([], {}):
        return f"{key!r} is empty"
    if isinstance(answer, float) and answer != answer:
        return f"{key!r} is no number (NaN)"
    return ""


Problems = Sequence[tuple[str, str, str]]  # place, what is wrong, the row


def _complaint(path: Path, problems: Problems, malformed: int, count: int) -> str:
    listed = [f"  {place}: {why}: {_short(text)}" for place, why, text in problems]
    if malformed > len(problems):
        listed.append(f"  and {malformed - len(problems)} more")
    lines = f"{problems[0][0].split()[0]}s"
    skip = f", or leave them out: data.drop_bad=true. It tells how many {lines} and why"
    return "\n".join(
        [
            f"{path} has {malformed} malformed of {count} rows:",
            *listed,
            f"Mend or delete these {lines}{skip if malformed < count else ''}.",
        ]
    )


def _left_out(path: Path, problems: Problems, malformed: int, count: int) -> str:
    listed = "; ".join(f"{place}: {why}" for place, why, _ in problems)
    more = f"; and {malformed - len(problems)} more" if malformed > len(problems) else ""
    return (
        f"warning: {malformed:,} of {count:,} rows of {path} are malformed and were left out "
        f"(data.drop_bad): {listed}{more}."
    )


def _short(text: str, width: int = 100) -> str:
    """Return the text's start, in characters that do nothing to a terminal."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[:width])
    return shown if len(text) <= width else f"{shown}..."
