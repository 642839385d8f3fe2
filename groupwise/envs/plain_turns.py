"""Turns in plain words, for models without a chat template: who speaks is written in letters.

A template has a place for the role and one for the text, "\\n[{role}]: {text}\\n". What stands in
front of the text is a turn's head. What stands behind it ends the turn, and is what the policy
writes to end its own: a template that ends with a line feed has turns of one line, and
"\\n[{role}]\\n{text}\\n[/{role}]\\n" has turns of several.

Others can't say a head or an end: wherever one stands in their words, a character is put behind its
first. What the tokenizer has no token for is read as a question mark, and told.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from groupwise.envs.call_text import parameters_of
from groupwise.envs.escapes import Breaker, Marks, break_for
from groupwise.envs.tool_calls import FAMILIES
from groupwise.errors import EngineWarning, ModelError
from groupwise.model.formats.tokenizer import Tokenizer
from groupwise.records import POLICY, Message

PLAIN = "\n[{role}]: {text}\n"
ROLE, TEXT = "{role}", "{text}"
SPEAK = (POLICY, "user", "tool")  # roles that a tokenizer must be able to write
ROLES = (*SPEAK, "system", "developer", "function", "environment")  # and those that nobody forges
UNKNOWN = "?"  # is read where the tokenizer has no token


def plain_turns(
    tokenizer: Tokenizer, template: str = PLAIN, *, name: str = "plain turns", calls: str = "tags"
) -> PlainTurns:
    """Return turns in plain words; refuse a template that does not tell them apart."""
    head, _, tail = template.partition(TEXT)
    before, _, after = head.partition(ROLE)
    lead = f"{name}: the template {template!r}"
    if template.count(TEXT) != 1 or head.count(ROLE) != 1:
        raise ModelError(
            f"{lead} must have {ROLE} once in front of {TEXT}, and {TEXT} once. Write {PLAIN!r}."
        )
    if not re.search(r"[^\w\s]", before + after):
        raise ModelError(
            f"{lead} writes a role like any other word, and every text with this word would look "
            f"like a turn. Put a sign beside {ROLE}, as in {PLAIN!r}."
        )
    if not tail:
        raise ModelError(
            f"{lead} has nothing behind {TEXT}: nobody could see where a turn ends. Write a line "
            "feed there, or a word, as in '\\n[{role}]\\n{text}\\n[/{role}]\\n'."
        )
    found = PlainTurns(tokenizer, template, name, calls)
    written = "".join(template.replace(ROLE, role).replace(TEXT, "") for role in SPEAK)
    missing = next((c for c in written if not found.knows(c)), None)
    if missing is not None:
        raise ModelError(
            f"{lead} writes {missing!r}, for which the tokenizer has no token. Use a template of "
            "characters that it has, or a model whose tokenizer has this one."
        )
    if found.by is None:
        raise ModelError(
            f"{lead} can't be kept out of what tools say: the tokenizer has no character that "
            "could break its heads up. Use other signs in it, or a tokenizer with a space."
        )
    return found


class PlainTurns:
    """Turns in the form of a text with the places {role} and {text}, made by `plain_turns`."""

    def __init__(self, tokenizer: Tokenizer, template: str, name: str, calls: str) -> None:
        self.tokenizer, self.name, self.calls = tokenizer, name, calls
        self.marks = Marks(tokenizer, "")
        self.end_ids = tokenizer.eos_ids
        self._head, _, self._tail = template.partition(TEXT)
        own = self._tail.replace(ROLE, POLICY)
        # White space behind an end is not waited for: it begins what comes next.
        self._end = own.rstrip() or own
        self._gap = own[len(self._end) :]
        self._known: dict[str, bool] = {}
        self._roles: set[str] = set()
        self.stop = self._stops()
        self._learn(ROLES)

    def opening(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        """Return the first prompt, which ends where the policy's first turn begins."""
        if tools:
            messages = _with_tools(messages, in_words(tools, self.calls))
        ids = self.marks.encode(self._text(messages))
        front = self.tokenizer.encode("", with_bos=True)
        return tuple(ids if ids[: len(front)] == front else [*front, *ids])

    def bridge(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return what stands between a turn's end and the beginning of the next."""
        return tuple(self.marks.encode(self._gap + self._text(messages)))

    def closing(self) -> tuple[int, ...]:
        """Return the tokens of the text that ends a turn which a limit has cut."""
        return tuple(self.marks.encode(self._end))

    def knows(self, character: str) -> bool:
        """Tell whether the tokenizer has a token for a character."""
        if character not in self._known:
            try:
                ids = self.tokenizer.encode(character)
            except ModelError:
                ids = []
            unknown = self.tokenizer.backend.token_to_id(self.tokenizer.names.get("unk_token", ""))
            self._known[character] = bool(ids) and unknown not in ids
        return self._known[character]

    def _text(self, messages: Sequence[Message]) -> str:
        self._learn(str(message["role"]) for message in messages)
        said = [self._turn(str(message["role"]), _words(message)) for message in messages]
        # Without spaces at the end: tokens of words begin with the space in front of them.
        return "".join(said) + self._head.replace(ROLE, POLICY).rstrip(" ")

    def _turn(self, role: str, text: str) -> str:
        head, tail = self._head.replace(ROLE, role), self._tail.replace(ROLE, role)
        safe = self._break(self._readable(text))
        if self._break.count(head + safe + tail) != self._break.count(head + tail):
            safe = f"{self.by}{safe}{self.by}"  # it began or ended with half of a head
        return head + str(self.marks.hidden(safe)) + tail

    def _readable(self, text: str) -> str:
        strange = [c for c in dict.fromkeys(text) if not self.knows(c)]
        if not strange:
            return text
        stands = UNKNOWN if self.knows(UNKNOWN) else ""
        how = f"as {stands!r}" if stands else "as nothing at all"
        shown = " ".join(map(repr, strange[:10]))
        warnings.warn(
            f"{self.name}: the tokenizer has no token for {shown}, which stands in what the policy "
            f"is told: it is read {how}. Let the environment write other characters.",
            EngineWarning,
            stacklevel=2,
        )
        return text.translate({ord(c): stands for c in strange})

    def _learn(self, roles: Iterable[str]) -> None:
        """Take note of roles whose heads and ends nobody else may say."""
        if new := set(roles) - self._roles:
            self._roles |= new
            shapes = [shape for shape in (self._head.strip(), self._tail.strip()) if shape]
            words = {shape.replace(ROLE, role) for shape in shapes for role in self._roles}
            self.by = break_for(words, self.knows)
            self._break = Breaker(words, self.by or "", any_case=True)

    def _stops(self) -> tuple[str, ...]:
        """Return what ends a turn: its end, and the head of a turn that is not the policy's."""
        heads = [self._head.replace(ROLE, role) for role in ROLES]
        if all(head.startswith(self._end) for head in heads):
            return (self._end,)
        end = self._end.lstrip() or self._end
        return tuple(dict.fromkeys((end, *(head.strip() for head in heads))))


def in_words(tools: Sequence[Mapping[str, Any]], calls: str) -> str:
    """Return what a policy is told of its tools, where no chat template tells it."""
    lines = [f"Tools are called by writing {FAMILIES[calls].form}."]
    for tool in tools:
        name, parameters = parameters_of(tool)
        shown = {key: _kind(schema) for key, schema in parameters.items()}
        form = json.dumps(shown, ensure_ascii=False)
        if calls == "tags":
            only = next(iter(shown.values())) if len(shown) == 1 else form
            form = f"<{name}>{only}</{name}>"
        else:
            form = f"{name}: {form}"
        about = tool.get("function", tool).get("description")
        lines.append(form + (f" {about}" if about else ""))
    return "\n".join(lines)


def _kind(schema: Any) -> str:
    found = schema.get("type") if isinstance(schema, Mapping) else None
    return found if isinstance(found, str) else "value"


def _with_tools(messages: Sequence[Message], told: str) -> list[Message]:
    """Put what is said of tools into the system's message, which is made where there is none."""
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{_words(messages[0])}\n{told}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _words(message: Message) -> str:
    """Return what a message says; a text may come in parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)
