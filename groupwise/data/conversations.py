"""Rows that are learned as they stand: what of a row is learned, in words and as token ids.

A row is a conversation (`messages`, or `prompt` and `completion` as messages), a prompt with its
answer as texts, or a `text` of which all is learned. Learned of a conversation is what the
assistant says and the token that ends its turn, never the header in front of it.
"""

from __future__ import annotations

import json
import re
import secrets
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from groupwise.data.prompts import Reader, Wording
from groupwise.data.tasks import turns_of
from groupwise.data.templates import PROMPT
from groupwise.errors import DataError, ModelError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import POLICY, LearnedRow, Message, Task, Turn

Turns = Literal["all", "last"]
Span = tuple[int, int]
COLUMNS = ("completion", "messages", "solution", "text")  # what is learned: the first that is there
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
SHOWN = 40  # characters of a text that is quoted
PLAIN = Wording("auto", "", PROMPT)


@dataclass(frozen=True)
class Lesson:
    """The words of a row that are learned, before a tokenizer reads them."""

    kind: Literal["conversation", "answer", "text"]
    text: str = ""  # of an answer, or all that is learned
    messages: tuple[Message, ...] = ()  # of a conversation
    learned: tuple[int, ...] = ()  # which of the messages are


def has_lesson(task: Task) -> bool:
    """Tell whether a row has a column that could be learned."""
    return any(task.columns.get(name) is not None for name in COLUMNS)


def lesson_of(task: Task, turns: Turns = "all") -> Lesson:
    """Return what is learned of a row; refuse one that teaches nothing."""
    found = next(((n, x) for n in COLUMNS if (x := task.columns.get(n)) is not None), None)
    if found is None:
        raise DataError(
            f"Row {task.id} has no text in column 'completion' or 'solution', and no `messages` "
            "or `text`, of which this recipe learns. Add one, or take a recipe that learns from "
            "rewards."
        )
    name, value = found
    if name == "text":
        return Lesson("text", _said(task, name, value))
    if name == "messages":
        return _conversation(task, name, value, 0, turns)
    if isinstance(value, str):
        return Lesson("answer", _said(task, name, value))
    asked = turns_of(task.prompt)
    whole = [*asked, *value] if isinstance(value, Sequence) else value
    return _conversation(task, name, whole, len(asked), turns)


def weight_of(task: Task) -> float:
    """Return how much a row counts: its column `weight`, 1 where it has none."""
    weight = task.columns.get("weight")
    if weight is None:
        return 1.0
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        raise DataError(
            f"Row {task.id} has weight {weight!r}: it says how much the row counts, a number from "
            "0 on. Mend it, or leave the column out."
        )
    return float(weight)


def tools_of(task: Task, tokenizer: Tokenizer) -> list[Any] | None:
    """Return the tools that a row's chat template is to describe; None where it has none.

    They are a list of the template's kind, or one as JSON.
    """
    found = task.columns.get("tools")
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except ValueError as error:
            raise DataError(
                f"Row {task.id} has tools that are no JSON: {error}. Write a list of functions."
            ) from error
    if not found:
        return None
    if not isinstance(found, list):
        raise DataError(f"Row {task.id} has tools that are no list. Write a list of functions.")
    if not re.search(r"\btools\b", tokenizer.template or ""):
        raise DataError(
            f"Row {task.id} has tools, and the chat template has no place for them: the model "
            "would learn to call what it never read of. Give it a template (chat_template.jinja) "
            "that writes `tools`, or remove the column."
        )
    return found


def learned_row(
    task: Task, tokenizer: Tokenizer, wording: Wording = PLAIN, turns: Turns = "all"
) -> LearnedRow:
    """Return a row as token ids and what of them is learned."""
    return LessonReader(tokenizer, wording, turns).row(task)


class LessonReader:
    """A converter from rows of the data to token ids and what of them is learned."""

    def __init__(self, tokenizer: Tokenizer, wording: Wording = PLAIN, turns: Turns = "all"):
        self.tokenizer, self.wording, self.turns = tokenizer, wording, turns
        self._prompts = Reader(tokenizer, wording)

    def row(self, task: Task) -> LearnedRow:
        """Return a row as token ids; refuse it where its mask would be in doubt."""
        lesson = lesson_of(task, self.turns)
        try:
            if lesson.kind == "text":
                return self._text(task, lesson.text)
            if lesson.kind == "conversation":
                return self._messages(task, self._with_system(task, lesson))
            written = self.wording(task)
            if not isinstance(written, str):  # the chat template says how an answer ends
                answer = {"role": POLICY, "content": lesson.text}
                asked = Lesson("conversation", "", (*written, answer), (len(written),))
                return self._messages(task, asked)
            prompt = tuple(task.token_ids or self._prompts.ids(task))
            ids = (*self.tokenizer.encode(lesson.text), self.tokenizer.eos_ids[0])
        except ModelError as error:
            raise DataError(f"Row {task.id}: {error}") from error
        return LearnedRow(prompt, ids, (Turn(POLICY, 0, len(ids)),), ((0, len(ids)),))

    def _text(self, task: Task, text: str) -> LearnedRow:
        """Learn all but the first token, which nothing stands before: the BOS, where there is one.

        The end token is learned, too.
        """
        ids = [*self.tokenizer.encode(text)]
        front = self._prompts.front
        ids = ids if ids[: len(front)] == front else front + ids
        if ids[-1] not in self.tokenizer.eos_ids:
            ids.append(self.tokenizer.eos_ids[0])
        rest = tuple(ids[1:])
        return LearnedRow((ids[0],), rest, (Turn(POLICY, 0, len(rest)),), ((0, len(rest)),))

    def _with_system(self, task: Task, lesson: Lesson) -> Lesson:
        if self.wording.around is not None:
            raise DataError(
                f"Row {task.id} is a conversation, which data.template = "
                f'{self.wording.template!r} has no place for. Set data.template = "auto".'
            )
        if not self.wording.system:
            return lesson
        if lesson.messages[0]["role"] == "system":
            raise DataError(
                f"Row {task.id} has a system message of its own, and data.system is set. Remove "
                "one of the two."
            )
        system = {"role": "system", "content": self.wording.system}
        learned = tuple(number + 1 for number in lesson.learned)
        return Lesson(lesson.kind, "", (system, *lesson.messages), learned)

    def _messages(self, task: Task, lesson: Lesson) -> LearnedRow:
        self._check_letters(task, lesson)
        template = self.tokenizer.template or ""
        find = self._by_marks if MARKED.search(template) else self._by_difference
        text, spans = find(task, lesson)
        for number, (start, end) in zip(lesson.learned, spans, strict=True):
            said = lesson.messages[number].get("content")
            if isinstance(said, str) and said.strip() not in text[start:end]:
                raise DataError(
                    f"Row {task.id}: the chat template drops or changes a part of "
                    f"{said[:SHOWN]!r}, what message {number} (assistant) says. Take it out of the "
                    "data, or give the model a template (chat_template.jinja) that keeps it."
                )
        return self._encoded(task, lesson, text, spans)

    def _check_letters(self, task: Task, lesson: Lesson) -> None:
        """Refuse words that would become tokens of the template's: turns that nobody took.

        The assistant may say special tokens, as some write their calls, but none that ends a turn.
        """
        ends = {self.tokenizer.decode([number]) for number in self.tokenizer.eos_ids}
        for number, message in enumerate(lesson.messages):
            own, said = message["role"] == POLICY, message.get("content")
            marks = ends if own else self._prompts.special_tokens
            twice = [mark for mark in marks if isinstance(said, str) and mark in said]
            if twice:
                raise DataError(
                    f"Row {task.id}: message {number} ({message['role']}) holds {min(twice)!r}, a "
                    "token that the chat template writes around messages: the model would read "
                    "turns that nobody took. Take it out of the data, or leave the row out."
                )

    def _by_marks(self, task: Task, lesson: Lesson) -> tuple[str, list[Span]]:
        """Find what {% generation %} marks: once for each of the assistant's messages."""
        key = secrets.token_hex(8)  # nothing that a message says can look like it
        marks = {"generation_begins": f"<{key}(>", "generation_ends": f"<{key})>"}
        tools = tools_of(task, self.tokenizer)
        marked = self.tokenizer.render(lesson.messages, to_continue=False, tools=tools, **marks)
        pieces = re.split(f"<{key}[()]>", marked)
        starts = [0]
        for piece in pieces:
            starts.append(starts[-1] + len(piece))
        every = [(starts[at], starts[at + 1]) for at in range(1, len(pieces), 2)]
        own = [n for n, message in enumerate(lesson.messages) if message["role"] == POLICY]
        if len(every) != len(own):
            raise DataError(
                f"Row {task.id}: the chat template marks {len(every)} turns with "
                "{% generation %}, and the assistant has "
                f"{len(own)}. Mend the template (chat_template.jinja): the marks belong around "
                "what the assistant says and the end of its turn."
            )
        return "".join(pieces), [every[own.index(number)] for number in lesson.learned]

    def _by_difference(self, task: Task, lesson: Lesson) -> tuple[str, list[Span]]:
        """Find what each message adds to the text: its header is what opens a turn."""
        render = partial(self.tokenizer.render, tools=tools_of(task, self.tokenizer))
        messages = lesson.messages
        whole, spans = render(messages, to_continue=False), []
        for number in lesson.learned:
            before = render(messages[:number])
            behind = render(messages[: number + 1], to_continue=False)
            if not behind.startswith(before) or not whole.startswith(behind):
                raise DataError(
                    f"Row {task.id}: what stands before and in message {number} (assistant, "
                    f"{str(messages[number].get('content'))[:SHOWN]!r}) is written otherwise once "
                    "there is more behind it: the chat template drops or changes earlier turns, "
                    "such as thoughts. Then no mask is what sampling sees. Set data.turns=last "
                    'and leave earlier thoughts out (or split the row, "loss": 0 for earlier '
                    "turns), or give the model a template with {% generation %} marks."
                )
            spans.append((len(before), len(behind)))
        return whole, spans

    def _encoded(self, task: Task, lesson: Lesson, text: str, spans: Sequence[Span]) -> LearnedRow:
        """Encode piece by piece, so that a turn begins where sampling would begin it."""
        ids: list[int] = []
        learned: list[Span] = []
        at = 0
        for number, (start, end) in zip(lesson.learned, spans, strict=True):
            ids += self.tokenizer.encode(text[at:start])
            turn = self.tokenizer.encode(text[start:end])
            self._check_same(task, text[start:end], turn)
            long = self._ended(task, number, turn)
            first = max(len(ids), 1)  # nothing stands before a row's first token
            learned.append((first, len(ids) + long))
            ids += turn
            at = end
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(
                f"Row {task.id} starts with two BOS tokens: its first message and the template "
                "both write one. Remove it from the message."
            )
        first, last = learned[0][0], learned[-1][1]
        shifted = tuple((a - first, b - first) for a, b in learned)
        turns = _turns(lesson, shifted)
        return LearnedRow(tuple(ids[:first]), tuple(ids[first:last]), turns, shifted)

    def _ended(self, task: Task, number: int, turn: Sequence[int]) -> int:
        """Return how many tokens of a turn are learned: up to the one on which the engine stops."""
        ends = [at for at, token in enumerate(turn) if token in self.tokenizer.eos_ids]
        behind = self.tokenizer.decode(turn[ends[-1] + 1 :]) if ends else "x"
        if ends and not behind.strip():
            return ends[-1] + 1
        stops = [self.tokenizer.decode([token]) for token in self.tokenizer.eos_ids]
        raise DataError(
            f"Row {task.id}: the chat template ends message {number} (assistant) with "
            f"{self.tokenizer.decode(turn[-4:])!r}, and sampling stops at {', '.join(stops)} "
            "alone: the model would learn to end in a way that ends nothing. Add the template's "
            'end of turn to "eos_token_id" in generation_config.json (a list may stand there), or '
            "mend the template; {% generation %} marks must hold it, too."
        )

    def _check_same(self, task: Task, text: str, ids: Sequence[int]) -> None:
        back = self.tokenizer.decode(ids)
        if _bare(back) != _bare(text):
            raise DataError(
                f"Row {task.id}: {text[:SHOWN]!r} comes back from its tokens as "
                f"{back[:SHOWN]!r}. Use the tokenizer that belongs to the model, or leave out what "
                "it has no tokens for."
            )


def pieces_of(row: LearnedRow, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return a row's text in pieces, each with whether it is learned."""
    cuts = [0, *(cut for span in row.learned for cut in span)]
    found = [(tokenizer.decode(row.prompt_ids), False)]
    for number, (start, end) in enumerate(pairwise(cuts)):
        if start < end:
            found.append((tokenizer.decode(row.token_ids[start:end]), number % 2 == 1))
    return found


def _turns(lesson: Lesson, learned: Sequence[Span]) -> tuple[Turn, ...]:
    """Return the turns of a row: what lies between two learned ones is whose message comes next."""
    turns = [Turn(POLICY, *learned[0])]
    for before, (a, b) in zip(lesson.learned, pairwise(learned), strict=False):
        if a[1] < b[0]:
            turns.append(Turn(str(lesson.messages[before + 1]["role"]), a[1], b[0]))
        turns.append(Turn(POLICY, *b))
    return tuple(turns)


def _conversation(task: Task, column: str, found: Any, first: int, turns: Turns) -> Lesson:
    """Read messages; learned are the assistant's from `first` on."""
    messages = _messages(task, column, found)
    own = [n for n, m in enumerate(messages) if n >= first and m["role"] == POLICY]
    if not own:
        roles = [message["role"] for message in messages]
        raise DataError(
            f"Row {task.id}, column {column!r}: messages of {roles}, and none of the assistant, "
            "so there is nothing to learn. Add its answer, or leave the row out."
        )
    own = own[-1:] if turns == "last" else own
    learned = tuple(n for n in own if messages[n].get("loss", 1))
    if not learned:
        raise DataError(
            f'Row {task.id}, column {column!r}: every turn of the assistant has "loss": 0, so '
            "there is nothing to learn. Leave the row out."
        )
    for number in learned:
        said = messages[number].get("content")
        if not (isinstance(said, str) and said.strip()) and not messages[number].get("tool_calls"):
            raise DataError(
                f"Row {task.id}, column {column!r}: message {number} of the assistant is empty. "
                'Fill it, or give it "loss": 0.'
            )
    bare = tuple({k: x for k, x in m.items() if k != "loss" and x is not None} for m in messages)
    return Lesson("conversation", "", bare, learned)


def _messages(task: Task, column: str, found: Any) -> list[Mapping[str, Any]]:
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise DataError(
            f"Row {task.id} has no messages in column {column!r}: it is {str(found)[:SHOWN]!r}. "
            'Write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
        )
    for number, message in enumerate(found):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"Row {task.id}, column {column!r}: message {number} is no object with a role. "
                'Write {"role": "user", "content": "..."}.'
            )
        loss = message.get("loss")
        if loss not in (None, 0, 1):
            raise DataError(
                f'Row {task.id}, column {column!r}: message {number} has "loss": {loss!r}. It is 1 '
                "(learned) or 0 (not)."
            )
        if loss and message["role"] != POLICY:
            raise DataError(
                f"Row {task.id}, column {column!r}: message {number} is of {message['role']!r} "
                'and has "loss": 1. Only what the assistant says is learned.'
            )
    return [{**m, "loss": 1 if m.get("loss") is None else int(m["loss"])} for m in found]


def _said(task: Task, column: str, found: Any) -> str:
    if not isinstance(found, str) or not found.strip():
        either = "'completion' or 'solution'" if column in ("completion", "solution") else column
        raise DataError(
            f"Row {task.id} has no text in column {either}, which this recipe learns from. Add "
            "it, or take a recipe that learns from rewards."
        )
    return found


def _bare(text: str) -> str:
    """Return a text without what tokenizers of sound models may change."""
    return "".join(unicodedata.normalize("NFC", text).split())
