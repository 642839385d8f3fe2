"""Token ids of prompts: made once, up front, for sampler and learner alike.

The template is applied once, exactly one BOS stands in front, and every prompt must come back from
its ids as it went in: otherwise the model would answer another prompt than the one in the data. A
few rows with odd characters are dropped and reported; if there are more, the set-up is at fault.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from groupwise.data.on_disk import store_alike
from groupwise.data.tasks import prompt_text
from groupwise.data.templates import CHAT, PROMPT, template_text
from groupwise.errors import DataError, ModelError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import Task

OPENED, TAIL = re.compile(r"(<[a-z_]+>)\s*$"), 16  # and in how many tokens it is looked for
MAX_LOST = 0.01  # share of prompts that may not survive the tokenizer


@dataclass(frozen=True)
class Dropped:
    task: int  # its id
    why: str
    tokens: int  # 0 where there is no telling


class _Lost(DataError):
    """A prompt that can't be decoded back from its ids."""


@dataclass(frozen=True)
class Prepared:
    tasks: Sequence[Task]  # with token_ids
    dropped: list[Dropped]
    limit: int  # tokens that a prompt may have
    opened: str = ""  # the tag that prompts end with, if they do: completions begin inside it

    @property
    def notes(self) -> list[str]:
        """Return notes on the rows that were left out."""
        total = len(self.dropped) + len(self.tasks)
        long = [row for row in self.dropped if row.tokens]
        lost = [row for row in self.dropped if not row.tokens]
        notes = []
        if long:
            longest = max(long, key=lambda row: row.tokens)
            notes.append(
                f"{len(long)} of {total} prompts are longer than {self.limit} tokens and were "
                f"dropped; the longest, row {longest.task}, has {longest.tokens}."
            )
        if lost:
            notes.append(
                f"{len(lost)} of {total} prompts do not survive the tokenizer and were dropped; "
                f"the first: {lost[0].why}"
            )
        if self.opened:
            notes.append(
                f"prompts end with {self.opened!r}, so completions begin inside it: a format that "
                f"asks for {self.opened!r} again would never be met."
            )
        return notes


def prepare(
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    *,
    template: str = "auto",
    system: str = "",
    instruction: str = PROMPT,
    max_prompt_tokens: int = 0,
    room: int,
) -> Prepared:
    """Return token ids for every task that fits. `room` is what the model holds beside answers."""
    _check_settings(tasks, template, system, instruction)
    limit = min(max_prompt_tokens or room, room)
    dropped: list[Dropped] = []
    reader = Reader(tokenizer, Wording(template, system, instruction))
    long = f"longer than {limit} tokens"

    def fitting() -> Iterator[Task]:
        for task in tasks:
            try:
                ids = reader.ids(task)
            except _Lost as error:
                dropped.append(Dropped(task.id, str(error), 0))
                continue
            if len(ids) > limit:
                dropped.append(Dropped(task.id, long, len(ids)))
            else:
                yield replace(task, token_ids=tuple(ids))

    kept = store_alike(tasks, fitting())
    lost = [row for row in dropped if not row.tokens]
    if len(lost) > MAX_LOST * len(tasks):
        raise DataError(
            f"{len(lost)} of {len(tasks)} prompts do not survive the tokenizer: the model would "
            f"read something else. {lost[0].why} Change the prompts or the template, or use the "
            "tokenizer that belongs to the model."
        )
    if not kept:
        shortest = min(row.tokens for row in dropped)
        raise DataError(
            f"All {len(tasks)} prompts are longer than {limit} tokens (the shortest has "
            f"{shortest}). Raise data.max_prompt_tokens, lower engine.max_tokens, or use a model "
            "with a longer context."
        )
    end = OPENED.search(tokenizer.decode(kept[0].token_ids[-TAIL:]))
    return Prepared(kept, dropped, limit, end[1] if end else "")


def read_one(
    task: Task,
    tokenizer: Tokenizer,
    *,
    template: str,
    system: str,
    instruction: str,
    room: int,
) -> tuple[int, ...]:
    """Return a prompt's token ids; none where it does not fit, or would be read otherwise."""
    try:
        ids = Reader(tokenizer, Wording(template, system, instruction)).ids(task)
    except _Lost:
        return ()
    return tuple(ids) if len(ids) <= room else ()


class Wording:
    """The form of a prompt for the model: plain text, or messages for its chat template."""

    def __init__(self, template: str, system: str, instruction: str) -> None:
        self.template, self.system, self.instruction = template, system, instruction
        self.around = None if template in CHAT else template_text(template)

    def __call__(self, task: Task) -> str | list[dict[str, Any]]:
        if self.around is not None:
            return self._within(self.around, self._within(self.instruction, self._question(task)))
        if isinstance(task.prompt, str):
            text = self._within(self.instruction, task.prompt)
            if self.template != "chat":
                return text
            messages = [{"role": "user", "content": text}]
        else:
            messages = [dict(message) for message in task.prompt]
        if not self.system:
            return messages
        if messages[0]["role"] == "system":
            raise DataError(
                f"Row {task.id} has a system message of its own, and data.system is set. Remove "
                "one of the two."
            )
        return [{"role": "system", "content": self.system}, *messages]

    def _within(self, text: str, prompt: str) -> str:
        # Not str.format: a prompt or instruction may hold braces of its own.
        return text.replace(PROMPT, prompt)

    def _question(self, task: Task) -> str:
        """Return the text of a single user message, which fits into a text template."""
        if isinstance(task.prompt, str):
            return task.prompt
        if len(task.prompt) == 1 and task.prompt[0]["role"] == "user":
            return str(task.prompt[0]["content"])
        raise DataError(
            f"Row {task.id} is a conversation, which data.template = {self.template!r} has no "
            'place for. Set data.template = "chat".'
        )


def _check_settings(tasks: Sequence[Task], template: str, system: str, instruction: str) -> None:
    """Refuse settings that no prompt would use."""
    if not tasks:
        raise DataError("There are no prompts. Check data.train and data.size.")
    strings = sum(isinstance(task.prompt, str) for task in tasks)
    if PROMPT not in instruction:
        raise DataError(
            f"data.instruction = {instruction!r} leaves the prompt out. Write {PROMPT} where it "
            "goes."
        )
    if template == "plain" and strings < len(tasks):
        raise DataError(
            f'{len(tasks) - strings} prompts are messages, which data.template = "plain" has no '
            'text for. Set data.template = "auto".'
        )
    if instruction != PROMPT and not strings and template in CHAT:
        raise DataError(
            "data.instruction is for prompts that are strings, and all of these are messages: it "
            "would be ignored. Use data.system, or write it into the messages."
        )
    chats = template == "chat" or (template == "auto" and strings < len(tasks))
    if system and not chats:
        raise DataError(
            "data.system is for chat prompts, and all of these are plain text: it would be "
            'ignored. Set data.template = "chat", or write it into data.instruction.'
        )


class Reader:
    """A converter from a task to checked ids."""

    def __init__(self, tokenizer: Tokenizer, wording: Wording) -> None:
        self.tokenizer, self.wording = tokenizer, wording
        if wording.template == "qwen_math":
            lacking = [t for t in ("<|im_start|>", "<|im_end|>") if t not in self.special_tokens]
            if lacking:
                raise DataError(
                    f'data.template = "qwen_math" writes {lacking[0]!r}, which is no token of this '
                    'model: it would read letters. Set data.template = "chat" or "r1_zero".'
                )
        # What the tokenizer puts around a text: nothing, or a BOS in front.
        self.front = tokenizer.encode("", with_bos=True)
        if len(self.front) > 1 or (
            self.front != [tokenizer.bos_id] and self.front and self.front[0] in tokenizer.eos_ids
        ):
            shown = [tokenizer.decode([number]) for number in self.front]
            raise DataError(
                f"The tokenizer puts {shown} around a text; a prompt may only have a BOS in front, "
                "or the model reads that it has ended. Change post_processor in tokenizer.json."
            )

    def ids(self, task: Task) -> list[int]:
        written = self.wording(task)
        self._check_untouched(task, written)
        try:
            text = written if isinstance(written, str) else self.tokenizer.render(written)
        except ModelError as error:
            raise DataError(f"Row {task.id}: {error}") from error
        if not isinstance(written, str):
            self._check_contents(task, written, text)
        try:
            ids = self.tokenizer.encode(text)
        except ModelError as error:
            raise _Lost(f"Row {task.id}: {self._stranger(text)!r} has no token.") from error
        self._check_round_trip(task, text, ids)
        # A chat template writes the BOS itself, and so do some plain prompts.
        if isinstance(written, str) and ids[: len(self.front)] != self.front:
            ids = self.front + ids
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(
                f"Row {task.id} starts with two BOS tokens ({self.tokenizer.decode([bos])!r}): the "
                "prompt and the template both write one. Remove it from the prompt."
            )
        return ids

    def _check_untouched(self, task: Task, written: str | list[dict[str, Any]]) -> None:
        """Refuse a prompt that has been through a template already."""
        around, prompt = self.wording.around, prompt_text(task.prompt)
        if isinstance(written, list):  # the chat template writes special tokens, the prompt may not
            marks = self.special_tokens
        elif around is None or around == PROMPT:
            return
        else:
            head = around.partition(PROMPT)[0].strip()
            marks = {token for token in self.special_tokens if token in around} | {head}
        twice = next((mark for mark in sorted(marks) if mark and mark in prompt), None)
        if twice is not None:
            raise _Lost(
                f"Row {task.id}: {twice[:40]!r} is in the prompt already and would stand there "
                "twice: a template is applied once."
            )

    def _check_contents(self, task: Task, messages: Sequence[Mapping[str, Any]], text: str) -> None:
        """Check that every message is in the text as it is in the data, in order.

        Templates of reasoning models drop the thoughts of earlier turns, or write them anew; others
        know no system message. The model would then answer another conversation, and none that it
        has sampled itself: what it reads in the next turn must begin with what it wrote in this.
        """
        at = 0
        for number, message in enumerate(messages):
            for said in (message.get(key) for key in ("reasoning_content", "content")):
                content = said.strip() if isinstance(said, str) else ""
                found = text.find(content, at)
                if found < 0:
                    raise _Lost(
                        f"Row {task.id}: the chat template drops or changes {content[:40]!r}, what "
                        f"message {number} ({message['role']}) says. Take it out of the data, or "
                        "give the model a template (chat_template.jinja) that keeps it."
                    )
                at = found + len(content)

    def _stranger(self, text: str) -> str:
        """Return the first character that the tokenizer refuses, or the text if no single one is
        refused.
        """
        for character in text:
            try:
                self.tokenizer.encode(character)
            except ModelError:
                return character
        return text

    def _check_round_trip(self, task: Task, text: str, ids: list[int]) -> None:
        back = self.tokenizer.decode(ids)
        if back == text or self._settled(back) == self._settled(text):
            return
        before, after = self._settled(text), self._settled(back)
        at = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        raise _Lost(
            f"Row {task.id}: {before[at : at + 20]!r} comes back as {after[at : at + 20]!r} "
            f"(character {at}, behind {before[max(0, at - 20) : at]!r})."
        )

    def _settled(self, text: str) -> str:
        """Return the text without what tokenizers of sound models may change.

        That is composed accents, and white space in front and beside special tokens.
        """
        *pieces, last = self._special.split(unicodedata.normalize("NFC", text))
        return "".join([*(piece.strip() for piece in pieces), last.lstrip()])

    @cached_property
    def special_tokens(self) -> set[str]:
        """Return the special tokens that mark where turns begin and end."""
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        return {token.content for token in added if token.special}

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = self.tokenizer.backend.get_added_tokens_decoder().values()
        tokens = sorted((re.escape(token.content) for token in added), reverse=True)
        return re.compile(f"({'|'.join(tokens)})" if tokens else "(?!)")
